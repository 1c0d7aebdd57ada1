#!/usr/bin/env python3
"""Lets a suspended job of a cluster start: `spec.suspend` of one object becomes false.

    resume.py NAMESPACE RESOURCE NAME [--when FILE]     from inside the cluster, for instance
    resume.py gmeta batch/v1/jobs gmeta-train --when /data/demo/manifest.json

Manifests create training suspended, so that no GPU is taken while its data is prepared. Needs
nothing but the standard library, as the image of the service has it.
"""

import argparse
import json
import os
import signal
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LOOK_EVERY_S = 2.0


def resume(path: str) -> None:
    """Unsuspend the object at a path of the cluster's API server.

    Raises:
        OSError: the server cannot be reached or refuses; HTTPError is one.
    """
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    request = urllib.request.Request(
        f"https://{host}:{port}{path}",
        method="PATCH",
        data=json.dumps({"spec": {"suspend": False}}).encode(),
        headers={
            "Authorization": f"Bearer {(ACCOUNT / 'token').read_text().strip()}",
            "Content-Type": "application/merge-patch+json",
        },
    )
    context = ssl.create_default_context(cafile=ACCOUNT / "ca.crt")
    with urllib.request.urlopen(request, timeout=30, context=context):
        pass


def main() -> None:
    """Wait for the file, if one is named, then unsuspend the job; exit with a line if refused."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("namespace")
    parser.add_argument("resource", help="GROUP/VERSION/RESOURCE, as batch/v1/jobs")
    parser.add_argument("name")
    parser.add_argument("--when", type=Path, metavar="FILE", help="wait until it is there")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0x80 + signal.SIGTERM))  # it is process 1
    if given.when and not given.when.exists():
        print(f"waiting for {given.when}", flush=True)
        while not given.when.exists():
            time.sleep(LOOK_EVERY_S)
    group, _, resource = given.resource.rpartition("/")
    try:
        resume(f"/apis/{group}/namespaces/{given.namespace}/{resource}/{given.name}")
    except OSError as error:
        sys.exit(
            f"error: {resource} {given.name} stays suspended: the API server answered {error!s}. "
            'Start it by hand: kubectl patch ... --type merge -p \'{"spec":{"suspend":false}}\''
        )
    print(f"{resource} {given.name} may start")


if __name__ == "__main__":
    main()
