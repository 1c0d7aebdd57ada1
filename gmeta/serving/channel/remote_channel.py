"""A channel at a URL, published from a folder and downloaded to serve. Descriptions go up last,
current.json after all versions: a stopped writer leaves the version before or the new one."""

import logging
import shutil
from pathlib import Path
from typing import Any

from gmeta.errors import GMetaError, UserError
from gmeta.platform.files.atomic_write import write_atomically
from gmeta.platform.files.local_paths import is_url
from gmeta.serving.channel.channel import CURRENT_FILE, VERSIONS, Channel, CurrentVersion
from gmeta.serving.channel.current_version import (
    read_bounded,
    read_current_file,
    translate_access_errors,
)
from gmeta.serving.channel.decision_files import PROMOTIONS
from gmeta.serving.channel.model_version import (
    DELTA_FORMAT,
    ParentVersion,
    Version,
    check_version,
    description_of,
    files_of,
    parse_checked,
    read_version,
)
from gmeta.serving.channel.version_cache import cache_folder, lock_folder
from gmeta.serving.channel.version_retention import remove_others
from gmeta.serving.exported_folder import CONFIG_FILE, DELTA_FILE
from metaio.errors import MetaIOError
from metaio.format.atomic_folder import (
    download_file,
    open_atomic_folder,
    remove_folder,
    upload_file,
    upload_folder,
)
from metaio.format.manifest import xxh3_hex
from metaio.format.storage import find_file_system, is_local

_log = logging.getLogger(__name__)


def channel_at(place: str | Path, cache: Path | None = None) -> Channel:
    """Return the channel at a path, or a copy in `cache` of what one at a URL serves now."""
    if not is_url(place):
        return Channel(place)
    url = str(place).rstrip("/")
    with lock_folder((cache or cache_folder()) / "channels" / xxh3_hex(url.encode())) as root:
        copy = Channel(root)
        content, current = read_current_file(url)
        with translate_access_errors(url):
            chain = _remote_chain(url, current)
            # The base first: a download that is stopped leaves a chain without holes.
            for parent, name, described in reversed(chain):
                _download_version(url, copy, parent, name, described)
        # After the versions, before the old ones go: the copy can be served at each moment.
        write_atomically(copy.root / CURRENT_FILE, content)
        remove_others(copy, [parent.number for parent, _, _ in chain])
    return copy


def publish(channel: Channel, url: str) -> list[int]:
    """Copy a channel to a URL, and remove there what it has no longer; return what was copied."""
    url = url.rstrip("/")
    fs, root = find_file_system(url)
    with channel.lock_for_change() as current, translate_access_errors(url):
        if current is None:
            raise UserError(
                f"{channel.root} has no version yet: there is nothing to publish. "
                f"Run: gmeta channel promote RUN {channel.root}"
            )

        def remove(name: str) -> None:
            # The description is removed first: half a version must not be readable.
            last = DELTA_FILE if DELTA_FILE in remote_sizes[name] else CONFIG_FILE
            remove_folder(fs, f"{root}/{VERSIONS}/{name}", last)

        # fsspec keeps listings of earlier calls, which another writer may have outdated.
        fs.invalidate_cache()
        # Versions without a current.json may be another channel's: they are replaced.
        is_own = _is_same_channel(channel, url)
        remote_sizes = _remote_sizes(fs, f"{root}/{VERSIONS}")
        copied, chain = [], channel.chain(current.number)
        for number in channel.numbers():
            folder = channel.folder_of(number)
            remote_files = remote_sizes.get(folder.name, {})
            try:
                version = channel.version(number)
                sizes = _listed_sizes(version)
                if is_own and remote_files == sizes:
                    continue
                check_version(version)
            except GMetaError as error:
                # What nobody needs for what serves must not keep that from its readers.
                if number in (one.number for one in (chain.base, *chain.deltas)):
                    raise
                _log.warning(f"version {number} of {channel.root} is not published: {error}")
                continue
            # Sizes show an upload that was cut short; otherwise a version never changes. Old files
            # must not stay beside the new ones: a delta.json would be read in place of config.json.
            # On a disk the folder is swapped as one.
            if not is_local(fs) and not remote_files.keys() <= sizes.keys():
                remove(folder.name)
            target = f"{root}/{VERSIONS}/{folder.name}"
            # Only what it lists: beside it may lie a stranger's link to anything.
            upload_folder(fs, folder, target, description_of(folder), sizes)
            copied.append(number)
        upload_file(fs, channel.root / PROMOTIONS, f"{root}/{PROMOTIONS}")
        if is_local(fs):  # elsewhere an object appears whole
            write_atomically(Path(root) / CURRENT_FILE, (channel.root / CURRENT_FILE).read_bytes())
        else:
            fs.put_file(str(channel.root / CURRENT_FILE), f"{root}/{CURRENT_FILE}")
        if is_own:
            kept = {channel.folder_of(number).name for number in channel.numbers()}
            # After current.json: until then readers may be sent to a version that goes now.
            for name in set(remote_sizes) - kept:
                remove(name)
    return copied


def _remote_chain(url: str, current: CurrentVersion) -> list[tuple[ParentVersion, str, bytes]]:
    """Return the served version and those below it, newest first, with their descriptions."""
    versions, next_parent = [], current.parent
    while True:
        name, content = _description(url, next_parent.number)
        versions.append((next_parent, name, content))
        where = f"{url}/{VERSIONS}/{next_parent.number:08d}/{name}"
        if name == CONFIG_FILE:
            checksum, parent = xxh3_hex(content), None
        else:
            body = parse_checked(content, where, DELTA_FORMAT)
            checksum, parent = body["checksum"], ParentVersion(**body["parent"])
        # The names come from current.json and from deltas; the content must be what they name.
        if checksum != next_parent.checksum:
            raise GMetaError(
                f"{where} is of version {ParentVersion(next_parent.number, checksum).name}, but "
                f"{next_parent.name} is served or built on: it was replaced. "
                f"Run: gmeta channel publish CHANNEL {url}"
            )
        if parent is None:
            return versions
        if parent.number >= next_parent.number:
            raise GMetaError(f"{where} builds on version {parent.number}, which comes after it")
        next_parent = parent


def _description(url: str, number: int) -> tuple[str, bytes]:
    fs, root = find_file_system(f"{url}/{VERSIONS}/{number:08d}")
    try:
        return DELTA_FILE, read_bounded(fs, f"{root}/{DELTA_FILE}")
    except (FileNotFoundError, PermissionError):  # S3 says so to who may not list
        return CONFIG_FILE, read_bounded(fs, f"{root}/{CONFIG_FILE}")


def _download_version(
    url: str, copy: Channel, wanted: ParentVersion, name: str, description: bytes
) -> None:
    """Bring a version to a copy of the channel, unless it is there and undamaged."""
    target = copy.folder_of(wanted.number)
    try:
        local_version = read_version(target, wanted.number)
        check_version(local_version)
        if local_version.checksum == wanted.checksum:
            return
    except GMetaError:
        pass  # it is brought anew
    fs, there = find_file_system(f"{url}/{VERSIONS}/{target.name}")
    # What is there is damaged, or of another version of this number.
    shutil.rmtree(target, ignore_errors=True)
    with open_atomic_folder(target) as partial:
        # The bytes that were checked against the chain, not those that may be there by now.
        (partial / name).write_bytes(description)
        version = read_version(partial, wanted.number)
        try:
            for file, entry in files_of(version).items():
                download_file(fs, f"{there}/{file}", partial / file, entry.num_bytes)
            check_version(version)
        except (GMetaError, MetaIOError) as error:
            raise GMetaError(
                f"version {version.name} did not come whole from {url}: {error}. If it is damaged "
                f"there, remove {VERSIONS}/{target.name} there and run: gmeta channel "
                f"publish CHANNEL {url}"
            ) from error


def _is_same_channel(channel: Channel, url: str) -> bool:
    """Return whether current.json at a URL names a version of this channel."""
    try:
        _, there = read_current_file(url)
    except UserError:
        return False
    except GMetaError as error:
        # A torn current.json: publishing writes it anew.
        if isinstance(error.__cause__, MetaIOError):
            return False
        raise
    logged = [(entry.get("number"), entry.get("checksum")) for entry in channel.promotions()]
    if (there.number, there.checksum) in logged:
        return True
    raise UserError(
        f"{url} holds another channel, which serves version {there.parent.name}: "
        f"no version of {channel.root} is that. Choose another URL, or empty that one"
    )


def _remote_sizes(fs: Any, versions: str) -> dict[str, dict[str, int]]:
    try:
        listed = fs.find(versions, detail=True)
    except FileNotFoundError:
        return {}
    sizes_by_version: dict[str, dict[str, int]] = {}
    for path, entry in listed.items():
        folder, _, file = str(path).rpartition(f"{versions.rsplit('/', 1)[-1]}/")[2].partition("/")
        sizes_by_version.setdefault(folder, {})[file] = int(entry["size"])
    return sizes_by_version


def _listed_sizes(version: Version) -> dict[str, int]:
    """Return the size of every file of a version."""
    described = description_of(version.folder)
    sizes = {described: (version.folder / described).stat().st_size}
    return sizes | {name: entry.num_bytes for name, entry in files_of(version).items()}
