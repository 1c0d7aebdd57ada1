"""Runs a command of gmeta in a process of its own, and returns its result.

Nothing of a run stays in the caller's process: no process group, threads, signal handlers or
settings of torch. A call is the command, so both give the same bits."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

from gmeta.errors import GMetaError, NotFiniteError, UserError

# The exit code of a verdict that refuses, which is a result.
REFUSED = 3
# How long a command may take to end by itself after Ctrl-C.
PATIENCE_S = 30.0


def run_command(*arguments: str, show: bool = True, has_json: bool = True) -> dict[str, Any]:
    """Return the JSON result of `gmeta ARGUMENTS`; {} for a command without one.

    With `show` the command's lines go to sys.stderr as they come, also in a notebook.

    Raises:
        UserError: what the command says in a line, where the caller can mend it.
        GMetaError: the same for a failure."""
    command = [*arguments, *(["--json"] if has_json else [])]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        with start_command(command, out) as process:
            assert process.stderr is not None
            last = _read_lines(process.stderr, show)
            code = process.wait()
        out.seek(0)
        found = out.read().strip().splitlines() if has_json else []
    if code == 0 or (code == REFUSED and found):
        result: dict[str, Any] = json.loads(found[-1]) if found else {}
        return result
    raise _make_error(code, last or f"gmeta {arguments[0]} ended with exit code {code}")


@contextmanager
def start_command(
    arguments: Sequence[str], out: IO[str], err: IO[str] | int = subprocess.PIPE
) -> Iterator["subprocess.Popen[str]"]:
    """Yield the process of `gmeta ARGUMENTS`, which has ended behind the block."""
    environment = dict(os.environ)
    # What this process can import, the command can: a notebook may have extended sys.path.
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    process = subprocess.Popen(
        [sys.executable, "-m", "gmeta.library.child", str(os.getpid()), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        text=True,
        errors="replace",
        env=environment,
        # Ctrl-C reaches it from here alone: once, wherever this runs.
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def write_overrides(overrides: Mapping[str, Any]) -> list[str]:
    """Return `section.key=value` for each override, as on the command line."""
    return [
        # JSON's values are TOML's; a path is text.
        f"{key}={json.dumps(value, default=str)}"
        for key, value in overrides.items()
    ]


def write_options(**options: Any) -> list[str]:
    """Return `--name value` for each option that is given: not None, False or empty."""
    words: list[str] = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif isinstance(value, list | tuple):
            words += [word for one in value for word in (option, str(one))]
        elif value is not None and value is not False and value != "":
            words += [option, str(value)]
    return words


def _read_lines(stream: IO[str], show: bool) -> str:
    """Show lines as they come, and return the text of the last error among them."""
    error = ""
    for line in stream:
        head, _, text = line.rstrip("\n").partition(": ")
        if head == "error" or head.startswith("error on rank "):
            error = text
        elif show:
            sys.stderr.write(line)
            sys.stderr.flush()
    return error


def _make_error(code: int, message: str) -> GMetaError:
    kinds = {UserError.exit_code: UserError, NotFiniteError.exit_code: NotFiniteError}
    return kinds.get(code, GMetaError)(message)
