"""gmeta: distributed optimisation-based meta-learning for recommendation models. `gmeta.load`
serves an exported model, `gmeta.follow` the model of a channel."""

from typing import TYPE_CHECKING, Any

from gmeta.platform import former_paths

if TYPE_CHECKING:
    from gmeta.serving.channel.follower import follow
    from gmeta.serving.model_loader import load

__version__ = "0.1.0"  # pyproject.toml and `gmeta --version` take it from here
__all__ = ["__version__", "follow", "load"]

former_paths.install()


def __getattr__(name: str) -> Any:
    """Import `load` or `follow` at its first use."""
    # Importing gmeta alone loads nothing: the data-shard service must not load torch.
    if name == "load":
        from gmeta.serving.model_loader import load

        return load
    if name == "follow":
        from gmeta.serving.channel.follower import follow

        return follow
    raise AttributeError(f"module 'gmeta' has no attribute {name!r}")
