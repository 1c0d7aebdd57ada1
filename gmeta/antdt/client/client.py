"""ShardClient: the data-shard service as a training process sees it. Importing it does not
import torch.

One process, one client. A background thread renews the leases; calls may come from several
threads."""

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
        """Register at once. Raise FencedError, RefusedError or ServiceUnavailableError.

        `worker_id` is one per rank and stays the same over restarts. `rdzv_round` is torchrun's
        rendezvous round when the caller counts them; with a higher one, every lease of earlier
        rounds goes back to the service."""
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
        self._heartbeat = HeartbeatSender(self._session, self._leases)

    @property
    def worker_id(self) -> str:
        """Return the worker id that the leases belong to."""
        return self._session.worker_id

    @property
    def incarnation(self) -> str:
        """Return the id that tells this process from others under the same worker id."""
        return self._session.incarnation

    @property
    def run_generation(self) -> int:
        """Return the generation that this process belongs to."""
        return self._session.run_generation

    @property
    def service_epoch(self) -> int:
        """Return how many times the service had started on its store when it last answered."""
        return self._session.service_epoch

    @property
    def held(self) -> list[Lease]:
        """Return the live leases."""
        return self._leases.live()

    def stop_when(self, is_stopping: Callable[[], bool]) -> None:
        """Ask from now on, in every wait for the service, whether this process was asked to stop;
        if so, calls give up on an outage after seconds."""
        self._session.connection.is_stopping = is_stopping

    def register_dataset(self, spec: DatasetSpec) -> int:
        """Name a dataset; return its number of shards. Raise RefusedError when the name stands for
        other data."""
        return int(self._session.call("RegisterDataset", spec=encode_spec(spec)).num_shards)

    def lease(
        self, dataset: str, epoch: int, max_shards: int = 1
    ) -> list[Lease] | WaitFor | EndOfEpoch:
        """Return up to `max_shards` shards, or WaitFor, or END. Does not wait for data, only during
        an outage."""
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
        """Yield every shard that this worker gets of the epoch, waiting where it must; end at END.

        For loops in which each worker trains by itself. The shard is completed when the loop asks
        for the next one, so its units must be in the model by then. A shard of a speculative
        dataset the loop completes itself, with `complete`, unless it lost it."""
        while not isinstance(answer := self.lease(dataset, epoch, prefetch_shards), EndOfEpoch):
            if isinstance(answer, WaitFor):
                _log.info("waiting for shards of %s: %s", dataset, answer.reason)
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
            self.release([lease])  # if it was only late, nobody need wait for its expiry
        elif lease.token in self._leases.tokens():
            raise ValueError(
                f"shard {lease.shard_index} of the speculative dataset {lease.dataset!r} was left "
                "without an end; its result counts only once it is completed. Call "
                "complete(lease), release([lease]) or fail(lease, ...) before the next shard."
            )

    def complete(self, lease: Lease) -> bool:
        """Report that the result of the whole shard is ready and not yet in effect. True: it
        counts, put it into effect. False: another worker was first, or the lease had run out;
        discard it."""
        outcomes = self._complete([lease.token])
        try:
            self._leases.apply_outcomes([(lease, lease.num_units)], outcomes, drop=True)
        except LeaseLostError:
            return False
        return True

    def completed(self, token: int) -> bool:
        """Return whether a result counts that was left by an earlier process of this worker, killed
        between `complete` and putting the result into effect. The service remembers the last 16,384
        shards, also those that a restore has taken back since."""
        return bool(self._complete([token])[0] != Outcome.FENCED)

    def _complete(self, tokens: list[int]) -> Sequence[int]:
        outcomes: Sequence[int] = self._session.call_numbered("Complete", tokens=tokens).outcomes
        return outcomes

    def flush(self) -> None:
        """Tell the service durably, at a step boundary, what is in the model. Raise LeaseLostError
        and FencedError.

        Leases that are finished are completed and no longer held. In a synchronous job every
        rank calls this before the checkpoint is prepared. May run in one thread while another
        one advances leases: what was noted before the call is sent, later notes wait."""
        self._flush(also_speculative=True)

    def _flush(self, also_speculative: bool) -> None:
        with self._flushing:
            progress = self._leases.collect_progress()
            partial = [
                (x, done)
                for x, done in progress
                if x.units_reported < done < x.num_units and not x.speculative
            ]
            complete = [
                (x, done)
                for x, done in progress
                if done == x.num_units and (also_speculative or not x.speculative)
            ]
            if partial:
                items = [pb.ProgressItem(token=x.token, units_done=done) for x, done in partial]
                outcomes = self._session.call("Progress", items=items).outcomes
                self._leases.apply_outcomes(partial, outcomes, drop=False)
            if complete:
                outcomes = self._complete([lease.token for lease, _ in complete])
                self._leases.apply_outcomes(complete, outcomes, drop=True)

    def _flush_held(self) -> LeaseLostError | None:
        """Flush the leases that are not lost, and return the first loss that is met. Finished
        speculative shards are left out: `complete` says when their results are ready."""
        first: LeaseLostError | None = None
        # Each try clears one loss: one from before, one of Progress, one of Complete.
        for _ in range(4):
            try:
                self._flush(also_speculative=False)
            except LeaseLostError as error:
                first = first or error
            else:
                break
        return first

    def release(self, leases: Iterable[Lease]) -> None:
        """Give shards back with what was flushed of them; others continue there. Lost leases are no
        error."""
        tokens = [lease.token for lease in leases]
        if tokens:
            self._session.call_numbered("Release", tokens=tokens)
        self._leases.drop(tokens)

    def fail(self, lease: Lease, failure_class: str, message: str) -> bool:
        """Report that the shard cannot be processed; return True when it is quarantined now. Its
        units that are in the model are flushed first. LeaseLostError, also for another lease, is
        raised only after this failure has been counted."""
        lost = self._flush_held()
        response = self._session.call_numbered(
            "Fail", token=lease.token, failure_class=failure_class, message=message
        )
        self._leases.apply_outcomes([(lease, lease.units_done)], [response.outcome], drop=True)
        if lost is not None:
            raise lost
        return bool(response.quarantined)

    def prepare_checkpoint(self, checkpoint_id: str, step: int) -> ShardManifest:
        """Return the manifest to save inside the checkpoint folder. For rank 0, after every rank
        has flushed at `step`."""
        response = self._session.call("PrepareCheckpoint", checkpoint_id=checkpoint_id, step=step)
        return parse_manifest(response.manifest_json.decode(), "the service's manifest")

    def commit_checkpoint(self, manifest: ShardManifest) -> None:
        """Tell the service that the checkpoint folder was renamed into place (rank 0). Losing this
        call loses nothing."""
        self._session.call(
            "CommitCheckpoint", checkpoint_id=manifest.checkpoint_id, digest=manifest.digest
        )

    def restore(self, manifest: ShardManifest | None) -> int:
        """Roll the service to the checkpoint (None: to the beginning); rank 0, at every start of
        the job.

        Returns the new generation; every process registered before is fenced. The other ranks
        create their client after this, or hand the generation's start on with a barrier."""
        restore_id = uuid.uuid4().hex
        text = b"" if manifest is None else manifest.to_json().encode()
        with self._heartbeat.beating:
            response = self._session.call("Restore", manifest_json=text, restore_id=restore_id)
            self._session.enter_generation(response.run_generation)
        # Their trained units are in a model that is gone.
        self._leases.lose_all("the job was rolled back to a checkpoint")
        return self.run_generation

    def report(self, report: Report, share: int = 0) -> None:
        """Set what the next heartbeat reports to the monitor; from the first report on there is one
        as often as the service asks for. `share`: tasks that this worker takes in each step now."""
        self._heartbeat.set_report(report, share)

    def report_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Tell watchers the model's loss and scores after a step, with the next heartbeat."""
        self._heartbeat.add_reading(step, values)

    def hurry(self) -> None:
        """Report at once, and ask soon after for what the controller decided."""
        self._heartbeat.hurry()

    def take_actions(self) -> list[Any]:
        """Return the actions that heartbeats brought since the last call; acknowledge each with
        `ack_action`."""
        return self._heartbeat.take_actions()

    def ack_action(self, action_id: str, result: str, message: str = "") -> None:
        """Acknowledge an action; `result` is APPLIED, REFUSED or FAILED."""
        number = pb.AckActionRequest.Result.Value(f"RESULT_{result}")
        self._session.call("AckAction", action_id=action_id, result=number, message=message)

    def close(self) -> None:
        """Give the leases back, with what was noted of them, and end the background thread. An
        unreachable service is not waited for."""
        session = self._session
        if session.closed.is_set():
            return
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
