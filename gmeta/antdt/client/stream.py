"""The units of an epoch for one rank of a synchronous job: taken ahead, counted when they are in
the model, reported behind the training loop's back.
"""

import threading
from collections import deque
from typing import NamedTuple, final

from gmeta.antdt.client.client import ShardClient
from gmeta.antdt.client.feed import ShardFeed
from gmeta.antdt.client.lease import Lease
from gmeta.antdt.errors import AntdtError

REPORT_EVERY_S = 0.25  # two durable calls a rank: 0.4 % of a core, and END comes no later for it


class UnitRange(NamedTuple):
    """Units `first` up to `first + number` of the dataset."""

    first: int
    number: int


@final
class UnitStream:
    """One epoch of one dataset. `take` may run any number of steps ahead of `trained`.

    What is in the model is the front of what was taken, because steps train in the order in which
    their units were taken: a number says it all.
    """

    def __init__(self, client: ShardClient, dataset: str, epoch: int, prefetch_shards: int) -> None:
        """Begin to lease at once."""
        self._client = client
        self._feed = ShardFeed(client, dataset, epoch, prefetch_shards)
        self._held: deque[Lease] = deque()  # in the order of taking, trained in part or not yet
        self._next_unit = 0  # of the last lease in `_held`: the first one not taken
        self._put_back: deque[Lease] = deque()  # to be taken again, before any new one
        self._error: AntdtError | None = None
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._reporter = threading.Thread(
            target=self._report_on, name="antdt-reporter", daemon=True
        )
        self._reporter.start()

    @property
    def ended(self) -> bool:
        """Return whether every unit of the epoch is in the model or was skipped, whichever rank had
        it."""
        self._raise_error()
        return self._feed.ended

    @property
    def waiting_for(self) -> str:
        """Return why the service holds shards back now; "" when it does not."""
        return self._feed.waiting_for

    def take(self, num_units: int) -> list[UnitRange]:
        """Return the next units, fewer than asked for when the others are in other ranks' hands.
        Waits for the service, never for other ranks. Raise AntdtError: a fence, a lost lease, an
        outage beyond the budget.
        """
        self._raise_error()
        ranges: list[UnitRange] = []
        while num_units:
            if not self._held or self._next_unit == self._held[-1].end_unit:
                lease = self._put_back.popleft() if self._put_back else self._feed.take()
                # Not yet the end of the epoch: what other ranks hold may come back.
                if lease is None:
                    self._wake.set()  # the end may wait for what this rank has not reported yet
                    break
                self._held.append(lease)
                self._next_unit = lease.start_unit + lease.units_done
            lease = self._held[-1]
            number = min(num_units, lease.end_unit - self._next_unit)
            ranges.append(UnitRange(self._next_unit, number))
            self._next_unit += number
            num_units -= number
        return ranges

    def put_back(self, num_units: int) -> None:
        """Take the last so many units again later: a plan for them was dropped."""
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
        """Keep so many leases ready from now on."""
        self._feed.prefetch_shards = num_shards

    def trained(self, num_units: int) -> None:
        """Note that so many more of the units taken are in the model. Raise what the reporter met,
        and LeaseLostError."""
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

    def _report_on(self) -> None:
        try:
            while not self._closed.is_set():
                self._wake.wait(REPORT_EVERY_S)
                self._wake.clear()
                self._client.flush()
        except AntdtError as error:
            self._error = error
