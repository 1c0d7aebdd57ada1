"""Who may call what: the roles, and the calls that each may make."""

import enum
from collections.abc import Iterable, Mapping

from gmeta_protos.antdt.v1 import shard_service_pb2 as pb


class Role(enum.Enum):
    """What a caller is to the job."""

    WORKER = "worker"
    OPERATOR = "operator"
    VIEWER = "viewer"


_TRAIN = {"RegisterDataset", "Register", "Lease", "Heartbeat", "Progress", "Complete", "Release"}
_TRAIN |= {"Fail", "AckAction"}
_SAVE = {"PrepareCheckpoint", "CommitCheckpoint", "Restore"}
_READ = {"Status", "ListShards", "Audit", "Watch"}
ALLOWED: Mapping[Role, frozenset[str]] = {
    Role.WORKER: frozenset(_TRAIN | _SAVE | {"Stream", "Status"}),
    Role.OPERATOR: frozenset(_READ | {"Requeue", "Skip", "Drain"}),
    Role.VIEWER: frozenset(_READ),
}
SERVICE_PREFIX = f"/{pb.DESCRIPTOR.services_by_name['ShardService'].full_name}/"


def may_call(role: Role, method: str) -> bool:
    """Return whether the role may make the call, by its full name. A call listed for no role is
    refused; reflection, which tells only what the proto does, is open to every role."""
    if not method.startswith(SERVICE_PREFIX):
        return True
    return method.removeprefix(SERVICE_PREFIX) in ALLOWED[role]


def role_of_certificate(uris: Iterable[str]) -> Role:
    """Return the role that a client certificate's URI names: `spiffe://ANY/gmeta/operator`. A
    certificate without one is a worker's: the role that every job hands to its pods."""
    for uri in uris:
        for role in Role:
            if uri.endswith(f"/gmeta/{role.value}"):
                return role
    return Role.WORKER
