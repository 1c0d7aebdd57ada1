"""Datasets and grants as protobuf, for the service and its clients alike."""

from dataclasses import fields
from typing import Any

from gmeta.antdt.model import DEFAULT_MAX_ATTEMPTS, DatasetSpec, Grant
from gmeta_protos.antdt.v1 import shard_service_pb2 as pb

_SPEC_FIELDS = [field.name for field in fields(DatasetSpec)]  # the proto calls them the same


def parse_spec(message: Any) -> DatasetSpec:
    """Return the spec of a proto. Raise RefusedError where it is out of bounds."""
    values = {name: getattr(message, name) for name in _SPEC_FIELDS}
    return DatasetSpec(**{**values, "max_attempts": message.max_attempts or DEFAULT_MAX_ATTEMPTS})


def encode_spec(spec: DatasetSpec) -> Any:
    """Return the proto of a spec."""
    return pb.DatasetSpec(**vars(spec))


def encode_grant(grant: Grant) -> Any:
    """Return the proto of a grant."""
    return pb.Grant(**grant._asdict())


def parse_grant(message: Any) -> Grant:
    """Return the grant of a proto."""
    return Grant(*(getattr(message, name) for name in Grant._fields))
