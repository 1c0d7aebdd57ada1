#!/usr/bin/env python3
"""Makes what a shard service and its callers need to trust each other: certificates and tokens.

    credentials.py OUT [--host NAME ...] [--days N]    one folder a holder below OUT
    credentials.py --kubernetes NAMESPACE [...]        one Secret a holder, from inside the cluster;
                                                       --prefix: of their names, and of the Services

Holders: `service` (ca.crt, tls.crt, tls.key), `tokens` (worker, operator, viewer: what the service
accepts), `worker`, `operator`, `viewer` (ca.crt, tls.crt, tls.key, token: what each shows) and
`spark` (token: what Spark's driver and executors know each other by).
What is there already stays as it is. The authority's key is never written: new certificates come
from a new authority, so a cluster that lives longer uses cert-manager (docs/deploy.md). Needs
openssl and nothing but the standard library, as the image of the service has it.
"""

import argparse
import base64
import json
import os
import secrets
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

ROLES = ("worker", "operator", "viewer")
HOSTS = ("localhost", "shard-service", "gmeta-shard-service", "serve", "gmeta-serve")
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def openssl(*arguments: str) -> None:
    """Run it; end with what it said when it fails."""
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: openssl {arguments[0]} failed: {done.stderr.strip().splitlines()[-1]}")


def write_token(*paths: Path) -> None:
    """A new token, for its owner and group to read."""
    token = secrets.token_hex(32) + "\n"
    for path in paths:
        path.write_text(token)
        path.chmod(0o440)


def make(folder: Path, hosts: list[str], days: int) -> None:
    """Write every holder's folder below `folder`."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        ca, ca_key = work / "ca.crt", work / "ca.key"
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        openssl(
            "req", "-x509", *curve, "-days", str(days), "-subj", "/CN=gmeta authority",
            # pathlen 0: it signs holders, and no further authorities.
            "-addext", "basicConstraints=critical,CA:TRUE,pathlen:0",
            "-addext", "keyUsage=critical,keyCertSign", "-keyout", str(ca_key), "-out", str(ca),
        )  # fmt: skip

        def issue(holder: str, names: str) -> None:
            """A key and a certificate with these names, signed by the authority."""
            out = folder / holder
            out.mkdir(parents=True)
            request, extensions = work / "request", work / "extensions"
            extensions.write_text(f"subjectAltName={names}\n")
            key = out / "tls.key"
            openssl(
                "req", *curve, "-subj", f"/CN=gmeta {holder}", "-keyout", str(key),
                "-out", str(request),
            )  # fmt: skip
            openssl(
                "x509", "-req", "-in", str(request), "-CA", str(ca), "-CAkey", str(ca_key),
                "-CAcreateserial", "-days", str(days), "-extfile", str(extensions),
                "-out", str(out / "tls.crt"),
            )  # fmt: skip
            # Its group too: the service runs as another user than the one that wrote it.
            key.chmod(0o440)
            (out / "ca.crt").write_bytes(ca.read_bytes())

        issue("service", ",".join([*(f"DNS:{host}" for host in hosts), "IP:127.0.0.1"]))
        (folder / "tokens").mkdir()
        for role in ROLES:
            issue(role, f"URI:spiffe://gmeta.local/gmeta/{role}")
            write_token(folder / "tokens" / role, folder / role / "token")
        (folder / "spark").mkdir()
        write_token(folder / "spark" / "token")


def call(method: str, path: str, body: object = None) -> int:
    """One request to the cluster's API server; its HTTP status."""
    server = os.environ.get(
        "KUBERNETES_API",
        f"https://{os.environ.get('KUBERNETES_SERVICE_HOST')}:"
        f"{os.environ.get('KUBERNETES_SERVICE_PORT')}",
    )
    account = Path(os.environ.get("KUBERNETES_ACCOUNT", ACCOUNT))
    request = urllib.request.Request(
        server + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={
            "Authorization": f"Bearer {(account / 'token').read_text().strip()}",
            "Content-Type": "application/json",
        },
    )
    secure = server.startswith("https:")
    context = ssl.create_default_context(cafile=account / "ca.crt") if secure else None
    try:
        with urllib.request.urlopen(request, timeout=30, context=context) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError as error:
        sys.exit(
            f"error: the API server at {server} does not answer: {error}. "
            "Is port 443 or 6443 open to it?"
        )


def store_as_secrets(folder: Path, namespace: str, prefix: str) -> None:
    """Create the Secrets that are not there; all of them, or a clear end."""
    base = f"/api/v1/namespaces/{namespace}/secrets"
    holders = sorted(path.name for path in folder.iterdir())
    found = {holder: call("GET", f"{base}/{prefix}-{holder}") for holder in holders}
    present = [holder for holder, status in found.items() if status == 200]
    if len(present) == len(holders):
        print("every Secret is there: nothing to do")
        return
    if present or set(found.values()) != {404}:
        sys.exit(
            f"error: the Secrets answered {found}: all or none must be there, for they belong "
            "together. Delete those that are there, or look into the API server's answer"
        )
    for holder in holders:
        data = {
            path.name: base64.b64encode(path.read_bytes()).decode()
            for path in (folder / holder).iterdir()
        }
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": f"{prefix}-{holder}",
                "labels": {"app.kubernetes.io/part-of": "gmeta"},
            },
            "type": "Opaque",
            "data": data,
        }
        status = call("POST", base, secret)
        if status != 201:
            sys.exit(f"error: Secret {prefix}-{holder} was not created: HTTP {status}")
        print(f"Secret {prefix}-{holder} created")


def main() -> None:
    """See the top."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", nargs="?", type=Path, help="folder, made anew")
    parser.add_argument("--kubernetes", metavar="NAMESPACE")
    parser.add_argument("--prefix", default="gmeta", help="of Secrets and Services (gmeta)")
    parser.add_argument("--host", action="append", default=[], help="further name of the service")
    parser.add_argument("--days", type=int, default=365)
    given = parser.parse_args()
    if (given.out is None) == (given.kubernetes is None):
        parser.error("give either OUT or --kubernetes NAMESPACE")
    hosts = [*HOSTS, *given.host]
    if given.kubernetes:
        for part in ("shard-service", "serve", "follow"):
            name = f"{given.prefix}-{part}"
            service = f"{name}.{given.kubernetes}"
            hosts += [name, service, f"{service}.svc", f"{service}.svc.cluster.local"]
        with tempfile.TemporaryDirectory() as name:
            make(Path(name) / "made", hosts, given.days)
            store_as_secrets(Path(name) / "made", given.kubernetes, given.prefix)
        return
    if (given.out / "service").exists():
        print(f"{given.out} has credentials: nothing to do")
        return
    made = given.out / ".made"
    shutil.rmtree(made, ignore_errors=True)  # of a run that was ended
    make(made, hosts, given.days)
    # The service's last: until it is there the next run makes all anew, as they belong together.
    for holder in sorted(made.iterdir(), key=lambda path: path.name == "service"):
        shutil.rmtree(given.out / holder.name, ignore_errors=True)
        holder.rename(given.out / holder.name)
    made.rmdir()
    print(f"credentials are in {given.out}")


if __name__ == "__main__":
    main()
