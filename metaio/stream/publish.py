"""Copies a stream to a URL, to train from on other machines and to restore after a lost disk."""

from pathlib import Path

from metaio.errors import DataError
from metaio.format.atomic_folder import remove_folder, upload_file, upload_folder
from metaio.format.layout import MANIFEST_NAME
from metaio.format.storage import find_file_system
from metaio.stream.chain import (
    INCREMENTS,
    STREAM_FILE,
    is_stream,
    list_increment_numbers,
    name_increment_folder,
    open_stream,
)
from metaio.stream.stream_state import STATE_FILE, STATES


def publish_stream(stream: Path, url: str) -> list[int]:
    """Copy the increments that are not at a URL yet, and the newest state; return their numbers."""
    own = open_stream(str(stream))
    fs, root = find_file_system(url.rstrip("/"))
    fs.invalidate_cache()
    # Others may have published since fsspec listed these folders; hence invalidate_cache().
    there = list_increment_numbers(url)
    newest = there[-1] if there else 0
    # Fingerprints chain: if the newest one there is ours, so are all before it.
    is_own = newest in own.numbers and open_stream(url).record(newest) == own.record(newest)
    if there and not is_own:
        raise DataError(
            f"{url} has an increment {newest} that {stream} has not: it is of another stream, or "
            "was taken back here. Choose another URL, or remove it there"
        )
    if not is_stream(url):
        upload_file(fs, stream / STREAM_FILE, f"{root}/{STREAM_FILE}")
    last = name_increment_folder(own.numbers[-1])
    # The state first, as on a disk: it counts once its increment exists.
    if not fs.exists(f"{root}/{STATES}/{last}/{STATE_FILE}"):
        upload_folder(fs, stream / STATES / last, f"{root}/{STATES}/{last}", STATE_FILE)
    copied = [number for number in own.numbers if number > newest]
    for number in copied:
        place = f"{INCREMENTS}/{name_increment_folder(number)}"
        upload_folder(fs, stream / place, f"{root}/{place}", MANIFEST_NAME)
    fs.invalidate_cache()
    # The newest state is all that a copy needs to be extended.
    for path in fs.ls(f"{root}/{STATES}", detail=False):
        name = str(path).rstrip("/").rsplit("/", 1)[-1]
        if name != last:
            remove_folder(fs, f"{root}/{STATES}/{name}", STATE_FILE)
    return copied
