"""Ends a run whose steps have stopped: one page has every rank's stack, where it waits, and who is
missing."""

import faulthandler
import json
import logging
import os
import socket
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, final

from gmeta.config.train_config import RunConfig
from gmeta.distributed.ranks import Ranks, broadcast_value, gather_values
from gmeta.platform.files.atomic_write import write_atomically
from gmeta.runs.run_folder import RunFolder

MEDIAN_STEPS = 100  # of so many median steps none takes as long
UNKNOWN_FACTOR = 5  # of the floor, as long as the median is not known
KNOWN_AFTER = 10  # steps
REPORT_TIMEOUT_S = 10.0  # until a rank that has said nothing counts as silent
# Where a rank stands that waits for others: it is not to blame.
_WAITING = ("torch/distributed/", "torch/autograd/", "gmeta/distributed/")
_log = logging.getLogger(__name__)


class _RankPlace(NamedTuple):
    """Where a rank's steps stand: `place` is the innermost line of ours, `waits` whether that is a
    message to or from other ranks."""

    rank: int
    step: int
    place: str
    waits: bool


@final
class HangWatch:
    """Watches the steps of a rank from a thread; all ranks make one. Only the time from beat to
    beat counts, inside `watch` and outside `pause`."""

    def __init__(
        self, folder: RunFolder, run: RunConfig, ranks: Ranks, step: Callable[[], int]
    ) -> None:
        """Write to the run folder's hangs/ once no step was taken for `run.hang_timeout_s` seconds
        and MEDIAN_STEPS median steps; 0: never. Collective."""
        self._floor_s, self._ranks, self._step = run.hang_timeout_s, ranks, step
        everyone = gather_values((socket.gethostname(), os.getpid()), ranks)
        # One folder for this life of the run, by one rank's clock.
        named = time.strftime("%Y-%m-%dT%H-%M-%S"), everyone
        name, everyone = broadcast_value(named, ranks)
        self._hosts: Sequence[tuple[str, int]] = everyone or ()
        self._folder = folder.root / "hangs" / name
        self._times_s: deque[float] = deque(maxlen=MEDIAN_STEPS)
        self._since_s: float | None = None  # None: nothing is to be watched
        self._main = threading.main_thread().ident

    def beat_before(self, work: Callable[[], bool]) -> Callable[[], bool]:
        """Return `work`, called as the ranks begin a step together, behind a note of that."""

        def beat() -> bool:
            now_s = time.monotonic()
            if self._since_s is not None:
                self._times_s.append(now_s - self._since_s)
                self._since_s = now_s
            return work()

        return beat

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch the steps in the block."""
        if not self._floor_s or self._ranks.world_size == 1:
            yield
            return
        is_over, self._since_s = threading.Event(), time.monotonic()
        watching = threading.Thread(target=self._look, args=(is_over,), daemon=True)
        watching.start()
        try:
            yield
        finally:
            is_over.set()
            self._since_s = None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out the time of a block, such as a validation, which may take what it takes."""
        before, self._since_s = self._since_s, None
        yield
        self._since_s = None if before is None else time.monotonic()

    def limit_s(self) -> float:
        """Return the seconds after which a step counts as hanging."""
        if len(self._times_s) < KNOWN_AFTER:
            return UNKNOWN_FACTOR * self._floor_s
        return max(self._floor_s, MEDIAN_STEPS * statistics.median([*self._times_s]))

    def _look(self, is_over: threading.Event) -> None:
        while not is_over.wait(min(1.0, self._floor_s / 4)):
            since_s = self._since_s
            if since_s is not None and time.monotonic() - since_s > self.limit_s():
                self._end(time.monotonic() - since_s)

    def _end(self, silent_s: float) -> None:
        """Report where this rank stands; the first rank that does tells of all. End the process."""
        own = self._ranks.rank
        with suppress(OSError):  # a full disk must not keep a hanging run alive
            self._folder.mkdir(parents=True, exist_ok=True)
            stacks = self._folder / f"rank-{own}.txt"
            with stacks.open("w") as file:
                faulthandler.dump_traceback(file)
            about = _RankPlace(own, self._step(), *find_place(self._main))
            write_atomically(stacks.with_suffix(".json"), json.dumps(about).encode())
            _wait_for(lambda: len(self._read_places()) == self._ranks.world_size)
            places, page = self._read_places(), self._folder / "page.txt"
            if own == min(places):
                message = describe_hang(places, self._hosts, silent_s)
                texts = [message]
                for rank, place in sorted(places.items()):
                    stack = stacks.with_stem(f"rank-{rank}").read_text(errors="replace")
                    texts.append(f"rank {rank}, at {place.place}:\n{stack}")
                write_atomically(page, "\n\n".join(texts).encode())
                _log.error("%s. All stacks: %s", message, page)
            else:
                # The agent ends all ranks once one has ended, the page's writer too.
                _wait_for(page.exists)
        # A main thread that waits inside a library can be ended in no other way.
        sys.stderr.flush()
        os._exit(1)

    def _read_places(self) -> dict[int, _RankPlace]:
        found = (json.loads(path.read_bytes()) for path in self._folder.glob("rank-*.json"))
        return {place.rank: place for place in (_RankPlace(*one) for one in found)}


def _wait_for(reached: Callable[[], Any]) -> None:
    until_s = time.monotonic() + REPORT_TIMEOUT_S
    while not reached() and time.monotonic() < until_s:
        time.sleep(0.1)


def find_place(thread: int | None) -> tuple[str, bool]:
    """Return the innermost line of ours that a thread stands at, and whether it waits for ranks."""
    frame = sys._current_frames().get(thread or 0)
    stack = traceback.extract_stack(frame)
    ours = [one for one in stack if "/gmeta/" in one.filename] or stack
    waits = any(part in stack[-1].filename for part in _WAITING)
    last = ours[-1] if waits else stack[-1]
    path = last.filename.rpartition("/gmeta/")
    return f"{'gmeta/' * bool(path[0])}{path[2]}:{last.lineno} in {last.name}", waits


def describe_hang(
    places: dict[int, _RankPlace], hosts: Sequence[tuple[str, int]], silent_s: float
) -> str:
    """Return in words who is missing and where the others wait."""
    newest = max(place.step for place in places.values())
    missing = []
    for rank, (host, pid) in enumerate(hosts):
        where = f"rank {rank} ({host}, process {pid})"
        place = places.get(rank)
        if place is None:
            missing.append(f"{where} says nothing: it is stopped, or its host is cut off")
        elif not place.waits:
            missing.append(f"{where} is at {place.place}")
    behind = ", ".join(str(rank) for rank, one in sorted(places.items()) if one.step < newest)
    blamed = "; ".join(missing) or (f"rank {behind}, a step behind" if behind else "nobody")
    waiting: dict[str, list[str]] = {}
    for rank, place in sorted(places.items()):
        if place.waits:
            waiting.setdefault(place.place, []).append(str(rank))
    others = "; ".join(f"rank {', '.join(ranks)} at {at}" for at, ranks in waiting.items())
    return (
        f"no step for {silent_s:.0f} s, behind step {newest}. Missing: {blamed}. "
        f"Waiting for others: {others or 'nobody'}. The run ends; --resume goes on from its "
        "newest checkpoint"
    )
