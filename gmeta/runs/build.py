"""From a config to dataset and model, without ranks or TorchRec: a launcher checks it first."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy  # noqa: F401  # torch would import it in C, and swallow a Ctrl-C meanwhile
import torch
from torch import nn

from gmeta.adaptation.algorithms.algorithm import TableSizes
from gmeta.adaptation.algorithms.registry import NAMED_ALGORITHMS
from gmeta.config.algorithm import PLAIN, AlgorithmConfig
from gmeta.config.evaluation import EvaluationConfig
from gmeta.config.inputs import (
    NO_PRIOR,
    ItemFeaturesConfig,
    LabelPrior,
    NeighboursConfig,
    SupportFeaturesConfig,
)
from gmeta.config.labels import LabelsConfig
from gmeta.config.losses import NAMED_LOSSES
from gmeta.config.sharding import (
    check_admission,
    check_sequences,
    check_sharding,
    keeps_tables_beyond,
)
from gmeta.config.table_names import module_name
from gmeta.config.table_widths import tables_of_events, widths_of_tables
from gmeta.config.train_config import DataConfig, TrainConfig
from gmeta.data.augment import check_augment
from gmeta.data.event_layout import EventColumns
from gmeta.data.features.item_statistics import ItemStatistics
from gmeta.data.features.neighbours import Neighbours
from gmeta.data.features.support_statistics import NO_STATISTICS, SupportStatistics
from gmeta.data.item_counts import count_items, log_shares
from gmeta.data.item_draws import ItemDraws
from gmeta.data.label_checks import check_first_labels, scored_labels
from gmeta.data.opening import open_data
from gmeta.data.reader import task_cost_of
from gmeta.errors import ConfigError
from gmeta.learner import MetaLearner
from gmeta.losses.named_losses import make_objectives
from gmeta.losses.objectives import Objectives
from gmeta.losses.row_losses import defined_labels_N
from gmeta.metrics.catalogue import custom_names, label_of
from gmeta.metrics.custom_metrics import NAMED_METRICS, try_out
from gmeta.runs.early_stop import make_early_stop
from gmeta.runs.logging.hook_registry import NAMED_CALLBACKS, NAMED_LOGGERS, find_hooks
from gmeta.runs.trusted_names import check_trusted
from gmeta_keys.plugins import Registry
from gmeta_models.gated import head_layers
from gmeta_models.initial_sum import keep_sum_units, list_sum_layers
from gmeta_models.model_config import InputSizes, ModelConfig, SparseColumn
from gmeta_models.registry import NAMED_MODELS, build_model, check_outputs
from gmeta_models.sequence.registry import build_encoder
from gmeta_models.table_projections import TableProjections
from metaio.format.dataset import Dataset
from metaio.format.features import Features
from metaio.prepare.schema.schema_file import list_weighed_labels
from metaio.quantities import format_count


def build(config: TrainConfig) -> tuple[Dataset, MetaLearner]:
    """Return the dataset, and the part of the model that every rank replicates. Raises ConfigError:
    the config does not fit the dataset, or the model the algorithm."""
    dataset = open_data(config.data)
    for key, split in (
        ("train_split", config.data.train_split),
        *(("valid_split", split) for split in config.data.valid_splits),
    ):
        if split and split not in dataset.splits:
            raise ConfigError(
                f"data.{key} = {split!r} is not in {config.data.path}: "
                f"it has {', '.join(dataset.splits)}. Name one of them"
                f"{', or leave it out' * (key == 'valid_split')}"
            )
        if split and not dataset.splits[split].num_episodes:
            raise ConfigError(
                f"data.{key} = {split!r} has 0 episodes in {config.data.path}: at least one is "
                "needed. Name another split, or prepare data with tasks in this one"
            )
    for split in config.data.valid_splits:
        if config.data.valid_splits.count(split) > 1:
            raise ConfigError(
                f"data.valid_split names {split!r} twice: the mean would count it twice. Name each "
                "split once"
            )
    check_source(config.data)
    task_cost_of(config.data)
    _check_early_stop_label(config.run.early_stop_metric, config.labels, config.data, dataset)
    if config.augment.resplit_support and dataset.manifest.support_is_past:
        raise ConfigError(
            f"augment.resplit_support is true, but the support rows of {config.data.path} are the "
            "past of its query rows, which drawing them anew would mix. Set it to false"
        )
    if config.run.start_from and config.run.continue_from:
        raise ConfigError(
            f"run.start_from = {config.run.start_from!r} and run.continue_from = "
            f"{config.run.continue_from!r}: a run begins with one of them. Leave one empty"
        )
    if not (config.algorithm.train_base or config.run.start_from or config.run.continue_from):
        raise ConfigError(
            "algorithm.options.train_base = false and run.start_from is empty: model and tables "
            "would stay "
            "as they are drawn. Name the run to begin with in run.start_from, or set it to true"
        )
    _check_plain_epochs(config.algorithm, config.run.epochs)
    tables = [table.name for table in dataset.features.tables]
    check_sequences(config.sharding, config.model.events, config.outer.accumulate_steps)
    check_sharding(config.sharding, tables, config.outer.sparse_optimizer)
    check_admission(config.model.admission, config.sharding, config.algorithm.name, tables)
    rows_learn = config.sharding.exchange == "host" and config.algorithm.train_base
    if config.outer.sparse_weight_decay and not rows_learn:
        raise ConfigError(
            f"outer.sparse_weight_decay = {config.outer.sparse_weight_decay} is of rows that learn "
            'in our own tables: it needs sharding.exchange = "host", and no algorithm.options.'
            "train_base = false. Set them so, or leave it 0"
        )
    if config.run.memory_checkpoint_every_steps and (
        config.sharding.exchange != "host" or keeps_tables_beyond(config.sharding)
    ):
        raise ConfigError(
            f"run.memory_checkpoint_every_steps = {config.run.memory_checkpoint_every_steps} knows "
            'which rows of tables on the device change: it needs sharding.exchange = "host" and '
            'sharding.placement "auto" or "device", by no exception either. Set them so, or leave '
            "it 0"
        )
    if config.run.memory_checkpoint_every_steps and config.sharding.groups > 1:
        raise ConfigError(
            f"run.memory_checkpoint_every_steps = {config.run.memory_checkpoint_every_steps} keeps "
            f"one copy of the tables, and sharding.groups = {config.sharding.groups} has several. "
            "Set one of them back: 0, or 1 group"
        )
    # Right before the model is built: all ranks must begin with equal layers.
    torch.manual_seed(config.run.seed)
    try:
        check_augment(config.augment, dataset.features)
        settings, items, labels = config.support_features, config.item_features, config.labels
        if labels.standardise and not labels.moments:
            kinds = labels.loss_kinds(config.outer.loss, dataset.features.labels)
            moments = estimate_moments(config.data.train_split, kinds, dataset)
            labels = replace(labels, moments=moments)
        # A config may have the prior of an earlier run: then the inputs mean the same.
        if config.has_support_inputs and LabelPrior.from_config(settings) is None:
            prior = estimate_label_prior(config.data.train_split, config.loss_of(), dataset)
            settings = replace(settings, label_prior=prior)
        statistics = build_statistics(settings, dataset.features, items, config.neighbours)
        learner = build_learner(
            dataset.features,
            config.model,
            config.algorithm,
            config.outer.loss,
            config.outer.huber_delta,
            statistics,
            items,
            labels,
            config.neighbours,
            list_weighed_labels(dataset.manifest),
        )
        if config.outer.negatives != "task":
            _compete_in_steps(config, learner, dataset)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return dataset, learner


def _compete_in_steps(config: TrainConfig, learner: MetaLearner, dataset: Dataset) -> None:
    """Have the learner's loss be the softmax over a step's items, or over drawn ones. Raises
    ValueError: config."""
    columns = learner.event_columns
    wanted = config.outer.loss, config.model.name, config.algorithm.name
    if wanted != ("softmax", "dot", PLAIN) or columns is None:
        raise ValueError(
            f"outer.negatives = {config.outer.negatives!r} with outer.loss = {wanted[0]!r}, "
            f"model.name = {wanted[1]!r} and algorithm.name = {wanted[2]!r}: softmax, dot and none "
            'are needed. Set them, or outer.negatives = "task"'
        )
    split = config.data.train_split
    if config.outer.negatives == "step":
        shares = log_shares(dataset, split, columns.target[0])
        learner.event_columns = replace(columns, log_share_A=shares)
        return
    ids_AM, count_A = count_items(dataset, split, columns.target)
    if not len(ids_AM):
        raise ValueError(
            f'outer.negatives = "popular", but no row of split {split!r} has a known item to draw. '
            'Prepare with more of them, or set outer.negatives = "task"'
        )
    table_M = dataset.features.table_of_single[list(columns.target)]
    number, seed = config.outer.popular_negatives, config.run.seed
    draws = ItemDraws(ids_AM, count_A / count_A.sum(), table_M, number, seed)
    learner.event_columns = replace(columns, draws=draws)


def _check_plain_epochs(algorithm: AlgorithmConfig, epochs: int) -> None:
    if algorithm.name == PLAIN or not algorithm.plain_epochs:
        return
    if algorithm.plain_epochs >= epochs:
        raise ConfigError(
            f"algorithm.plain_epochs = {algorithm.plain_epochs} of run.epochs = {epochs}: none is "
            f"left for {algorithm.name}. Choose fewer, or set algorithm.name = {PLAIN!r}"
        )
    if not algorithm.train_base:
        raise ConfigError(
            f"algorithm.plain_epochs = {algorithm.plain_epochs} with "
            "algorithm.options.train_base = false: "
            "plain training teaches model and tables, which are to stay. Set one of them back"
        )


def _check_early_stop_label(
    metric: str, labels: LabelsConfig, data: DataConfig, dataset: Dataset
) -> None:
    _, label = label_of(metric)
    if label and label not in [one.name for one in scored_labels(labels, dataset)]:
        raise ConfigError(
            f"run.early_stop_metric is of {label!r}, which is no label of {data.path}: it "
            f"has {', '.join(dataset.features.labels) or 'one without a name'}. Name one of them"
        )


def check_on_data(config: TrainConfig) -> None:
    """Check all of a config that its dataset shows, for a launcher. Raises ConfigError: see build
    and check_first_labels; FormatError: the first block is damaged."""
    check_hooks(config)
    dataset, _ = build(config)
    kinds = config.labels.loss_kinds(config.outer.loss, dataset.features.labels)
    check_first_labels(config.data.train_split, kinds, dataset)


def check_hooks(config: TrainConfig) -> None:
    """Check that a run's metrics, loggers and callbacks are available. Raises ConfigError: one
    cannot be imported; GMetaError: a metric fails."""
    make_early_stop(config)
    # A metric that fails would otherwise show at the first validation.
    for name in _list_custom_metrics(config.evaluation, config.run.early_stop_metric):
        try_out(name)
    find_hooks(config.run)


def _list_custom_metrics(evaluation: EvaluationConfig, early_stop_metric: str) -> list[str]:
    return custom_names([*evaluation.metrics, label_of(early_stop_metric)[0]])


def check_registered(
    path: Path,
    model: ModelConfig,
    algorithm: AlgorithmConfig,
    losses: Iterable[str],
    made_on: Mapping[str, Any],
) -> None:
    """Raise GMetaError unless this machine has, and trusts, the model, algorithm and losses of a
    run or export at `path`; `made_on` is its environment."""
    check_trusted(path, _list_registered_names(model, algorithm, losses), made_on)


def find_plugins(
    model: ModelConfig, algorithm: AlgorithmConfig, losses: Iterable[str]
) -> dict[str, dict[str, str]]:
    """Return package and version of each model, algorithm and loss of another package, by key."""
    named = _list_registered_names(model, algorithm, losses)
    found = {key: registry.package_of(name) for key, (registry, name) in named.items()}
    return {key: package for key, package in found.items() if package}


def find_all_plugins(config: TrainConfig) -> dict[str, dict[str, str]]:
    """Return these of the metrics, loggers and callbacks of a run, too."""
    run = config.run
    names_by_registry: list[tuple[Registry[Any], str]] = [
        *(
            (NAMED_METRICS, name)
            for name in _list_custom_metrics(config.evaluation, run.early_stop_metric)
        ),
        *((NAMED_LOGGERS, name) for name in run.loggers),
        *((NAMED_CALLBACKS, name) for name in run.callbacks),
    ]
    found = {f"{part.key}: {name}": part.package_of(name) for part, name in names_by_registry}
    model_plugins = find_plugins(config.model, config.algorithm, config.loss_names)
    return model_plugins | {key: package for key, package in found.items() if package}


def _list_registered_names(
    model: ModelConfig, algorithm: AlgorithmConfig, losses: Iterable[str]
) -> dict[str, tuple[Registry[Any], str]]:
    return {
        NAMED_MODELS.key: (NAMED_MODELS, model.name),
        NAMED_ALGORITHMS.key: (NAMED_ALGORITHMS, algorithm.name),
        **{f"{NAMED_LOSSES.key}: {name}": (NAMED_LOSSES, name) for name in losses},
    }


def check_source(data: DataConfig) -> None:
    """Raise ConfigError for a key that has no meaning for the data source."""
    # Keys without an effect are refused: they would hide a mistake.
    if data.source == "static":
        if data.service:
            raise ConfigError(
                f'data.service = {data.service!r}, but data.source = "static" leases no shards. '
                'Set data.source = "service", or remove the key'
            )
        return
    host, _, port = data.service.rpartition(":")
    if data.service and not (host and port.isdecimal()):
        raise ConfigError(
            f"data.service = {data.service!r} is no address: HOST:PORT of a running `gmeta "
            "shard-service` is allowed. Correct it, or remove the key: the job starts its own"
        )
    if data.blocks_per_step:
        raise ConfigError(
            f'data.blocks_per_step = {data.blocks_per_step}, but data.source = "service" hands out '
            "whole shards, every episode once. Remove the key"
        )


def estimate_label_prior(split: str, loss: str, dataset: Dataset, place: int = 0) -> LabelPrior:
    """Return mean and deviation of the labels of the training split's first block; of several
    labels of that at `place`."""
    label_N = dataset.read_block(split, 0).label_N
    label_N = label_N.reshape(len(label_N), -1)[:, place]
    # Labels that the loss does not take are refused elsewhere, with their row.
    return LabelPrior.of(label_N[defined_labels_N(loss, label_N)])


def estimate_moments(split: str, kinds: Sequence[str], dataset: Dataset) -> tuple[float, ...]:
    """Return mean and deviation of each label, one after the other, by the kinds of their losses;
    see estimate_label_prior."""
    priors = (estimate_label_prior(split, kind, dataset, place) for place, kind in enumerate(kinds))
    return tuple(moment for prior in priors for moment in prior)


def build_statistics(
    config: SupportFeaturesConfig,
    features: Features,
    items: ItemFeaturesConfig,
    neighbours: NeighboursConfig = NeighboursConfig(),  # noqa: B008 - frozen
) -> SupportStatistics:
    """Return the statistics of a config that has a prior. Raises ValueError: it names a column that
    is not there, or its prior is not valid."""
    prior = LabelPrior.from_config(config) or NO_PRIOR
    return SupportStatistics.of(config, features, prior, items, neighbours)


def build_learner(
    features: Features,
    model: ModelConfig,
    algorithm: AlgorithmConfig,
    loss: str,
    huber_delta: float = 1.0,
    statistics: SupportStatistics = NO_STATISTICS,
    item_features: ItemFeaturesConfig | None = None,
    labels: LabelsConfig = LabelsConfig(),  # noqa: B008 - frozen
    neighbours: NeighboursConfig = NeighboursConfig(),  # noqa: B008 - frozen
    weighed: tuple[str, ...] = (),
) -> MetaLearner:
    """Return a freshly initialised model and the way it adapts; labels in `weighed` are learnt
    before they are final. Raises ValueError: one is unknown, or they do not fit each other or the
    columns."""
    sizes = measure_inputs(features)
    objectives = make_objectives(loss, huber_delta, labels, features.labels, weighed)
    if model.output_bias and objectives.outer.moments[:1] not in ((), ((0.0, 1.0),)):
        raise ValueError(
            f"model.output_bias = {model.output_bias} with labels.standardise: outputs are "
            "deviations from the mean label already. Leave one of them out"
        )
    items = None
    if item_features is not None and item_features.columns:
        items = ItemStatistics(item_features, features)
    near = None
    if neighbours.column:
        near = Neighbours(neighbours, features, statistics.prior)
    events, event_columns = None, None
    if model.events != "none":
        event_columns = EventColumns.of(features, model)
        events = build_encoder(model, features.num_event_numbers)
    width = statistics.width + (items.width if items is not None else 0)
    width += 0 if events is None else events.outputs
    # Statistics reach the model as dense columns.
    sizes = replace(sizes, num_dense=sizes.num_dense + width)
    names = tuple(table.name for table in features.tables)
    tables = TableSizes(len(names), model.embedding_dim, names, sizes, model.without)
    built = build_model(model, sizes)
    # An unfit head would only show as wrong shapes in the first loss.
    num_outputs = sum(head.out_features for head in head_layers(built).values())
    if num_outputs != sizes.outputs:
        raise ValueError(
            f"model.name = {model.name!r}: the linear layer that it defines last, its head, has "
            f"{format_count(num_outputs, 'output')} and the dataset "
            f"{format_count(sizes.outputs, 'label')}: "
            "one each is needed. Define the head last, with sizes.outputs outputs"
        )
    check_outputs(built, model, sizes)
    # By names that modules may have: these hold no dot.
    width_of = {
        module_name(name): width for name, width in widths_of_tables(features, model).items()
    }
    left_out = tuple(map(module_name, model.without))
    of_events = set(map(module_name, tables_of_events(features, model)))
    shares = any(model.admission[:1])  # of an export that was changed by hand it may be empty
    projections = TableProjections(width_of, model.embedding_dim, left_out, of_events, shares)
    learner = MetaLearner(
        built,
        algorithm,
        objectives,
        tables,
        statistics=statistics,
        items=items,
        neighbours=near,
        projections=projections,
        events=events,
        event_columns=event_columns,
    )
    if features.labels:
        _check_one_label(features.labels, algorithm.name, learner)
    if model.linear_start:
        _check_linear_start(built, sizes, objectives)
        keep_sum_units(built)
    return learner


def _check_linear_start(model: nn.Module, sizes: InputSizes, objectives: Objectives) -> None:
    list_sum_layers(model)
    if sizes.outputs > 1 or objectives.outer.losses[0].ranks or not sizes.num_dense:
        raise ValueError(
            "model.linear_start is a regression of one label on dense columns and statistics: it "
            "needs one of these inputs at least, and a loss of each row alone. Leave it out"
        )


def _check_one_label(names: tuple[str, ...], algorithm: str, learner: MetaLearner) -> None:
    # Labels with names may be unknown in a row; these parts read the label of every row.
    requirements = {
        f"algorithm.name = {algorithm!r}": learner.encoder is not None,
        "neighbours": learner.neighbours is not None,
        "support_features": learner.statistics.width > 0,
        "item_features": learner.items is not None,
    }
    for what, is_required in requirements.items():
        if is_required:
            raise ValueError(
                f"{what} reads one label that every row has, and the dataset's are "
                f"{', '.join(names)}. Leave it out, or prepare the data with one [label]"
            )


def measure_inputs(features: Features) -> InputSizes:
    """Return the sizes and names of a dataset's columns, for a model."""
    return InputSizes(
        len(features.single),
        len(features.multi),
        len(features.dense),
        tuple(SparseColumn(feature.name, feature.table) for feature in features.single),
        tuple(SparseColumn(feature.name, feature.table) for feature in features.multi),
        features.num_labels,
    )
