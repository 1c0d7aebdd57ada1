"""Places to write to: folders and files of this machine, not URLs."""

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from gmeta.errors import UserError

# Path("s3://bucket/run") is "s3:/bucket/run", which would become a folder of that name.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+:)/+")


def is_url(place: str | Path) -> bool:
    """Return whether a place is a URL rather than a path of this machine."""
    return _URL.match(str(place)) is not None


def check_local(what: str, place: str | Path) -> None:
    """Raise UserError for a URL where a path of this machine is needed; `what` names the option."""
    if is_url(place):
        given = _URL.sub(r"\1//", str(place), count=1)
        raise UserError(
            f"{what} = {given!r} is a URL: a path of this machine is needed, where nothing is "
            "left half-written. Write to a path, then copy"
        )


def check_replaceable(out: Path, inputs: Iterable[tuple[str, str]], overwrite: bool) -> None:
    """Raise UserError where --out is a folder, one of the `inputs` or not to be overwritten."""
    if out.is_dir():
        raise UserError(f"--out = {str(out)!r} is a folder: a file is needed. Name one in it")
    for what, url in inputs:
        # Not even with --overwrite: the input's rows would be lost.
        if out.exists() and Path(url).exists() and out.samefile(url):
            raise UserError(
                f"--out = {str(out)!r} is {what}, whose rows would be replaced. Name another file"
            )
    if out.exists() and not overwrite:
        raise UserError(
            f"--out = {str(out)!r} exists already. Name another file, or pass --overwrite to "
            "replace it"
        )


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Link a file that nobody changes, or copy it where the file systems differ."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
