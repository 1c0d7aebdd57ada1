"""What a channel at a path or URL serves, and every move of current.json; no version is read."""

from pathlib import Path
from typing import Any

from gmeta.errors import GMetaError, UserError
from gmeta.platform.files.local_paths import is_url
from gmeta.platform.files.storage_errors import translate_storage_errors
from gmeta.serving.channel.channel import CURRENT_FILE, Channel, CurrentVersion, parse_current
from gmeta.serving.channel.decision_files import PROMOTIONS, parse_log
from gmeta_keys.translate_errors import translate_errors
from metaio.format.storage import find_file_system

# Of current.json, promotions.jsonl, delta.json and config.json: many times what any has.
MAX_DESCRIPTION_BYTES = 256 << 20


def current_at(place: str | Path) -> CurrentVersion:
    """Return what the channel at a path or URL serves now; of a URL current.json alone is read."""
    if not is_url(place):
        return Channel(place).require_current()
    return read_current_file(str(place))[1]


def is_channel_at(place: str) -> bool:
    """Return whether a channel is at a URL."""
    fs, root = find_file_system(place)
    with translate_access_errors(place):
        # An object store takes "//" for a folder without a name.
        return bool(fs.exists(f"{root.rstrip('/')}/{CURRENT_FILE}"))


def promotions_at(place: str) -> list[dict[str, Any]]:
    """Return every verdict and every move of current.json of the channel at a URL, oldest first."""
    fs, root = find_file_system(place)
    with translate_access_errors(place):
        log = parse_log(read_bounded(fs, f"{root.rstrip('/')}/{PROMOTIONS}"))
    if log.damage:
        raise GMetaError(
            f"{place}/{PROMOTIONS}: {log.damage}. Run: gmeta channel publish CHANNEL {place}"
        )
    return log.entries


def read_current_file(url: str) -> tuple[bytes, CurrentVersion]:
    """Return the bytes of current.json of the channel at a URL, and what they say."""
    fs, root = find_file_system(url)
    name = f"{url}/{CURRENT_FILE}"
    with translate_access_errors(url):
        try:
            content = read_bounded(fs, f"{root.rstrip('/')}/{CURRENT_FILE}")
        except FileNotFoundError:
            raise UserError(
                f"{url} holds no channel: there is no {CURRENT_FILE}. Run: gmeta channel "
                f"publish CHANNEL {url}"
            ) from None
    return content, parse_current(content, name, "CHANNEL")


def read_bounded(fs: Any, path: str) -> bytes:
    """Return a file that describes others. Raises GMetaError: it is far larger than any is."""
    content: bytes = fs.cat_file(path, start=0, end=MAX_DESCRIPTION_BYTES + 1)
    if len(content) > MAX_DESCRIPTION_BYTES:
        raise GMetaError(
            f"{path} has more than {MAX_DESCRIPTION_BYTES:,} bytes, the most that a description "
            "may have: it is no file of gmeta. Publish the channel again"
        )
    return content


def translate_access_errors(place: str | Path) -> translate_errors:
    """Return a block that turns an error at a URL or path, or in the cache, into one line."""
    return translate_storage_errors(
        f"{place} cannot be read or written",
        "Look at the place, the credentials and the space on the disk",
    )
