"""The tables before they are placed: collections of TorchRec's, with their optimizer."""

import torch
import torchrec.optim
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig

from gmeta.config.table_names import module_name
from gmeta.config.table_widths import collections_of_tables, widths_of_tables
from gmeta.config.train_config import OuterConfig
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


def make_unsharded_tables(features: Features, model: ModelConfig, outer: OuterConfig) -> nn.Module:
    """Return the tables in a collection of TorchRec's, or in one for each width that they have,
    with `outer.sparse_optimizer` fused into their backward.

    They have no values yet: each rank makes those of its own shards, see initialise_tables.
    """
    tables = _collections(features, model)
    epsilon = {} if outer.sparse_optimizer == "sgd" else {"eps": ADAGRAD_EPSILON}
    settings = {"lr": outer.sparse_lr, **epsilon}
    update_in_backward(tables, SPARSE_OPTIMIZERS[outer.sparse_optimizer], settings)
    return tables


def _collections(features: Features, model: ModelConfig) -> nn.Module:
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
            )
            for name in names
        ]
        found[path] = EmbeddingCollection(tables=configs, device=torch.device("meta"))
    if len(found) == 1:
        return found.popitem()[1]
    return nn.ModuleDict({path.rpartition(".")[2]: tables for path, tables in found.items()})
