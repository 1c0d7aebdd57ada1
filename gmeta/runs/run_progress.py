"""How far a run has come: what a checkpoint says beside the model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RunProgress:
    """Where in the data a checkpoint stands: `step` outer steps done, `epoch_step` of them in
    `epoch`; and what validation said: the best score, its step, and how many validations since were
    no better."""

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    scored_step: int = 0
    best_score: float | None = None
    best_step: int = 0
    stale: int = 0

    @property
    def is_best(self) -> bool:
        """Return whether the model was scored after this step, better than ever before."""
        return self.scored_step == self.step == self.best_step


def is_due(every_steps: int, step: int) -> bool:
    """Return whether something that happens every so many steps (0: never) is due now."""
    return every_steps > 0 and step % every_steps == 0
