"""What a channel at a path or URL serves, and every move of its pointer: none of its versions is
looked at.
"""

from pathlib import Path
from typing import Any

from gmeta.delivery.channel import POINTER, PROMOTIONS, Channel, Current, current_of, entries_of
from gmeta.errors import UserError
from gmeta.files.local import is_url
from gmeta.files.places import failing_at
from gmeta_keys.boundary import failing_as
from metaio.format.storage import file_system


def served_at(place: str | Path) -> Current:
    """Return what the channel at a path or a URL serves now; of a URL the pointer alone is read."""
    if not is_url(place):
        return Channel(place).served()
    return pointer_at(str(place))[1]


def is_channel_at(place: str) -> bool:
    """Return whether a channel is at a URL."""
    fs, root = file_system(place)
    with reached(place):
        return bool(fs.exists(f"{root.rstrip('/')}/{POINTER}"))


def promotions_at(place: str) -> list[dict[str, Any]]:
    """Return every verdict and every move of the pointer of the channel at a URL, oldest first."""
    fs, root = file_system(place)
    with reached(place):
        return entries_of(fs.cat_file(f"{root.rstrip('/')}/{PROMOTIONS}"))


def pointer_at(url: str) -> tuple[bytes, Current]:
    """Return the pointer of the channel at a URL, its bytes and what they say."""
    fs, root = file_system(url)
    name = f"{url}/{POINTER}"
    with reached(url):
        try:
            content: bytes = fs.cat_file(f"{root.rstrip('/')}/{POINTER}")
        except FileNotFoundError:
            raise UserError(
                f"{url} holds no channel: there is no {POINTER}. Run: gmeta publish CHANNEL {url}"
            ) from None
    return content, current_of(content, name, "CHANNEL")


def reached(place: str | Path) -> failing_as:
    """Return a block that says in one line what goes wrong at a URL or a path, or on the way from
    there to the cache: GMetaError."""
    return failing_at(
        f"{place} cannot be read or written",
        "Look at the place, the credentials and the space on the disk",
    )
