"""The one error tree of the data-shard service, its stores and its client.

Every message has four parts: what is wrong, the value, what is allowed, what to do.
"""

from typing import Any

from gmeta.errors import GMetaError, UserError


class AntdtError(GMetaError):
    """Base of every error that this package raises on purpose."""


REASON_KEY = "gmeta-reason"  # key of the trailing metadata for a refusal's Reason
# Status codes by which the service says that the call was wrong, not that it failed.
_USERS_TO_MEND = (
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
)


class RefusedError(AntdtError):
    """The ledger (or the server's edge) refuses a call; nothing of it was applied.

    `code` is the name of a gRPC status code, `reason` the name of a `Reason` of the proto
    without its prefix.
    """

    def __init__(self, code: str, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        if code in _USERS_TO_MEND:
            self.exit_code = UserError.exit_code

    def __reduce__(self) -> tuple[Any, ...]:
        # By default an exception is unpickled, on other ranks, from its message alone.
        return type(self), (self.code, self.reason, str(self)), vars(self)


def shutting_down() -> RefusedError:
    """Return the refusal of a service that ends, after which a client asks its successor."""
    return RefusedError(
        "UNAVAILABLE",
        "SHUTTING_DOWN",
        "the service is shutting down; retry: its successor answers.",
    )


class FencedError(AntdtError):
    """This process belongs to the past (a newer process or generation took over): it must stop
    training."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reason, str(self)), vars(self)


class LeaseLostError(AntdtError):
    """A lease expired, was revoked or could not be renewed in time: its shard is, or will be,
    another worker's."""


class ServiceUnavailableError(AntdtError):
    """The service did not answer within the outage budget. Never to be read as an end of data."""


class ManifestError(AntdtError, UserError):
    """A shard manifest cannot be used: unreadable, altered, of a newer schema, or of other data."""


class StoreError(AntdtError):
    """Base of what can go wrong with the durable store."""


class StoreNameError(StoreError, UserError):
    """No store can be where --store says."""


class StoreFullError(StoreError):
    """The disk under the store is full; the transaction was rolled back."""


class StoreFailedError(StoreError):
    """The store cannot be read or written; the transaction was rolled back."""


class StoreTakenError(StoreError, UserError):
    """Another service holds, or took over, this store."""


class StoreVersionError(StoreError, UserError):
    """The store was written by a newer version of this package."""
