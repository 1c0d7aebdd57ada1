"""Names in the files of a run or an export, which a stranger may have written: what they stand for
is code, and is not run untrusted."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gmeta.config.losses import NAMED_LOSSES
from gmeta.config.train_config import TrainConfig
from gmeta.errors import GMetaError
from gmeta.metrics.catalogue import custom_names, label_of
from gmeta.metrics.custom_metrics import NAMED_METRICS
from gmeta.runs.run_folder import RunFolder
from gmeta_keys.plugins import Registry, describe_package


def read_trusted_config(folder: RunFolder) -> TrainConfig:
    """Return the config of a run, whose metrics and losses may be asked for. Raises GMetaError: one
    is code of a package that this machine does not trust."""
    config = folder.read_config()
    metrics = [*config.evaluation.metrics, label_of(config.run.early_stop_metric)[0]]
    names = (NAMED_METRICS, custom_names(metrics)), (NAMED_LOSSES, config.loss_names)
    named = {f"{one.key}: {name}": (one, name) for one, own in names for name in own}
    check_trusted(folder.root, named, folder.read_environment())
    return config


def check_trusted(
    path: Path, named: Mapping[str, tuple[Registry[Any], str]], made_on: Mapping[str, Any]
) -> None:
    """Raise GMetaError unless this machine has, and trusts, what a run or an export at `path`
    names; `made_on` is its environment, which has their packages by the keys of `named`."""
    for key, (registry, name) in named.items():
        try:
            registry.check_trusted(name)
        except ValueError as error:
            needed = describe_package(made_on, key)
            raise GMetaError(f"{path} was made with {error}: docs/extending.md.{needed}") from error
