"""Runs the command line as a user does: a process, its exit code and what it printed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.forked import run_forked
from tests.support.waiting import PATIENCE_S

SMALL_MODEL = ["model.hidden=[16]", "model.options.bottom=[8]", "model.embedding_dim=4"]


def environment() -> dict[str, str]:
    """One thread a rank, and a terminal wide enough that no line is cut."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "1000"}


def gmeta(
    *arguments: str | Path, cwd: Path | None = None, own_server: bool = False
) -> subprocess.CompletedProcess[str]:
    """`gmeta ARGUMENTS`, waited for: it and what it starts are forked (forked.py)."""
    return run_forked("gmeta", *arguments, env=environment(), cwd=cwd, own_server=own_server)


def succeed(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`gmeta ARGUMENTS`, which must end well."""
    done = gmeta(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done


def evaluate(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`gmeta evaluate ARGUMENTS` with empty pictures, where a test does not look at them: to draw
    takes longer than to score the few tasks of one."""
    words = ("evaluate", *arguments)
    return run_forked("gmeta", *words, env=environment(), cwd=cwd, first=without_pictures)


def without_pictures() -> None:
    """Have this process draw nothing."""
    from gmeta.evaluation.report import html_page as page
    from gmeta.evaluation.report import report_files as files

    files.render_sheet = lambda chart: dict.fromkeys(files.SHEET_FILES, b"")
    page.render_svg = lambda chart, index: "<svg></svg>"


def fresh_gmeta(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """`python -m gmeta ARGUMENTS`, waited for: a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-m", "gmeta", *map(str, arguments)], capture_output=True, text=True,
        timeout=2 * PATIENCE_S, env=environment(), check=False,
    )  # fmt: skip


def write_config(path: Path, dataset: Path, run: Path) -> Path:
    """A config that trains a small model in a few steps."""
    path.write_text(
        f'[data]\npath = "{dataset}"\ntasks_per_step = 16\n'
        '[algorithm]\nname = "maml"\n'
        f'[run]\ndir = "{run}"\nlog_every_steps = 1\nmax_steps = 8\n'
    )
    return path


def metrics(run: Path) -> list[dict[str, Any]]:
    """The run's metrics lines."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    """The loss of every logged step."""
    return [line["loss"] for line in metrics(run) if "loss" in line]
