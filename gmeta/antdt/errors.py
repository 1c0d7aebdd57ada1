"""The service's error tree. A message: what is wrong, the value, what is allowed, what to do."""

from typing import Any

from gmeta.access.errors import AntdtError, RefusedError
from gmeta.errors import UserError


def shutdown_refusal() -> RefusedError:
    """Return the refusal of a service that ends; its successor answers the retry."""
    message = "the service is shutting down; retry: its successor answers."
    return RefusedError("UNAVAILABLE", "SHUTTING_DOWN", message)


class FencedError(AntdtError):
    """A newer process or generation took over: this process must stop training."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reason, str(self)), vars(self)


class LeaseLostError(AntdtError):
    """A lease expired, was revoked or not renewed in time: its shard is another worker's."""


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
