"""The tables before sharding: TorchRec's collections with their optimizer."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torchrec.optim
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig

from gmeta.config.sharding import BEYOND_DEVICE, ShardingConfig, placements_of_tables
from gmeta.config.table_names import module_name, table_of
from gmeta.config.table_widths import collections_of_tables, widths_of_tables
from gmeta.config.train_config import OuterConfig
from gmeta.distributed.tables.table_storage import TableStorage
from gmeta.platform.internals import update_in_backward
from gmeta_models.model_config import ModelConfig
from metaio.format.features import Features

SPARSE_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": torchrec.optim.RowWiseAdagrad,
    "adam": torch.optim.Adam,
    "partial_rowwise_adam": torchrec.optim.PartialRowWiseAdam,
}
# The default of fbgemm's kernels, named so that other implementations can match it.
ADAGRAD_EPSILON = 1e-8


def storages_of_tables(
    config: ShardingConfig, tables: list[str], run_dir: str
) -> dict[str, TableStorage]:
    """Return the storage of each table that the device does not hold."""
    folder = config.file_dir or run_dir
    return {
        name: TableStorage(placement, folder, config.cache_share)
        for name, placement in placements_of_tables(config, tables).items()
        if placement in BEYOND_DEVICE
    }


def make_unsharded_tables(
    features: Features,
    model: ModelConfig,
    outer: OuterConfig,
    storages: Mapping[str, TableStorage] = MappingProxyType({}),
) -> nn.Module:
    """Return the tables in a collection, or in one for each width, with `outer.sparse_optimizer`
    fused into their backward; without values: see initialise_tables. Tables in `storages`, by name,
    are kept beyond the device."""
    tables = _collections(features, model, storages)
    epsilon = {} if outer.sparse_optimizer == "sgd" else {"eps": ADAGRAD_EPSILON}
    settings: dict[str, Any] = {"lr": outer.sparse_lr, **epsilon}
    if model.admission[0]:
        settings["admission"] = model.admission
    update_in_backward(tables, SPARSE_OPTIMIZERS[outer.sparse_optimizer], settings)
    for collection in tables.modules():
        for name, table in getattr(collection, "embeddings", nn.ModuleDict()).items():
            # With the optimizer's settings TorchRec hands it to PlainTables, and keeps tables of
            # other settings apart.
            if storage := storages.get(table_of(name)):
                own = {**settings, "storage": storage}
                update_in_backward(table, SPARSE_OPTIMIZERS[outer.sparse_optimizer], own)
    return tables


def _leave_as_it_is(values: torch.Tensor) -> None:
    """Do nothing to a table that is made."""


def _collections(
    features: Features, model: ModelConfig, storages: Mapping[str, TableStorage]
) -> nn.Module:
    widths = widths_of_tables(features, model)
    num_rows = {table.name: table.num_rows for table in features.tables}
    found: dict[str, nn.Module] = {}
    for path, names in collections_of_tables(widths).items():
        configs = [
            EmbeddingConfig(
                name=module_name(name),
                embedding_dim=widths[name],
                num_embeddings=num_rows[name],
                feature_names=[module_name(name)],
                # TorchRec would fill all of a file with values that others replace.
                init_fn=_leave_as_it_is if name in storages else None,
            )
            for name in names
        ]
        # On the meta device: no rank makes memory for whole tables.
        found[path] = EmbeddingCollection(tables=configs, device=torch.device("meta"))
    if len(found) == 1:
        return found.popitem()[1]
    return nn.ModuleDict({path.rpartition(".")[2]: tables for path, tables in found.items()})
