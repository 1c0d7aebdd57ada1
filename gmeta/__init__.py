"""gmeta: distributed optimisation-based meta-learning for recommendation models.

`gmeta.load` serves an exported model; importing gmeta alone loads nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gmeta.serving.load import load

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    """Import what is asked for at its first use: the data-shard service must not load torch."""
    if name != "load":
        raise AttributeError(f"module 'gmeta' has no attribute {name!r}")
    from gmeta.serving.load import load

    return load
