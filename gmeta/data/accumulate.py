"""Gradient accumulation: a step's tasks in parts, one after the other, and still one exact step.

Shape suffixes: T tasks, B tables, U unique ids, D embedding width"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gmeta.data.episodes import Episodes, RowFetch, RowPlan, move_episodes, pack_episodes


# The tables' update is fused into backward: a backward per part would update them once per part,
# which is another algorithm with Adagrad. So the rows of all parts are fetched at once, each part
# goes forward and backward down to the fetched rows, and the sums of the parts' gradients go on
# into the step's one backward. Only one part's activations are alive at a time.
@dataclass(frozen=True)
class MicroBatches:
    """A rank's share of a step in at least one part; all index the same fetched rows."""

    parts: tuple[Episodes, ...]

    @property
    def unique_ids_U(self) -> Tensor:
        """Return the ids to fetch for all parts."""
        return self.parts[0].unique_ids_U

    @property
    def unique_lengths_B(self) -> Tensor:
        """Return the number of ids of each table."""
        return self.parts[0].unique_lengths_B

    @property
    def task_T(self) -> Tensor:
        """Return the task of each episode."""
        return torch.cat([part.task_T for part in self.parts])

    @property
    def num_terms(self) -> int:
        """Return the number of terms of the outer loss."""
        return sum(part.num_terms for part in self.parts)

    @property
    def num_reported(self) -> int:
        """Return the number of terms in the mean that is reported."""
        return sum(part.num_reported for part in self.parts)

    @property
    def num_rows(self) -> int:
        """Return the number of support and query rows."""
        return sum(part.num_rows for part in self.parts)

    @property
    def fetch(self) -> RowFetch | None:
        """Return the fetch of all parts' rows; None: not begun."""
        return self.parts[0].fetch

    @property
    def plan(self) -> RowPlan | None:
        """Return the plan of all parts' rows; None: not made yet."""
        return self.parts[0].plan

    def with_plan(self, plan: RowPlan) -> "MicroBatches":
        """Return these parts with this plan."""
        first, *rest = self.parts
        return MicroBatches((first.with_plan(plan), *rest))

    def with_fetch(self, fetch: RowFetch) -> "MicroBatches":
        """Return these parts with their rows on the way."""
        return MicroBatches(tuple(part.with_fetch(fetch) for part in self.parts))

    def to(self, device: torch.device) -> "MicroBatches":
        """Return copies of the parts on a device."""
        return MicroBatches(move_episodes(self.parts, device))

    def pack(self) -> "MicroBatches":
        """Return the parts in one block of memory, which `to` copies to a GPU at once."""
        return MicroBatches(pack_episodes(self.parts))


Collated = TypeVar("Collated", Episodes, Episodes | MicroBatches)


def accumulate_loss(
    learner: nn.Module, rows_UD: Tensor, micro_batches: MicroBatches, weight: float
) -> Tensor:
    """Return `learner(rows_UD, episodes, weight)` for all parts together, in value and gradient."""
    # The gradient is computed here and only scaled in backward: it has no derivative of its own.
    layers = [parameter for parameter in learner.parameters() if parameter.requires_grad]
    total: Tensor = _AccumulatedLoss.apply(
        lambda rows, part: learner(rows, part, weight), micro_batches.parts, rows_UD, *layers
    )
    return total


class _AccumulatedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        loss_of: Callable[[Tensor, Episodes], Tensor],
        parts: Sequence[Episodes],
        rows_UD: Tensor,
        *layers: Tensor,
    ) -> Tensor:
        # A leaf of its own: the parts' graphs end at the fetched rows, and never reach the fetch.
        wanted = [rows_UD.detach().requires_grad_(), *layers]
        total = torch.zeros((), device=rows_UD.device)
        sums: tuple[Tensor, ...] = ()
        for part in parts:
            with torch.enable_grad():
                loss = loss_of(wanted[0], part)
            # Not into .grad: the step's own backward does that, and data parallelism listens there.
            # Zeros for layers that a part does not use: sums need all of them.
            grads = torch.autograd.grad(loss, wanted, materialize_grads=True)
            sums = torch._foreach_add(sums, grads) if sums else grads
            total = total + loss.detach()
        ctx.save_for_backward(*sums)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (outer,) = grads
        return None, None, *(grad * outer for grad in ctx.saved_tensors)
