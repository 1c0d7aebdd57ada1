"""Processes of tests: the server that ranks are forked from; what may not be started."""

import ctypes
import gc
import multiprocessing as mp
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from benchmarks._socket_paths import keep_socket_paths_short

PRELOADED = ["gmeta.antdt.service.shard_server", "tests.support.preloaded"]
HUGE_PAGE_BYTES = 2 << 20
MADV_COLLAPSE = 25  # Linux 6.1; Python has no name for it


def with_imports_ready() -> ForkServerContext:
    """The context whose processes start with `PRELOADED` imported."""
    keep_socket_paths_short()
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def collect_garbage_rarely() -> None:
    """Leave what is imported out of every later collection, and let those come seldom: each writes
    to pages that forked processes share."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    gc.enable()


def collapse_memory() -> None:
    """Have this process's memory lie in huge pages, where Linux can: a fork copies the entry of
    every page, and its end takes each back, 25 ms of a process that did nothing but begin and end.
    """
    if not sys.platform.startswith("linux"):
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for mapping in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, _, _, *name = mapping.split(maxsplit=5)
        if not rights.startswith("rw") or name not in ([], ["[heap]"]):
            continue  # a file's
        begin, end = (int(one, 16) for one in addresses.split("-"))
        for page in range(-(-begin // HUGE_PAGE_BYTES), end // HUGE_PAGE_BYTES):
            madvise(page * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES, MADV_COLLAPSE)  # or it stays as it is


def remove_sockets() -> None:
    """With their folder, unless it is the forking process's: multiprocessing does so at exit."""
    config = mp.current_process()._config  # type: ignore[attr-defined]
    if mp.parent_process() is None and config.get("tempdir"):
        shutil.rmtree(config["tempdir"], ignore_errors=True)


@contextmanager
def skipping_what_may_not_start() -> Iterator[None]:
    """Skip a test that starts this interpreter, or a program beside it, where its user may not: as
    under a root that gave up its rights, whose interpreter lies in /root."""
    try:
        yield
    except PermissionError as error:
        beside = Path(sys.executable).parent
        if Path(error.filename or "").parent != beside or os.access(sys.executable, os.X_OK):
            raise
        pytest.skip(f"this user may not start {error.filename}: give them a Python that they may")
