"""Method: mutants. Each spoils, as long as it is entered, what the tests on the pretended GPU are
there to hold; tests that let one live prove little."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from gmeta.data import transfer
from gmeta.data.episodes import Episodes
from gmeta.learner import MetaLearner
from gmeta.platform.internals import call_after_backward
from tests.pretended.tables import Averaged


def _behind_forward(mutation: Callable[[Tensor], object]) -> AbstractContextManager[Any]:
    forward = MetaLearner.forward

    def mutated(self: MetaLearner, rows_UD: Tensor, episodes: Episodes, weight: float) -> Tensor:
        loss = forward(self, rows_UD, episodes, weight)
        mutation(loss)
        return loss

    return patch.object(MetaLearner, "forward", mutated)


def _a_read() -> AbstractContextManager[Any]:
    return _behind_forward(lambda loss: loss.item())


def _a_copy() -> AbstractContextManager[Any]:
    return _behind_forward(lambda loss: torch.ones(1).to(loss.device, non_blocking=True))


def _a_tensor_on_the_host() -> AbstractContextManager[Any]:
    found = transfer.TensorPlace.of

    def mutated(place: transfer.TensorPlace, block: Tensor) -> Tensor:
        is_label = len(place.shape) == 1 and place.dtype.is_floating_point
        return torch.zeros(place.shape, dtype=place.dtype) if is_label else found(place, block)

    return patch.object(transfer.TensorPlace, "of", mutated)


def _a_collective_late() -> AbstractContextManager[Any]:
    def mutated(self: Averaged, _: Tensor) -> None:
        self.missing -= 1
        if not self.missing:
            self.missing = len(self.layers)
            call_after_backward(self.average) if dist.get_rank() else self.average()

    return patch.object(Averaged, "ready", mutated)


MUTANTS = {
    "a value read in the step": _a_read,
    "a copy more": _a_copy,
    "labels left on the host": _a_tensor_on_the_host,
    "collectives swapped on a rank": _a_collective_late,
}
