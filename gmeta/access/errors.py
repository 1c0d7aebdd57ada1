"""Refusals of a call, and the base of all errors of the data-shard service and of access."""

from typing import Any

from gmeta.errors import GMetaError, UserError


class AntdtError(GMetaError):
    """Base of every error that this package raises on purpose."""


REASON_KEY = "gmeta-reason"  # key of the trailing metadata for a refusal's Reason
# Status codes that mean that the call was wrong, not that the service failed.
_USERS_TO_MEND = (
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
)


class RefusedError(AntdtError):
    """The ledger or the server's edge refuses a call; nothing of it was applied. `code` is the name
    of a gRPC status code, `reason` that of a `Reason` of the proto without its prefix."""

    def __init__(self, code: str, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        if code in _USERS_TO_MEND:
            self.exit_code = UserError.exit_code

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors travel to other ranks; by default they are unpickled from the message alone.
        return type(self), (self.code, self.reason, str(self)), vars(self)
