"""Locks a run folder: two processes that train in it would remove each other's checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gmeta.runs.run_folder import LOCK_FILE
from metaio.format.atomic_folder import lock_writer


@contextmanager
def lock_run_folder(root: Path) -> Iterator[None]:
    """Make the run folder, and hold its lock inside; the lock ends with its process, in any way."""
    root.mkdir(parents=True, exist_ok=True)
    with lock_writer(root / LOCK_FILE, f"run folder {root}"):
        yield
