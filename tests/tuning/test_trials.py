"""A trial's process, from its training to its score."""

import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gmeta.commands.work import tune
from gmeta.config import config_from_dict
from gmeta.errors import UserError


def test_what_was_trained_is_gone_before_it_is_scored_as_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ranks = SimpleNamespace(device=torch.device("cpu"))
    matmul, trained = torch.backends.cuda.matmul, []

    def train(*_: Any) -> Any:
        model = torch.nn.Linear(1, 1)
        model.cycle = [model]  # type: ignore[assignment]
        trained.append(weakref.ref(model))
        matmul.fp32_precision = "tf32"
        return SimpleNamespace(root=tmp_path)

    def evaluate(*_: Any) -> Any:
        found = trained[0]() is None, matmul.fp32_precision
        raise UserError(str(found))

    def work_alone(device: str, timeout_s: int, told: Any, work: Callable[[Any], None]) -> None:
        work(ranks)

    for name, fake in (("train", train), ("evaluate_run", evaluate), ("be_rank", work_alone)):
        monkeypatch.setattr(tune, name, fake)
    before = matmul.fp32_precision
    try:
        with pytest.raises(UserError, match="True, 'ieee'"):
            tune._train(config_from_dict({}), None)  # type: ignore[arg-type]
    finally:
        matmul.fp32_precision = before
