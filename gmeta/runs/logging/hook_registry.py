"""The loggers by name, and callbacks by entry point or import path."""

from gmeta.config.train_config import RunConfig
from gmeta.errors import ConfigError
from gmeta.runs.logging.callback import Callback
from gmeta.runs.logging.file_loggers import TensorBoard
from gmeta.runs.logging.logger import Logger
from gmeta.runs.logging.tracker_loggers import MLflow, WandB
from gmeta_keys.plugins import Registry, is_subclass_of

LOGGERS: dict[str, type[Logger]] = {"mlflow": MLflow, "tensorboard": TensorBoard, "wandb": WandB}

NAMED_LOGGERS = Registry(
    "run.loggers",
    "gmeta.loggers",
    LOGGERS,
    "a subclass of gmeta.runs.logging.logger.Logger",
    is_subclass_of(Logger),
)
NAMED_CALLBACKS: Registry[type[Callback]] = Registry(
    "run.callbacks",
    "gmeta.callbacks",
    {},
    "a subclass of gmeta.runs.logging.callback.Callback",
    is_subclass_of(Callback),
)


def find_hooks(run: RunConfig) -> tuple[dict[str, type[Logger]], dict[str, type[Callback]]]:
    """Return the loggers and the callbacks that a config names. Raises ConfigError: one is unknown,
    cannot be imported, or is something else."""
    try:
        loggers = {name: NAMED_LOGGERS.find(name) for name in run.loggers}
        callbacks = {name: NAMED_CALLBACKS.find(name) for name in run.callbacks}
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return loggers, callbacks
