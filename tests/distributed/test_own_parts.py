"""A loss of one's own, an auxiliary loss and a callback that changes the run, at 1, 2 and 4 ranks:
the same readings as on one, and those of an unbroken run behind a resume."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gmeta.config.losses import CustomLoss
from gmeta.config.train_config import config_from_dict
from gmeta.distributed.ranks import Ranks
from gmeta.errors import GMetaError
from gmeta.runs.logging.callback import Callback, Run
from gmeta.runs.run_folder import RunFolder, list_checkpoints
from gmeta.training import train
from gmeta_models.inputs import RowFeatures
from gmeta_models.melu import MeLU
from metaio import Provenance, write_dataset
from tests.distributed.harness import on_ranks
from tests.metaio.conftest import FEATURES, make_rows
from tests.support.refusals import catch_message

HERE = __name__


def focal(output_N: Tensor, label_N: Tensor) -> Tensor:
    p_N = output_N.sigmoid()
    cross_entropy_N = torch.nn.functional.softplus(output_N) - output_N * label_N
    return (label_N - p_N).square() * cross_entropy_N


FOCAL = CustomLoss(focal, "probability")


class Spread(MeLU):
    """Keeps what it sees small."""

    def auxiliary_N(self, rows: RowFeatures) -> Tensor:
        """Return it."""
        return 0.3 * rows.features_NFD.square().sum(dim=(1, 2))


class Halving(Callback):
    """Scales gradients, halves the rate every third step, and ends the run if told to."""

    ends_at = 0

    def __init__(self) -> None:
        self.halved = 0

    def on_backward(self, run: Run, batch: Any, loss: Tensor) -> None:
        """Log what it sees and double the head's gradient."""
        weight = run.learner.model.get_submodule("decision.2").weight
        assert weight.grad is not None
        run.log("head_grad", weight.grad.norm())
        run.log("tasks", batch.task_T.numel() * run.world_size)
        weight.grad.mul_(2.0)

    def on_step_end(self, run: Run, loss: Tensor) -> None:
        """Halve it."""
        if run.step % 3 == 0:
            self.halved += 1
            run.set_rates(dense_lr=run.optimizer.full_rates["dense_lr"] / 2)
        run.log("halved", self.halved)
        if run.rank == run.world_size - 1 and run.step == self.ends_at:
            run.stop("Halving: told to")

    def state_dict(self) -> dict[str, int]:
        """Return how often."""
        return {"halved": self.halved}

    def load_state_dict(self, state: Any) -> None:
        """Go on."""
        self.halved = state["halved"]


class Early(Halving):
    """Ends behind step 5."""

    ends_at = 5


class Alone(Callback):
    """Changes the rate of one rank."""

    def on_step_end(self, run: Run, loss: Tensor) -> None:
        """Change it."""
        if run.rank == 1:
            run.set_rates(sparse_lr=0.25)


class Clash(Callback):
    """Logs what is there."""

    def on_step_end(self, run: Run, loss: Tensor) -> None:
        """Log it."""
        run.log("loss", 1.0)


def described(folder: Path, callback: str = "Halving", **run: Any) -> dict[str, Any]:
    path = folder / "data"
    if not path.exists():
        rows = make_rows(64, seed=1)
        rows = replace(rows, label_N=(rows.label_N > np.median(rows.label_N)).astype(np.float32))
        about = Provenance(task="user", label="click")
        with write_dataset(str(path), FEATURES, about) as writer:
            writer.split("train").write(rows)
    return {
        "data": {"path": str(path), "tasks_per_step": 8},
        "model": {"name": f"{HERE}:Spread", "hidden": [4], "embedding_dim": 4},
        "algorithm": {"inner_steps": 2},
        "outer": {"loss": f"{HERE}:FOCAL", "dense_optimizer": "sgd", "dense_lr": 0.1},
        "run": {"device": "cpu", "callbacks": [f"{HERE}:{callback}"], "log_every_steps": 1, **run},
    }


def trained(ranks: Ranks, config: dict[str, Any]) -> list[dict[str, Any]] | str:
    try:
        return train(config_from_dict(config), ranks).read_metrics()
    except GMetaError as error:
        return str(error)


def told(lines: list[dict[str, Any]]) -> list[list[float]]:
    names = ("loss", "head_grad", "tasks", "halved", "dense_lr", "dense_grad_norm")
    return [[line[name] for name in names] for line in lines]


@pytest.mark.distributed
def test_ranks_and_a_resume_make_no_difference(tmp_path: Path) -> None:
    found = []
    for ranks in (1, 2, 4):
        config = described(tmp_path, dir=str(tmp_path / f"run-{ranks}"), epochs=1)
        found.append(told(on_ranks(ranks, trained, config)[0]))
    assert [line[2] for line in found[0]] == [8.0] * 8
    assert [line[3] for line in found[0]] == [0, 0, 1, 1, 1, 2, 2, 2]
    assert [line[4] for line in found[0]] == pytest.approx([0.1] * 3 + [0.05] * 3 + [0.025] * 2)
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=2e-4)

    folder = tmp_path / "broken"
    first = on_ranks(2, trained, described(tmp_path, "Early", dir=str(folder)))[0]
    (checkpoint,) = list_checkpoints(RunFolder(folder).checkpoints)
    assert 5 <= len(first) < 8  # two steps were under way
    assert (checkpoint / "callbacks.json").exists()
    resumed = on_ranks(1, trained, described(tmp_path, "Early", dir=str(folder)))[0]
    np.testing.assert_allclose(told(resumed), found[0], rtol=2e-4)


@pytest.mark.distributed
def test_the_fused_loop_takes_a_loss_and_an_auxiliary_of_ones_own(tmp_path: Path) -> None:
    config = described(tmp_path, dir=str(tmp_path / "run"), max_steps=2)
    assert on_ranks(1, routes, config)[0] == "fused"


def routes(ranks: Ranks, config: dict[str, Any]) -> str:
    from gmeta.runs.build import build

    return build(config_from_dict(config))[1].route


@pytest.mark.distributed
def test_rates_that_differ_between_ranks_end_the_run(tmp_path: Path) -> None:
    config = described(tmp_path, "Alone", dir=str(tmp_path / "run"), max_steps=2)
    one, other = on_ranks(2, trained, config)
    rates = "{'dense_lr': 0.1, 'sparse_lr': %s}"
    assert one == other == (
        f"a callback set the rates {rates % 0.25} on rank 1 and {rates % 0.05} on rank 0: the "
        "ranks would train different layers. Set them by what all ranks know alike, as a reading"
    )  # fmt: skip
    assert not list_checkpoints(RunFolder(tmp_path / "run").checkpoints)


@pytest.mark.distributed
def test_a_value_that_every_reading_has_is_no_callbacks(tmp_path: Path) -> None:
    config = described(tmp_path, "Clash", dir=str(tmp_path / "run"), max_steps=2)
    (line,) = on_ranks(1, trained, config)
    assert line == (
        "a callback logs 'loss', which every reading has already. Log it by another name"
    )


def test_a_rate_below_0_is_refused() -> None:
    run = Run.__new__(Run)
    message = catch_message(ValueError, lambda: run.set_rates(dense_lr=-1.0))
    assert message == "dense_lr = -1.0: a number from 0 on is needed"
