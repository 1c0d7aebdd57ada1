"""Which dataset a config means: the one at data.path, or an increment of the stream there."""

from dataclasses import replace

from gmeta.config import DataConfig
from gmeta.errors import ConfigError
from metaio.format.dataset import Dataset, open_dataset
from metaio.stream.chain import is_stream, open_stream


def open_data(data: DataConfig) -> Dataset:
    """Open the dataset that a resolved config means.

    Raises:
        ConfigError: data.increment is no number.
        FormatError: it is damaged.
        NoDatasetError: there is no dataset, no stream, or no such increment.
    """
    if not data.increment:
        return open_dataset(data.path)
    return open_stream(data.path).dataset(number_of(data.increment))


def open_named(named: str) -> Dataset:
    """Open a dataset, an increment of a stream as STREAM:NUMBER, or a stream's newest increment.

    Raises:
        FormatError: it is damaged.
        NoDatasetError: there is neither a dataset nor a stream, or no such increment.
    """
    path, _, number = named.rpartition(":")
    if path and number.isdecimal() and number.isascii():
        return open_stream(path).dataset(number_of(number))
    newest = newest_named(named)
    return open_dataset(named) if newest == named else open_named(newest)


def newest_named(named: str) -> str:
    """Return STREAM:NUMBER of the increment that is a stream's newest now, and any other name as it
    is.

    Raises:
        FormatError: the stream is damaged.
    """
    return f"{named}:{open_stream(named).newest.number}" if is_stream(named) else named


def data_of(data: DataConfig, dataset: Dataset) -> DataConfig:
    """Return the keys of a run's data for another dataset, whose splits it neither trained nor
    validated on."""
    return replace(
        data, path=dataset.url, increment="", train_split="", valid_split="", eval_splits=()
    )


def number_of(text: str) -> int:
    """Return the number of an increment, as data.increment has it.

    Raises:
        ConfigError: it is none.
    """
    if not (text.isdecimal() and text.isascii() and len(text) < 10):
        raise ConfigError(
            f"data.increment = {text!r} is no increment: a number is needed, or, to train, next. "
            "Correct it, or leave it empty where data.path is a dataset"
        )
    return int(text)
