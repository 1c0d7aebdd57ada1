"""How an error becomes one line on standard error and an exit code."""

import errno
import os
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from gmeta.distributed.launch import has_agent
from gmeta.errors import DISK_FAILS, GMetaError

# By name, not imported: a command that fails early has not loaded these packages.
METAIO_ERRORS = (("metaio.errors", "MetaIOError"),)
# Exit codes of metaio's errors by class name; those of all others are 2, for a wrong input.
METAIO_CODES = {"FormatError": 1, "QuarantinedError": 3}
# What the file systems of fsspec raise beside OSError: s3fs, gcsfs, adlfs and http.
STORE_ERRORS = (
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("gcsfs.retry", "HttpError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("azure.core.exceptions", "AzureError"),
    ("aiohttp", "ClientError"),
)
# Several times what torchrun's agent needs to notice that a rank ended and to end the others.
TURN_S = 2.0
FULL = (errno.ENOSPC, errno.EDQUOT)
# The user can correct these, by another path or its permissions: exit code 2.
WRONG_PATHS = (
    FileNotFoundError,
    FileExistsError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
)


def reportable_errors() -> tuple[type[Exception], ...]:
    """Return the errors that are printed as one line, of the packages that are loaded by now."""
    return (GMetaError, OSError, *_loaded_classes(METAIO_ERRORS), *_loaded_classes(STORE_ERRORS))


def _loaded_classes(names: Sequence[tuple[str, str]]) -> list[type[Exception]]:
    candidates = [(sys.modules.get(module), name) for module, name in names]
    return [getattr(module, name) for module, name in candidates if hasattr(module, name)]


def format_error(error: Exception) -> tuple[str, int]:
    """Return the line to print for an error, and its exit code."""
    line, code = _line_and_code(error)
    return line + join_notes(error), code


def join_notes(error: BaseException) -> str:
    """Return what callers added to an error as hints, such as to resume."""
    return "".join(f" ({note})" for note in getattr(error, "__notes__", ()))


def _line_and_code(error: Exception) -> tuple[str, int]:
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        if error.errno == errno.ENOSPC:
            remedy = "Free some and run again; nothing half-written was kept"
            return f"no space left on device{where}. {remedy}", 1
        if error.errno == errno.EROFS:
            remedy = "Name a place that can be written, or mount it so"
            return f"read-only file system{where}. {remedy}", 2
        line = f"{error.strerror or error}{where}"
        if error.errno == errno.EIO:
            return f"{line}. {DISK_FAILS}", 1
        return line, 2 if isinstance(error, WRONG_PATHS) else 1
    if isinstance(error.__cause__, OSError) and error.__cause__.errno in FULL:
        # A full disk is a failure, whichever package met it.
        return str(error), 1
    if isinstance(error, GMetaError):
        return str(error), error.exit_code
    if isinstance(error, tuple(_loaded_classes(STORE_ERRORS))):
        reason = (str(error).splitlines() or [""])[0].rstrip(".")
        return (
            f"a remote store refused or did not answer: {type(error).__name__}: {reason}. "
            "Check the URL, the credentials and the network, then run again",
            1,
        )
    # Metaio's errors: a damaged dataset is a failure; a wrong description or input the user can
    # correct.
    codes = (METAIO_CODES.get(kind.__name__) for kind in type(error).__mro__)
    return str(error), next((code for code in codes if code is not None), 2)


def wait_for_other_ranks(error: Exception) -> None:
    """Wait, under torchrun, if another rank of this machine may print the error or its cause."""
    if not has_agent():
        # No agent ends this rank: a wait would only delay the message.
        return
    # An error that explain_lost_peers explains is never the cause: other ranks may still print
    # theirs.
    turns = int(os.environ.get("LOCAL_RANK", "0") != "0") + isinstance(
        error.__cause__, RuntimeError
    )
    # When the rank that prints first has ended, torchrun's agent ends this one before it prints.
    time.sleep(turns * TURN_S)


def write_error(message: str) -> None:
    """Write one line to standard error, with the number of this rank."""
    rank = os.environ.get("RANK")
    prefix = "error" if rank is None else f"error on rank {rank}"
    console = Console(stderr=True, soft_wrap=True)
    with console.capture() as styled:
        console.print(f"[bold red]{prefix}[/]: ", end="")
    # Not by rich, which takes brackets in a message for markup; and in one piece, as other ranks
    # write to the same stream.
    sys.stderr.write(f"{styled.get()}{message}\n")
    sys.stderr.flush()
