"""How a command talks: -q, -v, --plain and --json, which its ranks and processes inherit."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from typing import TextIO

# fbgemm 1.6 warns a dozen times that it does not know torch 2.11, which it was built for.
logging.getLogger().addFilter(lambda one: "_torch_compat_table" not in str(one.msg))

VERBOSITY_VARIABLE = "GMETA_VERBOSITY"
JSON_VARIABLE = "GMETA_JSON"
PLAIN_VARIABLE = "GMETA_PLAIN"
QUIET, VERBOSE = "quiet", "verbose"
# Standard output, while sys.stdout leads to standard error.
_kept_stdout: ContextVar[TextIO | None] = ContextVar("_kept_stdout", default=None)


def is_quiet() -> bool:
    """Return whether nothing but results and errors is wanted."""
    return os.environ.get(VERBOSITY_VARIABLE) == QUIET


def is_verbose() -> bool:
    """Return whether more than usual is wanted."""
    return os.environ.get(VERBOSITY_VARIABLE) == VERBOSE


def is_plain() -> bool:
    """Return whether each event is to be one line of a log, without colours and bars."""
    return os.environ.get(PLAIN_VARIABLE) == "1"


def is_json() -> bool:
    """Return whether standard output is for one JSON object alone."""
    return os.environ.get(JSON_VARIABLE) == "1"


@contextmanager
def stdout_for_result() -> Iterator[None]:
    """Keep standard output for the result; other prints in the block go to standard error."""
    token = _kept_stdout.set(sys.stdout)
    try:
        # Such as those of a tracker, or of a user's callback.
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _kept_stdout.reset(token)


def result_stream() -> TextIO:
    """Return where a result is printed."""
    return _kept_stdout.get() or sys.stdout
