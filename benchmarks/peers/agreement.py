"""Are the peers' gradients and losses the plain loop's? Only who computes the same is timed."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from peers.interface import REFERENCE
from peers.remote import RemotePeer
from peers.workload import Rates

# At MeLU's inner rate of 5e-6 a peer that forgot the second order, or the inner step, would pass
# unnoticed. At these rates first-order MAML is far off (tests/benchmarks holds it to that).
CHECK_RATES = Rates(inner=0.02, outer=1e-3, tables=0.02)
# Relative to the largest entry of each array; sums in another order differ by less than 1e-5 here.
GRADIENT_TOLERANCE = 2e-4
LOSS_TOLERANCE = 2e-4


class DisagreementError(Exception):
    """A peer's loss or outer gradient is not the reference's."""


def require_agreement(
    peers: Mapping[str, RemotePeer], workload: dict[str, object], folder: Path
) -> float:
    """Compare every peer with the loop: outer gradient on one batch, then the losses of some steps.

    Returns the largest relative difference of a gradient.

    Raises:
        DisagreementError: a peer computes something else."""
    worst = 0.0
    expected: dict[str, NDArray[np.float32]] = {}
    expected_losses: list[float] = []
    for name in sorted(peers, key=lambda name: name != REFERENCE):  # the reference first
        path = folder / f"{name}.npz"
        losses = peers[name].ask(
            "check", gradients_path=str(path), workload=workload, rates=vars(CHECK_RATES)
        )["losses"]
        with np.load(path) as found:
            if name == REFERENCE:
                expected, expected_losses = dict(found), losses
            worst = max(worst, gradient_difference(name, dict(found), expected))
        require_equal_losses(name, losses, expected_losses)
        path.unlink()
    return worst


def gradient_difference(
    name: str, found: Mapping[str, NDArray[np.float32]], expected: Mapping[str, NDArray[np.float32]]
) -> float:
    """The largest difference relative to the largest entry of its array.

    Raises:
        DisagreementError: an array is missing, or off by more than the tolerance."""
    if set(found) != set(expected):
        raise DisagreementError(
            f"{name} gives gradients of {sorted(found)}, the loop of {sorted(expected)}"
        )
    worst = 0.0
    for key, reference in expected.items():
        difference = float(
            np.abs(found[key] - reference).max() / max(np.abs(reference).max(), 1e-30)
        )
        if not difference <= GRADIENT_TOLERANCE:  # NaN too
            raise DisagreementError(
                f"{name}'s outer gradient of {key} is off by {difference:.2g} of its largest "
                f"entry, at most {GRADIENT_TOLERANCE:.0e} is allowed: it computes something else "
                "than the plain loop. Correct the peer"
            )
        worst = max(worst, difference)
    return worst


def require_equal_losses(name: str, found: list[float], expected: list[float]) -> None:
    """Raise DisagreementError unless the losses of the same steps are equal up to rounding."""
    for step, (loss, reference) in enumerate(zip(found, expected, strict=True)):
        if not abs(loss - reference) <= LOSS_TOLERANCE * abs(reference):
            raise DisagreementError(
                f"{name}'s query loss at step {step} is {loss:.7g}, the plain loop's is "
                f"{reference:.7g}; a relative difference of {LOSS_TOLERANCE:.0e} is allowed: it "
                "trains another model. Correct the peer"
            )
