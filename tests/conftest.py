"""A small prepared dataset that every end-to-end test shares, and how the suite leaves."""

import gc
import logging
import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from gmeta.access.log import LOGGER_NAME
from metaio.recipes.synthetic import SyntheticConfig, prepare_synthetic
from tests.support.commands import succeed
from tests.support.labelled import prepare as prepare_labelled
from tests.support.processes import (
    collect_garbage_rarely,
    remove_sockets,
    skipping_what_may_not_start,
)
from tests.support.workers import fork_workers

# Before torch is loaded: the suite's tensors are small, and two threads that share two cores with
# the ranks it starts wait for each other most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# Until the tests are collected: a million objects are imported, and none of them is garbage.
gc.disable()

# Tests compute on the CPU, or on a GPU that pretends: ranks are forked from processes of the suite,
# and no fork can use a GPU that torch has looked for in the process before. benchmarks/gpu.py does.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# No test calls beyond this machine; a proxy of the network around it would be asked for it too.
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
COLOURS = ("FORCE_COLOR", "PY_COLORS", "CLICOLOR_FORCE", "GITHUB_ACTIONS")
for variable in (*PROXIES, *map(str.upper, PROXIES), *COLOURS):
    os.environ.pop(variable, None)
os.environ["COLUMNS"] = "80"  # of pytest's own lines, whatever terminal it was started from

# A script that starts the suite in the background has it ignore Ctrl-C, and all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples each time, however long this machine takes for one.
settings.register_profile(
    "steady", deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
settings.load_profile("steady")

ROOT = Path(__file__).parents[1]

# What takes seconds to make: files that use the same are tried by one worker, which makes it once.
COSTLY = {"followed", "labelled"}

EXIT_STATUS = pytest.StashKey[int]()


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that folds no line: paths of temporary folders differ in length."""
    monkeypatch.setenv("COLUMNS", "1000")


def pytest_xdist_auto_num_workers() -> int:
    """Return two workers a core: the suite waits half its time, for ranks and for servers."""
    return 2 * (os.cpu_count() or 1)


def pytest_xdist_setupnodes() -> None:
    """Fork the workers."""
    fork_workers()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import another share of the test files first in each worker of the whole suite: pytest keeps
    what it has made of them, and all workers would make it of all files at once."""
    is_whole = session.config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if is_whole and (given := getattr(session.config, "workerinput", None)):
        files = sorted(ROOT.glob("tests/**/test_*.py"))
        for path in files[int(given["workerid"][2:]) :: given["workercount"]]:
            with suppress(Exception, pytest.skip.Exception):  # the collection will tell
                import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first: a worker that began one last would keep all others waiting. Those with a
    test that was given more time are the longest, then come those that start ranks. Each worker is
    given a piece of the list, so the files are dealt out to as many piles, those that share what is
    costly to one."""
    long, ranks = (
        {item.path for item in items if item.get_closest_marker(name)}
        for name in ("timeout", "distributed")
    )
    items.sort(key=lambda item: (item.path not in long, item.path not in ranks))
    num_workers = getattr(config, "workerinput", {}).get("workercount", 1)
    shares: dict[Path, object] = {item.path: item.path for item in items}
    for item in items:
        for name in sorted(COSTLY.intersection(getattr(item, "fixturenames", ()))):
            shares[item.path] = name
    piles = {one: at % num_workers for at, one in enumerate(dict.fromkeys(shares.values()))}
    items.sort(key=lambda item: piles[shares[item.path]])


def pytest_collection_finish() -> None:
    """What is imported stays: no collection during the tests needs to look at it again."""
    collect_garbage_rarely()


@pytest.fixture(scope="session")
def click_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 synthetic users of 12 to 16 rows; 13 steps of 16 tasks an epoch."""
    out = tmp_path_factory.mktemp("data") / "clicks"
    config = SyntheticConfig(num_tasks=200, num_items=60, min_rows=12, max_rows=16, query_rows=5)
    prepare_synthetic(str(out), config)
    return out


@pytest.fixture(scope="session")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the log, dataset, config and run of tests/support/labelled.py: three labels."""
    folder = tmp_path_factory.mktemp("labelled")
    succeed("train", prepare_labelled(folder))
    return folder


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """`gmeta shard-service`, invoked in this process, logs to the stderr that it was given, which
    is closed when a later test logs; and a library that logs to the root has a handler made there,
    by which later tests would read each line twice."""
    logger, root = logging.getLogger(LOGGER_NAME), logging.getLogger()
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before
    for handler in list(root.handlers):
        if type(handler) is logging.StreamHandler:
            root.removeHandler(handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """What may be skipped in a fixture."""
    with skipping_what_may_not_start():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """What may be skipped in a test."""
    with skipping_what_may_not_start():
        return (yield)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Remember how the suite ended."""
    session.config.stash[EXIT_STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave as the command line does: a native thread may abort the interpreter's normal exit."""
    if EXIT_STATUS in config.stash:
        remove_sockets()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[EXIT_STATUS])
