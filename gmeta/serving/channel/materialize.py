"""A version of a channel as one exported folder; deltas are applied once a machine, in a cache."""

import logging
import os
import shutil
from pathlib import Path

from gmeta.errors import GMetaError
from gmeta.platform.files.local_paths import link_or_copy
from gmeta.serving.channel.channel import Channel
from gmeta.serving.channel.model_version import VersionChain
from gmeta.serving.channel.version_cache import cache_folder, lock_folder
from gmeta.serving.channel.version_delta import materialize_model
from gmeta.serving.exported_folder import CONFIG_FILE, check_files, read_config
from metaio.format.atomic_folder import copy_folder, open_atomic_folder
from metaio.format.manifest import xxh3_hex

_KEPT = 3  # the one that serves, the one before it, and the one that comes

_log = logging.getLogger(__name__)


def materialize_version(
    channel: Channel, number: int, cache: Path | None = None, verify: bool = True
) -> Path:
    """Return the folder of a version's model, its files checked; made in `cache` from deltas."""
    chain, current = channel.chain(number), channel.current()
    newest = chain.newest
    # Anybody may have replaced the folder; current.json says what was promoted.
    if current and current.number == number and current.checksum != newest.checksum:
        raise GMetaError(
            f"version {number} of {channel.root} is served as {current.parent.name}, "
            f"but {newest.name} stands there: it was replaced. Promote a full export, or roll back"
        )
    if not chain.deltas:
        folder = chain.base.folder
        check_files(folder, read_config(folder), checksums=verify)
        return folder
    with lock_folder(_channel_folder(channel, cache)) as folder_of_channel:
        target = _materialize(chain, folder_of_channel, contents=False)
        # _drop_oldest goes by the time of the last use.
        os.utime(target)
        _drop_oldest(folder_of_channel)
    try:
        # After the lock: all workers read at once. Without `verify` sizes alone are compared.
        check_files(target, read_config(target), checksums=verify)
    except GMetaError:
        with lock_folder(folder_of_channel):
            _materialize(chain, folder_of_channel, contents=True)  # one that is damaged goes
    return target


def keep_materialized(channel: Channel, checksum: str, model: Path) -> None:
    """Keep an exported folder in the cache as what the delta of this checksum leads to."""
    with lock_folder(_channel_folder(channel, None)) as folder_of_channel:
        if not _is_sound(folder_of_channel / checksum, contents=True):
            with open_atomic_folder(folder_of_channel / checksum) as partial:
                # Linked where it is on this disk already.
                copy_folder(model, partial, link_or_copy)


def _materialize(chain: VersionChain, cache: Path, contents: bool) -> Path:
    """Return the model that a chain leads to, from the newest of its versions in the cache."""
    base, deltas = chain.base.folder, list(chain.deltas)
    target = cache / chain.newest.checksum
    for index, delta in reversed(list(enumerate(chain.deltas))):
        copy = cache / delta.checksum
        # What is made from a base is checked against checksums: the base's own need no check first.
        if _is_sound(copy, contents=contents and copy == target):
            base, deltas = copy, deltas[index + 1 :]
            break
    if not deltas:
        return target
    try:
        with open_atomic_folder(target) as partial:
            materialize_model(base, deltas, partial)
    except GMetaError:
        if base == chain.base.folder or _is_sound(base, contents=True):
            raise
        return _materialize(chain, cache, contents)  # without the copy that was damaged
    return target


def _is_sound(copy: Path, contents: bool) -> bool:
    """Return whether a model in the cache has all of its files; remove one that is damaged."""
    if not copy.exists():
        return False
    try:
        check_files(copy, read_config(copy), checksums=contents)
    except GMetaError as error:
        _log.warning("%s is made anew: %s", copy, error)
        shutil.rmtree(copy)
        return False
    return True


def _drop_oldest(cache: Path) -> None:
    copies = [path for path in cache.glob("[0-9a-f]*") if (path / CONFIG_FILE).is_file()]
    copies.sort(key=lambda path: path.stat().st_mtime)
    # Also what was half removed before. Processes that have mapped a file keep it until they end.
    for path in set(cache.glob("[0-9a-f]*")).difference(copies[-_KEPT:]):
        # The config first: without it a half-removed folder is no model.
        (path / CONFIG_FILE).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)


def _channel_folder(channel: Channel, cache: Path | None) -> Path:
    # A folder a channel: dropping old versions must not touch those of others.
    return (cache or cache_folder()) / xxh3_hex(str(channel.root.absolute()).encode())
