"""The keys of stream.toml, which says what `gmeta follow` follows."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gmeta.config.settings import settings_from_dict
from gmeta.errors import ConfigError
from gmeta.pipeline.kafka_topic import check_pattern
from gmeta.platform.files.local_paths import check_local
from gmeta_keys import key, read_toml
from metaio.format.storage import find_file_system


@dataclass(frozen=True)
class FollowSection:
    """Where data comes from and models go to."""

    inputs: str = key("", "partitions of the log: a path or URL with * for each one's name")
    schema: str = key("", "TOML file that says what the columns are, with a [stream] section")
    stream: str = key("", "folder of the stream that the partitions become increments of")
    train: str = key("", "TOML file of the training of each increment")
    runs: str = key("", "folder of the runs, one an increment")
    channel: str = key("", "channel that the models are promoted to")
    closed_after_s: float = key(
        0.0,
        "a partition without _SUCCESS is closed when nothing was written to it for so long; 0: a "
        "folder needs _SUCCESS, a file is whole as soon as it is there",
        min=0,
    )
    every_s: float = key(10.0, "seconds between two looks for closed partitions", min=0.1)
    nproc_per_node: int = key(1, "ranks that train", min=1)
    fresh_s: float = key(
        0.0, "alarm when the served model knows nothing of the last so many seconds; 0: none", min=0
    )
    frozen: bool = key(
        True, "score the first promoted version on every increment, beside those that go on"
    )
    best: str = key(
        "",
        "JSON file that says the best possible AUC of each partition, if a recipe knows it: a list "
        "of {day, auc_of_p_click}; for the page",
    )
    keep: int = key(
        0,
        "newest versions of the channel that stay, with the checkpoints that they were made of; "
        "what is served, what it builds on and what a rollback goes back to stay too; 0: all",
        min=0,
    )
    takes_over: str = key(
        "",
        "channel of another loop on the same stream, for a model of another shape: it is promoted "
        "there once its loss is lower at 95 %; empty: none",
    )
    mirror: str = key(
        "",
        "URL that every promotion and rollback is copied to: servers elsewhere follow it; empty: "
        "none",
    )


@dataclass(frozen=True)
class KafkaSection:
    """A topic whose new messages become the log's next partition."""

    servers: str = key("", "HOST:PORT of brokers, separated by commas; empty: no topic is copied")
    topic: str = key("", "topic of JSON messages, a row each")
    properties: str = key("", "file of lines key=value for librdkafka, such as credentials")
    every_s: float = key(60.0, "seconds between two copies", min=1)


@dataclass(frozen=True)
class JudgeSection:
    """When a candidate is promoted; `gmeta channel judge --help` explains each."""

    split: str = key("gate", "split of the tasks that no increment trains")
    margin: float = key(0.0, "loss that may be worse by chance; 0: 1 % of the champion's", min=0)
    pool: int = key(7, "earlier increments to add where tasks are few", min=0, max=1000)
    calibration: tuple[float, ...] = key(
        (0.9, 1.1), "least and most mean prediction over mean label of clicks", min=0.0
    )
    max_refused: int = key(
        3,
        "candidates refused in a row, each trained on from the model that serves, before the loop "
        "waits for a person",
        min=1,
    )


@dataclass(frozen=True)
class ExportSection:
    """What is delivered."""

    tables: Literal["float32", "float16", "int8"] = key("float32", "how tables are held")


@dataclass(frozen=True)
class FollowConfig:
    """Everything in stream.toml."""

    follow: FollowSection = field(default_factory=FollowSection)
    kafka: KafkaSection = field(default_factory=KafkaSection)
    judge: JudgeSection = field(default_factory=JudgeSection)
    export: ExportSection = field(default_factory=ExportSection)


def load_follow_config(path: Path) -> FollowConfig:
    """Return the config in a TOML file."""
    config = settings_from_dict(FollowConfig, read_toml("config", path, ConfigError, "follow"))
    for name in ("inputs", "schema", "stream", "train", "runs", "channel"):
        if not getattr(config.follow, name):
            raise ConfigError(f"follow.{name} is empty: it is required. Set it in {path}")
    for name in ("stream", "runs", "channel", "best", "takes_over"):
        check_local(f"follow.{name}", getattr(config.follow, name))
    follow = config.follow
    if follow.takes_over and Path(follow.takes_over) == Path(follow.channel):
        raise ConfigError(
            f"follow.takes_over = {follow.takes_over!r} is follow.channel: a challenger has a "
            "channel of its own. Name another one"
        )
    band = config.judge.calibration
    if len(band) != 2 or not band[0] <= 1 <= band[1]:
        raise ConfigError(
            f"judge.calibration = {list(band)} is no least and most around 1. Write e.g. [0.9, 1.1]"
        )
    if config.kafka.servers:
        if not config.kafka.topic:
            raise ConfigError(f"kafka.topic is empty: it is required. Set it in {path}")
        check_pattern(config.follow.inputs)
    # Raises UrlError before anything is trained.
    if config.follow.mirror:
        find_file_system(config.follow.mirror)
    return config
