"""A leased shard as the training loop holds it, and the other answers to a call for a lease."""

import time
from collections.abc import Iterator
from typing import NamedTuple, final

from gmeta.antdt.errors import LeaseLostError
from gmeta.antdt.model import Grant

SAFE_FRACTION = 0.8  # of the ttl; the rest is for replies under way and clock drift


class WaitFor(NamedTuple):
    """No shard now: ask again after `retry_after_s`."""

    retry_after_s: float
    reason: str


class EndOfEpoch(NamedTuple):
    """Every shard of the epoch is done (or was skipped by an operator)."""


END = EndOfEpoch()


@final
class Lease:
    """Units `start_unit + units_done` up to `end_unit` of a dataset are this worker's to train."""

    def __init__(self, grant: Grant, usable_until_s: float) -> None:
        self.token = grant.token
        self.dataset = grant.dataset
        self.epoch = grant.epoch
        self.shard_index = grant.shard_index
        self.start_unit = grant.start_unit
        self.num_units = grant.num_units
        self.attempts = grant.attempts
        self.speculative = grant.speculative  # its result counts only if `complete` returns True
        self.units_done = grant.units_done  # in the model, as far as this process knows
        self.units_reported = grant.units_done  # what the service has acknowledged
        self.usable_until_s = usable_until_s  # on this process's monotonic clock
        self.lost = ""  # why it may not be used any more

    @property
    def end_unit(self) -> int:
        """Return one past the last unit."""
        return self.start_unit + self.num_units

    @property
    def finished(self) -> bool:
        """Return whether every unit is in the model."""
        return self.units_done == self.num_units

    def units(self) -> Iterator[int]:
        """Yield the units still to train, in order. Raise LeaseLostError when lost."""
        for unit in range(self.start_unit + self.units_done, self.end_unit):
            self.check()
            yield unit

    def advance(self, num_units: int) -> None:
        """Note that `num_units` more units are in the model. Raise LeaseLostError or ValueError."""
        self.check()
        # The service would refuse it too, but only at the next flush: long after the wrong step.
        if not 0 <= self.units_done + num_units <= self.num_units:
            raise ValueError(
                f"shard {self.shard_index} has {self.num_units} units, {self.units_done} are "
                f"trained and {num_units} more were reported; count each unit once."
            )
        # Only noted: ShardClient.flush sends it between two steps, once the step is done.
        self.units_done += num_units

    def check(self) -> None:
        """Raise LeaseLostError when the lease was revoked, or not renewed for 0.8 of its ttl."""
        late_s = time.monotonic() - self.usable_until_s
        # Once late, lost for good: by now the shard may be another worker's.
        if not self.lost and late_s > 0:
            self.lost = (
                f"not renewed in time ({late_s:.1f} s late), the process or the link stood still"
            )
        if self.lost:
            raise LeaseLostError(
                f"the lease of shard {self.shard_index} of dataset {self.dataset!r} is lost: "
                f"{self.lost}. Only a live lease may be trained: in a synchronous job stop this "
                "process and restart from the checkpoint."
            )
