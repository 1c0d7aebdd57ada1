"""`gmeta.follow`: the model that a channel serves, always a whole version, exchanged as newer ones
are promoted."""

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
    """Return the version that the channel at a path or URL serves, after one computation with it,
    so that what fails does so here."""
    channel = channel_at(place, cache)
    current = channel.require_current()
    model = load(materialize_version(channel, current.number, cache, verify), verify=False)
    _ = model.unadapted
    return ServedVersion(model, current.number, current.checksum, current.since_s)


@final
class Follower:
    """The model that a channel serves, always a whole version, kept new by a thread; the channel is
    a path, or a URL that `gmeta publish` writes. A context manager; `close` ends the thread.

    Versions of a URL are held, and deltas made whole, in `cache` (default: GMETA_CACHE, or gmeta's
    folder in the user's cache), once a machine.

    Take `model` once for each request: it stays whole and the same however often newer versions
    come meanwhile. A newer version that is damaged or cannot be loaded now is not served: the last
    one stays, `refused` and `age_s` say so, the log does once, and it is tried again.
    """

    def __init__(
        self,
        channel: str | Path,
        every_s: float = 2.0,
        verify: bool = True,
        cache: str | Path | None = None,
    ) -> None:
        """Load what is served now, and look for newer versions every `every_s` seconds (0: never,
        call `check`)."""
        self._place, self._verify = channel, verify
        self._cache = None if cache is None else Path(cache)
        self._served = load_current(channel, verify, self._cache)
        self._load_failure = LoadFailure()
        self._retired: ServedVersion | None = None
        self._checking, self._ended = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        if every_s > 0:
            # A daemon: a program that forgets to close must not be kept from ending.
            self._thread = threading.Thread(
                target=self._watch, args=(every_s,), name="gmeta-follow", daemon=True
            )
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
        served = self._served
        return (
            f"{failure[1]} (version {served.number} of {self._place} serves on, promoted "
            f"{self.age_s:,.0f} s ago)"
        )

    @property
    def age_s(self) -> float:
        """Return the seconds since the version that serves was promoted."""
        return max(0.0, time.time() - self._served.since_s)

    def check(self) -> bool:
        """Look for another version now; return whether it serves from here on."""
        with self._checking:
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
            # One assignment: a thread has the old version or the new one, never parts of both. The
            # old one goes at the next look, in this thread: not with the last request that uses it.
            # A collection of the cycles among its layers, a fifth of a second in which nobody
            # predicts, is left to Python.
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
    """Make this thread rest for 12 ms whenever a call in the block begins or ends half a
    millisecond after its last rest: requests beside a load are not held up.

    Python lets a thread keep the interpreter for 5 ms once it has it, and every operation of torch
    in another thread gives it away: a request beside a load would wait for most of it.
    """
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
