"""Which dataset a config means: the one at data.path, or an increment of the stream there."""

from dataclasses import replace

from gmeta.config.train_config import DataConfig
from gmeta.errors import ConfigError
from metaio.format.dataset import Dataset, open_dataset
from metaio.stream.chain import is_stream, open_stream


def open_data(data: DataConfig) -> Dataset:
    """Open the dataset that a resolved config means. Raises ConfigError:
    data.increment is no number."""
    if not data.increment:
        return open_dataset(data.path)
    return open_stream(data.path).dataset(parse_increment(data.increment))


def open_by_name(name: str) -> Dataset:
    """Open a dataset, an increment of a stream as STREAM:NUMBER, or a stream's newest increment."""
    path, _, number = name.rpartition(":")
    if path and number.isdecimal() and number.isascii():
        return open_stream(path).dataset(parse_increment(number))
    newest = resolve_newest(name)
    return open_dataset(name) if newest == name else open_by_name(newest)


def resolve_newest(name: str) -> str:
    """Return STREAM:NUMBER of the increment that is a stream's newest now, and any other name as it
    is."""
    return f"{name}:{open_stream(name).newest.number}" if is_stream(name) else name


def data_config_for(data: DataConfig, dataset: Dataset) -> DataConfig:
    """Return the keys of a run's data for another dataset, whose splits it neither trained nor
    validated on."""
    return replace(
        data, path=dataset.url, increment="", train_split="", valid_split="", eval_splits=()
    )


def parse_increment(text: str) -> int:
    """Return the number of an increment, as data.increment has it."""
    if not (text.isdecimal() and text.isascii() and len(text) < 10):
        raise ConfigError(
            f"data.increment = {text!r} is no increment: a number is needed, or, to train, next. "
            "Correct it, or leave it empty where data.path is a dataset"
        )
    return int(text)
