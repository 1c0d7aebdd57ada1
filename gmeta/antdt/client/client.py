"""ShardClient: the data-shard service as a training process sees it, without importing torch."""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from gmeta.access.errors import AntdtError
from gmeta.antdt.client.connection import ConnectionConfig, ServiceConnection
from gmeta.antdt.client.heartbeat import HeartbeatSender
from gmeta.antdt.client.held_leases import HeldLeases
from gmeta.antdt.client.lease import END, SAFE_FRACTION, EndOfEpoch, Lease, WaitFor
from gmeta.antdt.client.session import Session
from gmeta.antdt.errors import LeaseLostError
from gmeta.antdt.manifests.shard_manifest import ShardManifest, parse_manifest
from gmeta.antdt.model import DatasetSpec, Outcome
from gmeta.antdt.reports import Report
from gmeta.antdt.rpc.proto_types import encode_spec, parse_grant
from gmeta_protos.antdt.v1 import shard_service_pb2 as pb

_log = logging.getLogger("gmeta.antdt.client")


@final
class ShardClient:
    """A registered worker. As a context manager it gives its leases back at the end."""

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
        """Register at once. Raise FencedError, RefusedError or ServiceUnavailableError.

        `worker_id` is one per rank and stays the same over restarts. `rdzv_round` is torchrun's
        rendezvous round, where the caller counts them: a higher one takes earlier leases back."""
        config = ConnectionConfig(
            address,
            outage_budget_s,
            tls_ca=tls_ca,
            tls_cert=tls_cert,
            tls_key=tls_key,
            token_file=token_file,
        )
        self._leases = HeldLeases()
        self._flushing = threading.Lock()  # one flush at a time
        connection = ServiceConnection(config)
        self._session = Session(connection, worker_id, rdzv_round, self._leases)
        try:
            self._session.register()
        except AntdtError:
            connection.close()
            raise
        # Its thread renews the leases from now on; calls may come from any thread.
        self._heartbeat = HeartbeatSender(self._session, self._leases)

    @property
    def worker_id(self) -> str:
        """Return the worker id that the leases belong to."""
        return self._session.worker_id

    @property
    def incarnation(self) -> str:
        """Return the id of this process among all that used the worker id."""
        return self._session.incarnation

    @property
    def run_generation(self) -> int:
        """Return the generation that this process belongs to."""
        return self._session.run_generation

    @property
    def service_epoch(self) -> int:
        """Return how often the service had started on its store at its last answer."""
        return self._session.service_epoch

    @property
    def held(self) -> list[Lease]:
        """Return the live leases."""
        return self._leases.live()

    def stop_when(self, is_stopping: Callable[[], bool]) -> None:
        """Have calls give up on an outage within seconds once `is_stopping` returns True."""
        self._session.connection.is_stopping = is_stopping

    def register_dataset(self, spec: DatasetSpec) -> int:
        """Name a dataset; return its number of shards. Raise RefusedError for a name in use."""
        return int(self._session.call("RegisterDataset", spec=encode_spec(spec)).num_shards)

    def lease(
        self, dataset: str, epoch: int, max_shards: int = 1
    ) -> list[Lease] | WaitFor | EndOfEpoch:
        """Return up to `max_shards` shards, or WaitFor, or END. Blocks only during an outage."""
        # Taken before the call: the service counts the ttl from a later moment.
        sent_s = time.monotonic()
        response = self._session.call_numbered(
            "Lease", dataset=dataset, epoch=epoch, max_shards=max_shards
        )
        answer = response.WhichOneof("answer")
        if answer == "end":
            return END
        if answer == "wait":
            return WaitFor(response.wait.retry_after_ms / 1000, response.wait.message)
        usable_until_s = sent_s + SAFE_FRACTION * response.grants.lease_ttl_ms / 1000
        leases = [Lease(parse_grant(grant), usable_until_s) for grant in response.grants.grants]
        self._leases.add(leases)
        return leases

    def shards(self, dataset: str, epoch: int = 0, prefetch_shards: int = 1) -> Iterator[Lease]:
        """Yield every shard that this worker gets of the epoch, where each worker trains by itself.

        A shard is completed when the loop asks for the next one: its units must be in the model by
        then. The loop itself completes a speculative shard that is not lost, with `complete`."""
        while not isinstance(answer := self.lease(dataset, epoch, prefetch_shards), EndOfEpoch):
            if isinstance(answer, WaitFor):
                _log.info("waiting for shards of %s: %s", dataset, answer.reason)
                # Not a sleep: `close` ends the wait.
                self._session.closed.wait(answer.retry_after_s)
                self._session.check_fence()
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
            # It may only be late: released, it is offered again before it would expire.
            self.release([lease])
        elif lease.token in self._leases.tokens():
            raise ValueError(
                f"shard {lease.shard_index} of the speculative dataset {lease.dataset!r} was left "
                "without an end; its result counts only once it is completed. Call "
                "complete(lease), release([lease]) or fail(lease, ...) before the next shard."
            )

    def complete(self, lease: Lease) -> bool:
        """Report a whole result that is not in effect yet. Return False if it must be discarded."""
        outcomes = self._complete([lease.token])
        try:
            self._leases.apply_outcomes([(lease, lease.num_units)], outcomes, drop=True)
        except LeaseLostError:
            # Another worker was first, or the lease had run out.
            return False
        return True

    def completed(self, token: int) -> bool:
        """Return whether a result counts that an earlier process of this worker has left."""
        # For a process killed between `complete` and putting the result into effect. The service
        # remembers the last 16,384 shards, also those that a restore has taken back since.
        return bool(self._complete([token])[0] != Outcome.FENCED)

    def _complete(self, tokens: list[int]) -> Sequence[int]:
        outcomes: Sequence[int] = self._session.call_numbered("Complete", tokens=tokens).outcomes
        return outcomes

    def flush(self) -> None:
        """Report durably what is in the model. Raise LeaseLostError or FencedError."""
        # In a synchronous job every rank flushes before the checkpoint is prepared. Another thread
        # may advance leases meanwhile: what it notes later is sent by the next flush.
        self._flush(also_speculative=True)

    def _flush(self, also_speculative: bool) -> None:
        with self._flushing:
            progress = self._leases.collect_progress()
            begun = [(x, done) for x, done in progress if x.units_reported < done < x.num_units]
            partial = [(x, done) for x, done in begun if not x.speculative]
            whole = [(x, done) for x, done in progress if done == x.num_units]
            complete = [(x, done) for x, done in whole if also_speculative or not x.speculative]
            if partial:
                items = [pb.ProgressItem(token=x.token, units_done=done) for x, done in partial]
                outcomes = self._session.call("Progress", items=items).outcomes
                self._leases.apply_outcomes(partial, outcomes, drop=False)
            if complete:
                outcomes = self._complete([lease.token for lease, _ in complete])
                self._leases.apply_outcomes(complete, outcomes, drop=True)

    def _flush_held(self) -> LeaseLostError | None:
        """Flush the leases that are not lost, and return the first loss that is met."""
        first: LeaseLostError | None = None
        # Each try clears one loss: one from before, one of Progress, one of Complete.
        for _ in range(4):
            try:
                # Finished speculative shards wait for `complete`: their results may not be ready.
                self._flush(also_speculative=False)
            except LeaseLostError as error:
                first = first or error
            else:
                break
        return first

    def release(self, leases: Iterable[Lease]) -> None:
        """Give shards back with what was flushed of them. A lost lease is no error."""
        tokens = [lease.token for lease in leases]
        if tokens:
            self._session.call_numbered("Release", tokens=tokens)
        self._leases.drop(tokens)

    def fail(self, lease: Lease, failure_class: str, message: str) -> bool:
        """Report a shard as failed; return whether it is quarantined now. Raise LeaseLostError."""
        # Its units in the model are flushed first. A loss is raised only after this failure counts.
        lost = self._flush_held()
        response = self._session.call_numbered(
            "Fail", token=lease.token, failure_class=failure_class, message=message
        )
        self._leases.apply_outcomes([(lease, lease.units_done)], [response.outcome], drop=True)
        if lost is not None:
            raise lost
        return bool(response.quarantined)

    def prepare_checkpoint(self, checkpoint_id: str, step: int) -> ShardManifest:
        """Return the manifest for the checkpoint folder. For rank 0, after all have flushed."""
        response = self._session.call("PrepareCheckpoint", checkpoint_id=checkpoint_id, step=step)
        return parse_manifest(response.manifest_json.decode(), "the service's manifest")

    def commit_checkpoint(self, manifest: ShardManifest) -> None:
        """Confirm that the checkpoint folder was renamed into place. For rank 0."""
        # Nothing depends on it: a restore of the checkpoint counts as its commit.
        self._session.call(
            "CommitCheckpoint", checkpoint_id=manifest.checkpoint_id, digest=manifest.digest
        )

    def restore(self, manifest: ShardManifest | None) -> int:
        """Roll the service to the checkpoint (None: the beginning). Return the new generation."""
        # For rank 0, at each start of the job. It fences every process registered before, so the
        # other ranks create their client after it, or pass a barrier.
        restore_id = uuid.uuid4().hex
        text = b"" if manifest is None else manifest.to_json().encode()
        with self._heartbeat.beating:
            response = self._session.call("Restore", manifest_json=text, restore_id=restore_id)
            self._session.enter_generation(response.run_generation)
        # Their trained units are in a model that is gone.
        self._leases.lose_all("the job was rolled back to a checkpoint")
        return self.run_generation

    def report(self, report: Report, share: int = 0) -> None:
        """Set the next heartbeat's report, and the tasks that this worker takes in each step."""
        # After the first report heartbeats come as often as the service asks for reports.
        self._heartbeat.set_report(report, share)

    def report_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Report the model's loss and scores after a step, with the next heartbeat."""
        self._heartbeat.add_reading(step, values)

    def report_run(self, status: str, folder: str, total_steps: int) -> None:
        """Report with the next heartbeat that the run is TRAINING, FINISHED, STOPPED or FAILED."""
        self._heartbeat.set_run(status, folder, total_steps)

    def hurry(self) -> None:
        """Report at once, and again soon after, to fetch what the controller decided."""
        self._heartbeat.hurry()

    def take_actions(self) -> list[Any]:
        """Return the actions since the last call; answer each with `ack_action`."""
        return self._heartbeat.take_actions()

    def ack_action(self, action_id: str, result: str, message: str = "") -> None:
        """Acknowledge an action; `result` is APPLIED, REFUSED or FAILED."""
        number = pb.AckActionRequest.Result.Value(f"RESULT_{result}")
        self._session.call("AckAction", action_id=action_id, result=number, message=message)

    def close(self) -> None:
        """Give the leases back, with the progress noted, and end the background thread."""
        session = self._session
        if session.closed.is_set():
            return
        # Shortens the outage budget too: an unreachable service is not waited for.
        session.closed.set()
        self._heartbeat.join()
        try:
            if not session.is_fenced:
                if lost := self._flush_held():
                    _log.warning("units were trained that another worker trains, too: %s", lost)
                self.release(self.held)
        except AntdtError as error:
            _log.warning("leases were not given back and will expire: %s", error)
        session.connection.close()

    def __enter__(self) -> "ShardClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
