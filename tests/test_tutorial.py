"""docs/tutorial.md, run from top to bottom as a reader would."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import environment, gmeta

TUTORIAL = Path(__file__).parents[1] / "docs" / "tutorial.md"
STEP = re.compile(r"(?:<!-- file: (\S+) -->\n)?```(\w+)\n(.*?)```", flags=re.DOTALL)


def run(line: str, folder: Path) -> str:
    """A line of a bash block; what it printed."""
    program, *arguments = line.split()
    assert program in ("gmeta", "python")
    if program == "gmeta":
        done = gmeta(*arguments, cwd=folder)
    else:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env={**environment(), "PYTHONPATH": str(TUTORIAL.parents[1])},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, f"{line}\n{done.stderr}"
    return done.stdout


@pytest.mark.timeout(1800)
def test_the_tutorial_runs_and_shows_what_it_says(tmp_path: Path) -> None:
    printed = {}
    for name, language, text in STEP.findall(TUTORIAL.read_text()):
        if name:
            (tmp_path / name).write_text(text)
        elif language == "bash":
            printed.update({line: run(line, tmp_path) for line in text.splitlines()})
    assert "user-cold" in printed["gmeta inspect data/clicks"]
    table = printed["gmeta evaluate runs/maml --against runs/maml-plain"]
    # The values of each model, then what adapted is ahead of the others by.
    values, differences = re.findall(r"^AUC.*$", table, flags=re.MULTILINE)
    before, after = map(float, re.findall(r"0\.\d{4}", values)[:2])
    assert abs(before - 0.5) < 0.03
    assert after > 0.62
    assert differences.count("better") == 3  # than before, the plain run, the bias model
    even, odd = re.findall(r"even (\S+), odd (\S+)", printed["python newcomer.py"])[0]
    assert float(even) - float(odd) > 0.3
