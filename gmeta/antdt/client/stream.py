"""One epoch of a dataset for one rank of a synchronous job: leases ahead, units counted behind."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

from gmeta.access.errors import AntdtError
from gmeta.antdt.client.client import ShardClient
from gmeta.antdt.client.lease import EndOfEpoch, Lease, WaitFor
from gmeta_keys.translate_errors import format_foreign_error, translate_errors

REPORT_EVERY_S = 0.25  # two durable calls: 0.4 % of a core a rank, and no later END


@final
class ShardFeed:
    """The leases of an epoch, taken by a thread, with up to `prefetch_shards` of them ready."""

    def __init__(
        self, client: ShardClient, dataset: str, epoch: int, prefetch_shards: int = 2
    ) -> None:
        """Begin to lease at once. Raise ValueError for a prefetch below 1."""
        if prefetch_shards < 1:
            raise ValueError(
                f"prefetch_shards is {prefetch_shards}; at least 1 is needed. Use 2 to hide the "
                "service."
            )
        self._client = client
        self._dataset = dataset
        self._epoch = epoch
        self.prefetch_shards = prefetch_shards  # may be changed at any time
        self._ready: deque[Lease] = deque()
        self._error: AntdtError | None = None
        self._end_seen = False
        self.waiting_for = ""  # why there is nothing to train now, for the progress bar
        self._held_back = False  # the last answer was WAIT or END
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._closed = threading.Event()
        # Leases are taken ahead in a thread, so that a step never waits for the service.
        self._thread = threading.Thread(target=self._run, name="antdt-feed", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Return whether the service said END and no lease is left. Raise the thread's error."""
        # A rank without a shard feeds an empty batch; all ranks stop at the step where every one of
        # them has seen this.
        self._raise_error()
        return self._end_seen and not self._ready

    @property
    def ready(self) -> list[Lease]:
        """Return the leases that wait to be taken."""
        return list(self._ready)

    def poll(self) -> Lease | None:
        """Return the next shard, or None, without blocking. Raise the thread's error."""
        self._raise_error()
        lease = self._ready.popleft() if self._ready else None
        # Not at every shard: a step may take many, and the thread would compete with it.
        if self._num_to_lease():
            self._wake.set()
        return lease

    def next_lease(self) -> Lease | None:
        """Return the next shard, or None after WAIT or END. Raise the thread's error."""
        # Waits for the service, not for other workers: after WAIT or END only they, or a flush of
        # this one, can bring more shards.
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._held_back or self._error)
        return self.poll()

    def close(self) -> None:
        """Stop leasing and give back what was not taken."""
        self._closed.set()
        self._wake.set()
        self._thread.join()
        unused = list(self._ready)
        self._ready.clear()
        if self._error is None:
            self._client.release(unused)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            # Whatever it is: whoever waits for a shard must not wait for ever.
            with translate_errors(_wrap_defect, AntdtError):
                while not self._closed.is_set() and not self._end_seen:
                    # Cleared before the missing shards are counted: a shard taken after that sets
                    # it again.
                    self._wake.clear()
                    wait_s = self._lease_missing()
                    self._wake.wait(wait_s)
        except AntdtError as error:
            self._error = error
        with self._changed:
            # Also after an error: nothing comes any more, and `next_lease` must not wait for it.
            self._held_back = True
            self._changed.notify_all()

    def _num_to_lease(self) -> int:
        """Return how many shards to lease now."""
        wanted = self.prefetch_shards
        missing = wanted - len(self._ready)
        # None until half are missing: a call costs the same for one shard as for many.
        return missing if missing >= max(1, wanted // 2) else 0

    def _lease_missing(self) -> float | None:
        """Lease what is missing; return the pause in seconds, None: until enough is missing."""
        missing = self._num_to_lease()
        if not missing:
            return None
        answer = self._client.lease(self._dataset, self._epoch, missing)
        with self._changed:
            self._end_seen = isinstance(answer, EndOfEpoch)
            self.waiting_for = answer.reason if isinstance(answer, WaitFor) else ""
            self._held_back = isinstance(answer, EndOfEpoch | WaitFor)
            if not isinstance(answer, EndOfEpoch | WaitFor):
                self._ready.extend(answer)
            self._changed.notify_all()
        if isinstance(answer, WaitFor):
            # Not on `_wake`, which each poll sets: the pause would become calls without end.
            self._closed.wait(answer.retry_after_s)
        return 0.0


def _wrap_defect(error: Exception) -> AntdtError:
    return AntdtError(
        f"no shard can be leased any more: {format_foreign_error(error).rstrip('.')}. That is a "
        "defect; report it with its traceback."
    )


class UnitRange(NamedTuple):
    """Units `first` up to `first + number` of the dataset."""

    first: int
    number: int


# Returns the cost of each unit of a range.
CostsOfRange = Callable[[UnitRange], Sequence[float]]


def count_units(units: UnitRange) -> Sequence[float]:
    """Return a cost of 1 for each unit."""
    return [1.0] * units.number


@final
class UnitStream:
    """One epoch of one dataset, unit by unit: taken before a step, marked trained after it."""

    def __init__(self, client: ShardClient, dataset: str, epoch: int, prefetch_shards: int) -> None:
        """Begin to lease at once."""
        self._client = client
        self._feed = ShardFeed(client, dataset, epoch, prefetch_shards)
        self._held: deque[Lease] = deque()  # in the order taken; trained in part, or not yet
        self._next_unit = 0  # of the last lease in `_held`: the first one not taken
        self._put_back: deque[Lease] = deque()  # to be taken again, before any new one
        self._error: AntdtError | None = None
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._reporter = threading.Thread(
            target=self._report_until_closed, name="antdt-reporter", daemon=True
        )
        self._reporter.start()

    @property
    def ended(self) -> bool:
        """Return whether every unit of the epoch, of all ranks, is in the model or was skipped."""
        self._raise_error()
        return self._feed.ended

    @property
    def leased_ahead(self) -> list[UnitRange]:
        """Return the units that no `take_units` has come to yet."""
        return [UnitRange(lease.start_unit, lease.num_units) for lease in self._feed.ready]

    @property
    def waiting_for(self) -> str:
        """Return why the service holds shards back now; "" when it does not."""
        return self._feed.waiting_for

    def take_units(self, budget: float, costs_of: CostsOfRange = count_units) -> list[UnitRange]:
        """Return the next units, whose costs come as near to the budget as they can: at least one,
        fewer where other ranks hold the rest. Raise AntdtError."""
        self._raise_error()
        ranges: list[UnitRange] = []
        left = budget
        while left > 0:
            if not self._held or self._next_unit == self._held[-1].end_unit:
                lease = self._put_back.popleft() if self._put_back else self._feed.next_lease()
                # Not yet the end of the epoch: what other ranks hold may come back.
                if lease is None:
                    self._wake.set()  # END may wait for this rank's unreported units
                    break
                self._held.append(lease)
                self._next_unit = lease.start_unit + lease.units_done
            held = UnitRange(self._next_unit, self._held[-1].end_unit - self._next_unit)
            number = 0
            for cost in costs_of(held):
                # A unit belongs to the budget that holds more than half of it.
                if left <= 0 or (left < cost / 2 and (ranges or number)):
                    left = 0.0
                    break
                left -= cost
                number += 1
            if number:
                ranges.append(UnitRange(self._next_unit, number))
            self._next_unit += number
        return ranges

    def put_back(self, num_units: int) -> None:
        """Take the last `num_units` again later: a plan for them was dropped."""
        while num_units:
            lease = self._held[-1]
            number = min(num_units, self._next_unit - lease.start_unit - lease.units_done)
            self._next_unit -= number
            num_units -= number
            if num_units:
                if len(self._held) == 1:
                    raise ValueError(f"{num_units} more units were put back than were taken")
                # Whole again, and before what was put back earlier: units keep their order.
                self._put_back.appendleft(self._held.pop())
                self._next_unit = self._held[-1].end_unit

    def lease_ahead(self, num_shards: int) -> None:
        """Keep `num_shards` leases ready from now on."""
        self._feed.prefetch_shards = num_shards

    def mark_trained(self, num_units: int) -> None:
        """Note that `num_units` more are in the model. Raise AntdtError, as `take_units` does."""
        # A number is enough: steps train units in the order in which they were taken, however many
        # steps `take_units` runs ahead.
        self._raise_error()
        while num_units:
            # The last one stays: `take` goes on in it, or sees that it is used up.
            while len(self._held) > 1 and self._held[0].finished:
                self._held.popleft()
            lease = self._held[0]
            number = min(num_units, lease.num_units - lease.units_done)
            if not number:
                raise ValueError(
                    f"{num_units} more units were trained than were taken. Count each unit once."
                )
            lease.advance(number)
            num_units -= number

    def flush(self) -> None:
        """Return when the service has everything that is in the model, durably."""
        self._raise_error()
        self._client.flush()

    def close(self) -> None:
        """Stop leasing and reporting; what is still held goes back when the client is closed."""
        self._closed.set()
        self._wake.set()
        self._reporter.join()
        self._feed.close()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _report_until_closed(self) -> None:
        try:
            while not self._closed.is_set():
                self._wake.wait(REPORT_EVERY_S)
                self._wake.clear()
                self._client.flush()
        except AntdtError as error:
            self._error = error
