"""A version of a channel as one exported folder: a full version as it stands, a chain of deltas
made whole once a machine, in a cache that processes share."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gmeta.delivery.channel import Channel
from gmeta.delivery.delta import write_whole_model
from gmeta.delivery.versions import Chain
from gmeta.errors import GMetaError, UserError
from gmeta.serving.folder import CONFIG_FILE
from metaio.format.destination import WITHOUT_LOCKS, flush_to_disk
from metaio.format.manifest import xxh3_hex

CACHE_VARIABLE = "GMETA_CACHE"
_KEPT = 3  # the one that serves, the one before it, and the one that comes


def cache_folder() -> Path:
    """Return where versions are made whole: GMETA_CACHE, or a folder of the user's own cache."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gmeta"


def whole_version(channel: Channel, number: int, cache: Path | None = None) -> Path:
    """Return the folder of a version's model, which `gmeta.load` reads; made in `cache` (default:
    cache_folder()) where the version is a delta.

    Raises:
        UserError: the cache cannot be written.
        GMetaError: a version of the chain is missing or damaged.
    """
    chain = channel.chain(number)
    if not chain.deltas:
        return chain.base.folder
    with alone(_own(channel, cache)) as own:
        return _made(chain, own)


def keep_whole(channel: Channel, checksum: str, model: Path) -> None:
    """Move an exported folder into the cache as what the delta of this checksum leads to, so that
    nobody on this machine makes it again."""
    with alone(_own(channel, None)) as own:
        if not (own / checksum).exists():
            shutil.move(model, own / checksum)


def _made(chain: Chain, cache: Path) -> Path:
    """Return the model that a chain leads to, from the newest of its versions that is whole."""
    base, deltas = chain.base.folder, list(chain.deltas)
    for index, delta in reversed(list(enumerate(chain.deltas))):
        if (cache / delta.checksum / CONFIG_FILE).is_file():
            base, deltas = cache / delta.checksum, deltas[index + 1 :]
            break
    target = cache / chain.newest.checksum
    if deltas:
        partial = cache / f".{target.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # what a killed process left
        partial.mkdir()
        try:
            write_whole_model(base, deltas, partial)
            flush_to_disk((*partial.rglob("*"), partial))
            partial.rename(target)
        except GMetaError:
            shutil.rmtree(partial, ignore_errors=True)
            if base != chain.base.folder:
                # What is damaged may be the copy in the cache: the next try starts without it.
                shutil.rmtree(base, ignore_errors=True)
            raise
    os.utime(target)
    _drop_oldest(cache)
    return target


def _drop_oldest(cache: Path) -> None:
    """Keep the newest few; who has mapped another keeps its files until it closes them."""
    found = list(cache.glob(f"[0-9a-f]*/{CONFIG_FILE}"))
    found.sort(key=lambda path: path.parent.stat().st_mtime)
    for config in found[:-_KEPT]:
        config.unlink()  # first: what is half removed must not look whole
        shutil.rmtree(config.parent, ignore_errors=True)


def _own(channel: Channel, cache: Path | None) -> Path:
    """Return a channel's folder of the cache: another's versions are not this one's to drop."""
    return (cache or cache_folder()) / xxh3_hex(str(channel.root.absolute()).encode())


@contextmanager
def alone(own: Path) -> Iterator[Path]:
    """Wait until no other process works in a folder of the cache, which is made if need be, and
    yield it.

    Raises:
        UserError: it cannot be written.
    """
    try:
        own.mkdir(parents=True, exist_ok=True)
        lock = (own / ".cache.lock").open("a")
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise UserError(
            f"the cache {own} cannot be written: {error.strerror}. "
            f"Set {CACHE_VARIABLE} to a folder that can"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
        yield own
