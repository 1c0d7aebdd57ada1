"""A rank that is gone, as the others learn of it: from gloo, before they wait for their GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from gmeta.distributed import ranks as parallel_ranks
from gmeta.distributed.ranks import start_any_rank
from gmeta.evaluation.predictions import _make_columns
from gmeta.runs.step_meter import StepMeter
from tests.support.waiting import wait_until

LOST = "gloo: Connection closed by peer"


@pytest.fixture
def left_alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A rank on a GPU that nobody computes on any more: what waits for it would wait for ever."""

    def lost(*_: Any) -> None:
        raise RuntimeError(LOST)

    def waits_for_ever() -> None:
        raise AssertionError("it waits for the GPU")

    event = SimpleNamespace(record=lambda: None, synchronize=waits_for_ever)
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory, **more: empty(*sizes, **more))
    monkeypatch.setattr(parallel_ranks, "barrier", lost)
    transport = SimpleNamespace(add=lambda values: SimpleNamespace(wait=lost))
    return SimpleNamespace(
        world_size=1, device=SimpleNamespace(type="cuda"), transport=transport, item=waits_for_ever
    )


def test_a_step_of_which_a_rank_is_gone_is_not_waited_for_on_the_gpu(left_alone: Any) -> None:
    answer = start_any_rank(torch.tensor(False), left_alone)
    with pytest.raises(RuntimeError, match=LOST):
        answer()


def test_nor_is_a_reading(monkeypatch: pytest.MonkeyPatch, left_alone: Any) -> None:
    monkeypatch.setattr(StepMeter, "_reset", lambda meter: None)
    meter = StepMeter(left_alone)
    meter._loss = left_alone  # whose item() waits for the GPU
    with pytest.raises(RuntimeError, match=LOST):
        meter.read(0.0)
    with pytest.raises(RuntimeError, match=LOST), meter.exclude_time():
        pass


def test_nor_is_a_prediction(left_alone: Any) -> None:
    prediction: Any = None  # the first thing that is looked at
    with pytest.raises(RuntimeError, match=LOST):
        _make_columns(prediction, SimpleNamespace(ranks=left_alone), prediction, [])  # type: ignore[arg-type]


def test_a_rank_that_waits_for_others_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wait_for_others(*_: object, **__: object) -> None:
        wait_until(lambda: bool(caplog.messages), "a line about the wait")
        raise RuntimeError(LOST)

    monkeypatch.setattr(parallel_ranks, "LONG_WAIT_S", 0.01)
    monkeypatch.setattr(parallel_ranks.dist, "init_process_group", wait_for_others)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=LOST):
        parallel_ranks.start_ranks("cpu", 1, HashStore())
    assert caplog.messages[0].startswith("rank 0 has waited for the other ranks for 0.01 s: see")
