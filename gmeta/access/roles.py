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
    """Return whether the role may make the call of this full name."""
    # Reflection is open to every role: it shows only what the proto does.
    if not method.startswith(SERVICE_PREFIX):
        return True
    return method.removeprefix(SERVICE_PREFIX) in ALLOWED[role]


def role_of_certificate(uris: Iterable[str]) -> Role:
    """Return the role that the URI of a client certificate names, else WORKER."""
    # As in `spiffe://ANY/gmeta/operator`. Worker is the role that every job gives to its pods.
    for uri in uris:
        for role in Role:
            if uri.endswith(f"/gmeta/{role.value}"):
                return role
    return Role.WORKER
