"""A small run that was trained once, and copies of it to damage."""

import shutil
from pathlib import Path

import pytest

from gmeta.runs.run_folder import list_checkpoints
from tests.support.commands import SMALL_MODEL, succeed, write_config


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, click_logs: Path) -> Path:
    """A run of two steps, by the train.toml beside it."""
    folder = tmp_path_factory.mktemp("trained")
    config = write_config(folder / "train.toml", click_logs, folder / "run")
    succeed("train", config, *SMALL_MODEL, "run.max_steps=2")
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def checkpoint(run: Path) -> Path:
    """The copy's newest checkpoint."""
    return list_checkpoints(run / "checkpoints")[-1]
