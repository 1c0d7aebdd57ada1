"""Why the newest version of a model does not serve, whoever follows it."""

import time
from typing import final

RETRY_S = 60.0  # between two tries of a version that could not be loaded


@final
class LoadFailure:
    """Why the newest version does not serve: its name ("" if unknown) and the reason, or None."""

    def __init__(self) -> None:
        self.failure: tuple[str, str] | None = None
        # Not tried again at once: a disk or a network may have failed, and time mends that.
        self._failed_version: tuple[str, str] | None = None
        self._again_at_s = 0.0

    def is_backing_off(self, version: str) -> bool:
        """Return whether a version failed a short while ago, whatever went wrong since."""
        if (self._failed_version or ("",))[0] != version or time.monotonic() >= self._again_at_s:
            return False
        self.failure = self._failed_version
        return True

    def note_failure(self, version: str, error: Exception) -> bool:
        """Note why a version does not serve; return whether that was not reported yet."""
        # Both were reported: a channel out of reach and a bad version may take turns.
        before, self.failure = (self.failure, self._failed_version), (version, str(error))
        # Without a name there is nothing to put off: the next look may find the channel again.
        if version:
            self._failed_version, self._again_at_s = self.failure, time.monotonic() + RETRY_S
        return self.failure not in before

    def clear(self) -> None:
        """Note that the newest version serves."""
        self.failure = self._failed_version = None
