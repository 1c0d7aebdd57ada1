"""Leases ahead of the training loop, in a thread, so that a step never waits for the service.

For synchronous jobs: `poll` never blocks, `take` waits for the service alone and not for other
workers. A rank without a shard feeds an empty batch, and all ranks stop at the step where every
one of them has seen `ended`.
"""

import threading
from collections import deque
from typing import final

from gmeta.antdt.client.client import ShardClient
from gmeta.antdt.client.lease import EndOfEpoch, Lease, WaitFor
from gmeta.antdt.errors import AntdtError
from gmeta_keys.boundary import failing_as, kind_and_text


@final
class ShardFeed:
    """One epoch of one dataset for one rank, with up to `prefetch_shards` leases ready."""

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
        self._thread = threading.Thread(target=self._run, name="antdt-feed", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Return whether the service said END: every shard of the epoch is done, this rank's
        included. Raise what the thread met."""
        self._raise_error()
        return self._end_seen and not self._ready

    def poll(self) -> Lease | None:
        """Return the next shard, or None when none is ready. Never blocks. Raise what the thread
        met (a fence, an outage)."""
        self._raise_error()
        lease = self._ready.popleft() if self._ready else None
        # Not for every shard: a step may take many, and the thread would take turns with it.
        if self._missing():
            self._wake.set()
        return lease

    def take(self) -> Lease | None:
        """Return the next shard, or None when the service said WAIT or END: then only other
        workers, or a flush of this one, can bring more. Raise what the thread met."""
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
            with failing_as(_defect, AntdtError):
                while not self._closed.is_set() and not self._end_seen:
                    # Before it is counted what is missing: a shard that is taken after that sets it
                    # again.
                    self._wake.clear()
                    wait_s = self._fill()
                    self._wake.wait(wait_s)
        except AntdtError as error:
            self._error = error
        with self._changed:
            self._held_back = True  # nothing comes any more: nobody may wait for it
            self._changed.notify_all()

    def _missing(self) -> int:
        """Return how many shards to lease now: half of them at once, as a call costs the same for
        one as for many."""
        wanted = self.prefetch_shards
        missing = wanted - len(self._ready)
        return missing if missing >= max(1, wanted // 2) else 0

    def _fill(self) -> float | None:
        """Lease what is missing; return how long to pause, None until so much is missing."""
        missing = self._missing()
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
            # Not for `_wake`, which a poll sets again: the pause would become calls without end.
            self._closed.wait(answer.retry_after_s)
        return 0.0


def _defect(error: Exception) -> AntdtError:
    return AntdtError(
        f"no shard can be leased any more: {kind_and_text(error).rstrip('.')}. That is a defect; "
        "report it with its traceback."
    )
