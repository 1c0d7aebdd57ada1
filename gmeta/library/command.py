"""Runs a command of gmeta in a process of its own, and returns its result.

Nothing of a run stays in the caller's process: no process group, threads, signal handlers or
settings of torch. A call is the command, so both give the same bits."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

from gmeta.errors import GMetaError, NotFiniteError, UserError
from gmeta.tuning.config_toml import format_toml_value

# The exit code of a verdict that refuses, which is a result.
REFUSED = 3
# How long a command may take to end by itself after Ctrl-C: ranks have 120 s for a checkpoint.
PATIENCE_S = 150.0
# What a notebook's kernel sets for what it shows itself: colours would hide an error's line.
OF_NOTEBOOKS = ("FORCE_COLOR", "CLICOLOR_FORCE", "PY_COLORS", "TTY_COMPATIBLE", "MPLBACKEND")
# The line of an error, of one rank among several, or of an option that a command does not have.
ERROR = re.compile(r"(?:error(?: on rank \d+)?|Error): (.*)")
# Options that are on unless --no-... is given.
ON_BY_DEFAULT = ("access_log", "trees", "verify")


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
            try:
                last = _read_lines(process.stderr, show)
            except KeyboardInterrupt:
                # Its last lines say what it kept.
                rest = end_command(process)
                if show:
                    sys.stderr.write(rest)
                raise
            code = process.wait()
        out.seek(0)
        found = out.read().strip().splitlines() if has_json else []
    if code == 0 or (code == REFUSED and found):
        result: dict[str, Any] = json.loads(found[-1]) if found else {}
        return result
    raise make_error(code, last or f"gmeta {arguments[0]} ended with exit code {code}")


@contextmanager
def start_command(
    arguments: Sequence[str], out: IO[Any], err: IO[Any] | int = subprocess.PIPE
) -> Iterator["subprocess.Popen[str]"]:
    """Yield the process of `gmeta ARGUMENTS`, which has ended behind the block."""
    environment = {name: text for name, text in os.environ.items() if name not in OF_NOTEBOOKS}
    # What this process can import, the command can: a notebook may have extended sys.path.
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    environment["TYPER_USE_RICH"] = "0"  # it would draw a box around an error
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
        end_command(process)


def end_command(process: "subprocess.Popen[str]") -> str:
    """Interrupt a command that still runs, and return what it says then."""
    if process.poll() is not None:
        return ""
    process.send_signal(signal.SIGINT)
    try:
        # Read to the end: a command that nobody reads could not end.
        return process.communicate(timeout=PATIENCE_S)[1] or ""
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        # A second Ctrl-C, too, ends it at once.
        process.kill()
        process.wait()
        return ""


def write_settings(settings: Mapping[str, Any], within: str = "") -> list[str]:
    """Return `section.key=value` for each value of nested dicts, as on the command line."""
    words: list[str] = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            words += write_settings(value, f"{within}{name}.")
        else:
            words.append(f"{within}{name}={format_toml_value(_as_plain(within + name, value))}")
    return words


def _as_plain(key: str, value: Any) -> Any:
    """Return a value as TOML has it: of a path its text, of an array of any library a list."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple):
        return [_as_plain(key, one) for one in value]
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, str | int | float | list):
        return value
    raise UserError(
        f"{key} = {value!r} is no value of a config: text, numbers, true, false and lists of them "
        "are allowed. Correct it, or leave it out for the default"
    )


def write_options(**options: Any) -> list[str]:
    """Return `--name value` for each option that is given: not None or empty."""
    words: list[str] = []
    for name, value in options.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            if value != (name in ON_BY_DEFAULT):
                words.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None and value != "":
            for one in value if isinstance(value, list | tuple) else [value]:
                text = os.fspath(one) if isinstance(one, os.PathLike) else str(one)
                words += [f"--{option}", text]
    return words


def find_error(line: str) -> str:
    """Return the text of a line that tells an error; "" of any other."""
    found = ERROR.fullmatch(line.rstrip("\n"))
    return found[1] if found else ""


def _read_lines(stream: IO[str], show: bool) -> str:
    """Show lines as they come, and return the text of the last error among them."""
    error = ""
    for line in stream:
        if text := find_error(line):
            error = text
        elif show:
            sys.stderr.write(line)
            sys.stderr.flush()
    return error


def make_error(code: int, message: str) -> GMetaError:
    """Return the error of an exit code."""
    kinds = {UserError.exit_code: UserError, NotFiniteError.exit_code: NotFiniteError}
    return kinds.get(code, GMetaError)(message)
