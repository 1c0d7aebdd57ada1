"""The tutorial's pages, run from top to bottom as a reader would."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import environment, evaluate, gmeta
from tests.support.forked import run_forked

REPOSITORY = Path(__file__).parents[1]
STEP = re.compile(r"(?:<!-- file: (\S+) -->\n)?```(\w+)\n(.*?)```", flags=re.DOTALL)


def run(line: str, folder: Path) -> str:
    """A line of a bash block; what it printed."""
    program, *arguments = line.split()
    assert program in ("gmeta", "python")
    if line.startswith("gmeta evaluate "):
        done = evaluate(*arguments[1:], cwd=folder)
    elif line != "python make_logs.py" and program == "python":  # tests/serving has a fresh one
        done = run_forked(str(folder / arguments[0]), env=environment(), cwd=folder)
    elif program == "gmeta":
        done = gmeta(*arguments, cwd=folder, own_server=True)
    else:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=folder,
            env={**environment(), "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
    assert done.returncode == 0, f"{line}\n{done.stderr}"
    return done.stdout


def run_all(page: str, folder: Path) -> list[tuple[str, str]]:
    """Every line of the page's commands with what it printed, its files written before."""
    printed = []
    for name, language, text in STEP.findall((REPOSITORY / "docs" / page).read_text()):
        if name:
            (folder / name).write_text(text)
        elif language == "bash":
            printed += [(line, run(line, folder)) for line in text.splitlines()]
    return printed


@pytest.mark.timeout(1800)
def test_the_tutorial_runs_and_shows_what_it_says(tmp_path: Path) -> None:
    printed = dict(run_all("tutorial.md", tmp_path))
    assert "user-cold" in printed["gmeta inspect data/clicks"]
    table = printed["gmeta evaluate runs/maml --against runs/maml-plain"]
    # The values of each model, then what adapted is ahead of the others by.
    values, differences = re.findall(r"^AUC.*$", table, flags=re.MULTILINE)
    before, after = map(float, re.findall(r"0\.\d{4}", values)[:2])
    assert abs(before - 0.5) < 0.05
    assert after > 0.7
    assert differences.count("better") == 3  # than before, the plain run, the bias model
    even, odd = re.findall(r"even (\S+), odd (\S+)", printed["python newcomer.py"])[0]
    assert float(even) - float(odd) > 0.3


@pytest.mark.timeout(1800)
def test_the_second_part_ships_two_versions_and_goes_back(tmp_path: Path) -> None:
    printed = run_all("tutorial-stream.md", tmp_path)
    answers = [text for line, text in printed if line == "python ask.py"]
    assert [answer.split(":")[0] for answer in answers] == ["version 2", "version 1"]
    assert answers[0].split(":")[1] != answers[1].split(":")[1]
    assert json.loads((tmp_path / "channels/clicks/versions/00000002/delta.json").read_text())
    assert len(list((tmp_path / "followed/stream/increments").glob("0*"))) == 4
    assert "<svg" in (tmp_path / "stream.html").read_text()
