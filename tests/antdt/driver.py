"""Drives the committed ledger without sockets, threads or sleeps: fake clock, service, workers."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gmeta.access.errors import RefusedError
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.model import Caller, DatasetSpec, Grant
from gmeta.antdt.storage.committer import Committer
from gmeta.antdt.storage.store import MemoryDisk, MemoryStore

TTL_S = 30.0


@dataclass
class FakeClock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass
class Service:
    """A service on a store; `restart` is what a kill -9 and a new start do to it."""

    disk: MemoryDisk = field(default_factory=MemoryDisk)
    clock: FakeClock = field(default_factory=FakeClock)
    snapshot_every_events: int = 7

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.store = MemoryStore(self.disk)
        self.committer = Committer(
            self.store,
            self.clock,
            lease_ttl_s=TTL_S,
            snapshot_every_events=self.snapshot_every_events,
        )

    def call(self, command: cmd.Command) -> Any:
        """The reply, or the RefusedError raised."""
        (answer,) = self.committer.commit([command])
        if isinstance(answer, RefusedError):
            raise answer
        return answer

    @property
    def state(self) -> Any:
        return self.committer.ledger.state

    def register_dataset(self, **spec: Any) -> DatasetSpec:
        made = DatasetSpec(**{"name": "d", "num_units": 20, "units_per_shard": 4, **spec})
        self.call(cmd.RegisterDataset(made))
        return made

    def worker(
        self, worker_id: str, incarnation: str = "p0", rdzv_round: int | None = None
    ) -> "Process":
        process = Process(self, worker_id, incarnation)
        process.register(rdzv_round)
        return process


@dataclass
class Process:
    """One worker process: numbers its calls and keeps its registration, as a real client does."""

    service: Service
    worker_id: str
    incarnation: str
    seq: int = 0

    def __post_init__(self) -> None:
        self.caller = Caller(self.worker_id, self.incarnation, 0, 0)

    def register(self, rdzv_round: int | None = None) -> cmd.RegisterReply:
        reply: cmd.RegisterReply = self.service.call(
            cmd.Register(self.worker_id, self.incarnation, rdzv_round)
        )
        self.caller = Caller(
            self.worker_id, self.incarnation, reply.service_epoch, reply.run_generation
        )
        self.seq = reply.last_seq
        return reply

    def lease_command(
        self, max_shards: int = 1, epoch: int = 0, dataset: str = "d"
    ) -> cmd.LeaseShards:
        return cmd.LeaseShards(self.caller, self.seq + 1, dataset, epoch, max_shards)

    def numbered(self, command: Any) -> Any:
        reply = self.service.call(command)
        self.seq = reply.last_seq
        return reply

    def lease(self, max_shards: int = 1, epoch: int = 0) -> Any:
        return self.numbered(self.lease_command(max_shards, epoch))

    def grant(self, epoch: int = 0) -> Grant:
        (grant,) = self.lease(1, epoch).grants
        return grant  # type: ignore[no-any-return]

    def complete(self, *tokens: int) -> Any:
        return self.numbered(cmd.Complete(self.caller, self.seq + 1, tokens)).outcomes

    def release(self, *tokens: int) -> Any:
        return self.numbered(cmd.Release(self.caller, self.seq + 1, tokens)).outcomes

    def fail(self, token: int, failure_class: str = "bad", message: str = "row 3") -> Any:
        return self.numbered(cmd.Fail(self.caller, self.seq + 1, token, failure_class, message))

    def progress(self, token: int, units_done: int) -> Any:
        (outcome,) = self.service.call(
            cmd.ReportProgress(self.caller, ((token, units_done),))
        ).outcomes
        return outcome

    def heartbeat(self, *tokens: int) -> cmd.HeartbeatReply:
        reply: cmd.HeartbeatReply = self.service.call(cmd.Heartbeat(self.caller, tokens, ()))
        return reply

    def prepare(self, checkpoint_id: str, step: int = 1) -> cmd.ManifestReply:
        return self.service.call(  # type: ignore[no-any-return]
            cmd.PrepareCheckpoint(self.caller, checkpoint_id, step)
        )

    def restore(self, manifest_json: str, restore_id: str) -> cmd.RestoreReply:
        reply: cmd.RestoreReply = self.service.call(
            cmd.Restore(self.caller, manifest_json, restore_id)
        )
        self.caller = self.caller._replace(run_generation=reply.run_generation)
        return reply


def counts(service: Service, dataset: str = "d") -> dict[str, int]:
    """How many shards are in each state, counted one by one."""
    table = service.state.tables[dataset]
    found = {"READY": 0, "DOING": 0, "DONE": 0, "SKIPPED": 0, "QUARANTINED": 0}
    for position in range(table.spec.num_shards):
        found[table.state_of(position).name] += 1
    return found


def drain_epoch(process: Process, epoch: int = 0) -> Iterator[Grant]:
    """Leases and completes until END."""
    while not isinstance(reply := process.lease(3, epoch), cmd.End):
        process.complete(*(grant.token for grant in reply.grants))
        yield from reply.grants
