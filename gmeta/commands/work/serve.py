"""`gmeta serve` once its options are known to be right."""

from gmeta.server import process
from gmeta.server.config import ServeConfig
from gmeta.server.worker import run_worker


def serve_until_signal(config: ServeConfig, log_level: str) -> int:
    """Serve with as many workers as the config says; return the exit code."""
    return process.serve_until_signal(config, log_level, run_worker)
