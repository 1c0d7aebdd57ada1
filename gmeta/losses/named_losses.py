"""The objectives that a config names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmeta.config.losses import find_custom_loss, kind_of_loss
from gmeta.losses.custom_loss_check import check_custom_loss
from gmeta.losses.objectives import LabelLosses, Objectives
from gmeta.losses.row_losses import ANY_NUMBER, LossFunction

if TYPE_CHECKING:
    from gmeta.config.labels import LabelsConfig


def make_objectives(
    loss: str,
    huber_delta: float,
    config: LabelsConfig,
    names: tuple[str, ...],
    weighed: tuple[str, ...] = (),
) -> Objectives:
    """Return the objectives of a dataset's labels, `names`; of one without a name by `loss`. The
    outer loop learns those in `weighed` by fake-negative weights, as its rows are shown twice."""
    config.check(names)
    moments: tuple[tuple[float, float], ...] = ()
    if config.standardise and config.moments:
        # Probabilities and scores have no units.
        kinds, pairs = config.loss_kinds(loss, names), zip(*[iter(config.moments)] * 2, strict=True)
        of_labels = zip(kinds, pairs, strict=True)
        moments = tuple(pair if kind in ANY_NUMBER else (0.0, 1.0) for kind, pair in of_labels)
    losses = tuple(_make_loss(one, huber_delta) for one in config.losses_of(loss, names))
    if not names:
        alike = LabelLosses(losses, (1.0,), (-1,), moments)
        return Objectives(alike, alike)
    before = tuple(
        names.index(config.entire_space[name]) if name in config.entire_space else -1
        for name in names
    )
    for name, own, at in zip(names, losses, before, strict=True):
        if at >= 0 and {own.kind, losses[at].kind} != {"bce"}:
            raise ValueError(
                f"labels.entire_space has {name} among {names[at]}, of losses {own.kind} and "
                f"{losses[at].kind}: a product is of probabilities. Give both the loss bce"
            )
    outer = tuple(
        own._replace(comes_late=name in weighed) for name, own in zip(names, losses, strict=True)
    )
    for name, own in zip(names, outer, strict=True):
        if own.comes_late and own.kind != "bce":
            raise ValueError(
                f'label {name} of the schema has unripe = "weigh", and the loss {own.kind}: a '
                "weight is of a probability. Give it the loss bce, or let its rows wait"
            )
    weights = tuple(config.weight.get(name, 1.0) for name in names)
    adapts = config.adapt or names
    # The inner loop leaves a label out by the weight 0: the outputs stay the same.
    inner = tuple(
        weight if name in adapts else 0.0 for name, weight in zip(names, weights, strict=True)
    )
    return Objectives(
        LabelLosses(losses, inner, before, moments), LabelLosses(outer, weights, before, moments)
    )


def _make_loss(name: str, huber_delta: float) -> LossFunction:
    """Return the loss of that name. Raises ConfigError: a package's own is not fit for use."""
    own = find_custom_loss(name)
    if own is not None:
        check_custom_loss(name, own)
    return LossFunction(kind_of_loss(name), huber_delta, own=own)
