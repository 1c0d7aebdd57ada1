#!/usr/bin/env python3
"""`make deploy-pin`: asks the registries which digest each base image's tag has now, and writes it.

    pin.py FILE...     rewrites every NAME:TAG@sha256:DIGEST in the files

Change a tag by hand, run this, look at the difference, commit. Standard library only.
"""

import json
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from functools import cache
from pathlib import Path

PINNED = re.compile(r"([a-z0-9./_:-]+):([A-Za-z0-9_.-]+)@sha256:[0-9a-f]{64}")
_KINDS = ", ".join(
    [
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    ]
)


def place(name: str) -> tuple[str, str]:
    """(registry, repository) of an image's name, by Docker's rules."""
    first, slash, rest = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return first, rest
    return "registry-1.docker.io", name if slash else f"library/{name}"


def url_of(registry: str, repository: str, tag: str) -> str:
    """Where the registry keeps the manifest; without TLS on this machine only."""
    scheme = "http" if registry.partition(":")[0] in ("localhost", "127.0.0.1") else "https"
    return f"{scheme}://{registry}/v2/{repository}/manifests/{tag}"


@cache
def digest(name: str, tag: str) -> str:
    """The digest that the tag has now. Raises OSError."""
    request = urllib.request.Request(
        url_of(*place(name), tag), method="HEAD", headers={"Accept": _KINDS}
    )
    try:
        answer = urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as error:
        if error.code != 401:
            raise
        # Public images, too, are only told to who shows a token; anybody gets one.
        asked = dict(re.findall(r'(\w+)="([^"]*)"', error.headers["WWW-Authenticate"]))
        query = urllib.parse.urlencode({key: asked[key] for key in ("service", "scope")})
        with urllib.request.urlopen(f"{asked['realm']}?{query}", timeout=30) as reply:
            request.add_header("Authorization", f"Bearer {json.load(reply)['token']}")
        answer = urllib.request.urlopen(request, timeout=30)
    with answer:
        return str(answer.headers["Docker-Content-Digest"])


def pinned(text: str) -> str:
    """The text with every digest as the registries have it now. Raises OSError."""
    return PINNED.sub(lambda found: f"{found[1]}:{found[2]}@{digest(found[1], found[2])}", text)


def main() -> None:
    """See the top."""
    texts = {}
    for path in map(Path, sys.argv[1:]):
        try:
            texts[path] = pinned(path.read_text())
        except OSError as error:
            sys.exit(f"error: {path}: no digest: {error}. Nothing was changed")
    for path, text in texts.items():
        print(f"{'same   ' if text == path.read_text() else 'changed'} {path}")
        path.write_text(text)


if __name__ == "__main__":
    main()
