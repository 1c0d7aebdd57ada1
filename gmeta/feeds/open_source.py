"""Opens a run's batch source."""

from pathlib import Path

from gmeta.antdt.manifests.shard_manifest import MANIFEST_FILE_NAME
from gmeta.distributed.ranks import Ranks
from gmeta.errors import UserError
from gmeta.feeds.batch_request import BatchSettings
from gmeta.feeds.batch_source import BatchSource
from gmeta.feeds.leased import LeasedBatchSource
from gmeta.feeds.static import StaticBatchSource
from metaio.format.dataset import Dataset


def open_batch_source(
    settings: BatchSettings,
    dataset: Dataset,
    ranks: Ranks,
    checkpoint: Path | None,
    manifest: str = "",
) -> BatchSource:
    """Return the source that `data.source` names, where `checkpoint` stands in the data, or where
    rank 0's shard manifest of a later step does. Raises UserError: the checkpoint was trained with
    the other source, or from other data."""
    leased = settings.data.source == "service"
    if checkpoint is not None and (checkpoint / MANIFEST_FILE_NAME).exists() != leased:
        raise UserError(
            f'data.source = "{settings.data.source}", but checkpoint {checkpoint} was trained with '
            f'data.source = "{"static" if leased else "service"}": what it has seen of its epoch '
            "means nothing to the other. Set data.source as it was, or choose another run.dir"
        )
    if leased:
        return LeasedBatchSource(settings, dataset, ranks, checkpoint, manifest)
    return StaticBatchSource(settings, dataset, ranks, is_fresh=checkpoint is None)
