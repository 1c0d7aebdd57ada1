"""Task-grouped training data: prepare it, store it, and stream it as batches of whole episodes."""

from metaio.batch import TaskBatch, empty_batch
from metaio.block import Rows
from metaio.dataset import Dataset, Split, open_dataset
from metaio.errors import DataError, FormatError, MetaIOError, SchemaError
from metaio.features import Features, FeatureSpec, TableSpec
from metaio.order import BlockEpisodes, EpisodeOrder, OrderConfig
from metaio.reader import BatchReader, EpisodeRange, RangeReader, read_ranges
from metaio.task_rows import task_rows
from metaio.writer import Provenance, write_dataset

__all__ = [
    "BatchReader",
    "BlockEpisodes",
    "DataError",
    "Dataset",
    "EpisodeOrder",
    "EpisodeRange",
    "FeatureSpec",
    "Features",
    "FormatError",
    "MetaIOError",
    "OrderConfig",
    "Provenance",
    "RangeReader",
    "Rows",
    "SchemaError",
    "Split",
    "TableSpec",
    "TaskBatch",
    "empty_batch",
    "open_dataset",
    "read_ranges",
    "task_rows",
    "write_dataset",
]
