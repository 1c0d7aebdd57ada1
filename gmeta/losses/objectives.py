"""The losses of a row's labels, and how they make up the row's loss.

    loss of row n = w_n sum_l weight_l known_nl loss_l(z_nl, y_nl)

with w_n the row's own weight. A label of the entire space, such as a purchase after a click, is
learned as p = p(click) p(buy | click) over all rows, so that rows without a click teach it too:
ESMM (Ma et al., "Entire Space Multi-Task Model", SIGIR 2018, arXiv 1804.07931). With z the logit of
the click and b the model's own output, the logit of the product is

    z' = b - softplus(softplus(b) - z)

Shape suffixes: N rows, L labels, O outputs"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gmeta.losses.ranking import list_grads, list_losses
from gmeta.losses.row_losses import LossFunction, errors_N, in_float32, row_grads_N, row_losses_N

if TYPE_CHECKING:
    from gmeta.losses.ranking import TaskLists


class LabelLosses(NamedTuple):
    """The losses of a row's labels, and how much each counts. Outputs, labels and weights of one
    label are [N] or [N, 1], those of several [N, L]."""

    losses: tuple[LossFunction, ...]
    weights: tuple[float, ...]
    before: tuple[int, ...]  # the label that each takes place among, an earlier one; -1: all rows
    # Mean and deviation of each label, which the losses and outputs are in units of; (): 0 and 1.
    moments: tuple[tuple[float, float], ...] = ()

    def logits(self, output: Tensor) -> Tensor:
        """Return the labels' logits: the model's outputs, or the product's for the entire space."""
        # No label is of the entire space.
        if max(self.before) < 0:
            return output
        own = in_float32(output).unbind(dim=1)
        return torch.stack(self._entire_space(own), dim=1)

    def row_losses_N(
        self, logits: Tensor, label: Tensor, weight: Tensor | None, lists: TaskLists
    ) -> Tensor:
        """Return the loss of each row, in float32 at least; see `known_labels`."""
        label = self.standardise(known_labels(label, weight))
        losses = self._losses(logits, label, weight, lists)
        # An unknown label adds 0, and means over a task's rows stay means over all of them: few
        # known labels move a task as little as few rows do.
        losses = losses if weight is None else losses * weight.to(losses.dtype)
        losses = self.scale(losses)
        return losses if len(self.losses) == 1 else losses.sum(dim=1)

    def predictions(self, logits: Tensor) -> Tensor:
        """Return a probability for bce, a score for a ranking loss, else the predicted label, in
        its own units."""

        def predict_label(loss: LossFunction, logit: Tensor) -> Tensor:
            return logit.sigmoid() if loss.kind == "bce" else logit.clone()

        predicted = self._map_labels(predict_label, logits)
        if not self.moments:
            return predicted
        mean, deviation = self._moments_of(predicted)
        return predicted * deviation + mean

    def standardise(self, label: Tensor) -> Tensor:
        """Return labels, [N], [N, 1] or [N, L], as the losses take them."""
        if not self.moments:
            return label
        mean, deviation = self._moments_of(label)
        return (label - mean) / deviation

    def _moments_of(self, values: Tensor) -> tuple[float | Tensor, float | Tensor]:
        if len(self.moments) == 1:
            return self.moments[0]
        means, deviations = zip(*self.moments, strict=True)
        at = values.dtype, values.device
        return _tensor(means, *at), _tensor(deviations, *at)

    def errors(
        self, logits: Tensor, label: Tensor, weight: Tensor | None, lists: TaskLists
    ) -> Tensor:
        """Return label minus prediction, standardised, or how a ranking loss pulls an output; 0 if
        unknown."""
        known = None if weight is None else (weight > 0).to(label.dtype)

        def error(loss: LossFunction, logit: Tensor, label: Tensor, known: Tensor | None) -> Tensor:
            if loss.ranks:
                return -list_grads(loss.kind, in_float32(logit), label, known, lists)
            errors = errors_N(loss, logit, label)
            return errors if known is None else torch.where(known > 0, errors, 0.0)

        label = self.standardise(known_labels(label, weight))
        return self._map_labels(error, logits, label, known)

    def scale(self, values: Tensor) -> Tensor:
        """Return the values times the labels' weights: [N, L] from [N, L] or [N, 1]."""
        if len(self.weights) > 1:
            return values * _tensor(self.weights, values.dtype, values.device)
        # One label of weight 1 is the common case, and costs no product.
        return values if self.weights == (1.0,) else values * self.weights[0]

    def losses_NL(
        self, output_NL: Tensor, label_NL: Tensor, weight_NL: Tensor, lists: TaskLists
    ) -> Tensor:
        """Return the loss of each label at the outputs of a last layer, in float32 at least."""
        return self._losses(self.logits(output_NL), label_NL, weight_NL, lists)

    def grads_NL(
        self, output_NL: Tensor, label_NL: Tensor, weight_NL: Tensor, lists: TaskLists
    ) -> Tensor:
        """Return the gradient of the losses' weighted sum at a last layer, differentiable again."""

        def label_grads(
            loss: LossFunction, output: Tensor, label: Tensor, weight: Tensor
        ) -> Tensor:
            if loss.ranks:
                return list_grads(loss.kind, output, label, weight, lists)
            return row_grads_N(loss, output, label) * weight

        output_NL = in_float32(output_NL)
        if max(self.before) < 0:
            return self._map_labels(label_grads, output_NL, label_NL, weight_NL)
        own = output_NL.unbind(dim=1)
        joint = self._entire_space(own)
        of_joint = self._map_labels(label_grads, torch.stack(joint, dim=1), label_NL, weight_NL)
        found = list(of_joint.unbind(dim=1))
        # From the last label to the first: what a label takes place among stands before it.
        for at in reversed(range(len(found))):
            if (before := self.before[at]) >= 0:
                # z' = b - softplus(softplus(b) - z): dz'/dz = share, dz'/db = 1 - share sigmoid(b).
                share_N = torch.sigmoid(_softplus(own[at]) - joint[before])
                found[before] = found[before] + found[at] * share_N
                found[at] = found[at] * (1.0 - share_N * torch.sigmoid(own[at]))
        return torch.stack(found, dim=1)

    def _losses(
        self, logits: Tensor, label: Tensor, weight: Tensor | None, lists: TaskLists
    ) -> Tensor:

        def losses(
            loss: LossFunction, logit: Tensor, label: Tensor, weight: Tensor | None
        ) -> Tensor:
            if loss.ranks:
                return list_losses(loss.kind, in_float32(logit), label, weight, lists)
            return row_losses_N(loss, logit, label)

        return self._map_labels(losses, logits, label, weight)

    def _entire_space(self, own: tuple[Tensor, ...]) -> list[Tensor]:
        joint = list(own)
        for at, before in enumerate(self.before):
            if before >= 0:
                # By logits alone: float32 would lose the digits of a product of two probabilities.
                joint[at] = own[at] - _softplus(_softplus(own[at]) - joint[before])
        return joint

    def _map_labels(self, function: Callable[..., Tensor], *of_labels: Tensor | None) -> Tensor:
        # One call for all labels where they have one loss: several would be as many launches.
        if len(set(self.losses)) == 1:
            return function(self.losses[0], *of_labels)
        none = [None] * len(self.losses)
        columns = [none if each is None else each.unbind(dim=1) for each in of_labels]
        found = [function(*one) for one in zip(self.losses, *columns, strict=True)]
        return torch.stack(found, dim=1)


class Objectives(NamedTuple):
    """The losses of the labels in the inner loop, which may leave some out, and in the outer."""

    inner: LabelLosses
    outer: LabelLosses

    @classmethod
    def of(
        cls, loss: str, huber_delta: float = 1.0, moments: tuple[tuple[float, float], ...] = ()
    ) -> Objectives:
        """Return the objectives of one label that has this loss of ours."""
        losses = LabelLosses((LossFunction(loss, huber_delta),), (1.0,), (-1,), moments)
        return cls(losses, losses)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the loss of each label."""
        return tuple(loss.kind for loss in self.outer.losses)

    @property
    def num_labels(self) -> int:
        """Return the number of labels."""
        return len(self.outer.losses)


class RowLoss(NamedTuple):
    """A weighted sum of the losses of rows, by the outputs [N, L] of a last layer."""

    losses: LabelLosses
    label_NL: Tensor  # any number where it is not known
    weight_NL: Tensor  # in float32 at least
    lists: TaskLists

    def sum(self, output_NO: Tensor) -> Tensor:
        """Return the loss of these outputs: a scalar."""
        losses_NO = self.losses.losses_NL(output_NO, self.label_NL, self.weight_NL, self.lists)
        return torch.dot(losses_NO.flatten(), self.weight_NL.flatten())

    def times(self, rate: float) -> RowLoss:
        """Return the loss with all weights times `rate`."""
        return self._replace(weight_NL=self.weight_NL * rate)

    def grad_NO(self, output_NO: Tensor) -> Tensor:
        """Return the gradient of the loss at these outputs, differentiable once more."""
        grads_NO = self.losses.grads_NL(output_NO, self.label_NL, self.weight_NL, self.lists)
        return grads_NO.to(output_NO.dtype)


def label_weights(label: Tensor, weight_N: Tensor) -> Tensor | None:
    """Return the weight of each label in its row's loss: the row's own, or 1; 0 where the label is
    NaN; None where all are 1."""
    if weight_N.numel():
        return known_weights(label, weight_N)
    known = known_weights(label, None)
    return None if bool(known.all()) else known


def known_weights(label: Tensor, weight_N: Tensor | None) -> Tensor:
    """Return the result of `label_weights`, without branching on labels."""
    # An exported program must not branch on values.
    known = (~label.isnan()).to(label.dtype)
    if weight_N is None:
        return known
    return known * (weight_N.unsqueeze(1) if label.dim() > 1 else weight_N)


def known_labels(label: Tensor, weight: Tensor | None) -> Tensor:
    """Return the labels with 0 in place of those of weight 0, unknown ones among them."""
    # NaN times a weight of 0 would still be NaN.
    return label if weight is None else torch.where(weight > 0, label, 0.0)


def weigh_rows_N(values_N: Tensor, weight: Tensor | None) -> Tensor:
    """Return values that belong to a row, not to a label, as its loss counts them: times its
    weight, 0 where no label is known; `weight` as `label_weights`."""
    if weight is None:
        return values_N
    return values_N * (weight if weight.dim() == 1 else weight.amax(dim=1)).to(values_N.dtype)


def _softplus(values: Tensor) -> Tensor:
    # torch's own threshold of 20 is an error of 2e-9, which float64 would show.
    return F.softplus(values, threshold=50.0)


@cache
def _tensor(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # Kept for good: every step would wait for a new copy to CUDA, and a CUDA graph reads the memory
    # of what it was captured with.
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)
