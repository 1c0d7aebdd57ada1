"""Training configs: TOML plus `section.key=value` overrides, checked once, into frozen dataclasses.

Each section is a dataclass that stands beside its owner; unknown keys are refused with the nearest
name.
"""

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

from gmeta.adaptation.config import AlgorithmConfig
from gmeta.batches.config import AugmentConfig
from gmeta.errors import ConfigError
from gmeta.files.local import check_local
from gmeta.settings import describe_settings, settings_from_dict
from gmeta.tables.sharding import ShardingConfig
from models.config import ModelConfig


@dataclass(frozen=True)
class DataConfig:
    """Where episodes come from, and how many make a step."""

    path: str = field(
        default="", metadata={"help": "prepared dataset: a folder or any fsspec URL (required)"}
    )
    train_split: str = field(default="train", metadata={"help": "split to train on"})
    valid_split: str = field(
        default="",
        metadata={"help": "split to score while training; empty: none. Never one you report on"},
    )
    eval_splits: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "splits that evaluate scores; []: all but the training and validation split"
        },
    )
    tasks_per_step: int = field(
        default=128, metadata={"help": "episodes per outer step, all ranks together", "min": 1}
    )
    shuffle: bool = field(
        default=True, metadata={"help": "shuffle episodes anew every epoch, from the seed"}
    )
    lanes: int = field(
        default=1,
        metadata={
            "help": "streams a step draws from; a multiple of the ranks lets each read its own",
            "min": 1,
        },
    )
    window_blocks: int = field(
        default=0,
        metadata={
            "help": "blocks a lane shuffles episodes within; 0: all of a small split, else 8",
            "min": 0,
        },
    )
    blocks_per_step: int = field(
        default=0,
        metadata={
            "help": "above 0: a step is so many stored blocks, shuffled whole: the fastest",
            "min": 0,
        },
    )
    drop_last: bool = field(default=False, metadata={"help": "drop an epoch's last, smaller step"})
    threads: int = field(default=1, metadata={"help": "decoding threads per rank", "min": 1})
    source: Literal["static", "service"] = field(
        default="static",
        metadata={
            "help": "static: every rank its share of each step, from the seed; "
            "service: ranks lease shards as they need them, each episode once whatever dies"
        },
    )
    service: str = field(
        default="",
        metadata={
            "help": "HOST:PORT of `gmeta shard-service`; empty: $GMETA_SHARD_SERVICE, else the job "
            "starts its own"
        },
    )
    tasks_per_shard: int = field(
        default=0,
        metadata={
            "help": "episodes handed out as one; 0: up to 16 of a split that fits in memory, else "
            "a block's worth",
            "min": 0,
        },
    )


@dataclass(frozen=True)
class OuterConfig:
    """The outer loop: loss and optimizers."""

    loss: Literal["bce", "mse", "huber"] = field(
        default="bce",
        metadata={
            "help": "bce: labels 0 and 1 (clicks); mse, or huber for a small absolute error: "
            "any number (ratings)"
        },
    )
    dense_optimizer: Literal["adam", "adamw", "adagrad", "sgd"] = field(
        default="adam", metadata={"help": "for the data-parallel layers"}
    )
    dense_lr: float = field(
        default=1e-3, metadata={"help": "learning rate of the layers", "min": 0.0}
    )
    weight_decay: float = field(
        default=0.0,
        metadata={"help": "L2 penalty on the layers; adamw: decoupled decay", "min": 0.0},
    )
    momentum: float = field(
        default=0.0, metadata={"help": "of the layers' sgd", "min": 0.0, "max": 1.0}
    )
    lr_schedule: Literal["constant", "linear", "cosine"] = field(
        default="constant",
        metadata={
            "help": "of layers and tables; linear, cosine: falls to 0 behind the last step of "
            "the run"
        },
    )
    warmup_steps: int = field(
        default=0,
        metadata={"help": "first steps, over which the rates rise; the schedule follows", "min": 0},
    )
    clip_norm: float = field(
        default=0.0,
        metadata={
            "help": "greatest norm of a step's gradient, layers and tables together; 0: no limit",
            "min": 0.0,
        },
    )
    accumulate_steps: int = field(
        default=1,
        metadata={
            "help": "parts that a step's tasks are worked through in, for memory; the same step",
            "min": 1,
        },
    )
    sparse_optimizer: Literal[
        "rowwise_adagrad", "adagrad", "sgd", "adam", "partial_rowwise_adam"
    ] = field(
        default="rowwise_adagrad",
        metadata={
            "help": "fused into the backward of the embedding tables; "
            "adam, partial_rowwise_adam: CUDA only"
        },
    )
    sparse_lr: float = field(
        default=0.05, metadata={"help": "learning rate of the tables", "min": 0.0}
    )
    embedding_init_std: float = field(
        default=0.05,
        metadata={"help": "standard deviation of the tables' initial values", "min": 0.0},
    )


@dataclass(frozen=True)
class RunConfig:
    """Where a run goes, how long it lasts, what it writes."""

    dir: str = field(default="", metadata={"help": "run folder, made by the run (required)"})
    start_from: str = field(
        default="",
        metadata={
            "help": "run, or checkpoint of one, whose weights a new run begins with; its "
            "optimizers begin anew"
        },
    )
    seed: int = field(
        default=0,
        # As much as torch's generators take.
        metadata={"help": "of initial values and of the data order", "min": 0, "max": 2**63 - 1},
    )
    epochs: int = field(default=1, metadata={"help": "passes over the training split", "min": 1})
    max_steps: int = field(
        default=0, metadata={"help": "stop after so many outer steps; 0: no limit", "min": 0}
    )
    device: Literal["auto", "cpu", "cuda"] = field(
        default="auto",
        metadata={"help": "auto: cuda with NCCL where a GPU is visible, else cpu with gloo"},
    )
    precision: Literal["float32", "bf16"] = field(
        default="float32",
        metadata={"help": "bf16: training's products of matrices in bfloat16, the rest in float32"},
    )
    deterministic: bool = field(
        default=False,
        metadata={"help": "let torch take only ways that give the same bits again, or refuse"},
    )
    log_every_steps: int = field(
        default=10, metadata={"help": "one metrics line per so many steps", "min": 1}
    )
    profile_steps: int = field(
        default=0,
        metadata={
            "help": "write a trace and a summary of so many steps of rank 0 to profile/; 0: none",
            "min": 0,
        },
    )
    checkpoint_every_steps: int = field(
        default=0,
        metadata={"help": "checkpoint after so many steps; 0: after every epoch", "min": 0},
    )
    checkpoint_in_background: bool = field(
        default=True,
        metadata={
            "help": "write while training goes on; costs a copy of the rank's state in host memory"
        },
    )
    keep_last: int = field(default=2, metadata={"help": "checkpoints kept", "min": 1})
    keep_best: bool = field(
        default=True,
        metadata={"help": "take and keep a checkpoint of the best validation as well"},
    )
    valid_every_steps: int = field(
        default=0,
        metadata={"help": "score data.valid_split after so many steps; 0: every epoch", "min": 0},
    )
    early_stop_patience: int = field(
        default=0,
        metadata={
            "help": "end after so many validations in a row without a better score; 0: never",
            "min": 0,
        },
    )
    early_stop_metric: str = field(
        default="",
        metadata={"help": "what makes a score better; empty: auc of clicks, mae of ratings"},
    )
    early_stop_min_delta: float = field(
        default=0.0, metadata={"help": "by how much it must be better", "min": 0.0}
    )
    collective_timeout_s: int = field(
        default=300,
        # A larger one overflows what torch counts timeouts in.
        metadata={
            "help": "a collective that waits longer ends the run with an error",
            "min": 1,
            "max": 10**9,
        },
    )


@dataclass(frozen=True)
class TrainConfig:
    """Everything a training run is made from; saved resolved as config.json in the run folder."""

    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def digest(self) -> str:
        """See digest_of; of all values, defaults too: a later release may have others."""
        return digest_of(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and scalars."""
        # There and back, so that tuples are the lists that a reader will find.
        value: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return value


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The config at `path` (TOML) with `section.key=value` overrides, values as TOML (bare words
    are text).

    Raises:
        ConfigError: no such file, no TOML, an unknown key, a bad value, a required key left empty.
    """
    try:
        raw = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"config {str(path)!r} cannot be read: {error.strerror}. Give a TOML file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {str(path)!r} is no TOML: {error}. Mend that line") from error
    for override in overrides:
        _override(raw, override)
    config = config_from_dict(raw)
    # Not in the dataclasses: the config of an exported model has neither.
    for key, value in (("data.path", config.data.path), ("run.dir", config.run.dir)):
        if not value:
            raise ConfigError(
                f"{key} is empty: it is required. Set it in the config, or add {key}=PATH"
            )
    check_local("run.dir", config.run.dir)
    outer = config.outer
    if outer.momentum and outer.dense_optimizer != "sgd":
        raise ConfigError(
            f"outer.momentum = {outer.momentum} has no meaning for outer.dense_optimizer = "
            f"{outer.dense_optimizer!r}: only sgd takes it. Leave it 0, or choose sgd"
        )
    return config


def digest_of(config: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits that change with any value of a resolved config."""
    # Sorted: in which order a file has its keys says nothing.
    text = json.dumps(config, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def config_from_dict(raw: Mapping[str, Any]) -> TrainConfig:
    """A config from nested dicts, as TOML or JSON gives them."""
    config: TrainConfig = settings_from_dict(TrainConfig, raw)
    return config


def describe_config() -> list[tuple[str, str, str]]:
    """(key, default, help) of every key, in order: the reference that docs and --help show."""
    return describe_settings(TrainConfig)


def _text_keys() -> set[str]:
    """The keys whose values are text."""
    return {
        f"{section}.{name}"
        for section, fields in get_type_hints(TrainConfig).items()
        for name, hint in get_type_hints(fields).items()
        if hint is str
    }


def _override(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    section, dot, name = key.partition(".")
    if not (equals and dot and section and name):
        raise ConfigError(
            f"override {override!r} is not of the form section.key=value. Write e.g. run.epochs=3"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    if f"{section}.{name}" in _text_keys():
        # run.dir=2026-11-22 means the text, though TOML reads a date.
        value = value if isinstance(value, str) else text
    target = raw.setdefault(section, {})
    if not isinstance(target, dict):
        raise ConfigError(
            f"{section} = {target!r} is a value, not a section. Write [{section}] in the config"
        )
    target[name] = value
