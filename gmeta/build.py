"""From a config to its dataset and model.

Needs neither ranks nor TorchRec: a launcher finds what is wrong before it starts anything.
"""

import torch

from gmeta.adaptation.algorithm import TableSizes
from gmeta.adaptation.config import AlgorithmConfig
from gmeta.batches.augment import check_augment
from gmeta.batches.labels import check_first_labels
from gmeta.config import DataConfig, TrainConfig
from gmeta.errors import ConfigError
from gmeta.learner import MetaLearner
from gmeta.numerics import BF16
from gmeta.outer.early_stop import early_stop_of
from gmeta.tables.sharding import check_sharding
from metaio.dataset import Dataset, open_dataset
from metaio.features import Features
from models.config import InputSizes, ModelConfig, SparseColumn
from models.registry import build_model


def build(config: TrainConfig) -> tuple[Dataset, MetaLearner]:
    """Open the dataset and build the part of the model that every rank replicates.

    Raises:
        ConfigError: the config does not fit the dataset, or the model does not fit the algorithm.
    """
    dataset = open_dataset(config.data.path)
    for key, split in (
        ("train_split", config.data.train_split),
        ("valid_split", config.data.valid_split),
    ):
        if split and split not in dataset.splits:
            raise ConfigError(
                f"data.{key} = {split!r} is not in {config.data.path}: "
                f"it has {', '.join(dataset.splits)}. Name one of them"
            )
        if split and not dataset.splits[split].num_episodes:
            raise ConfigError(
                f"data.{key} = {split!r} has 0 episodes in {config.data.path}: at least one is "
                "needed. Name another split, or prepare data with tasks in this one"
            )
    check_source(config.data)
    # Only for what it refuses: the launcher must find it before any rank starts.
    early_stop_of(config)
    tables = [table.name for table in dataset.features.tables]
    check_sharding(config.sharding, tables, config.outer.sparse_optimizer)
    # Right before the model is built: all ranks must begin with equal layers.
    torch.manual_seed(config.run.seed)
    try:
        check_augment(config.augment, dataset.features)
        learner = build_learner(dataset.features, config.model, config.algorithm, config.outer.loss)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if config.run.precision == BF16:
        learner.use_general_loop()
    return dataset, learner


def check_on_data(config: TrainConfig) -> None:
    """All that can be wrong with a config and its dataset without a rank.

    Raises:
        ConfigError: see build and check_first_labels.
        FormatError: the first block is damaged.
    """
    dataset, _ = build(config)
    check_first_labels(config, dataset)


def check_source(data: DataConfig) -> None:
    """Hold the keys of the data source against each other.

    Raises:
        ConfigError: a key says something that the source does not do.
    """
    if data.source == "static":
        for key in ("service", "tasks_per_shard"):
            if getattr(data, key):
                raise ConfigError(
                    f'data.{key} = {getattr(data, key)!r}, but data.source = "static" leases no '
                    'shards. Set data.source = "service", or remove the key'
                )
        return
    host, _, port = data.service.rpartition(":")
    if data.service and not (host and port.isdecimal()):
        raise ConfigError(
            f"data.service = {data.service!r} is no address: HOST:PORT of a running `gmeta "
            "shard-service` is allowed. Correct it, or remove the key: the job starts its own"
        )
    defaults = {"lanes": 1, "window_blocks": 0, "blocks_per_step": 0, "drop_last": False}
    for key, default in defaults.items():
        if getattr(data, key) != default:
            raise ConfigError(
                f'data.{key} = {getattr(data, key)}, but data.source = "service" hands out whole '
                "shards, every episode once. Remove the key"
            )


def build_learner(
    features: Features, model: ModelConfig, algorithm: AlgorithmConfig, loss: str
) -> MetaLearner:
    """The model of these columns and the way it adapts, freshly initialised.

    Raises:
        ValueError: the model or the algorithm is unknown, or they do not fit each other or the
            columns.
    """
    sizes = input_sizes(features)
    tables = TableSizes(len(features.tables), model.embedding_dim)
    return MetaLearner(build_model(model, sizes), algorithm, loss, tables)


def input_sizes(features: Features) -> InputSizes:
    """What a model needs to know of a dataset's columns."""
    return InputSizes(
        len(features.single),
        len(features.multi),
        len(features.dense),
        tuple(SparseColumn(feature.name, feature.table) for feature in features.single),
        tuple(SparseColumn(feature.name, feature.table) for feature in features.multi),
    )
