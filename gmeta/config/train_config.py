"""Training configs: TOML plus `section.key=value` overrides, checked once, into frozen dataclasses.

Each section is a dataclass that stands beside its owner; unknown keys are refused with the nearest
name."""

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from gmeta.config.algorithm import ALGORITHM_OPTIONS, AlgorithmConfig
from gmeta.config.evaluation import EvaluationConfig
from gmeta.config.former_keys import MOVED, with_current_keys
from gmeta.config.inputs import (
    AugmentConfig,
    ItemFeaturesConfig,
    NeighboursConfig,
    SupportFeaturesConfig,
)
from gmeta.config.labels import LabelsConfig
from gmeta.config.losses import NAMED_LOSSES, Loss, kind_of_loss
from gmeta.config.settings import (
    WORDING,
    describe_keys,
    describe_settings,
    flatten_sections,
    settings_from_dict,
)
from gmeta.config.sharding import ShardingConfig
from gmeta.errors import ConfigError
from gmeta.platform.files.local_paths import check_local
from gmeta_keys import key, read_toml
from gmeta_models.model_config import ModelConfig
from gmeta_models.options import EVENT_OPTIONS, MODEL_OPTIONS, with_all_options

OPTIONS = {
    "model.options": MODEL_OPTIONS,
    "model.event_options": EVENT_OPTIONS,
    "algorithm.options": ALGORITHM_OPTIONS,
}


@dataclass(frozen=True)
class DataConfig:
    """Where episodes come from, and how many make a step."""

    path: str = key("", "prepared dataset: a folder or any fsspec URL (required)")
    increment: str = key(
        "",
        'increment of the stream at data.path: its number, or "next"; empty: data.path is a '
        "dataset",
    )
    train_split: str = key("train", "split to train on")
    valid_split: str | tuple[str, ...] = key(
        "",
        "split to score while training, or a list whose mean decides; empty: none. Never one "
        "you report on",
    )
    eval_splits: tuple[str, ...] = key(
        (), "splits that evaluate scores; []: all but the training and validation split"
    )
    # As much as the data-shard service counts of a step, and more than any memory holds.
    tasks_per_step: int = key(
        128, "episodes per outer step, all ranks together", min=1, max=2**31 - 1
    )
    rows_per_step: int = key(
        0, "above 0: a step is about so many rows of whole tasks, not tasks_per_step", min=0
    )
    task_cost: str | tuple[float, ...] = key(
        (4.0, 1.0),
        "cost of a task and of each of its rows; ranks take slices of a step that cost alike; "
        "[1, 0]: equally many tasks; fitted: as the steps before the checkpoint took "
        "(docs/scaling.md)",
    )
    shuffle: bool = key(True, "shuffle episodes anew every epoch, from the seed")
    blocks_per_step: int = key(0, "above 0: a step is so many stored blocks, shuffled whole", min=0)
    threads: int = key(
        1, "threads per rank that decode, and as many that arrange for a GPU", min=1, max=1024
    )
    processes: int = key(
        -1,
        "processes per rank that make its batches; 0: threads do; -1: on a GPU up to four, on "
        "a CPU 0 (docs/gpu.md)",
        min=-1,
        max=1024,
    )
    source: Literal["static", "service"] = key(
        "static",
        "static: every rank its share of each step, from the seed; service: ranks lease "
        "shards, each episode once",
    )
    service: str = key(
        "",
        "HOST:PORT of `gmeta shard-service`; empty: $GMETA_SHARD_SERVICE, else one of the "
        "job's own",
    )

    def mean_tasks_per_step(self, num_tasks: int, num_rows: int) -> int:
        """Return the tasks of a step, with rows_per_step on average: of a split of so many tasks
        and rows."""
        if not self.rows_per_step:
            return self.tasks_per_step
        return max(1, round(self.rows_per_step * num_tasks / max(1, num_rows)))

    @property
    def valid_splits(self) -> tuple[str, ...]:
        """Return the splits that valid_split names."""
        named = (self.valid_split,) if isinstance(self.valid_split, str) else self.valid_split
        return tuple(filter(None, named))


ADAGRADS = ("rowwise_adagrad", "adagrad")  # the optimizers that keep sums of squares


@dataclass(frozen=True)
class OuterConfig:
    """The outer loop: loss and optimizers."""

    loss: Loss | str = key(
        "bce",
        "bce: labels 0 and 1 (clicks); mse, huber, mae: any number (ratings); softmax, "
        "pairwise: the order of a task's rows; or your own as package.module:Name "
        "(docs/extending.md)",
    )
    negatives: Literal["task", "step", "popular"] = key(
        "task",
        "softmax: what a positive row competes with: the rows of its task; or, less their "
        "popularity, the items of all rows of a rank's step, or items drawn by it "
        "(model.name = dot, algorithm.name = none)",
    )
    popular_negatives: int = key(
        1024, "negatives = popular: items drawn for a step, the same on all ranks", min=1, max=2**20
    )
    huber_delta: float = key(1.0, "huber: the error up to which its loss is squared", min=1e-6)
    dense_optimizer: Literal["adam", "adamw", "adagrad", "sgd"] = key(
        "adam", "optimizer of the data-parallel layers"
    )
    dense_lr: float = key(1e-3, "learning rate of the layers", min=0.0)
    weight_decay: float = key(0.0, "L2 penalty on the layers; adamw: decoupled decay", min=0.0)
    momentum: float = key(0.0, "momentum of the layers' sgd", min=0.0, max=1.0)
    lr_schedule: Literal["constant", "linear", "cosine"] = key(
        "constant", "linear, cosine: learning rates fall towards 0 over the run"
    )
    warmup_steps: int = key(
        0, "steps over which the learning rates rise; the schedule follows", min=0
    )
    clip_norm: float = key(
        0.0, "largest norm of a step's gradient, layers and tables together; 0: no limit", min=0.0
    )
    accumulate_steps: int = key(
        1, "micro-batches that a step's tasks are split into", min=1, max=2**16
    )
    sparse_optimizer: Literal[
        "rowwise_adagrad", "adagrad", "sgd", "adam", "partial_rowwise_adam"
    ] = key("rowwise_adagrad", "optimizer of the embedding tables")
    sparse_lr: float = key(0.05, "learning rate of the tables", min=0.0)
    sparse_weight_decay: float = key(0.0, "decoupled decay of the table rows of a step", min=0.0)
    adagrad_decay: float = key(
        1.0,
        "run.continue_from: factor of Adagrad's sums of squares before the first step",
        min=0.0,
        max=1.0,
    )
    embedding_init_std: float = key(
        0.05, "standard deviation of the tables' initial values", min=0.0
    )


@dataclass(frozen=True)
class RunConfig:
    """Where a run goes, how long it lasts, what it writes."""

    dir: str = key("", "run folder, made by the run (required)")
    start_from: str = key("", "run, or checkpoint of one, whose weights a new run begins with")
    continue_from: str = key(
        "", "run, or checkpoint of one, that goes on with the next increment of its stream"
    )
    skip_increments: tuple[int, ...] = key(
        (), "continue_from: increments that the model is never trained on", min=1
    )
    prequential: bool = key(
        True, "continue_from: score the increment before the first step on it: a forecast"
    )
    # As much as torch's generators take.
    seed: int = key(0, "seed of the initial values and of the data order", min=0, max=2**63 - 1)
    epochs: int = key(1, "passes over the training split", min=1)
    max_steps: int = key(0, "stop after so many outer steps; 0: no limit", min=0)
    device: Literal["auto", "cpu", "cuda"] = key(
        "auto", "auto: cuda with NCCL where a GPU is visible, else cpu with gloo"
    )
    precision: Literal["float32", "tf32", "bf16"] = key(
        "float32", "of training's matrix products. tf32: on CUDA; bf16: bfloat16"
    )
    shape_buckets: Literal["auto", "on", "off"] = key(
        "auto",
        "round up the sizes of a batch, so that ragged data has few shapes; auto: on CUDA "
        "(docs/gpu.md)",
    )
    cuda_graphs: Literal["auto", "on", "off"] = key(
        "auto",
        "one CUDA graph a shape, where that is safe; needs shape_buckets. on: say where it is "
        "not (docs/gpu.md)",
    )
    deterministic: bool = key(False, "use deterministic torch kernels only")
    log_every_steps: int = key(10, "steps between two lines of metrics", min=1)
    loggers: tuple[str, ...] = key(
        ("tensorboard",),
        "where readings go beside metrics.jsonl: tensorboard, wandb, mlflow, or your own "
        "(docs/extending.md)",
    )
    callbacks: tuple[str, ...] = key(
        (), "callbacks of your own, by entry point or package.module:Name (docs/extending.md)"
    )
    profile_steps: int = key(0, "steps of rank 0 to write a trace of to profile/", min=0)
    checkpoint_every_steps: int = key(
        0, "steps between two checkpoints; 0: after every epoch", min=0
    )
    memory_checkpoint_every_steps: int = key(
        0,
        "steps between two checkpoints in memory, of what changed since the last on disk, for "
        "restarts; 0: none (docs/training.md)",
        min=0,
    )
    checkpoint_in_background: bool = key(
        True, "write while training goes on, from a copy in host memory"
    )
    keep_last: int = key(2, "checkpoints kept", min=1)
    mirror: str = key(
        "", "URL, as s3://bucket/run, that gets a copy of every checkpoint; --resume fetches it"
    )
    keep_best: bool = key(True, "take and keep a checkpoint of the best validation as well")
    valid_every_steps: int = key(
        0, "score data.valid_split after so many steps; 0: every epoch", min=0
    )
    early_stop_patience: int = key(
        0, "end after so many validations in a row without a better score; 0: never", min=0
    )
    early_stop_metric: str = key(
        "", "metric that must improve, any of evaluation.metrics' names; empty: the headline"
    )
    hang_timeout_s: int = key(
        240,
        "no step for so long, and for 100 median steps, ends a run of several ranks with the "
        "stacks of all; 0: never (docs/operations.md)",
        min=0,
        max=10**9,
    )
    # A larger one overflows what torch counts timeouts in.
    collective_timeout_s: int = key(
        300, "a collective that waits longer ends the run with an error", min=1, max=10**9
    )


@dataclass(frozen=True)
class TrainConfig:
    """Everything a training run is made from; saved resolved as config.json in the run folder."""

    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    support_features: SupportFeaturesConfig = field(default_factory=SupportFeaturesConfig)
    item_features: ItemFeaturesConfig = field(default_factory=ItemFeaturesConfig)
    neighbours: NeighboursConfig = field(default_factory=NeighboursConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    labels: LabelsConfig = field(default_factory=LabelsConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def loss_of(self, label: str = "") -> Loss:
        """Return the loss of a label, or of one given another (`buy|click`); "": the headline's;
        in place of a package's own that of ours which it is like (kind_of_loss)."""
        return kind_of_loss(self.loss_name(label))

    def loss_name(self, label: str = "") -> str:
        """Return the loss of a label as the config has it; see `loss_of`."""
        name = label.partition("|")[0] or self.labels.judged
        # A dataset's own names are checked where it is opened: labels.loss by LabelsConfig.check.
        return self.labels.loss.get(name, self.outer.loss)

    @property
    def loss_names(self) -> list[str]:
        """Return all losses that the config names."""
        return self.labels.list_losses(self.outer.loss)

    @property
    def has_support_inputs(self) -> bool:
        """Tell whether the model has inputs made from support rows."""
        return self.support_features.is_used or bool(self.neighbours.column)

    @property
    def digest(self) -> str:
        """Return digest_of all values, including defaults: a later release may have others."""
        return digest_of(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts, lists and scalars."""
        # There and back, so that tuples are the lists that a reader will find.
        value: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return value

    def by_key(self) -> dict[str, Any]:
        """Return every value, as JSON has it, by its section.key, or section.options.key."""
        return flatten_sections(self.to_json())


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Return the config at `path` (TOML, or config.json of a run) with `section.key=value`
    overrides, whose values are TOML (bare words are text). Raises ConfigError: no such file, no
    TOML, an unknown key, a bad value, a required key left empty."""
    raw = read_toml("config", Path(path), ConfigError, "run")
    raw = with_current_keys(raw, is_saved=Path(path).suffix == ".json")
    for override in overrides:
        _override(raw, override)
    config = config_from_dict(raw)
    # Not in the dataclasses: the config of an exported model has neither.
    for name, value in (("data.path", config.data.path), ("run.dir", config.run.dir)):
        if not value:
            raise ConfigError(
                f"{name} is empty: it is required. Set it in the config, or add {name}=PATH"
            )
    check_local("run.dir", config.run.dir)
    outer = config.outer
    if outer.momentum and outer.dense_optimizer != "sgd":
        raise ConfigError(
            f"outer.momentum = {outer.momentum} has no meaning for outer.dense_optimizer = "
            f"{outer.dense_optimizer!r}: only sgd takes it. Leave it 0, or choose sgd"
        )
    return config


def overridden(config: TrainConfig, overrides: Sequence[str]) -> TrainConfig:
    """Return the config with these `section.key=value` in place of its own values. Raises
    ConfigError: an unknown key or a bad value."""
    raw = config.to_json()
    for override in overrides:
        _override(raw, override)
    return config_from_dict(raw)


def digest_of(config: Mapping[str, Any]) -> str:
    """Return twelve hexadecimal digits that change with any value of a resolved config."""
    # Sorted: in which order a file has its keys says nothing.
    text = json.dumps(config, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def config_from_dict(raw: Mapping[str, Any], is_saved: bool = False) -> TrainConfig:
    """Return a config from nested dicts, as TOML or JSON gives them; `is_saved`: see
    with_current_keys. Raises ConfigError: an unknown key, a wrong type, or a value outside its
    bounds."""
    config = settings_from_dict(TrainConfig, with_current_keys(raw, is_saved))
    if not is_saved:  # whoever reads a saved one checks that its packages are trusted, too
        try:
            NAMED_LOSSES.check_named(config.outer.loss, NAMED_LOSSES.key)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    return with_every_option(config)


def with_every_option(config: TrainConfig) -> TrainConfig:
    """Return the config with every option of its model and its algorithm, and those of no other;
    where one is somebody's own, with those that are there. Raises ConfigError: an option is
    unknown, of a wrong type, or outside its bounds."""
    algorithm = config.algorithm
    if algorithm.name in ALGORITHM_OPTIONS:
        algorithm = algorithm.with_options_of(ALGORITHM_OPTIONS[algorithm.name])
    return replace(config, model=with_all_options(config.model, WORDING), algorithm=algorithm)


def describe_config() -> list[tuple[str, str, str]]:
    """Return (key, default, help) of every key, in order, the options of our own models and
    algorithms behind their sections."""
    described = {}
    for line in describe_settings(TrainConfig):
        described[line[0]] = line
        for kind in OPTIONS.get(line[0], {}).values():
            described |= {own[0]: own for own in describe_keys(kind, line[0])} if kind else {}
    return list(described.values())


def types_of_keys() -> dict[str, Any]:
    """Return the type of every key, and of every option of our own models and algorithms."""
    found = {
        f"{section}.{name}": hint
        for section, fields in get_type_hints(TrainConfig).items()
        for name, hint in get_type_hints(fields).items()
    }
    for section, kinds in OPTIONS.items():
        for kind in filter(None, kinds.values()):
            found |= {f"{section}.{name}": hint for name, hint in get_type_hints(kind).items()}
    return found


def _text_keys() -> dict[str, tuple[type, ...]]:
    """Return the keys whose values are text, or a list of texts, and their types in TOML."""
    return {
        key: (str,) if hint is str else (str, list)
        for key, hint in types_of_keys().items()
        if hint is str or (str in get_args(hint) and get_origin(hint) is not dict)
    }


def _override(raw: dict[str, Any], override: str) -> None:
    target, equals, text = override.partition("=")
    target = MOVED.get(target, target)
    section, dot, name = target.partition(".")
    if not (equals and dot and section and name):
        raise ConfigError(
            f"override {override!r} is not of the form section.key=value. Write e.g. run.epochs=3"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text
    # run.dir=2026-11-22 means the text, though TOML reads a date.
    if not isinstance(value, _text_keys().get(target, object)):
        value = text
    keys = raw.setdefault(section, {})
    *tables, name = name.split(".")  # model.options.depth: a table within the section
    for table in tables:
        keys = keys.setdefault(table, {}) if isinstance(keys, dict) else keys
    # A value in a section's place is refused with the rest of the config.
    if isinstance(keys, dict):
        keys[name] = value
