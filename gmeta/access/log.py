"""Structured logs: one JSON object a line on stderr, with time, level, event and fields."""

import errno
import json
import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import final

LOGGER_NAME = "gmeta.antdt"


@final
class JsonFormatter(logging.Formatter):
    """Formats `log.info("event_name", extra={"fields": {...}})` as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON, its traceback included."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


@final
class DecisionLog:
    """The controller's evaluations, one line of JSON each, for `gmeta sim replay`."""

    def __init__(self, path: Path) -> None:
        """Open the file to append to it. Raise OSError when it cannot be written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def write(self, line: str) -> None:
        """Write one complete line, unbuffered, or none."""
        before = os.fstat(self._file.fileno()).st_size
        content = (line + "\n").encode()
        try:
            if self._file.write(content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with suppress(OSError):  # a pipe, or a mount that is gone, cannot be cut
                # The next line must not begin in the middle of this one.
                self._file.truncate(before)
            # Logged, not raised: workers are watched and moved also while the disk is full.
            event(logging.ERROR, "decision_not_logged", error=error.strerror)


def configure_logging(level: str = "INFO") -> None:
    """Send this package's logs to stderr as JSON lines."""
    # For the service process only, never on import: a trainer has its own logging.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger(LOGGER_NAME)
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    # Else a root logger of the process would print each line again, in its own form.
    logger.propagate = False


def event(level: int, name: str, **fields: object) -> None:
    """Log one event with its fields."""
    logging.getLogger(LOGGER_NAME).log(level, name, extra={"fields": fields})
