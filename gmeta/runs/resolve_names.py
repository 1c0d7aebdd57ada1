"""Which increment and which label a config means where it leaves it to its data.

Needs no torch.
"""

from dataclasses import replace
from pathlib import Path

from gmeta.config.train_config import DataConfig, RunConfig, TrainConfig
from gmeta.data.opening import open_data, parse_increment
from gmeta.errors import UserError
from gmeta.runs.checkpoints.choice import named_checkpoint
from gmeta.runs.checkpoints.lineage import read_lineage
from gmeta.runs.checkpoints.progress_file import read_about
from gmeta.runs.run_folder import CONFIG_FILE, RunFolder
from metaio.format.dataset import Dataset
from metaio.stream.chain import open_stream


def with_names(config: TrainConfig) -> tuple[TrainConfig, Dataset]:
    """Return the config with the number of its increment, and with the first of several labels as
    the judged one if it names none; and its dataset.

    Raises:
        ConfigError, UserError, FormatError: the stream has no such increment, or is damaged.
        NoDatasetError: there is no dataset.
    """
    data = replace(config.data, increment=_increment(config.data, config.run))
    config, dataset = replace(config, data=data), open_data(data)
    if (names := dataset.features.labels) and not config.labels.judged:
        config = replace(config, labels=replace(config.labels, judged=names[0]))
    return config, dataset


def config_of_begun_run(run_dir: str) -> TrainConfig | None:
    """Return the config that the run in a folder was begun with, if there is one."""
    folder = RunFolder(Path(run_dir))
    return folder.read_config() if (folder.root / CONFIG_FILE).exists() else None


def _increment(data: DataConfig, run: RunConfig) -> str:
    """Return the number of the increment that a run is trained on, as text; "" of a dataset that
    stands alone.

    "next" is the one that the run in run.dir was begun with, if there is one, else the first after
    the last of run.continue_from that run.skip_increments does not name, else the first.

    Raises:
        ConfigError: data.increment is no number.
        UserError: the stream has none behind that.
        GMetaError: the checkpoint of run.continue_from is damaged.
    """
    if data.increment != "next":
        return str(parse_increment(data.increment)) if data.increment else ""
    if (before := config_of_begun_run(run.dir)) and before.data.increment:
        return before.data.increment
    last = 0
    if run.continue_from:
        _, checkpoint = named_checkpoint("run.continue_from", run.continue_from)
        lineage = read_lineage(read_about(checkpoint))
        last = lineage[-1].increment if lineage else 0
    stream = open_stream(data.path)
    later = [
        record.number
        for record in stream.records
        if record.number > last and record.number not in run.skip_increments
    ]
    if not later:
        raise UserError(
            f'data.increment = "next", but stream {data.path} has no increment after {last}, the '
            "last that run.continue_from was trained on. Append one with gmeta prepare --extend"
        )
    return str(min(later))
