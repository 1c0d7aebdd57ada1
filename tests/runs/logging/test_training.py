"""Hooks of real runs: a callback that ends one on all ranks alike, and what readings hold."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gmeta.antdt.service.shard_server import ServiceConfig, ShardServer
from gmeta.config.train_config import TrainConfig, load_config
from gmeta.distributed.ranks import Ranks
from gmeta.errors import GMetaError
from gmeta.runs.logging.callback import Callback, Run
from gmeta.runs.logging.logger import Logger, Reading
from gmeta.runs.run_folder import RunFolder, list_checkpoints
from gmeta.training import train
from tests.distributed.harness import on_ranks
from tests.support.commands import SMALL_MODEL, losses, metrics, write_config


class Second(Callback):
    """Rank 1 alone asks, behind step 3; every rank notes what it heard."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_step_end(self, run: Run, loss: Tensor) -> None:
        """Ask."""
        self.heard.append([run.step, run.epoch, loss.item()])
        if run.rank == 1 and run.step == 3:
            run.stop("Second: enough")

    def on_validation_end(self, run: Run, scores: Any) -> None:
        """Note what all ranks must know."""
        self.heard.append(dict(scores))

    def on_checkpoint(self, run: Run, checkpoint: Path) -> None:
        """Note it."""
        self.heard.append(checkpoint.name)

    def on_train_end(self, run: Run, status: str) -> None:
        """Write down what was heard."""
        path = run.info.folder / f"heard-{run.rank}.json"
        path.write_text(json.dumps([*self.heard, status]))


class Faulty(Callback):
    """Raises on rank 1 alone."""

    def on_step_end(self, run: Run, loss: Tensor) -> None:
        """Fail behind step 2."""
        if run.rank == 1 and run.step == 2:
            raise KeyError("mine")


class Stuck(Logger):
    """Never returns from its first reading, as the client of a server that swallows packets."""

    def log(self, reading: Reading) -> None:
        """Wait."""
        threading.Event().wait()


def trained(ranks: Ranks, config: TrainConfig) -> str:
    """How a run ended."""
    torch.set_num_threads(2)
    try:
        train(config, ranks)
    except GMetaError as error:
        return str(error)
    assert torch.get_num_threads() == 2  # for what comes next, such as the scoring of a trial
    return ""


def config_of(tmp_path: Path, data: Path, *overrides: str) -> TrainConfig:
    path = write_config(tmp_path / "train.toml", data, tmp_path / "run")
    return load_config(path, [*SMALL_MODEL, "data.valid_split=valid", *overrides])


@pytest.mark.distributed
def test_one_rank_asks_and_all_end_before_the_same_step(tmp_path: Path, click_logs: Path) -> None:
    named = f'run.callbacks=["{__name__}:Second"]'
    config = config_of(tmp_path, click_logs, named, "run.valid_every_steps=2")
    run = RunFolder(tmp_path / "run")
    assert on_ranks(2, trained, config) == ["", ""]
    heard = [json.loads((run.root / f"heard-{rank}.json").read_text()) for rank in (0, 1)]
    ended = len(losses(run.root))
    # A step is announced two ahead: those are taken.
    assert 3 <= ended <= 6
    for told in heard:
        steps = [one for one in told if isinstance(one, list)]
        assert [step for step, _, _ in steps] == [*range(1, ended + 1)]
        assert told[-1] == "stopped"
        assert f"step-{ended:08d}" in told
    scores = [[one for one in told if isinstance(one, dict)] for told in heard]
    assert scores[0] == scores[1]
    assert scores[0][0] == next(line["valid"] for line in metrics(run.root) if "valid" in line)
    # A rank's loss is its part: the mean over ranks is what is logged.
    parts = zip(*([one[2] for one in told if isinstance(one, list)] for told in heard), strict=True)
    assert [sum(pair) / 2 for pair in parts] == pytest.approx(losses(run.root), rel=1e-5)
    config = config_of(tmp_path, click_logs, "run.valid_every_steps=2")
    assert on_ranks(2, trained, config) == ["", ""]
    assert len(losses(run.root)) == 8  # as the config says, and no step twice
    assert list_checkpoints(run.checkpoints)[-1].name == "step-00000008"


@pytest.mark.distributed
def test_a_run_outlives_a_logger_that_never_returns(tmp_path: Path, click_logs: Path) -> None:
    named = f'run.loggers=["{__name__}:Stuck"]'
    config = config_of(tmp_path, click_logs, named, "run.collective_timeout_s=6", "run.max_steps=8")
    assert on_ranks(2, trained, config) == ["", ""]
    assert len(losses(tmp_path / "run")) == 8


@pytest.mark.distributed
def test_what_one_rank_raises_is_raised_on_all(tmp_path: Path, click_logs: Path) -> None:
    named = f'run.callbacks=["{__name__}:Faulty"]'
    config = config_of(tmp_path, click_logs, named)
    first, second = on_ranks(2, trained, config)
    assert first == second
    assert first.startswith(
        f"the callback '{__name__}:Faulty' of run.callbacks failed behind step 2: KeyError: 'mine'."
    )


@pytest.mark.distributed
def test_readings_have_one_ranks_rates_and_norms_at_any(tmp_path: Path, click_logs: Path) -> None:
    """Clipping far above any norm changes nothing, and also knows that of the tables."""
    shared = ("run.max_steps=3", "outer.lr_schedule=linear", "data.valid_split=")
    readings = []
    for world_size, clip_norm in ((1, 0.0), (1, 1e9), (2, 1e9)):
        (folder := tmp_path / f"{world_size}-{clip_norm}").mkdir()
        config = config_of(folder, click_logs, *shared, f"outer.clip_norm={clip_norm}")
        assert on_ranks(world_size, trained, config) == [""] * world_size
        readings.append(metrics(folder / "run"))
    plain, clipped, both = readings
    assert [line["dense_lr"] for line in plain] == pytest.approx([1e-3, 2e-3 / 3, 1e-3 / 3])
    assert [line["sparse_lr"] for line in both] == pytest.approx([0.05, 0.1 / 3, 0.05 / 3])
    norms = [[line["dense_grad_norm"] for line in one] for one in readings]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert norms[0] == pytest.approx(norms[2], rel=1e-3)
    assert "grad_norm" not in plain[0]
    for one, other in zip(clipped, both, strict=True):
        assert one["grad_norm"] > one["dense_grad_norm"] > 0.0
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


def test_the_live_page_has_what_is_logged(tmp_path: Path, click_logs: Path) -> None:
    server = ShardServer(ServiceConfig("127.0.0.1:0", metrics_listen="127.0.0.1:0"))
    overrides = ["data.source=service", f"data.service={server.address}", "run.valid_every_steps=4"]
    try:
        assert on_ranks(1, trained, config_of(tmp_path, click_logs, *overrides)) == [""]
        seen = server._dashboard.document()
        curves = {
            name: [tuple(point[:2]) for point in points] for name, points in seen["curves"].items()
        }
    finally:
        server.stop(0.0)
    lines = metrics(tmp_path / "run")
    assert curves["loss"] == [(line["step"], line["loss"]) for line in lines if "loss" in line]
    scored = [(line["step"], line["valid"]["auc"]) for line in lines if "valid" in line]
    assert curves["valid/auc"] == scored
    assert seen["run"]["status"] == "finished"
    assert (seen["run"]["folder"], seen["step"]) == (str(tmp_path / "run"), lines[-1]["step"])
