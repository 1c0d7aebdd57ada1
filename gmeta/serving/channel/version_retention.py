"""Which versions of a channel stay: the newest few, and what somebody may still need."""

import shutil
from collections.abc import Collection

from gmeta.serving.channel.channel import VERSIONS, Channel
from metaio.format.atomic_folder import flush_to_disk

_GOING = ".{}.removed"


def kept_versions(channel: Channel, keep: int) -> set[int]:
    """Return the newest `keep` versions, the one that serves, and the target of a rollback."""
    current = channel.current()
    wanted = {*channel.numbers()[-keep:], channel.version_before(current)}
    wanted |= {current.number} if current is not None else set()
    return {number for number in wanted if number is not None}


def prune(channel: Channel, keep: int) -> list[int]:
    """Remove versions but `kept_versions` and what these build on; return them, newest first."""
    with channel.lock_for_change():
        stay: set[int] = set()
        for number in kept_versions(channel, keep):
            chain = channel.chain(number)
            stay |= {version.number for version in (chain.base, *chain.deltas)}
        return remove_others(channel, stay)


def remove_others(channel: Channel, stay: Collection[int]) -> list[int]:
    """Remove all versions but these; return what was removed, newest first."""
    # From the newest: killed midway, no version is left without what it builds on.
    gone = [number for number in reversed(channel.numbers()) if number not in stay]
    folder = channel.root / VERSIONS
    for number in gone:
        # Under another name first: what is half removed must not look like a version.
        path = channel.folder_of(number)
        path.rename(path.with_name(_GOING.format(path.name)))
    if gone:
        flush_to_disk([folder])
    for path in folder.glob(_GOING.format("*")):  # also what a killed process left
        # What cannot be removed now goes with the next removal.
        shutil.rmtree(path, ignore_errors=True)
    return gone
