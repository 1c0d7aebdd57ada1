"""The client's one place for deadlines, retries and fences."""

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import grpc

from gmeta.access.address import check_target
from gmeta.access.credentials import (
    Bearer,
    CredentialError,
    WatchedFiles,
    client_credentials,
    is_loopback,
)
from gmeta.access.errors import RefusedError
from gmeta.antdt.client.call_stream import CallError, CallStream
from gmeta.antdt.errors import FencedError, ServiceUnavailableError
from gmeta.antdt.rpc.event_loop import wait_for
from gmeta.antdt.rpc.streamed_calls import STREAMED
from gmeta_protos.antdt.v1 import shard_service_pb2_grpc as pb_grpc

MAX_MESSAGE_BYTES = 16 << 20
# A call of a training loop is far smaller; any larger one is made outside the stream.
MAX_STREAMED_BYTES = 1 << 20

_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 2.0
_PAUSE_GROWS = 1.5  # so an outage's end is noticed within half its length
_QUIET_S = 1.0  # a restart within this time is not worth a log line
_WARN_EVERY_S = 10.0
# The budget of a process that was asked to stop: long enough for a restart of the service, and
# Kubernetes kills the process 30 s after it asked.
STOPPING_BUDGET_S = 5.0
_LOOK_EVERY_S = 0.25  # in a pause, at `is_stopping`
_OPTIONS = (
    # A cut link is UNAVAILABLE once what a call sent is not acknowledged for the timeout
    # (TCP_USER_TIMEOUT, which gRPC sets where there is a keepalive time); else it hangs for ever.
    # Pings are rarer than the 5 minutes that a proxy permits by default: more often, it would end
    # the connection ("too_many_pings").
    ("grpc.keepalive_time_ms", 330_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Reconnect quickly after a restart of the service: a refused connection costs nothing.
    # The pauses grow by 1.6, by default to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    # `call` retries, and knows what may be sent again; gRPC's own buffer for it is CPU for nothing.
    ("grpc.enable_retries", 0),
    # Messages are small: no pings to measure the link's bandwidth.
    ("grpc.http2.bdp_probe", 0),
    # A channel of its own: clients of one process must not share a connection's fate.
    ("grpc.use_local_subchannel_pool", 1),
)
_TRANSIENT_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_TRANSIENT_REASONS = ("STORE_FULL", "BUSY", "")  # "": the server's own limit on calls at once
# NOT_REGISTERED: the store was emptied under the job. Only a restart brings the manifest back.
_FENCES = ("FENCED_GENERATION", "FENCED_INCARNATION", "NOT_REGISTERED")

_log = logging.getLogger("gmeta.antdt.client")


@dataclass(frozen=True)
class ConnectionConfig:
    """How to reach the service."""

    address: str
    outage_budget_s: float = 300.0  # how long the service may be away before a call raises
    # For one attempt; a group commit on a slow disk takes well under a second.
    call_timeout_s: float = 10.0
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    token_file: Path | None = None


@final
class ServiceConnection:
    """A channel, and a stream on it for the calls of a training loop; safe from any thread."""

    def __init__(self, config: ConnectionConfig) -> None:
        """Connect lazily. Raise AddressError, or CredentialError for unreadable files."""
        self._config = config
        check_target(config.address)
        host = config.address.rpartition(":")[0]
        if config.token_file is not None and config.tls_ca is None and not is_loopback(host):
            raise CredentialError(
                f"the token would travel to {config.address} in clear text: no certificate "
                "authority is given. Name the file with the service's: --tls-ca (in Python, "
                "tls_ca)."
            )
        # No proxy for this machine's own loopback, which a proxy of the network ($http_proxy)
        # cannot reach, though gRPC would ask it.
        self._options = (*_OPTIONS, ("grpc.enable_http_proxy", int(not is_loopback(host))))
        self._files = WatchedFiles([config.tls_ca, config.tls_cert, config.tls_key])
        self._bearer = Bearer(config.token_file) if config.token_file else None
        self._channels = [wait_for(self._open())]
        self._stub = pb_grpc.ShardServiceStub(self._channels[0])
        self._opening = threading.Lock()  # one stream is opened at a time
        self._stream: CallStream | None = None
        self._has_streams = True  # until the service says otherwise
        # Whether the process is to stop. Called in pauses: a signal's handler may set no
        # event that the thread it interrupts waits for.
        self.is_stopping: Callable[[], bool] = lambda: False

    async def _open(self) -> Any:
        config = self._config
        credentials = client_credentials(config.tls_ca, config.tls_cert, config.tls_key)
        if credentials is None:
            return grpc.aio.insecure_channel(config.address, self._options)
        return grpc.aio.secure_channel(config.address, credentials, self._options)

    def _take_new_certificates(self) -> bool:
        """Return whether there were new certificates, and open a channel with them."""
        if not self._files.have_changed():
            return False
        try:
            # A channel keeps the certificates that it was made with.
            channel = wait_for(self._open())
        except CredentialError as error:
            _log.warning("the replaced certificates are not used yet: %s", error)
            return False
        # The old channel stays until `close`: other threads' calls may be under way on it.
        self._channels.append(channel)
        with self._opening:
            self._stub = pb_grpc.ShardServiceStub(channel)
            self._end_stream()
        return True

    def _attempt(self, rpc: str, request: Any) -> Any:
        """Make one attempt at a call and return its response. Raise CallError."""
        metadata = self._bearer.metadata() if self._bearer else ()
        timeout_s = self._config.call_timeout_s
        # A message beyond the limit would take the whole stream down, and others' calls with it.
        if rpc in STREAMED and self._has_streams and request.ByteSize() <= MAX_STREAMED_BYTES:
            return self._stream_with(metadata).call(rpc, request, timeout_s)

        async def call_once() -> Any:
            return await getattr(self._stub, rpc)(request, timeout=timeout_s, metadata=metadata)

        try:
            return wait_for(call_once())
        except grpc.RpcError as error:
            raise CallError.of(error) from error

    def _stream_with(self, metadata: tuple[tuple[str, str], ...]) -> CallStream:
        with self._opening:
            stream = self._stream
            if stream is None or stream.ended or stream.metadata != metadata:
                self._end_stream()
                self._stream = stream = CallStream(self._stub, metadata)
            return stream

    def _end_stream(self) -> None:
        """End the stream."""
        if self._stream is not None:
            # Other threads' calls on it fail as in an outage, and are made again on the next one.
            self._stream.close()
            self._stream = None

    def call(
        self,
        rpc: str,
        build: Callable[[], Any],
        renew: Callable[[], None] | None = None,
        budget_s: float | None = None,
    ) -> Any:
        """Return the response of one RPC. `renew` registers again after the service restarted.
        Raise FencedError, RefusedError, or ServiceUnavailableError after the outage budget."""
        budget_s = self._config.outage_budget_s if budget_s is None else budget_s
        began_s = time.monotonic()
        pause_s, warn_after_s = _FIRST_PAUSE_S, _QUIET_S
        while True:
            try:
                # Built anew for each attempt: it must carry the fences of now.
                return self._attempt(rpc, build())
            except CallError as error:
                # Tried whatever the error is: a connection with an expired certificate just fails.
                renewed = self._take_new_certificates()
                # At once: the service has only refused a stream so far, and seen no call.
                if self._falls_back_to_calls(error):
                    continue
                if error.reason == "FENCED_SERVICE_EPOCH" and renew is not None:
                    renew()
                    continue
                if error.code is grpc.StatusCode.UNAUTHENTICATED and renewed:
                    continue  # the connection's certificate had expired
                if not is_transient(error):
                    raise _final_error(error) from error
                waited_s = time.monotonic() - began_s
                if self.is_stopping():
                    budget_s = min(budget_s, STOPPING_BUDGET_S)
                if waited_s + pause_s > budget_s:
                    # An error, never an end of data: the rest of the epoch must not be skipped.
                    raise self._outage_error(rpc, waited_s, error) from error
                if waited_s >= warn_after_s:
                    warn_after_s = waited_s + _WARN_EVERY_S
                    left_s = budget_s - waited_s
                    _log.warning("%s: %s; trying for %.0f s more", rpc, error.details, left_s)
            # Jitter, so that a thousand workers do not come back in the same instant.
            self._pause(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(_PAUSE_GROWS * pause_s, _MAX_PAUSE_S)

    def _pause(self, pause_s: float) -> None:
        """Sleep for `pause_s`, or until the process is asked to stop."""
        was_stopping, until_s = self.is_stopping(), time.monotonic() + pause_s
        while (left_s := until_s - time.monotonic()) > 0 and self.is_stopping() == was_stopping:
            time.sleep(min(left_s, _LOOK_EVERY_S))

    def _falls_back_to_calls(self, error: CallError) -> bool:
        """Return whether the service has no stream for this client."""
        # Now (LIMIT) or at all (an old service); single calls work too, only more slowly.
        none_left = error.reason == "LIMIT"
        if not error.of_stream or not (none_left or error.code is grpc.StatusCode.UNIMPLEMENTED):
            return False
        if self._has_streams:
            self._has_streams = False
            _log.warning(
                "the shard service at %s takes no stream (%s): its calls are made one by one, for "
                "twice the CPU",
                self._config.address,
                error.details,
            )
        return True

    def close(self) -> None:
        """End the channel."""
        with self._opening:
            self._end_stream()
        for channel in self._channels:
            wait_for(channel.close())

    def _outage_error(self, rpc: str, waited_s: float, error: CallError) -> ServiceUnavailableError:
        message = (
            f"the shard service at {self._config.address} did not answer {rpc} for {waited_s:.0f} "
            f"s ({error.code.name}: {error.details})"
        )
        if self.is_stopping():
            return ServiceUnavailableError(
                f"{message}, and this process was asked to stop, which waits no longer. Start it "
                "again once the service answers: what is in no checkpoint is handed out again."
            )
        return ServiceUnavailableError(
            f"{message}; allowed is {self._config.outage_budget_s:.0f} s. "
            "Start it again on the same store, or look into its log; the data has NOT ended."
        )


def is_transient(error: CallError) -> bool:
    """Return whether the same call may succeed later without anyone changing it."""
    exhausted = (
        error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and error.reason in _TRANSIENT_REASONS
    )
    return error.code in _TRANSIENT_CODES or (exhausted and "larger than max" not in error.details)


def _final_error(error: CallError) -> Exception:
    if error.reason in _FENCES:
        return FencedError(error.reason, error.details)
    return RefusedError(error.code.name, error.reason, error.details)
