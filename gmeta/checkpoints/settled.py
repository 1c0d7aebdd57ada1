"""What the data decides of a config, settled before a run begins: the increment of a stream, what
its model's inputs are measured by, and which of several labels headline metrics are of.
"""

from dataclasses import replace

from gmeta.build import prior_of
from gmeta.checkpoints.choice import named_checkpoint
from gmeta.checkpoints.named import begun, named
from gmeta.config import TrainConfig
from gmeta.parallel.ranks import Ranks, value_of_first
from gmeta.parallel.together import by_first


def settled(config: TrainConfig) -> TrainConfig:
    """Return the config of a run with what its stream decides filled in: the number of the
    increment, and, for the statistics of support rows, the label prior of the stream's first run:
    of another day's labels it would change what the inputs mean. Of several labels the first
    is judged, if none is named.

    Raises:
        ConfigError, UserError, FormatError: the stream has no such increment, or is damaged.
    """
    config, dataset = named(config)
    inputs = config.support_features
    if not inputs.is_used or inputs.label_prior:
        return config
    if dataset.manifest.stream is None:
        return config
    before = begun(config)
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
    increment, inputs, labels = value_of_first(
        (first.data.increment, first.support_features, first.labels), ranks
    )
    data = replace(config.data, increment=increment)
    return replace(config, data=data, support_features=inputs, labels=labels)
