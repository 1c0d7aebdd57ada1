"""`gmeta.follow`: the model that a channel serves, exchanged as newer versions are promoted."""

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, final

from gmeta.errors import GMetaError
from gmeta.serving.channel.current_version import current_at, translate_access_errors
from gmeta.serving.channel.load_failure import LoadFailure
from gmeta.serving.channel.materialize import materialize_version
from gmeta.serving.channel.remote_channel import channel_at
from gmeta.serving.model_loader import load
from gmeta.serving.served_model import ServedModel
from metaio.errors import MetaIOError

# Python lets a thread keep the interpreter for 5 ms once it has it, and every operation of torch
# in another thread gives it away: a request beside a load would wait for most of the load.
_PIECE_S = 0.0005
_REST_S = 0.012

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedVersion:
    """One version: rows, layers and vocabularies together."""

    model: ServedModel
    number: int
    checksum: str
    since_s: float  # when it was promoted, in seconds since 1970


def load_current(
    place: str | Path, verify: bool = True, cache: Path | None = None
) -> ServedVersion:
    """Return the version that the channel at a path or URL serves."""
    channel = channel_at(place, cache)
    current = channel.require_current()
    model = load(materialize_version(channel, current.number, cache, verify), verify=False)
    # Computes once, so that a model that fails does so here and not for a request.
    _ = model.unadapted
    return ServedVersion(model, current.number, current.checksum, current.since_s)


@final
class Follower:
    """The model that a channel serves, kept new by a thread; `close` ends the thread.

    The channel is a path, or a URL that `gmeta channel publish` writes; versions of a URL are held,
    and deltas made full, in `cache` (default: GMETA_CACHE, or gmeta's folder in the user's cache).

    Take `model` once for each request: it stays the same while newer versions come. In place of one
    that does not load, the last stays: `refused`, `age_s` and the log say so; it is tried again."""

    def __init__(
        self,
        channel: str | Path,
        every_s: float = 2.0,
        verify: bool = True,
        cache: str | Path | None = None,
    ) -> None:
        """Load what is served now; look for newer versions every `every_s` seconds (0: never)."""
        self._place, self._verify = channel, verify
        self._cache = None if cache is None else Path(cache)
        self._served = load_current(channel, verify, self._cache)
        self._load_failure = LoadFailure()
        self._retired: ServedVersion | None = None
        # `check` may be called by the program as well as by the thread.
        self._checking, self._ended = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        if every_s > 0:
            # A daemon: a program that forgets to close must not be kept from ending.
            watch, name = partial(self._watch, every_s), "gmeta-follow"
            self._thread = threading.Thread(target=watch, name=name, daemon=True)
            self._thread.start()

    @property
    def model(self) -> ServedModel:
        """Return the model that is served now."""
        return self._served.model

    @property
    def served(self) -> ServedVersion:
        """Return the model with its version, of one moment."""
        return self._served

    @property
    def refused(self) -> str:
        """Return why the newest version does not serve; "" where it does."""
        failure = self._load_failure.failure
        if failure is None:
            return ""
        now = f"version {self._served.number} of {self._place} serves on"
        return f"{failure[1]} ({now}, promoted {self.age_s:,.0f} s ago)"

    @property
    def age_s(self) -> float:
        """Return the seconds since the version that serves was promoted."""
        return max(0.0, time.time() - self._served.since_s)

    def check(self) -> bool:
        """Look for another version now; return whether it serves from here on."""
        with self._checking:
            # Freed one look after it was replaced, in this thread: the last request that has it
            # must not pay for that.
            self._retired = None
            try:
                with translate_access_errors(self._place):
                    current = current_at(self._place)
            except (GMetaError, MetaIOError) as error:
                self._refuse("", error)
                return False
            if current.checksum == self._served.checksum:
                self._load_failure.clear()
                return False
            if self._load_failure.is_backing_off(current.checksum):
                return False
            try:
                with translate_access_errors(self._place):
                    served = load_current(self._place, self._verify, self._cache)
            except (GMetaError, MetaIOError) as error:
                self._refuse(current.checksum, error)
                return False
            # One assignment: a thread has the old version or the new one, never parts of both. No
            # gc.collect() for the old one's cycles: it would stop all threads for 0.2 s.
            self._retired, self._served = self._served, served
            self._load_failure.clear()
            return True

    def _refuse(self, checksum: str, error: Exception) -> None:
        if self._load_failure.note_failure(checksum, error):
            _log.warning("%s", self.refused)

    def close(self) -> None:
        """End the thread; the model that is served stays usable."""
        self._ended.set()
        if self._thread is not None:
            # A check that is under way ends first: nothing changes after `close`.
            self._thread.join()

    def __enter__(self) -> "Follower":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _watch(self, every_s: float) -> None:
        while not self._ended.wait(every_s):
            with _rest_between_calls():
                self.check()


follow = Follower


@contextmanager
def _rest_between_calls() -> Iterator[None]:
    """Make this thread rest 12 ms at a call that begins or ends 0.5 ms after its last rest."""
    rested_s = time.perf_counter()

    def rest(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal rested_s
        if time.perf_counter() - rested_s >= _PIECE_S:
            time.sleep(_REST_S)
            rested_s = time.perf_counter()

    # The only hook that Python calls so often; it is this thread's alone.
    before = sys.getprofile()
    sys.setprofile(rest)
    try:
        yield
    finally:
        sys.setprofile(before)
