"""Who calls: the proofs of a caller's role, and the guard in front of every RPC."""

import asyncio
import base64
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, final

import grpc

from gmeta.access.credentials import CredentialError, ReloadedValue, end_of_certificate, read_tokens
from gmeta.access.errors import REASON_KEY, RefusedError
from gmeta.access.rate import CallLimits
from gmeta.access.roles import ALLOWED, SERVICE_PREFIX, Role, may_call, role_of_certificate

MIN_TOKEN_LENGTH = 16
MAX_CALLS = 8192  # under way at once, of callers who have shown their proof; streams count too
# Under way at once. Strangers can send them, so few: each holds a task.
MAX_PROBES = 64
MESSAGE_TIMEOUT_S = 10.0  # for a call's message to come
_OPEN_PREFIX = "/grpc.health."  # probes show no proof
_RELOAD_EVERY_S = 1.0


@final
class Tokens:
    """A folder of token files, one token a line, named after roles: `worker`, `operator`,
    `viewer`. No token gives a role that has no file."""

    def __init__(self, folder: Path) -> None:
        """Read the folder's files. Raise CredentialError."""
        self._paths = {role: folder / role.value for role in Role}
        self._folder = folder
        self._roles = ReloadedValue(
            list(self._paths.values()), self._read_roles, "tokens_not_rotated"
        )
        self._next_look_s = 0.0

    def role_of(self, authorization: str) -> Role | None:
        """Return the role behind the header `Bearer TOKEN` or `Basic`; None for a stranger."""
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + _RELOAD_EVERY_S
            self._roles.refresh()
        # Looked up by digest: the time that it takes reveals nothing about the tokens.
        return self._roles.value.get(_digest(_token_in(authorization)))

    def _read_roles(self) -> dict[bytes, Role]:
        roles_by_digest: dict[bytes, Role] = {}
        for role, path in self._paths.items():
            if not path.exists():
                continue
            for token in read_tokens(path):
                if len(token) < MIN_TOKEN_LENGTH:
                    raise CredentialError(
                        f"a token in {path} has {len(token)} characters; at least "
                        f"{MIN_TOKEN_LENGTH} are needed. Make one with: openssl rand -hex 32"
                    )
                if roles_by_digest.setdefault(_digest(token), role) is not role:
                    raise CredentialError(
                        f"a token in {path} stands in the file of another role too; a token has "
                        "one role. Make another one."
                    )
        if not roles_by_digest:
            raise CredentialError(
                f"the token folder {self._folder} has none of the files "
                f"{', '.join(role.value for role in Role)}: nobody could call. Write a token to "
                "each role's file."
            )
        return roles_by_digest


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _token_in(authorization: str) -> str:
    scheme, _, rest = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    # What a browser sends: the token is the password, under any user name.
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest, validate=True).decode().partition(":")[2]
        except ValueError:  # no base64, or no text in it
            return ""
    return ""


class CallerCredentials(NamedTuple):
    """What a call, or the connection under it, shows of its caller."""

    authorization: str
    common_names: tuple[str, ...]
    uris: tuple[str, ...]
    valid_until_s: float  # of the certificate, seconds since 1970
    peer: str

    @staticmethod
    def from_context(context: Any) -> "CallerCredentials":
        """Return what the context of a call shows."""
        of_connection = context.auth_context()

        def texts(key: str) -> tuple[str, ...]:
            return tuple(value.decode(errors="replace") for value in of_connection.get(key, ()))

        metadata = dict(context.invocation_metadata() or ())
        (pem,) = tuple(of_connection.get("x509_pem_cert", ())) or (b"",)
        valid_until_s = end_of_certificate(pem) if pem else float("inf")
        return CallerCredentials(
            str(metadata.get("authorization", "")),
            texts("x509_common_name"),
            texts("peer_uri"),
            valid_until_s,
            context.peer(),
        )


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Checks proof, role and rate before every RPC and every request of a stream."""

    def __init__(self, tokens: Tokens | None, certificates: bool, limits: CallLimits) -> None:
        """Take the tokens, if any, and whether the handshake demands a client certificate."""
        self._tokens = tokens
        self._certificates = certificates
        self._limits = limits
        # Called for each call that is refused here: the RPC, the refusal, the peer.
        self.on_refused: Callable[[str, RefusedError, str], None] = lambda rpc, error, peer: None
        self.reads: Any = nullcontext()  # in which a message is read
        self.most_probes = MAX_PROBES
        self._num_calls = 0
        self._probes: dict[Any, None] = {}  # the task of each, the oldest first

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        """Return the method's handler behind this guard."""
        handler = await continuation(details)
        if handler is None:
            return None
        if self.is_probe(details.method):
            return _guard_handler(handler, lambda context: self._probe(), nullcontext())
        # The handler is wrapped, not the call refused here: only the handler sees the peer.
        place = partial(self._call, details.method)
        return _guard_handler(handler, place, self.reads)

    def is_probe(self, method: str) -> bool:
        """Return whether a call needs no proof."""
        return method.startswith(_OPEN_PREFIX)

    @contextmanager
    def _call(self, method: str, context: Any) -> Iterator[None]:
        """Check a call, and hold a place for it until it ends. Raise RefusedError."""
        try:
            self.check(method, CallerCredentials.from_context(context))
            # After the proofs, so that strangers take up no place.
            if self._num_calls >= MAX_CALLS:
                text = f"{MAX_CALLS} calls are under way; no more are taken. Retry after a pause."
                raise _busy_refusal(text)
        except RefusedError as error:
            self.on_refused(method.rpartition("/")[2], error, context.peer())
            raise
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1

    @contextmanager
    def _probe(self) -> Iterator[None]:
        """Hold a place for a probe. Raise RefusedError in the oldest of too many."""
        task = asyncio.current_task()
        # The oldest loses its place: an honest probe brings its message and is answered at once.
        if len(self._probes) >= self.most_probes:
            oldest = next(iter(self._probes))
            del self._probes[oldest]
            oldest.cancel()
        self._probes[task] = None
        try:
            yield
        except asyncio.CancelledError:
            if task in self._probes:  # its caller has left
                raise
            text = f"{self.most_probes} later probes came. Use Check in place of Watch."
            raise _busy_refusal(text) from None
        finally:
            self._probes.pop(task, None)

    def admission(self, context: Any) -> Callable[[str], None]:
        """Return a function that checks each request of a stream; it raises RefusedError."""
        credentials = CallerCredentials.from_context(context)
        # So a stream whose proof has expired or was withdrawn ends at its next request.
        return lambda rpc: self.check(SERVICE_PREFIX + rpc, credentials)

    def check(self, method: str, credentials: CallerCredentials) -> None:
        """Raise RefusedError unless the caller may make this call now."""
        roles = self._check_proofs(credentials)
        for role in roles:
            if not may_call(role, method):
                raise RefusedError(
                    "PERMISSION_DENIED",
                    "PERMISSION_DENIED",
                    f"{method.rpartition('/')[2]} is not a call of the role {role.value}; it "
                    f"may call {', '.join(sorted(ALLOWED[role]))}. Use the credentials of the "
                    "role that may.",
                )
        refusal = self._limits.refusal(credentials.peer, _name_identity(credentials, roles))
        if refusal is not None:
            raise _busy_refusal(refusal)

    def _check_proofs(self, credentials: CallerCredentials) -> list[Role]:
        """Return one role for each required proof. Raise RefusedError where one is missing."""
        # Each proof that is configured must be shown: a client certificate, whose URI names a role,
        # and a bearer token, whose file names the role. The caller may do what both roles allow.
        roles = []
        if self._tokens is not None:
            role = self._tokens.role_of(credentials.authorization)
            if role is None:
                raise RefusedError(
                    "UNAUTHENTICATED",
                    "UNAUTHENTICATED",
                    "the call carries no valid token; this service needs one. Pass the token file "
                    "to the client.",
                )
            roles.append(role)
        if self._certificates:
            late_s = time.time() - credentials.valid_until_s
            # It was valid at the handshake, but a connection may live longer.
            if late_s > 0:
                raise RefusedError(
                    "UNAUTHENTICATED",
                    "UNAUTHENTICATED",
                    f"the client certificate of this connection expired {late_s:.0f} s ago. "
                    "Replace its file: the client connects again with the new one.",
                )
            roles.append(role_of_certificate(credentials.uris))
        return roles


def _guard_handler(
    handler: Any, place: Callable[[Any], AbstractContextManager[None]], reads: Any
) -> Any:
    """Return the handler with `place` entered before its message is awaited."""
    behaviour = handler.unary_unary or handler.unary_stream or handler.stream_stream

    async def answer(requests: Any, context: Any) -> Any:
        # The place comes first: a call without proof must take up nothing while it is awaited.
        try:
            with place(context):
                return await behaviour(await _read_message(context, reads), context)
        except RefusedError as error:
            await abort(context, error)

    async def stream(requests: Any, context: Any) -> None:
        try:
            with place(context):
                argument = (
                    requests if handler.stream_stream else await _read_message(context, reads)
                )
                responses = behaviour(argument, context)
                if isinstance(responses, Awaitable):  # it writes by itself
                    await responses
                else:
                    async for response in responses:
                        await context.write(response)
        except RefusedError as error:
            await abort(context, error)

    # gRPC sees a handler of a stream: for a single message it would wait itself, without an end.
    codecs = handler.request_deserializer, handler.response_serializer
    if handler.unary_unary:
        return grpc.stream_unary_rpc_method_handler(answer, *codecs)
    return grpc.stream_stream_rpc_method_handler(stream, *codecs)


async def _read_message(context: Any, reads: Any) -> Any:
    """Return the one message of a call. Raise RefusedError when it does not come."""
    try:
        async with reads, asyncio.timeout(MESSAGE_TIMEOUT_S):
            message = await context.read()
    except TimeoutError:
        message = grpc.aio.EOF
    if message is grpc.aio.EOF:
        # A refusal that clients retry: a network may have been cut, or this process stopped.
        raise _busy_refusal(
            f"the call's message did not come within {MESSAGE_TIMEOUT_S:.0f} s. Retry."
        )
    return message


def _name_identity(credentials: CallerCredentials, roles: list[Role]) -> str:
    """Return the name under which calls are counted together."""
    names = [role.value for role in roles] + list(credentials.common_names)
    # All workers of a job show the same credentials: only their addresses differ, and without the
    # port a worker's connections count together. Anybody else is one caller from anywhere.
    if Role.WORKER in roles:
        names.append(credentials.peer.rpartition(":")[0])
    return " ".join(names)


def _busy_refusal(message: str) -> RefusedError:
    return RefusedError("RESOURCE_EXHAUSTED", "BUSY", message)


async def abort(context: Any, error: RefusedError) -> None:
    """End a call with the refusal as its status. Raise what gRPC ends a handler with."""
    context.set_trailing_metadata(((REASON_KEY, error.reason),))
    await context.abort(getattr(grpc.StatusCode, error.code), str(error))
