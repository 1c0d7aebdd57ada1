"""An error that ends all ranks alike is printed by rank 0 alone: a job of 64 ranks says it once.

Ranks that fail cannot ask each other in a collective, in which others may wait for something else.
They leave a note in the store through which they met, and wait for it only PATIENCE_S.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from gmeta.cli.commands.error_messages import format_error, reportable_errors, write_error
from gmeta.distributed.ranks import Ranks
from gmeta.platform.internals import job_store

# Ranks that fail alike do so at the same place of the same work. A rank whose error is its own
# delays its exit by this much.
PATIENCE_S = 2.0
PAUSE_S = 0.02


@contextmanager
def report_once(ranks: Ranks, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Print the error that is raised inside, on one rank if all would print the same, and end with
    its exit code. Raises SystemExit: an error of `reportable_errors` was raised on one of several
    ranks, and printed."""
    try:
        yield
    except reportable_errors() as error:
        if ranks.world_size == 1 or os.environ.get("GMETA_TRACEBACK"):
            raise
        line, code = format_error(error)
        store = PrefixStore("gmeta-told-once", job_store())
        if ranks.rank == 0:
            # First of all: the rank that leaves first has the others ended.
            write_error(line)
            _share_line(store, line, ranks.world_size - 1, patience_s)
        elif not _was_printed_by_first(store, line, patience_s):
            write_error(line)
        sys.exit(code)


def _share_line(store: Store, line: str, num_others: int, patience_s: float) -> None:
    """Leave the line in the store, which may end with rank 0: wait until the others read it."""
    try:
        store.set("line", line)
        _wait_until(lambda: store.add("heard", 0) == num_others, patience_s)
    except RuntimeError:
        return  # the store is gone, and with it whoever would have asked


def _was_printed_by_first(store: Store, line: str, patience_s: float) -> bool:
    """Return whether rank 0 has printed this very line."""
    try:
        if not _wait_until(lambda: store.check(["line"]), patience_s):
            return False
        first_line = store.get("line").decode()
        store.add("heard", 1)
    except RuntimeError:
        return False  # rank 0 is gone
    return bool(first_line == line)


def _wait_until(holds: Callable[[], bool], patience_s: float) -> bool:
    until_s = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > until_s:
            return False
        time.sleep(PAUSE_S)
    return True
