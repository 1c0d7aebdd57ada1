"""Files and folders that are there whole or not at all, whatever happens while they are written."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from metaio.format.destination import flush_to_disk, replace_folder


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes its name once it is written and on the disk.

    After a failure `path` is as it was before, and nothing is left beside it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            # Before the rename, or a power cut could leave the name with nothing in it.
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_whole(path: Path, content: bytes) -> None:
    """Write `content` to a file that is there whole or not at all."""
    with whole_file(path) as file:
        file.write(content)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the name `target` once the block has ended and its files are
    on the disk; after a failure it goes.

    The caller is alone in the folder of `target`: what killed ones left there of this or of any
    other folder goes first, or a full disk would stay full.
    """
    for kind in ("partial", "old"):
        for left in target.parent.glob(f".*.{kind}"):
            shutil.rmtree(left, ignore_errors=True)
    partial = target.with_name(f".{target.name}.partial")
    partial.mkdir(parents=True)
    try:
        yield partial
        flush_to_disk((*partial.rglob("*"), partial))
        replace_folder(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
