"""A new model packed for a channel: as a delta over what it serves, or whole where that is less."""

from pathlib import Path

from gmeta.delivery.channel import Channel
from gmeta.delivery.delta import write_delta
from gmeta.delivery.versions import Version, read_version
from gmeta.delivery.whole import keep_whole, whole_version
from gmeta.serving.folder import ExportedConfig, new_folder, read_config
from gmeta.tables.widths import widths_of_tables

MAX_CHAIN = 16  # deltas that a fresh server applies at most
MAX_SHARE = 0.5  # of a full version: beyond, a fresh server reads much more than the model


def pack(
    channel: Channel, model: Path, out: Path, overwrite: bool, max_chain: int = MAX_CHAIN
) -> tuple[Version, str]:
    """Move the exported folder `model` to `out`, as a delta over what the channel serves where that
    can be; return the version, and why it is whole ("" of a delta).

    Raises:
        UserError: `out` is taken.
        GMetaError: the version that the channel serves is damaged.
    """
    current = channel.current()
    why = "the channel has no version yet"
    if current is not None:
        chain = channel.chain(current.number)
        known = whole_version(channel, current.number)
        why = _misfit(read_config(known), read_config(model))
        if not why and len(chain.deltas) >= max_chain:
            why = f"{len(chain.deltas)} deltas stand over version {chain.base.number} already"
        if not why:
            with new_folder(out, overwrite) as partial:
                write_delta(known, current.parent, model, partial)
            version = read_version(out)
            most = int(MAX_SHARE * version.full_bytes)
            if chain.delta_bytes + version.num_bytes <= most:
                keep_whole(channel, version.checksum, model)
                return version, ""
            why, overwrite = f"the deltas over version {chain.base.number} are half of it", True
    with new_folder(out, overwrite) as partial:
        partial.rmdir()
        model.rename(partial)
    return read_version(out), why


def _misfit(old: ExportedConfig, new: ExportedConfig) -> str:
    """Return why no row of one model is a row of the other; "" where they may be."""
    if [table.name for table in old.features.tables] != [one.name for one in new.features.tables]:
        return "its tables are others"
    was, now = ((one.table_format, one.model.embedding_dim) for one in (old, new))
    if was != now:
        return f"its rows are {now[0]} of width {now[1]}, those served {was[0]} of width {was[1]}"
    if widths_of_tables(old.features, old.model) != widths_of_tables(new.features, new.model):
        return "its tables have other widths"
    return ""
