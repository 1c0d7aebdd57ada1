"""One process at a time trains in a run folder: two would remove each other's checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gmeta.runs.run_folder import LOCK_FILE
from metaio.format.atomic_folder import lock_writer


@contextmanager
def lock_run_folder(root: Path) -> Iterator[None]:
    """Make the run folder, and be the only process inside. The lock goes with its process, however
    that ends."""
    root.mkdir(parents=True, exist_ok=True)
    with lock_writer(root / LOCK_FILE, f"run folder {root}"):
        yield
