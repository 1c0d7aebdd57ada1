"""scikit-learn's metrics, imported by the test that asks for one first: it takes two seconds."""

from importlib import import_module
from typing import Any

NAMES = {
    "average_precision_score", "log_loss", "mean_absolute_error", "ndcg_score", "roc_auc_score",
    "root_mean_squared_error",
}  # fmt: skip


class _Metrics:
    def __getattr__(self, name: str) -> Any:
        if name not in NAMES:  # pytest asks everything that it collects for names of its own
            raise AttributeError(name)
        return getattr(import_module("sklearn.metrics"), name)


scikit = _Metrics()
