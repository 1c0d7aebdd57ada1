"""The server that test processes are forked from, with everything imported: one for the suite."""

import multiprocessing as mp
from multiprocessing.context import ForkServerContext

PRELOADED = ["gmeta.antdt.server", "gmeta.train"]


def with_imports_ready() -> ForkServerContext:
    """The context whose processes start with `PRELOADED` imported."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
