"""Makes rank 0 alone print an error that ends all ranks alike: 64 ranks print it once."""

# No collective here: the other ranks may be in one that is about something else. Ranks that fail
# leave a note in the store through which they met.
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from gmeta.cli.commands.error_messages import format_error, reportable_errors, write_error
from gmeta.distributed.ranks import Ranks
from gmeta.platform.internals import job_store

# Ranks that fail alike do so at the same place of the same work. One whose error is its own exits
# later by this much.
PATIENCE_S = 2.0
PAUSE_S = 0.02


@contextmanager
def report_once(ranks: Ranks, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Print an error raised inside, once if all ranks would print the same, and exit."""
    try:
        yield
    except reportable_errors() as error:
        if ranks.world_size == 1 or os.environ.get("GMETA_TRACEBACK"):
            raise
        line, code = format_error(error)
        store = PrefixStore("gmeta-told-once", job_store())
        if ranks.rank == 0:
            # Printed before the note is left: torchrun ends the other ranks as soon as one has
            # exited.
            write_error(line)
            _share_line(store, line, ranks.world_size - 1, patience_s)
        elif not _was_printed_by_first(store, line, patience_s):
            write_error(line)
        sys.exit(code)


def _share_line(store: Store, line: str, num_others: int, patience_s: float) -> None:
    """Leave the line in the store, and wait until the other ranks have read it."""
    try:
        store.set("line", line)
        # The store may end with rank 0.
        _wait_until(lambda: store.add("heard", 0) == num_others, patience_s)
    except RuntimeError:
        # The store ended with the job: no rank is left to read the line.
        return


def _was_printed_by_first(store: Store, line: str, patience_s: float) -> bool:
    try:
        if not _wait_until(lambda: store.check(["line"]), patience_s):
            return False
        first_line = store.get("line").decode()
        store.add("heard", 1)
    except RuntimeError:
        # Rank 0, which holds the store, is gone.
        return False
    return bool(first_line == line)


def _wait_until(holds: Callable[[], bool], patience_s: float) -> bool:
    until_s = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > until_s:
            return False
        time.sleep(PAUSE_S)
    return True
