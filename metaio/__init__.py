"""Task-grouped training data: prepare it, store it, and stream it as batches of episodes."""

import importlib
from typing import TYPE_CHECKING, Any

from metaio.errors import DataError, FormatError, MetaIOError, SchemaError
from metaio.format.block import Rows
from metaio.format.dataset import Dataset, Split, open_dataset
from metaio.format.dataset_writer import Provenance, write_dataset
from metaio.format.features import Features, FeatureSpec, TableSpec
from metaio.read.episode_order import BlockEpisodes, EpisodeOrder, OrderConfig
from metaio.read.equal_cost import TaskCost

# Batches are tensors: prepare, and tools that only open datasets, must not load torch.
if TYPE_CHECKING:
    from metaio.read.batch import TaskBatch, empty_batch
    from metaio.read.reader import BatchReader, EpisodeRange, RangeReader, read_ranges
    from metaio.read.task_dataset import TaskDataset, Tasks

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
    "TaskCost",
    "TaskDataset",
    "Tasks",
    "empty_batch",
    "open_dataset",
    "read_ranges",
    "write_dataset",
]


def __getattr__(name: str) -> Any:
    """Import what needs torch at its first use."""
    if name not in __all__:
        raise AttributeError(f"module 'metaio' has no attribute {name!r}")
    modules = {"TaskBatch": "batch", "empty_batch": "batch"}
    modules |= {"TaskDataset": "task_dataset", "Tasks": "task_dataset"}
    return getattr(importlib.import_module(f"metaio.read.{modules.get(name, 'reader')}"), name)
