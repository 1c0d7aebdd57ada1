"""Who calls: the proofs of a role, and the guard in front of every RPC.

Two proofs can be asked for, and each one that is configured must be given: a client certificate
(its URI names a role) and a bearer token (its file names the role). A caller acts in the role that
both allow.
"""

import base64
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple, final

import grpc

from gmeta.antdt.access.credentials import (
    CredentialError,
    WatchedFiles,
    end_of_certificate,
    read_tokens,
)
from gmeta.antdt.access.rate import CallLimits
from gmeta.antdt.access.roles import ALLOWED, SERVICE_PREFIX, Role, may_call, role_of_certificate
from gmeta.antdt.errors import REASON_KEY, RefusedError
from gmeta.antdt.log import event

MIN_TOKEN_LENGTH = 16
_OPEN_PREFIX = "/grpc.health."  # probes show no proof
_RELOAD_EVERY_S = 1.0


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
        except ValueError:  # no base64, or no text in it
            return ""
    return ""


class Shown(NamedTuple):
    """What a call, or the connection under it, shows of who makes it."""

    authorization: str
    common_names: tuple[str, ...]
    uris: tuple[str, ...]
    valid_until_s: float  # of the certificate, seconds since 1970
    peer: str

    @staticmethod
    def by(context: Any) -> "Shown":
        """Of a call's context."""
        of_connection = context.auth_context()

        def texts(key: str) -> tuple[str, ...]:
            return tuple(value.decode(errors="replace") for value in of_connection.get(key, ()))

        metadata = dict(context.invocation_metadata() or ())
        (pem,) = tuple(of_connection.get("x509_pem_cert", ())) or (b"",)
        valid_until_s = end_of_certificate(pem) if pem else float("inf")
        return Shown(
            str(metadata.get("authorization", "")),
            texts("x509_common_name"),
            texts("peer_uri"),
            valid_until_s,
            context.peer(),
        )


@final
class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Stands before every RPC and every request of a stream, health probes apart: proof, role,
    rate."""

    def __init__(self, tokens: Tokens | None, certificates: bool, limits: CallLimits) -> None:
        """`certificates`: the handshake has demanded and verified a client certificate."""
        self._tokens = tokens
        self._certificates = certificates
        self._limits = limits

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        """See grpc.aio.ServerInterceptor. Wraps the handler: the peer is known only inside the
        call."""
        handler = await continuation(details)
        if handler is None or details.method.startswith(_OPEN_PREFIX):
            return handler
        given = dict(details.invocation_metadata).get("authorization", "")
        if self._tokens is not None and self._tokens.role_of(str(given)) is None:
            # Before the message is even parsed.
            return grpc.unary_unary_rpc_method_handler(_refuse_stranger)
        return _wrap(handler, lambda context: self._check(details.method, Shown.by(context)))

    def admission(self, context: Any) -> Callable[[str], None]:
        """For the requests of one stream: judges one of the RPC as if it came now by itself, so
        that a proof that has expired or was withdrawn ends with the next request. Raises
        RefusedError."""
        shown = Shown.by(context)
        return lambda rpc: self._check(SERVICE_PREFIX + rpc, shown)

    def _check(self, method: str, shown: Shown) -> None:
        roles = self._roles(shown)
        for role in roles:
            if not may_call(role, method):
                raise RefusedError(
                    "PERMISSION_DENIED",
                    "PERMISSION_DENIED",
                    f"{method.rpartition('/')[2]} is not a call of the role {role.value}; it "
                    f"may call {', '.join(sorted(ALLOWED[role]))}. Use the credentials of the "
                    "role that may.",
                )
        refused = self._limits.refusal(shown.peer, _identity(shown, roles))
        if refused is not None:
            raise RefusedError("RESOURCE_EXHAUSTED", "BUSY", refused)

    def _roles(self, shown: Shown) -> list[Role]:
        """One by each proof that is asked for."""
        roles = []
        if self._tokens is not None:
            role = self._tokens.role_of(shown.authorization)
            if role is None:
                raise _stranger()
            roles.append(role)
        if self._certificates:
            late_s = time.time() - shown.valid_until_s
            if late_s > 0:  # the handshake was before
                raise RefusedError(
                    "UNAUTHENTICATED",
                    "UNAUTHENTICATED",
                    f"the client certificate of this connection expired {late_s:.0f} s ago. "
                    "Replace its file: the client connects again with the new one.",
                )
            roles.append(role_of_certificate(shown.uris))
        return roles


def _wrap(handler: Any, check: Callable[[Any], None]) -> Any:
    """The handler with `check` before its first line."""
    behaviour = handler.unary_unary or handler.unary_stream or handler.stream_stream

    async def admitted(context: Any) -> None:
        try:
            check(context)
        except RefusedError as error:
            await abort(context, error)

    async def answer(request: Any, context: Any) -> Any:
        await admitted(context)
        return await behaviour(request, context)

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        await admitted(context)
        async for response in behaviour(request, context):
            yield response

    codecs = handler.request_deserializer, handler.response_serializer
    if handler.unary_unary:
        return grpc.unary_unary_rpc_method_handler(answer, *codecs)
    if handler.unary_stream:
        return grpc.unary_stream_rpc_method_handler(stream, *codecs)
    return grpc.stream_stream_rpc_method_handler(stream, *codecs)


def _identity(shown: Shown, roles: list[Role]) -> str:
    """Whose calls count together. All workers of a job show the same credentials, so for them the
    address tells apart; a person or a dashboard is one caller from wherever."""
    names = [role.value for role in roles] + list(shown.common_names)
    if Role.WORKER in roles:
        # Without the port: a worker's connections count together.
        names.append(shown.peer.rpartition(":")[0])
    return " ".join(names)


def _stranger() -> RefusedError:
    return RefusedError(
        "UNAUTHENTICATED",
        "UNAUTHENTICATED",
        "the call carries no valid token; this service needs one. Pass the token file to the "
        "client.",
    )


async def _refuse_stranger(request: Any, context: Any) -> None:
    await abort(context, _stranger())


async def abort(context: Any, error: RefusedError) -> None:
    """Ends a call with the refusal as its status. Raises what gRPC ends a handler with."""
    context.set_trailing_metadata(((REASON_KEY, error.reason),))
    await context.abort(getattr(grpc.StatusCode, error.code), str(error))
