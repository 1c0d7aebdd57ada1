"""gmeta: distributed optimisation-based meta-learning for recommendation models.

The commands as functions, `gmeta.prepare` to `gmeta.serve`, each in a process of its own;
`gmeta.load` and `gmeta.follow` give an exported model, or that of a channel, in this one."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gmeta.platform import former_paths

if TYPE_CHECKING:
    from gmeta.errors import GMetaError, UserError
    from gmeta.library.results import (
        Draft,
        EvaluationReport,
        Judgement,
        PreparedData,
        TrainedRun,
        Tuned,
    )
    from gmeta.library.verbs import (
        evaluate,
        export,
        init,
        judge,
        prepare,
        promote,
        rollback,
        serve,
        train,
        tune,
    )
    from gmeta.serving.channel.follower import follow
    from gmeta.serving.model_loader import load
    from gmeta.serving.served_model import ServedModel

__version__ = "0.1.0"  # pyproject.toml and `gmeta --version` take it from here
__all__ = [
    "Draft",
    "EvaluationReport",
    "GMetaError",
    "Judgement",
    "PreparedData",
    "ServedModel",
    "TrainedRun",
    "Tuned",
    "UserError",
    "__version__",
    "evaluate",
    "export",
    "follow",
    "init",
    "judge",
    "load",
    "prepare",
    "promote",
    "rollback",
    "serve",
    "train",
    "tune",
]
# Importing gmeta alone loads nothing: the data-shard service must not load torch.
_MODULES = {
    **dict.fromkeys(__all__, "gmeta.library.verbs"),
    **dict.fromkeys(("GMetaError", "UserError"), "gmeta.errors"),
    **dict.fromkeys(
        ("Draft", "Judgement", "PreparedData", "EvaluationReport", "TrainedRun", "Tuned"),
        "gmeta.library.results",
    ),
    "follow": "gmeta.serving.channel.follower",
    "load": "gmeta.serving.model_loader",
    "ServedModel": "gmeta.serving.served_model",
}

former_paths.install()


def __getattr__(name: str) -> Any:
    """Import a function or class at its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'gmeta' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
