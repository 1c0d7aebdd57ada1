"""What the data decides of a config, settled before a run begins: the increment of a stream, what
its model's inputs are measured by, and which of several labels headline metrics are of.
"""

from dataclasses import replace
from pathlib import Path

from gmeta.build import prior_of
from gmeta.checkpoints.about import read_about
from gmeta.checkpoints.lineage import lineage_of
from gmeta.checkpoints.resume import named_checkpoint
from gmeta.config import TrainConfig
from gmeta.errors import UserError
from gmeta.feeds.increment import number_of, open_data
from gmeta.parallel.ranks import Ranks, value_of_first
from gmeta.parallel.together import by_first
from gmeta.runs.folder import CONFIG_FILE, RunFolder
from metaio.format.dataset import Dataset
from metaio.stream.chain import open_stream


def settled(config: TrainConfig) -> TrainConfig:
    """Return the config of a run with what its stream decides filled in: the number of the
    increment, and, for the statistics of support rows, the label prior of the stream's first run:
    of another day's labels it would change what the inputs mean. Of several labels the first
    is judged, if none is named. An increment is not validated on splits in which it has no task.

    Raises:
        ConfigError, UserError, FormatError: the stream has no such increment, or is damaged.
    """
    data = replace(config.data, increment=_increment(config))
    config, inputs = replace(config, data=data), config.support_features
    dataset = open_data(data)
    config = _validated(config, dataset)
    if (names := dataset.features.labels) and not config.labels.judged:
        config = replace(config, labels=replace(config.labels, judged=names[0]))
    if not inputs.is_used or inputs.label_prior:
        return config
    if dataset.manifest.stream is None:
        return config
    before = _begun(config)
    if before is None and config.run.continue_from:
        before = named_checkpoint("run.continue_from", config.run.continue_from)[0].read_config()
    known = before.support_features.label_prior if before else ()
    prior = known or tuple(prior_of(config, dataset))
    return replace(config, support_features=replace(inputs, label_prior=prior))


def settled_by_first(config: TrainConfig, ranks: Ranks) -> TrainConfig:
    """Return the config as rank 0 settles it, for an increment may land in between: see settled.
    Where the data is stays each machine's own. Collective.
    """
    found = [config]
    by_first(lambda: found.append(settled(config)), ranks)
    first = found[-1]
    data, run, inputs, labels = value_of_first(
        (
            (first.data.increment, first.data.valid_split),
            (first.run.valid_every_steps, first.run.early_stop_patience),
            first.support_features,
            first.labels,
        ),
        ranks,
    )
    return replace(
        config,
        data=replace(config.data, increment=data[0], valid_split=data[1]),
        run=replace(config.run, valid_every_steps=run[0], early_stop_patience=run[1]),
        support_features=inputs,
        labels=labels,
    )


def _validated(config: TrainConfig, dataset: Dataset) -> TrainConfig:
    """Return the config without the validation splits in which an increment has no task: a loop
    gets small ones, too, and their gate may be empty."""
    data = config.data
    if dataset.manifest.stream is None:
        return config
    splits = tuple(
        name
        for name in data.valid_splits
        if name not in dataset.splits or dataset.splits[name].num_episodes
    )
    if splits == data.valid_splits:
        return config
    # Without a score nothing is stopped by one.
    run = config.run if splits else replace(config.run, valid_every_steps=0, early_stop_patience=0)
    return replace(config, data=replace(data, valid_split=splits or ""), run=run)


def _begun(config: TrainConfig) -> TrainConfig | None:
    """Return the config that the run in run.dir was begun with, if there is one."""
    folder = RunFolder(Path(config.run.dir))
    return folder.read_config() if (folder.root / CONFIG_FILE).exists() else None


def _increment(config: TrainConfig) -> str:
    """Return the number of the increment that a run is trained on, as text; "" of a dataset that
    stands alone.

    "next" is the one that the run in run.dir was begun with, if there is one, else the first after
    the last of run.continue_from that run.skip_increments does not name, else the first.

    Raises:
        ConfigError: data.increment is no number.
        UserError: the stream has none behind that.
        GMetaError: the checkpoint of run.continue_from is damaged.
    """
    data, run = config.data, config.run
    if data.increment != "next":
        return str(number_of(data.increment)) if data.increment else ""
    if (begun := _begun(config)) and begun.data.increment:
        return begun.data.increment
    last = 0
    if run.continue_from:
        _, checkpoint = named_checkpoint("run.continue_from", run.continue_from)
        lineage = lineage_of(read_about(checkpoint))
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
