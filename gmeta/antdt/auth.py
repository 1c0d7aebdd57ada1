"""Who may call what: roles, the calls each may make, and the guard in front of every RPC.

Two proofs can be asked for, and each one that is configured must be given: a client certificate
(its URI names a role) and a bearer token (its file names the role). A caller acts in the role that
both allow.
"""

import base64
import binascii
import enum
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

import grpc

from gmeta.antdt.credentials import CredentialError, WatchedFiles, read_tokens
from gmeta.antdt.log import event
from gmeta.antdt.rate import CallLimits
from protos.antdt.v1 import shard_service_pb2 as pb

MIN_TOKEN_LENGTH = 16
_REASON_KEY = "gmeta-reason"
_OPEN_PREFIX = "/grpc.health."  # probes show no proof
_RELOAD_EVERY_S = 1.0


class Role(enum.Enum):
    """What a caller is to the job."""

    WORKER = "worker"
    OPERATOR = "operator"
    VIEWER = "viewer"


_READ = {"Status", "ListShards", "Audit", "Watch"}
ALLOWED: Mapping[Role, frozenset[str]] = {
    Role.WORKER: frozenset(
        {
            "RegisterDataset",
            "Register",
            "Lease",
            "Heartbeat",
            "Progress",
            "Complete",
            "Release",
            "Fail",
            "PrepareCheckpoint",
            "CommitCheckpoint",
            "Restore",
            "AckAction",
            "Status",
        }
    ),
    Role.OPERATOR: frozenset(_READ | {"Requeue", "Skip", "Drain"}),
    Role.VIEWER: frozenset(_READ),
}
_SERVICE_PREFIX = f"/{pb.DESCRIPTOR.services_by_name['ShardService'].full_name}/"


def may_call(role: Role, method: str) -> bool:
    """Whether the role may make the call, by its full name. What is named for no role is refused
    to all; reflection, which only tells what the proto tells, is open to every role."""
    if not method.startswith(_SERVICE_PREFIX):
        return True
    return method.removeprefix(_SERVICE_PREFIX) in ALLOWED[role]


def role_of_certificate(uris: Iterable[str]) -> Role:
    """The role that a client certificate's URI names: `spiffe://ANY/gmeta/operator`. Without one
    it is a worker's: the role that every job hands to its pods."""
    for uri in uris:
        for role in Role:
            if uri.endswith(f"/gmeta/{role.value}"):
                return role
    return Role.WORKER


@final
class Tokens:
    """A folder of token files named after roles: `worker`, `operator`, `viewer`. Each holds one
    token a line; a role without a file cannot be had by token. Replaced files count within a
    second."""

    def __init__(self, folder: Path) -> None:
        """Raises CredentialError."""
        self._paths = {role: folder / role.value for role in Role}
        self._folder = folder
        self._files = WatchedFiles(list(self._paths.values()))
        self._roles = self._read()
        self._next_look_s = 0.0

    def role_of(self, authorization: str) -> Role | None:
        """The role behind `Bearer TOKEN`, or behind `Basic` with the token as the password (what
        a browser sends); None for a stranger."""
        self._refresh()
        # Looked up by digest: how long it takes tells nothing about the tokens.
        return self._roles.get(_digest(_token_in(authorization)))

    def _refresh(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + _RELOAD_EVERY_S
        if self._files.changed():
            try:
                self._roles = self._read()
            except CredentialError as error:
                event(logging.ERROR, "tokens_not_rotated", message=str(error))

    def _read(self) -> dict[bytes, Role]:
        found: dict[bytes, Role] = {}
        for role, path in self._paths.items():
            if not path.exists():
                continue
            for token in read_tokens(path):
                if len(token) < MIN_TOKEN_LENGTH:
                    raise CredentialError(
                        f"a token in {path} has {len(token)} characters; at least "
                        f"{MIN_TOKEN_LENGTH} are needed. Make one with: openssl rand -hex 32"
                    )
                if found.setdefault(_digest(token), role) is not role:
                    raise CredentialError(
                        f"a token in {path} stands in the file of another role too; a token has "
                        "one role. Make another one."
                    )
        if not found:
            raise CredentialError(
                f"the token folder {self._folder} has none of the files "
                f"{', '.join(role.value for role in Role)}: nobody could call. Write a token to "
                "each role's file."
            )
        return found


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _token_in(authorization: str) -> str:
    scheme, _, rest = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""


@final
class Guard(grpc.ServerInterceptor):  # type: ignore[misc]
    """Stands before every RPC, health probes apart: proof, role, rate."""

    def __init__(self, tokens: Tokens | None, certificates: bool, limits: CallLimits) -> None:
        """`certificates`: the handshake has demanded and verified a client certificate."""
        self._tokens = tokens
        self._certificates = certificates
        self._limits = limits

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """See grpc.ServerInterceptor. Wraps the handler: the peer is known only inside the call."""
        handler = continuation(details)
        if handler is None or details.method.startswith(_OPEN_PREFIX):
            return handler
        roles = []
        if self._tokens is not None:
            given = dict(details.invocation_metadata).get("authorization", "")
            role = self._tokens.role_of(str(given))
            if role is None:
                # Before the message is even parsed.
                return grpc.unary_unary_rpc_method_handler(_refuse_stranger)
            roles.append(role)
        return self._guarded(handler, details.method, roles)

    def _guarded(self, handler: Any, method: str, roles: list[Role]) -> Any:
        def check(context: Any) -> None:
            shown = [*roles, *([_role_of_peer(context)] if self._certificates else [])]
            for role in shown:
                if not may_call(role, method):
                    _abort(
                        context,
                        grpc.StatusCode.PERMISSION_DENIED,
                        "PERMISSION_DENIED",
                        f"{method.rpartition('/')[2]} is not a call of the role {role.value}; it "
                        f"may call {', '.join(sorted(ALLOWED[role]))}. Use the credentials of the "
                        "role that may.",
                    )
            refused = self._limits.refusal(context.peer(), _identity(context, shown))
            if refused is not None:
                _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "BUSY", refused)

        return _wrap(handler, check)


def _wrap(handler: Any, check: Callable[[Any], None]) -> Any:
    """The handler with `check` before its first line. The service has calls with one request and,
    but for reflection, no streams of requests."""
    behaviour = handler.unary_unary or handler.unary_stream or handler.stream_stream

    def answer(request: Any, context: Any) -> Any:
        check(context)
        return behaviour(request, context)

    def stream(request: Any, context: Any) -> Iterator[Any]:
        check(context)
        yield from behaviour(request, context)

    codecs = handler.request_deserializer, handler.response_serializer
    if handler.unary_unary:
        return grpc.unary_unary_rpc_method_handler(answer, *codecs)
    if handler.unary_stream:
        return grpc.unary_stream_rpc_method_handler(stream, *codecs)
    return grpc.stream_stream_rpc_method_handler(stream, *codecs)


def _role_of_peer(context: Any) -> Role:
    uris = context.auth_context().get("peer_uri", ())
    return role_of_certificate(uri.decode(errors="replace") for uri in uris)


def _identity(context: Any, roles: list[Role]) -> str:
    """Whose calls count together. All workers of a job show the same credentials, so for them the
    address tells apart; a person or a dashboard is one caller from wherever."""
    names = context.auth_context().get("x509_common_name", ())
    shown = [role.value for role in roles] + [name.decode(errors="replace") for name in names]
    if Role.WORKER in roles:
        shown.append(context.peer().rpartition(":")[0])
    return " ".join(shown)


def _refuse_stranger(request: Any, context: Any) -> None:
    _abort(
        context,
        grpc.StatusCode.UNAUTHENTICATED,
        "UNAUTHENTICATED",
        "the call carries no valid token; this service needs one. Pass the token file to the "
        "client.",
    )


def _abort(context: Any, code: Any, reason: str, message: str) -> None:
    context.set_trailing_metadata(((_REASON_KEY, reason),))
    context.abort(code, message)
