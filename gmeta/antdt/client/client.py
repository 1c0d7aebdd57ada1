"""ShardClient: the data-shard service as a training process sees it. Importing it does not
import torch.

One process, one client. A background thread renews the leases; calls may come from several
threads.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, final

from gmeta.antdt.client.connection import Connection, ConnectionConfig
from gmeta.antdt.client.held import HeldLeases
from gmeta.antdt.client.lease import END, SAFE_FRACTION, EndOfEpoch, Lease, WaitFor
from gmeta.antdt.errors import AntdtError, FencedError, LeaseLostError
from gmeta.antdt.manifests.manifest import ShardManifest, parse_manifest
from gmeta.antdt.model import DatasetSpec, Outcome
from gmeta.antdt.monitor import Report
from gmeta.antdt.rpc.wire import grant_from, spec_to
from protos.antdt.v1 import shard_service_pb2 as pb

_log = logging.getLogger("gmeta.antdt.client")

DECIDED_AFTER_S = 0.5  # the controller's answer to reports that all workers hurried


@final
class ShardClient:
    """A registered worker. Use it as a context manager: leaving it gives the leases back."""

    def __init__(
        self,
        address: str,
        worker_id: str,
        *,
        rdzv_round: int | None = None,
        outage_budget_s: float = 300.0,
        tls_ca: Path | None = None,
        tls_cert: Path | None = None,
        tls_key: Path | None = None,
        token_file: Path | None = None,
    ) -> None:
        """Registers at once. Raises FencedError, RefusedError or ServiceUnavailableError.

        `worker_id` is one per rank and stays the same over restarts. `rdzv_round` is torchrun's
        rendezvous round when the caller counts them; a higher one takes every lease of earlier
        rounds back.
        """
        config = ConnectionConfig(
            address,
            outage_budget_s,
            tls_ca=tls_ca,
            tls_cert=tls_cert,
            tls_key=tls_key,
            token_file=token_file,
        )
        self.worker_id = worker_id
        self.incarnation = uuid.uuid4().hex
        self._connection = Connection(config)
        self._rdzv_round = rdzv_round
        self._numbered = threading.Lock()  # one numbered call at a time
        self._flushing = threading.Lock()  # one flush at a time
        self._registering = threading.Lock()
        self._leases = HeldLeases()
        self._caller = pb.Caller()
        self._seq = 0  # of the last call that was answered
        self._seq_at = (0, 0)  # service epoch and generation in which it counts
        self._registered_seq = 0  # what the last Register called the last one
        self._seq_lock = threading.Lock()  # for the three and the caller
        self._ttl_s = 30.0
        self._report_every_s = 0.0
        self._report: Any = None
        self._beat_again_s = 0.0  # the pause behind a hurried heartbeat
        self._actions: list[Any] = []
        self._actions_lock = threading.Lock()
        self._fenced: FencedError | None = None
        self._closed = threading.Event()
        self._hurry = threading.Event()  # the next heartbeat is due now
        try:
            self._register()
        except AntdtError:
            self._connection.close()
            raise
        self._heart = threading.Thread(target=self._beat_on, name="antdt-heartbeat", daemon=True)
        self._heart.start()

    @property
    def run_generation(self) -> int:
        """The generation this process belongs to."""
        return int(self._caller.run_generation)

    @property
    def service_epoch(self) -> int:
        """Starts of the service on its store, as last seen."""
        return int(self._caller.service_epoch)

    @property
    def held(self) -> list[Lease]:
        """The live leases."""
        return self._leases.live()

    def register_dataset(self, spec: DatasetSpec) -> int:
        """Names a dataset; returns its number of shards. Raises RefusedError when the name
        stands for other data."""
        response = self._call(
            "RegisterDataset", lambda: pb.RegisterDatasetRequest(spec=spec_to(spec))
        )
        return int(response.num_shards)

    def lease(
        self, dataset: str, epoch: int, max_shards: int = 1
    ) -> list[Lease] | WaitFor | EndOfEpoch:
        """Up to `max_shards` shards, or WaitFor, or END. Does not block on data, only on an
        outage."""
        # From before the call: the service counts the ttl from a moment that lies behind it.
        sent_s = time.monotonic()
        response = self._call_numbered(
            "Lease",
            lambda: pb.LeaseRequest(
                caller=self._caller,
                seq=self._seq + 1,
                dataset=dataset,
                epoch=epoch,
                max_shards=max_shards,
            ),
        )
        answer = response.WhichOneof("answer")
        if answer == "end":
            return END
        if answer == "wait":
            return WaitFor(response.wait.retry_after_ms / 1000, response.wait.message)
        usable_until_s = sent_s + SAFE_FRACTION * response.grants.lease_ttl_ms / 1000
        leases = [Lease(grant_from(grant), usable_until_s) for grant in response.grants.grants]
        self._leases.add(leases)
        return leases

    def shards(self, dataset: str, epoch: int = 0, prefetch_shards: int = 1) -> Iterator[Lease]:
        """Every shard that this worker gets of the epoch, waiting where it must; ends at END.

        For loops in which each worker trains by itself. The shard is completed when the loop
        asks for the next one, so its units must be in the model by then. One of a speculative
        dataset the loop completes itself, with `complete`, unless it lost it.
        """
        while not isinstance(answer := self.lease(dataset, epoch, prefetch_shards), EndOfEpoch):
            if isinstance(answer, WaitFor):
                _log.info("waiting for shards of %s: %s", dataset, answer.reason)
                self._closed.wait(answer.retry_after_s)
                self._check_fence()
                continue
            for lease in answer:
                yield lease
                if lease.speculative:
                    self._check_left(lease)
                    continue
                lease.advance(lease.num_units - lease.units_done)
                self.flush()

    def _check_left(self, lease: Lease) -> None:
        if lease.lost:
            self.release([lease])  # where it was only late, nobody need wait for it to expire
        elif lease.token in self._leases.tokens():
            raise ValueError(
                f"shard {lease.shard_index} of the speculative dataset {lease.dataset!r} was left "
                "without an end; its result counts only once it is completed. Call "
                "complete(lease), release([lease]) or fail(lease, ...) before the next shard."
            )

    def complete(self, lease: Lease) -> bool:
        """The result of the whole shard is ready and not yet in effect. True: it counts, put it
        into effect. False: another worker was first, or the lease had run out; discard it."""
        outcomes = self._complete([lease.token])
        try:
            self._leases.settle([(lease, lease.num_units)], outcomes, drop=True)
        except LeaseLostError:
            return False
        return True

    def completed(self, token: int) -> bool:
        """For a result that an earlier process of this worker left behind, killed between
        `complete` and putting it into effect: whether it counts. The service remembers the last
        16,384 shards."""
        return bool(self._complete([token])[0] != Outcome.FENCED)

    def _complete(self, tokens: list[int]) -> Sequence[int]:
        response = self._call_numbered(
            "Complete",
            lambda: pb.CompleteRequest(caller=self._caller, seq=self._seq + 1, tokens=tokens),
        )
        outcomes: Sequence[int] = response.outcomes
        return outcomes

    def flush(self) -> None:
        """At a step boundary: tells the service what is in the model, durably. Raises
        LeaseLostError and FencedError.

        Leases that are finished are completed and no longer held. In a synchronous job every
        rank calls this before the checkpoint is prepared. May run in one thread while another
        one advances leases: what was noted before the call is sent, later notes wait.
        """
        with self._flushing:
            self._flush()

    def _flush(self) -> None:
        noted = self._leases.noted()
        partial = [
            (x, done)
            for x, done in noted
            if x.units_reported < done < x.num_units and not x.speculative
        ]
        whole = [(x, done) for x, done in noted if done == x.num_units]
        if partial:
            items = [pb.ProgressItem(token=x.token, units_done=done) for x, done in partial]
            response = self._call(
                "Progress", lambda: pb.ProgressRequest(caller=self._caller, items=items)
            )
            self._leases.settle(partial, response.outcomes, drop=False)
        if whole:
            outcomes = self._complete([lease.token for lease, _ in whole])
            self._leases.settle(whole, outcomes, drop=True)

    def release(self, leases: Iterable[Lease]) -> None:
        """Gives shards back with what was flushed of them; others continue there. Lost leases
        are no error."""
        tokens = [lease.token for lease in leases]
        if tokens:
            self._call_numbered(
                "Release",
                lambda: pb.ReleaseRequest(caller=self._caller, seq=self._seq + 1, tokens=tokens),
            )
        self._leases.drop(tokens)

    def fail(self, lease: Lease, failure_class: str, message: str) -> bool:
        """The shard cannot be processed; returns True when it is quarantined now. Raises
        LeaseLostError."""
        response = self._call_numbered(
            "Fail",
            lambda: pb.FailRequest(
                caller=self._caller,
                seq=self._seq + 1,
                token=lease.token,
                failure_class=failure_class,
                message=message,
            ),
        )
        self._leases.settle([(lease, lease.units_done)], [response.outcome], drop=True)
        return bool(response.quarantined)

    def prepare_checkpoint(self, checkpoint_id: str, step: int) -> ShardManifest:
        """Rank 0, after every rank has flushed at `step`: the manifest to save inside the
        checkpoint folder."""
        response = self._call(
            "PrepareCheckpoint",
            lambda: pb.PrepareCheckpointRequest(
                caller=self._caller, checkpoint_id=checkpoint_id, step=step
            ),
        )
        return parse_manifest(response.manifest_json.decode(), "the service's manifest")

    def commit_checkpoint(self, manifest: ShardManifest) -> None:
        """Rank 0, after the checkpoint folder was renamed into place. Losing this call loses
        nothing."""
        self._call(
            "CommitCheckpoint",
            lambda: pb.CommitCheckpointRequest(
                caller=self._caller, checkpoint_id=manifest.checkpoint_id, digest=manifest.digest
            ),
        )

    def restore(self, manifest: ShardManifest | None) -> int:
        """Rank 0, at every start of the job: rolls the service to the checkpoint (None: to the
        beginning).

        Returns the new generation; every process registered before is fenced. The other ranks
        create their client after this, or hand the generation's start on with a barrier.
        """
        restore_id = uuid.uuid4().hex
        text = b"" if manifest is None else manifest.to_json().encode()
        response = self._call(
            "Restore",
            lambda: pb.RestoreRequest(
                caller=self._caller, manifest_json=text, restore_id=restore_id
            ),
        )
        self._caller.run_generation = response.run_generation
        # What was trained of them is in a model that is gone.
        self._leases.lose_all("the job was rolled back to a checkpoint")
        return self.run_generation

    def report(self, report: Report, share: int = 0) -> None:
        """What the next heartbeat tells the monitor; from the first report on there is one as
        often as the service asks for. `share`: tasks that this worker takes in each step now."""
        is_first = self._report is None
        self._report = pb.WorkerReport(**report._asdict(), share=share)
        # Or it would come with the next beat for the leases, up to a third of the ttl later.
        if is_first:
            self._hurry.set()

    def hurry(self) -> None:
        """Reports at once, and looks soon after what the controller decided."""
        self._beat_again_s = DECIDED_AFTER_S
        self._hurry.set()

    def take_actions(self) -> list[Any]:
        """Actions that heartbeats brought since the last call; acknowledge each with
        `ack_action`."""
        with self._actions_lock:
            actions, self._actions = self._actions, []
        return actions

    def ack_action(self, action_id: str, result: str, message: str = "") -> None:
        """`result` is APPLIED, REFUSED or FAILED."""
        number = pb.AckActionRequest.Result.Value(f"RESULT_{result}")
        self._call(
            "AckAction",
            lambda: pb.AckActionRequest(
                caller=self._caller, action_id=action_id, result=number, message=message
            ),
        )

    def close(self) -> None:
        """Gives the leases back and ends the background thread. An unreachable service is not
        waited for."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._hurry.set()
        self._heart.join()
        try:
            if self._fenced is None:
                self.release(self.held)
        except AntdtError as error:
            _log.warning("leases were not given back and will expire: %s", error)
        self._connection.close()

    def __enter__(self) -> "ShardClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, rpc: str, build: Callable[[], Any]) -> Any:
        self._check_fence()
        # At the end an outage is not waited for: what is not given back expires.
        budget_s = 2.0 if self._closed.is_set() else None
        try:
            return self._connection.call(rpc, build, self._register, budget_s)
        except FencedError as error:
            self._fenced = error
            raise

    def _call_numbered(self, rpc: str, build: Callable[[], Any]) -> Any:
        sent_to = 0  # the epoch of the service that the last attempt was meant for

        def build_whole() -> Any:
            nonlocal sent_to
            with self._seq_lock:
                request = build()
            sent_to = request.caller.service_epoch
            return request

        with self._numbered:
            response = self._call(rpc, build_whole)
            with self._seq_lock:
                self._seq = response.last_seq
                if sent_to != self._caller.service_epoch:
                    # Another thread has registered with a successor of the service that answered,
                    # and a WAIT of the old one is no number there.
                    self._seq = min(self._seq, self._registered_seq)
            return response

    def _check_fence(self) -> None:
        if self._fenced is not None:
            raise FencedError(self._fenced.reason, str(self._fenced))

    def _register(self) -> None:
        """Also after a restart of the service, which answers with the leases that this process
        still holds."""
        with self._registering:
            sent_s, named = time.monotonic(), self._leases.tokens()
            response = self._connection.call(
                "Register",
                lambda: pb.RegisterRequest(
                    worker_id=self.worker_id,
                    incarnation=self.incarnation,
                    rdzv_round=self._rdzv_round,
                ),
            )
            with self._seq_lock:
                self._caller = pb.Caller(
                    worker_id=self.worker_id,
                    incarnation=self.incarnation,
                    service_epoch=response.service_epoch,
                    run_generation=response.run_generation,
                )
                self._registered_seq = response.last_seq
                # Lower when the restart took calls that are not on the disk: a WAIT, or in a
                # power cut a grant. A call under way is one ahead. From one service to itself
                # nothing is lost, and calls answered since Register was sent know better.
                joined = (response.service_epoch, response.run_generation)
                if self._seq_at != joined:
                    self._seq_at = joined
                    self._seq = min(self._seq, response.last_seq)
            self._ttl_s = response.lease_ttl_ms / 1000
            self._report_every_s = response.report_every_ms / 1000
            live = {grant.token for grant in response.leases}
            self._renewed(sent_s, named - live)

    def _renewed(self, sent_s: float, gone: set[int]) -> None:
        self._leases.renewed(sent_s + SAFE_FRACTION * self._ttl_s, gone)

    def _beat_on(self) -> None:
        while not self._closed.is_set():
            self._hurry.wait(self._pause_s())
            self._hurry.clear()
            if self._closed.is_set():
                return
            try:
                self._beat()
            except FencedError as error:
                self._fenced = error
                return
            except AntdtError as error:
                _log.warning("heartbeat: %s", error)

    def _pause_s(self) -> float:
        if self._beat_again_s:
            pause_s, self._beat_again_s = self._beat_again_s, 0.0
            return pause_s
        if self._report is None or not self._report_every_s:
            # One beat may fail altogether: the next comes at two thirds, a lease is used up to 0.8.
            return self._ttl_s / 3
        return min(self._ttl_s / 3, self._report_every_s)

    def _beat(self) -> None:
        report, sent_s, tokens = self._report, time.monotonic(), self._leases.tokens()
        response = self._connection.call(
            "Heartbeat",
            lambda: pb.HeartbeatRequest(caller=self._caller, tokens=tokens, report=report),
            self._register,
            budget_s=self._ttl_s / 3,
        )
        self._renewed(sent_s, tokens & set(response.revoked_tokens))
        with self._actions_lock:
            known = {action.action_id for action in self._actions}
            self._actions += [a for a in response.actions if a.action_id not in known]
