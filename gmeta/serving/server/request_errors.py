"""The one error of a request: an HTTP status, or gRPC's of the same meaning, and one line."""

import logging
import reprlib
from typing import Any

from gmeta.access.log import LOGGER_NAME
from gmeta.errors import GMetaError

# The name of the gRPC status of the same meaning for an HTTP status.
GRPC_CODES = {
    **dict.fromkeys((400, 413, 415), "INVALID_ARGUMENT"),
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    **dict.fromkeys((408, 504), "DEADLINE_EXCEEDED"),
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
}


# Of a long value only the beginning is looked at.
_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxdict = 20
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 80


class CallerLeftError(Exception):
    """The caller left before its request was read: there is nobody to answer."""


class RequestError(GMetaError):
    """A request that is not answered: what is wrong, the value, what is allowed, what to do."""

    def __init__(self, status: int, message: str, retry_after_s: int | None = None) -> None:
        # One short line, whatever text of the caller is in it: it goes into logs and headers.
        super().__init__(" ".join(message.split())[:1000])
        self.status = status
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is pickled by its message alone, which this constructor would take for a
        # status.
        return type(self), (self.status, str(self), self.retry_after_s)

    @property
    def grpc_code(self) -> str:
        """Return the name of the gRPC status."""
        return GRPC_CODES[self.status]


def bad_request(message: str) -> RequestError:
    """Return the error of a request that is wrong in itself."""
    return RequestError(400, message)


def defect_error(error: Exception) -> RequestError:
    """Return the error of a request that met a defect, and log the defect in full."""
    logging.getLogger(LOGGER_NAME).error("request_failed", exc_info=error)
    return RequestError(500, "the server failed on this request; its log says why")


def abbreviate(value: object) -> str:
    """Return a caller's value for a message: short, and without control characters."""
    text = value if isinstance(value, str) else _SHORT.repr(value)
    # A caller's line ends could forge lines of the log.
    text = "".join(char if char.isprintable() else "?" for char in text[:80])
    return repr(text) if isinstance(value, str) else text
