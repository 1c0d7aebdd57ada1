"""`gmeta serve` once its options are known to be right."""

from gmeta.server.config import ServeConfig
from gmeta.server.process import serve_until_signal


def serve_model(config: ServeConfig, log_level: str) -> int:
    """Serve until a signal and return the exit code."""
    config.check()
    return serve_until_signal(config, log_level)
