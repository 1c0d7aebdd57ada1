"""Which dataset a config means: the one at data.path, or an increment of the stream there."""

from pathlib import Path

from gmeta.checkpoints.files import read_about
from gmeta.checkpoints.lineage import lineage_of
from gmeta.checkpoints.resume import named_checkpoint
from gmeta.config import DataConfig, TrainConfig
from gmeta.errors import ConfigError, UserError
from gmeta.runs.folder import CONFIG_FILE, RunFolder
from metaio.format.dataset import Dataset, open_dataset
from metaio.stream.chain import is_stream, open_stream

NEXT = "next"


def open_data(data: DataConfig) -> Dataset:
    """Open the dataset that a config with a settled increment means.

    Raises:
        ConfigError: data.increment is no number.
        FormatError: there is no such increment, or it is damaged.
        NoDatasetError: there is no dataset, or no stream.
    """
    if not data.increment:
        return open_dataset(data.path)
    return open_stream(data.path).dataset(_number(data.increment))


def open_named(named: str) -> Dataset:
    """Open a dataset, an increment of a stream as STREAM:NUMBER, or a stream's newest increment.

    Raises:
        FormatError: there is no such increment, or it is damaged.
        NoDatasetError: there is neither a dataset nor a stream.
    """
    path, _, number = named.rpartition(":")
    if path and number.isdecimal() and number.isascii():
        return open_stream(path).dataset(_number(number))
    if is_stream(named):
        stream = open_stream(named)
        return stream.dataset(stream.newest.number)
    return open_dataset(named)


def settled_increment(config: TrainConfig) -> str:
    """Return the number of the increment that a run is trained on, as text; "" of a dataset that
    stands alone.

    "next" is the one that the run in run.dir was begun with, if there is one, else the one after
    the last of run.continue_from, else the first.

    Raises:
        ConfigError: data.increment is no number.
        UserError: the stream has none behind that.
        GMetaError: the checkpoint of run.continue_from is damaged.
    """
    data, run = config.data, config.run
    if data.increment != NEXT:
        return str(_number(data.increment)) if data.increment else ""
    begun = RunFolder(Path(run.dir))
    if (begun.root / CONFIG_FILE).exists() and (number := begun.read_config().data.increment):
        return number
    last = 0
    if run.continue_from:
        _, checkpoint = named_checkpoint("run.continue_from", run.continue_from)
        lineage = lineage_of(read_about(checkpoint))
        last = lineage[-1].increment if lineage else 0
    stream = open_stream(data.path)
    later = [record.number for record in stream.records if record.number > last]
    if not later:
        raise UserError(
            f'data.increment = "next", but stream {data.path} has no increment after {last}, the '
            "last that run.continue_from was trained on. Append one with gmeta prepare --extend"
        )
    return str(min(later))


def _number(text: str) -> int:
    if not (text.isdecimal() and text.isascii() and len(text) < 10):
        raise ConfigError(
            f'data.increment = {text!r} is no increment: a number, or "next". Correct it, or leave '
            "it empty where data.path is a dataset"
        )
    return int(text)
