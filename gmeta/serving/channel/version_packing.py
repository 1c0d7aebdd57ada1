"""A new model packed for a channel: as a delta over what it serves, or full where that is less."""

import logging
from pathlib import Path

from gmeta.config.table_widths import widths_of_tables
from gmeta.errors import GMetaError, UserError
from gmeta.serving.channel.channel import Channel
from gmeta.serving.channel.materialize import keep_materialized, materialize_version
from gmeta.serving.channel.model_version import Version, read_version
from gmeta.serving.channel.version_delta import write_delta
from gmeta.serving.exported_folder import ExportedConfig, new_folder, read_config

MAX_CHAIN = 16  # deltas that a fresh server applies at most
MAX_SHARE = 0.5  # of a full version: beyond, a fresh server reads much more than the model

_log = logging.getLogger(__name__)


def pack(
    channel: Channel, model: Path, out: Path, overwrite: bool, max_chain: int = MAX_CHAIN
) -> tuple[Version, str]:
    """Make a version at `out` from the export `model`; return it and why it is full ("" if not)."""
    current = channel.current()
    if current is None:
        return _pack_full(model, out, overwrite, "the channel has no version yet")
    try:
        # Every file is checked, of the chain too: a cache may be sound where no other reader could
        # make the model of what stands there.
        chain = channel.check_chain(current.number)
        champion_folder = materialize_version(channel, current.number)
    except UserError:
        raise
    except GMetaError as error:
        # A version that no delta can be made over must not serve for ever.
        why = f"version {current.number}, which is served, is damaged: {error}"
        _log.warning("the next version of %s is whole: %s", channel.root, why)
        return _pack_full(model, out, overwrite, why)
    why = _delta_obstacle(read_config(champion_folder), read_config(model))
    if not why and len(chain.deltas) >= max_chain:
        why = f"{len(chain.deltas)} deltas stand over version {chain.base.number} already"
    if why:
        return _pack_full(model, out, overwrite, why)
    with new_folder(out, overwrite) as partial:
        write_delta(champion_folder, current.parent, model, partial)
    version = read_version(out)
    if chain.delta_bytes + version.num_bytes > int(MAX_SHARE * version.full_bytes):
        why = f"the deltas over version {chain.base.number} are half of it"
        return _pack_full(model, out, True, why)
    # The next pack compares with this model: it must not be made from its chain again.
    keep_materialized(channel, version.checksum, model)
    return version, ""


def _pack_full(model: Path, out: Path, overwrite: bool, why: str) -> tuple[Version, str]:
    with new_folder(out, overwrite) as partial:
        # The caller's export itself: a copy would take its size on the disk twice.
        partial.rmdir()
        model.rename(partial)
    return read_version(out), why


def _delta_obstacle(old: ExportedConfig, new: ExportedConfig) -> str:
    """Return why no row of one model is a row of the other; "" where they may be."""
    if [table.name for table in old.features.tables] != [one.name for one in new.features.tables]:
        return "its tables are others"
    was, now = ((one.table_format, one.model.embedding_dim) for one in (old, new))
    if was != now:
        return f"its rows are {now[0]} of width {now[1]}, those served {was[0]} of width {was[1]}"
    if widths_of_tables(old.features, old.model) != widths_of_tables(new.features, new.model):
        return "its tables have other widths"
    if old.neighbours != new.neighbours:
        return "its neighbours are others"
    return ""
