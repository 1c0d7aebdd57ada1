"""What inner steps take from a layer inside each task of a rectangle, and its derivative, written
out.

The change D_t of a task's layer is a sum over steps of A_j^T G_j (see linear.py), held as its
factors or as the matrix. It is used in two ways: on rows x that pass the layer, out -= x D_t and
c_t times its bias; and turned, on gradients g that come back through it, below -= g D_t^T. c_t is
what two rows of a task have in common beside x: 1, and more where x is not all that they are
(common.py). Derivatives are taken in reverse order: all uses after a step come before the step is
undone.

Shape suffixes: T tasks, L rows of a task, S its support rows, I input width, O output width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor

from gmeta.adaptation.thin_products import add_in_task, put_in_task, times_in_task

if TYPE_CHECKING:
    from gmeta.adaptation.paths import Path


class StepGrads(NamedTuple):
    """Where the gradients of what a step added are put; blocks, written before they are read."""

    activations_TSI: Tensor
    scaled_TSO: Tensor


class Change(ABC):
    """The change of one layer for the tasks of one rectangle; used once a step was added.

    `fresh` tells that no use before wrote the gradients of the steps, `rows_fresh` that nobody
    wrote that of the rows.
    """

    def __init__(self, common: Tensor, wants_common: bool) -> None:
        # c_t of the equations: [T, 1, 1] and differentiated, or [1, 1, 1] and 1.
        self._common = common
        self._wants_common = wants_common
        self._common_grad: Tensor | None = None

    @property
    def common_grad_T(self) -> Tensor:
        """The gradient of c, after all derivatives."""
        if self._common_grad is None:
            return self._common.new_zeros(self._common.shape[0])
        return self._common_grad.neg()

    def _add_common_grad(self, taken_T: Tensor) -> None:
        """Of more that was taken from outputs, with this gradient of what was taken."""
        before = self._common_grad
        self._common_grad = taken_T if before is None else before.add_(taken_T)

    @abstractmethod
    def add(self, activations_TSI: Tensor, scaled_TSO: Tensor) -> None:
        """One step more."""

    @abstractmethod
    def subtract(self, out_TLO: Tensor, rows_TLI: Tensor) -> Any:
        """The first use, in place; returns what its derivative needs."""

    @abstractmethod
    def subtract_backward(
        self,
        kept: Any,
        grad_TLO: Tensor,
        rows_TLI: Tensor,
        rows_grad_TLI: Tensor | None,
        steps: list[StepGrads],
        fresh: bool,
        rows_fresh: bool = False,
    ) -> None:
        """Adds to the gradient of the rows and, of the `steps` that had been made (none: they are
        constants), to those of the steps.
        """

    @abstractmethod
    def turned(self, below_TSI: Tensor, grads_TSO: Tensor) -> Any:
        """The second use, in place; returns what its derivative needs."""

    @abstractmethod
    def turned_backward(
        self,
        kept: Any,
        below_grad_TSI: Tensor,
        grads_TSO: Tensor,
        grads_grad_TSO: Tensor,
        steps: list[StepGrads],
    ) -> None:
        """Adds to the gradients of `grads` and of the steps; never the first to do so."""

    def undo(self, grads: StepGrads, fresh: bool) -> None:  # noqa: B027 - most have nothing to do
        """The last step is left: what all its uses asked of it now stands in `grads`."""


@final
class LowRank(Change):
    """The factors of every step: S (I + O) numbers a task and step."""

    def __init__(self, common: Tensor, wants_common: bool) -> None:
        super().__init__(common, wants_common)
        self._factors: list[tuple[Tensor, Tensor]] = []

    def add(self, activations_TSI: Tensor, scaled_TSO: Tensor) -> None:
        """See Change."""
        self._factors.append((activations_TSI, scaled_TSO))

    def subtract(self, out_TLO: Tensor, rows_TLI: Tensor) -> list[Tensor]:
        """out -= sum_j (x A_j^T + c) G_j."""
        spreads = []
        for activations, scaled in self._factors:
            spread = torch.baddbmm(self._common, rows_TLI, activations.mT)
            add_in_task(out_TLO, spread, scaled, -1)
            spreads.append(spread)
        return spreads

    def subtract_backward(
        self,
        kept: list[Tensor],
        grad_TLO: Tensor,
        rows_TLI: Tensor,
        rows_grad_TLI: Tensor | None,
        steps: list[StepGrads],
        fresh: bool,
        rows_fresh: bool = False,
    ) -> None:
        """See Change."""
        for number, spread in enumerate(kept):
            activations, scaled = self._factors[number]
            of_spread = times_in_task(grad_TLO, scaled.mT)
            if self._wants_common:
                self._add_common_grad(of_spread.sum(dim=(1, 2)))
            if rows_grad_TLI is not None:
                _less(rows_grad_TLI, of_spread, activations, rows_fresh and not number)
            if steps:
                _less(steps[number].activations_TSI, of_spread.mT, rows_TLI, fresh)
                _less(steps[number].scaled_TSO, spread.mT, grad_TLO, fresh)

    def turned(self, below_TSI: Tensor, grads_TSO: Tensor) -> list[Tensor]:
        """below -= sum_j (g G_j^T) A_j."""
        spreads = []
        for activations, scaled in self._factors:
            spread = times_in_task(grads_TSO, scaled.mT)
            add_in_task(below_TSI, spread, activations, -1)
            spreads.append(spread)
        return spreads

    def turned_backward(
        self,
        kept: list[Tensor],
        below_grad_TSI: Tensor,
        grads_TSO: Tensor,
        grads_grad_TSO: Tensor,
        steps: list[StepGrads],
    ) -> None:
        """See Change."""
        for number, spread in enumerate(kept):
            activations, scaled = self._factors[number]
            of_spread = torch.bmm(below_grad_TSI, activations.mT)
            add_in_task(grads_grad_TSO, of_spread, scaled, -1)
            _less(steps[number].activations_TSI, spread.mT, below_grad_TSI, False)
            _less(steps[number].scaled_TSO, of_spread.mT, grads_TSO, False)


@final
class FixedLowRank(Change):
    """The factors where every step has the same activations: one pair, (A, G_1 + G_2 + ...), and
    the product of the support rows with A once. The steps share one StepGrads.
    """

    def __init__(self, common: Tensor, wants_common: bool) -> None:
        super().__init__(common, wants_common)
        self._sums: list[Tensor] = []
        self._activations: Tensor
        self._own_spread: Tensor | None = None

    def add(self, activations_TSI: Tensor, scaled_TSO: Tensor) -> None:
        """See Change."""
        self._activations = activations_TSI
        # A new sum: uses of the one before keep it for their derivatives.
        self._sums.append(self._sums[-1] + scaled_TSO if self._sums else scaled_TSO)

    def subtract(self, out_TLO: Tensor, rows_TLI: Tensor) -> tuple[Tensor, Tensor]:
        """out -= (x A^T + c) (G_1 + G_2 + ...)."""
        spread = self._own_spread if rows_TLI is self._activations else None
        if spread is None:
            spread = torch.baddbmm(self._common, rows_TLI, self._activations.mT)
        if rows_TLI is self._activations:
            self._own_spread = spread
        add_in_task(out_TLO, spread, self._sums[-1], -1)
        return spread, self._sums[-1]

    def subtract_backward(
        self,
        kept: tuple[Tensor, Tensor],
        grad_TLO: Tensor,
        rows_TLI: Tensor,
        rows_grad_TLI: Tensor | None,
        steps: list[StepGrads],
        fresh: bool,
        rows_fresh: bool = False,
    ) -> None:
        """See Change."""
        spread, total = kept
        of_spread = times_in_task(grad_TLO, total.mT)
        if self._wants_common:
            self._add_common_grad(of_spread.sum(dim=(1, 2)))
        if rows_grad_TLI is not None:
            _less(rows_grad_TLI, of_spread, self._activations, rows_fresh)
        if steps:
            _less(steps[0].activations_TSI, of_spread.mT, rows_TLI, fresh)
            _less(steps[0].scaled_TSO, spread.mT, grad_TLO, fresh)

    def turned(self, below_TSI: Tensor, grads_TSO: Tensor) -> None:
        """Nothing is asked below the first layer."""
        raise NotImplementedError

    def turned_backward(
        self,
        kept: Any,
        below_grad_TSI: Tensor,
        grads_TSO: Tensor,
        grads_grad_TSO: Tensor,
        steps: list[StepGrads],
    ) -> None:
        """See turned."""
        raise NotImplementedError


class _Matrices(NamedTuple):
    weight_TIO: Tensor
    bias_T1O: Tensor


@final
class Materialised(Change):
    """The change as a matrix: I O numbers a task, however many rows."""

    def __init__(self, common: Tensor, wants_common: bool) -> None:
        super().__init__(common, wants_common)
        self._steps: list[tuple[Tensor, Tensor]] = []
        self._totals: list[_Matrices] = []
        self._grad: _Matrices | None = None

    def add(self, activations_TSI: Tensor, scaled_TSO: Tensor) -> None:
        """See Change."""
        self._steps.append((activations_TSI, scaled_TSO))
        bias_T1O = scaled_TSO.sum(dim=1, keepdim=True)
        if self._totals:
            before = self._totals[-1]
            # A new matrix: uses of the one before keep it for their derivatives.
            weight_TIO = torch.baddbmm(before.weight_TIO, activations_TSI.mT, scaled_TSO)
            bias_T1O += before.bias_T1O
        else:
            weight_TIO = times_in_task(activations_TSI.mT, scaled_TSO)
        self._totals.append(_Matrices(weight_TIO, bias_T1O))

    def subtract(self, out_TLO: Tensor, rows_TLI: Tensor) -> _Matrices:
        """out -= x D + c sum_js G_js."""
        change = self._totals[-1]
        bias_T1O = change.bias_T1O
        if self._wants_common:
            bias_T1O = bias_T1O * self._common
        add_in_task(out_TLO, rows_TLI, change.weight_TIO, -1)
        out_TLO.sub_(bias_T1O)
        return change

    def subtract_backward(
        self,
        kept: _Matrices,
        grad_TLO: Tensor,
        rows_TLI: Tensor,
        rows_grad_TLI: Tensor | None,
        steps: list[StepGrads],
        fresh: bool,
        rows_fresh: bool = False,
    ) -> None:
        """See Change."""
        if rows_grad_TLI is not None:
            _less(rows_grad_TLI, grad_TLO, kept.weight_TIO.mT, rows_fresh)
        if not (steps or self._wants_common):
            return
        of_bias = grad_TLO.sum(dim=1, keepdim=True)
        if self._wants_common:
            self._add_common_grad((of_bias * kept.bias_T1O).sum(dim=(1, 2)))
            of_bias = of_bias * self._common
        if steps:
            if self._grad is None:
                of_weight = times_in_task(rows_TLI.mT, grad_TLO)
                self._grad = _Matrices(of_weight.neg_(), of_bias.neg_())
            else:
                add_in_task(self._grad.weight_TIO, rows_TLI.mT, grad_TLO, -1)
                self._grad.bias_T1O.sub_(of_bias)

    def turned(self, below_TSI: Tensor, grads_TSO: Tensor) -> _Matrices:
        """below -= g D^T."""
        add_in_task(below_TSI, grads_TSO, self._totals[-1].weight_TIO.mT, -1)
        return self._totals[-1]

    def turned_backward(
        self,
        kept: _Matrices,
        below_grad_TSI: Tensor,
        grads_TSO: Tensor,
        grads_grad_TSO: Tensor,
        steps: list[StepGrads],
    ) -> None:
        """See Change."""
        assert self._grad is not None  # the first use came before
        add_in_task(grads_grad_TSO, below_grad_TSI, kept.weight_TIO, -1)
        add_in_task(self._grad.weight_TIO, below_grad_TSI.mT, grads_TSO, -1)

    def undo(self, grads: StepGrads, fresh: bool) -> None:
        """See Change."""
        assert self._grad is not None
        activations, scaled = self._steps.pop()
        of_weight_TIO, of_bias_T1O = self._grad
        (put_in_task if fresh else add_in_task)(grads.activations_TSI, scaled, of_weight_TIO.mT)
        put_in_task(grads.scaled_TSO, activations, of_weight_TIO)
        grads.scaled_TSO.add_(of_bias_T1O)


def new_change(path: Path, common: Tensor, wants_common: bool = False) -> Change:
    """A change that is held this way. `common`, in the layers' precision and place, is c of each
    task, [T, 1, 1], if it is differentiated, else a single 1, [1, 1, 1].
    """
    kinds: dict[Path, type[Change]] = {
        "fixed": FixedLowRank,
        "low_rank": LowRank,
        "materialised": Materialised,
    }
    return kinds[path](common, wants_common)


def _less(block: Tensor, left: Tensor, right: Tensor, fresh: bool) -> None:
    """block -= left right, or the first of these products to be written there."""
    (put_in_task if fresh else add_in_task)(block, left, right, -1)
