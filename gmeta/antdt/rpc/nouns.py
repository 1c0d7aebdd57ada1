"""Datasets and grants as protobuf, for the service and its clients alike."""

from dataclasses import fields
from typing import Any

from gmeta.antdt.model import DEFAULT_MAX_ATTEMPTS, DatasetSpec, Grant
from gmeta_protos.antdt.v1 import shard_service_pb2 as pb

_SPEC_FIELDS = [field.name for field in fields(DatasetSpec)]  # the proto calls them the same


def spec_from(message: Any) -> DatasetSpec:
    """Return the spec of a proto. Raise RefusedError where it is out of bounds."""
    given = {name: getattr(message, name) for name in _SPEC_FIELDS}
    return DatasetSpec(**{**given, "max_attempts": message.max_attempts or DEFAULT_MAX_ATTEMPTS})


def spec_to(spec: DatasetSpec) -> Any:
    """Return the proto of a spec."""
    return pb.DatasetSpec(**vars(spec))


def grant_to(grant: Grant) -> Any:
    """Return the proto of a grant."""
    return pb.Grant(**grant._asdict())


def grant_from(message: Any) -> Grant:
    """Return the grant of a proto."""
    return Grant(*(getattr(message, name) for name in Grant._fields))
