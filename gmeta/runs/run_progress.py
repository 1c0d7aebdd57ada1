"""A run's progress, which its checkpoints hold beside the model."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RunProgress:
    """`step` outer steps done, `epoch_step` of them in `epoch`; the best validation score, its
    step, and the number of validations since that were no better."""

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    scored_step: int = 0
    best_score: float | None = None
    best_step: int = 0
    stale: int = 0

    def after_step(self) -> "RunProgress":
        """Return the progress one step on."""
        return replace(self, step=self.step + 1, epoch_step=self.epoch_step + 1)

    def after_epoch(self) -> "RunProgress":
        """Return the progress at the beginning of the next epoch."""
        return replace(self, epoch=self.epoch + 1, epoch_step=0)

    @property
    def is_best(self) -> bool:
        """Return whether this step's validation is the best so far."""
        return self.scored_step == self.step == self.best_step


def is_due(every_steps: int, step: int) -> bool:
    """Return whether something that happens every so many steps (0: never) is due now."""
    return every_steps > 0 and step % every_steps == 0
