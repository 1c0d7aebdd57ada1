"""A process's registration with the service: its identity, its next call number, its fences."""

import threading
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from gmeta.antdt.client.connection import ServiceConnection
from gmeta.antdt.client.lease import SAFE_FRACTION
from gmeta.antdt.errors import FencedError
from gmeta_protos.antdt.v1 import shard_service_pb2 as pb

# For types alone: at run time it would lengthen the longest chain of imports.
if TYPE_CHECKING:
    from gmeta.antdt.client.held_leases import HeldLeases

CLOSING_BUDGET_S = 2.0  # an outage is not waited for: leases expire anyway


@final
class Session:
    """May be used from any thread. `register` comes before the first call."""

    def __init__(
        self,
        connection: ServiceConnection,
        worker_id: str,
        rdzv_round: int | None,
        leases: "HeldLeases",
    ) -> None:
        self.connection = connection
        self.worker_id = worker_id
        self.incarnation = uuid.uuid4().hex
        self.ttl_s = 30.0
        self.report_every_s = 0.0  # 0: the service asks for no reports
        self.closed = threading.Event()
        self._rdzv_round = rdzv_round
        self._leases = leases
        self._numbered = threading.Lock()  # one numbered call at a time
        self._registering = threading.Lock()
        self._caller = pb.Caller()
        self._seq = 0  # the number of the last call that was answered
        self._seq_at = (0, 0)  # service epoch and generation of that number
        self._registered_seq = 0  # the last call's number as the last Register gave it
        self._seq_lock = threading.Lock()  # guards these three and the caller
        self._fenced: FencedError | None = None

    @property
    def run_generation(self) -> int:
        """Return the generation that this process belongs to."""
        return int(self._caller.run_generation)

    @property
    def service_epoch(self) -> int:
        """Return how often the service had started on its store at its last answer."""
        return int(self._caller.service_epoch)

    @property
    def is_fenced(self) -> bool:
        """Return whether the service said that this process belongs to the past."""
        return self._fenced is not None

    @property
    def _budget_s(self) -> float | None:
        """Return how long to wait out an outage; None: as long as the connection does."""
        return CLOSING_BUDGET_S if self.closed.is_set() else None

    def check_fence(self) -> None:
        """Raise FencedError if this process belongs to the past."""
        if self._fenced is not None:
            raise FencedError(self._fenced.reason, str(self._fenced))

    def enter_generation(self, run_generation: int) -> None:
        """Go on in a generation that this process has begun."""
        self._caller.run_generation = run_generation

    def call(self, rpc: str, budget_s: float | None = None, **fields: Any) -> Any:
        """Return the response of one RPC, as ServiceConnection.call does."""
        return self._call(rpc, lambda: self._request(rpc, **fields), budget_s)

    def call_numbered(self, rpc: str, **fields: Any) -> Any:
        """Return the response of one RPC under the next call number."""
        sent_to = 0  # the epoch of the service that the last attempt was meant for

        def build() -> Any:
            nonlocal sent_to
            with self._seq_lock:  # caller and number belong together
                request = self._request(rpc, seq=self._seq + 1, **fields)
            sent_to = request.caller.service_epoch
            return request

        with self._numbered:
            response = self._call(rpc, build)
            with self._seq_lock:
                self._seq = response.last_seq
                if sent_to != self._caller.service_epoch:
                    # Another thread has registered with a successor of the service that answered,
                    # where a number used for the old one's WAIT does not count.
                    self._seq = min(self._seq, self._registered_seq)
            return response

    def _request(self, rpc: str, **fields: Any) -> Any:
        kind = getattr(pb, f"{rpc}Request")
        if "caller" in kind.DESCRIPTOR.fields_by_name:  # a dataset may be named by anybody
            fields["caller"] = self._caller
        return kind(**fields)

    def _call(self, rpc: str, build: Callable[[], Any], budget_s: float | None = None) -> Any:
        self.check_fence()
        try:
            return self.connection.call(rpc, build, self.register, budget_s or self._budget_s)
        except FencedError as error:
            self._fenced = error
            raise

    def register(self) -> None:
        """Register this process. Raise FencedError, RefusedError or ServiceUnavailableError."""
        with self._registering:
            # Also after a restart of the service, whose answer lists the leases still held.
            sent_s, held_tokens = time.monotonic(), self._leases.tokens()
            request = pb.RegisterRequest(
                worker_id=self.worker_id, incarnation=self.incarnation, rdzv_round=self._rdzv_round
            )
            response = self.connection.call("Register", lambda: request, budget_s=self._budget_s)
            with self._seq_lock:
                self._caller = pb.Caller(
                    worker_id=self.worker_id,
                    incarnation=self.incarnation,
                    service_epoch=response.service_epoch,
                    run_generation=response.run_generation,
                )
                self._registered_seq = response.last_seq
                # Lower when the restart lost calls that were not on the disk: a WAIT, or in a power
                # cut a grant. A call under way is one ahead. Within one service's life nothing is
                # lost, and calls answered since Register was sent have newer numbers.
                joined = (response.service_epoch, response.run_generation)
                if self._seq_at != joined:
                    self._seq_at = joined
                    self._seq = min(self._seq, response.last_seq)
            self.ttl_s = response.lease_ttl_ms / 1000
            self.report_every_s = response.report_every_ms / 1000
            live = {grant.token for grant in response.leases}
            self.apply_renewal(sent_s, held_tokens, held_tokens - live)

    def apply_renewal(self, sent_s: float, renewed_tokens: set[int], lost_tokens: set[int]) -> None:
        """Note that a call sent at `sent_s` renewed `renewed_tokens` but for `lost_tokens`."""
        self._leases.apply_renewal(sent_s + SAFE_FRACTION * self.ttl_s, renewed_tokens, lost_tokens)
