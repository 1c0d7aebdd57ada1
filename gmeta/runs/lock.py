"""One process at a time trains in a run folder: two would remove each other's checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gmeta.runs.folder import LOCK_FILE
from metaio.format.destination import one_writer


@contextmanager
def held_alone(root: Path) -> Iterator[None]:
    """Make the run folder, and be the only process inside. The lock goes with its process, however
    that ends."""
    root.mkdir(parents=True, exist_ok=True)
    with one_writer(root / LOCK_FILE, f"run folder {root}"):
        yield
