"""A loop of the tests: its stages are forked with everything imported."""

from collections.abc import Callable
from pathlib import Path

from gmeta.pipeline.follow_config import load_follow_config
from gmeta.pipeline.pipeline import Pipeline
from gmeta.pipeline.stage_process import find_command, last_line
from tests.support.commands import gmeta


def run_stage(arguments: list[str], log: Path) -> int:
    """A command of gmeta as the loop runs it, but forked from the server of the tests."""
    done = gmeta(*find_command(arguments))
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(done.stdout + done.stderr)
    return done.returncode


def loop_of(
    config: Path, stage: Callable[[list[str], Path], int] = run_stage, is_strict: bool = False
) -> Pipeline:
    return Pipeline(load_follow_config(config), stage, last_line, is_strict)


def stages_of(loop: Pipeline) -> list[tuple[str, int]]:
    """Every stage there is to take, taken."""
    found: list[tuple[str, int]] = []
    while (done := loop.step()) is not None:
        found.append((done.stage, done.increment))
        assert len(found) < 100, f"it never ends: {found[-8:]}"
    return found
