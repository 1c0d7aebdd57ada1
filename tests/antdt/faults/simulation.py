"""A synchronous job, its network, its power supply and the real ledger code in one thread, driven
by one seed. The model is a Counter of trained units, its checkpoint a copy of it beside the
manifest: at END every unit must have been trained exactly once an epoch, whatever was killed, lost,
doubled, delayed or restored on the way."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from gmeta.access.errors import RefusedError
from gmeta.antdt.errors import StoreFullError
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.manifests.shard_manifest import parse_manifest
from gmeta.antdt.model import Caller, DatasetSpec, Grant, Outcome, ShardState
from gmeta.antdt.order import ShardOrder
from gmeta.antdt.storage.committer import Committer
from gmeta.antdt.storage.store import MemoryDisk, MemoryStore, Store
from gmeta.antdt.storage.store_records import RecordBatch, StoredSnapshot
from tests.antdt.driver import TTL_S, FakeClock

CRASH_POINTS = ("before_append", "after_append", "before_sync", "after_sync", "before_snapshot")
CRASH_POINTS += ("after_snapshot", "after_claim")
MAX_STEPS = 4000
Model = Counter[tuple[int, int]]  # (epoch, unit) -> times trained
Saved = tuple[Model, str, int, set[tuple[int, int]]]  # model, manifest, epoch, acknowledged


@lru_cache(maxsize=4096)
def position_of(order: ShardOrder, shard: int) -> int:
    """As the order says, which is asked for the same shards after each command."""
    return order.position_of(shard)


class Crash(Exception):  # noqa: N818 - what happens to a machine, not an error of the code
    """The service died at this point."""


class JobMustRestart(Exception):  # noqa: N818
    """A rank found out that it was fenced or lost a lease; torchrun would restart all."""


class Violation(AssertionError):  # noqa: N818
    """An invariant of the ledger does not hold."""


def require(holds: bool, invariant: str) -> None:
    if not holds:
        raise Violation(invariant)


class FaultyStore(Store):
    """A MemoryStore whose service dies at a named point when told so."""

    def __init__(self, disk: MemoryDisk, dies: Callable[[str], bool]) -> None:
        self.inner = MemoryStore(disk)
        self.dies = dies

    def at(self, point: str) -> None:
        if self.dies(point):
            raise Crash(point)

    def claim(self) -> int:
        epoch = self.inner.claim()
        self.at("after_claim")
        return epoch

    def load(self) -> tuple[StoredSnapshot | None, list[RecordBatch]]:
        return self.inner.load()

    def append(self, batch: RecordBatch) -> None:
        self.at("before_append")
        if self.dies("disk_full"):
            raise StoreFullError("the disk is full")
        self.inner.append(batch)
        self.at("after_append")

    def sync(self) -> None:
        self.at("before_sync")
        self.inner.sync()
        self.at("after_sync")

    def write_snapshot(self, snapshot: StoredSnapshot) -> None:
        self.at("before_snapshot")
        self.inner.write_snapshot(snapshot)
        self.at("after_snapshot")

    def close(self) -> None:
        self.inner.close()


@dataclass
class Rank:
    """One process of the job, numbering and retrying its calls as ShardClient does."""

    name: str
    incarnation: str
    caller: Caller = Caller("", "", 0, 0)  # noqa: RUF009 - immutable
    seq: int = 0
    held: dict[int, Grant] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)  # token -> units in the model
    ended: bool = False


@dataclass
class Simulation:
    seed: int
    crash_rate: float = 0.01
    only_point: str = ""
    num_epochs: int = 2

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.clock = FakeClock()
        self.disk = MemoryDisk()
        self.make_spec()
        self.crashing = False
        self.crashes: Counter[str] = Counter()
        self.recover()
        self.epoch = 0
        self.model: Model = Counter()
        self.checkpoint: Saved | None = None
        self.zombies: list[Rank] = []
        self.limbo: list[cmd.Command] = []
        self.names = 0
        # (epoch, shard) completed since the last restore.
        self.acknowledged: set[tuple[int, int]] = set()
        self.highest = (0, 0)
        self.ranks: list[Rank] = []

    def make_spec(self, speculative: bool = False) -> None:
        num_units = self.rng.randint(1, 24)
        self.spec = DatasetSpec(
            "d", num_units, self.rng.randint(1, 4), self.seed, self.num_epochs, max_attempts=2,
            speculative=speculative,
        )  # fmt: skip

    def run(self) -> None:
        """Raises Violation, or ends with the data trained exactly once an epoch."""
        self.start_job()
        for number in range(MAX_STEPS):
            # Faults stop in the end, so that I9 can be demanded: then END must come.
            self.crashing = number < 60
            try:
                if self.epoch == self.num_epochs:
                    break
                self.step()
            except JobMustRestart:
                self.restart_job()
        require(self.epoch == self.num_epochs, "I9: END comes within a bound once faults stop")
        every = {(e, u) for e in range(self.num_epochs) for u in range(self.spec.num_units)}
        require(set(self.model) == every, "I1: every unit was trained")
        require(set(self.model.values()) <= {1}, "I1: no unit was trained twice")

    def dies(self, point: str) -> bool:
        wanted = not self.only_point or point == self.only_point
        rate = self.crash_rate * (20 if self.only_point else 1)
        if self.crashing and wanted and self.rng.random() < rate:
            self.crashes[point] += 1
            return True
        return False

    def recover(self) -> None:
        """A new service on what the old one left; a power cut takes what was not synced."""
        while True:
            if self.crashing and self.rng.random() < 0.5:
                del self.disk.log[self.rng.randint(self.disk.num_synced, len(self.disk.log)) :]
            try:
                # A start that meets a full disk does not serve; the next one does.
                self.committer = Committer(
                    FaultyStore(self.disk, self.dies),
                    self.clock,
                    lease_ttl_s=TTL_S,
                    snapshot_every_events=9,
                )
                return
            except (Crash, StoreFullError):
                continue

    def deliver(self, command: cmd.Command) -> Any:
        """One request reaches the service. Raises Crash when it dies before answering."""
        try:
            (answer,) = self.committer.commit([command])
        except Crash:
            self.recover()
            raise
        self.check_invariants()
        return answer

    def ask(self, rank: Rank | None, make: Callable[[], Any]) -> Any:
        """As the client does: again until there is an answer; it registers after a restart."""
        while True:
            command = make()
            fate = self.rng.random() if self.crashing else 1.0
            self.clock.advance(0.01)
            if fate < 0.03:
                continue  # the request is lost
            if fate < 0.06:
                self.limbo.append(command)  # a copy arrives much later
            try:
                answer = self.deliver(command)
                if fate < 0.09:
                    answer = self.deliver(command)  # doubled; the client sees the second answer
            except Crash:
                continue
            if fate < 0.12 and fate >= 0.09:
                continue  # the answer is lost
            if isinstance(answer, RefusedError):
                if answer.reason == "FENCED_SERVICE_EPOCH" and rank is not None:
                    self.register(rank)
                    continue
                if answer.reason.startswith("FENCED"):
                    raise JobMustRestart
                if answer.reason == "STORE_FULL":
                    continue
                raise Violation(f"a correct call was refused: {answer}")
            return answer

    def register(self, rank: Rank) -> None:
        reply = self.ask(None, lambda: cmd.Register(rank.name, rank.incarnation, None))
        rank.caller = Caller(rank.name, rank.incarnation, reply.service_epoch, reply.run_generation)
        rank.seq = min(rank.seq, reply.last_seq)
        live = {grant.token for grant in reply.leases}
        if not set(rank.held) <= live:
            raise JobMustRestart

    def start_job(self) -> None:
        self.ask(None, lambda: cmd.RegisterDataset(self.spec))
        self.ranks = []
        for number in range(self.rng.randint(1, 4)):
            self.names += 1
            rank = Rank(f"rank{number}", f"p{self.names}")
            self.register(rank)
            if number == 0:
                self.restore(rank)
            self.ranks.append(rank)

    def restore(self, rank: Rank) -> None:
        nothing: Saved = (Counter(), "", 0, set())
        model, manifest, epoch, acknowledged = self.checkpoint or nothing
        self.acknowledged = set(acknowledged)
        restore_id = f"r{self.names}"
        reply = self.ask(rank, lambda: cmd.Restore(rank.caller, manifest, restore_id))
        rank.caller = rank.caller._replace(run_generation=reply.run_generation)
        self.model, self.epoch = Counter(model), epoch

    def is_done(self, shard: int) -> bool:
        table = self.committer.ledger.state.tables["d"]
        return table.states[position_of(table.order, shard)] == ShardState.DONE

    def restart_job(self) -> None:
        """All ranks are killed; some of them do not notice and stay as zombies."""
        for rank in self.ranks:
            if self.rng.random() < 0.5:
                self.zombies.append(rank)
        self.zombies = self.zombies[-4:]
        while True:
            try:
                return self.start_job()
            except JobMustRestart:
                continue

    def step(self) -> None:
        """One training step of all ranks, a flush, sometimes a checkpoint; faults in between."""
        if self.crashing:
            self.misfortune()
        for rank in self.ranks:
            self.train(rank)
        for rank in self.ranks:
            self.flush(rank)
        if all(rank.ended for rank in self.ranks):
            self.epoch += 1
            for rank in self.ranks:
                rank.ended = False
            require_all = self.num_epochs if self.epoch == self.num_epochs else self.epoch
            require(
                len(self.acknowledged) >= require_all * self.spec.num_shards,
                "I5: END came too early",
            )
        if self.rng.random() < 0.3:
            self.save()

    def misfortune(self) -> None:
        luck = self.rng.random()
        if luck < 0.03:
            raise JobMustRestart  # kill -9 of a rank
        if luck < 0.06:
            self.clock.advance(self.rng.choice([1.0, TTL_S + 1]))
        if luck < 0.10:
            self.recover()  # kill -9 of the service
        if luck < 0.12 and self.ranks[0].held:
            self.give_up_a_shard(self.ranks[0])
        if self.limbo and luck < 0.5:
            self.late(self.limbo.pop(self.rng.randrange(len(self.limbo))))
        for zombie in self.zombies:
            self.haunt(zombie)

    def late(self, command: cmd.Command) -> None:
        try:
            self.deliver(command)
        except Crash:
            return

    def haunt(self, zombie: Rank) -> None:
        """A zombie calls with all that it knows; none of it may be accepted."""
        tokens = tuple(zombie.held) or (1,)
        caller = zombie.caller._replace(service_epoch=self.committer.service_epoch)
        for command in (
            cmd.Complete(caller, zombie.seq + 1, tokens),
            cmd.ReportProgress(caller, tuple((token, 1) for token in tokens)),
            cmd.LeaseShards(caller, zombie.seq + 1, "d", self.epoch, 1),
            cmd.PrepareCheckpoint(caller, "zombie", 1),
            cmd.Restore(caller, "", "zombie"),
        ):
            try:
                answer = self.deliver(command)
            except Crash:
                return
            fenced = isinstance(answer, RefusedError) and answer.reason.startswith(
                ("FENCED", "STORE_FULL")
            )
            require(fenced, "I4: no accepted call with a stale fence")

    def train(self, rank: Rank) -> None:
        if not rank.held and not rank.ended:
            number = self.rng.randint(1, 3)
            answer = self.ask(
                rank, lambda: cmd.LeaseShards(rank.caller, rank.seq + 1, "d", self.epoch, number)
            )
            rank.seq = answer.last_seq
            rank.ended = isinstance(answer, cmd.End)
            for grant in getattr(answer, "grants", ()):
                rank.held[grant.token] = grant
                rank.done[grant.token] = grant.units_done
        for token, grant in rank.held.items():
            for _ in range(self.rng.randint(0, grant.num_units - rank.done[token])):
                self.model[self.epoch, grant.start_unit + rank.done[token]] += 1
                rank.done[token] += 1

    def flush(self, rank: Rank) -> None:
        """What is in the model is reported; a lost lease restarts the job."""
        partial = [t for t, g in rank.held.items() if 0 < rank.done[t] < g.num_units]
        whole = [t for t, g in rank.held.items() if rank.done[t] == g.num_units]
        if partial:
            items = tuple((token, rank.done[token]) for token in partial)
            outcomes = self.ask(rank, lambda: cmd.ReportProgress(rank.caller, items)).outcomes
            if Outcome.FENCED in outcomes:
                raise JobMustRestart
        if whole:
            reply = self.ask(rank, lambda: cmd.Complete(rank.caller, rank.seq + 1, tuple(whole)))
            rank.seq = reply.last_seq
            for token, outcome in zip(whole, reply.outcomes, strict=True):
                if outcome == Outcome.FENCED:
                    raise JobMustRestart
                grant = rank.held.pop(token)
                self.acknowledged.add((grant.epoch, grant.shard_index))
        self.ask(rank, lambda: cmd.Heartbeat(rank.caller, tuple(rank.held), ()))

    def give_up_a_shard(self, rank: Rank) -> None:
        token = next(iter(rank.held))
        failing = self.rng.random() < 0.5
        if failing:
            reply = self.ask(rank, lambda: cmd.Fail(rank.caller, rank.seq + 1, token, "bad", ""))
        else:
            reply = self.ask(rank, lambda: cmd.Release(rank.caller, rank.seq + 1, (token,)))
        rank.seq = reply.last_seq
        grant = rank.held.pop(token)
        if Outcome.FENCED in reply.outcomes:
            raise JobMustRestart
        if getattr(reply, "quarantined", False):
            self.names += 1
            self.ask(None, lambda: cmd.Requeue(f"q{self.names}", "d", (grant.shard_index,)))

    def save(self) -> None:
        """Prepare, rename, Commit; the job may die between any two of them."""
        self.names += 1
        name, rank = f"c{self.names}", self.ranks[0]
        manifest = self.ask(rank, lambda: cmd.PrepareCheckpoint(rank.caller, name, 1))
        require(parse_manifest(manifest.manifest_json).digest == manifest.digest, "I7: digest")
        if self.crashing and self.rng.random() < 0.1:
            raise JobMustRestart  # before the rename: the old checkpoint stands
        self.checkpoint = (
            Counter(self.model), manifest.manifest_json, self.epoch, set(self.acknowledged),
        )  # fmt: skip
        if self.crashing and self.rng.random() < 0.1:
            raise JobMustRestart  # before Commit: the new checkpoint stands
        self.ask(rank, lambda: cmd.CommitCheckpoint(rank.caller, name, manifest.digest))

    def check_invariants(self) -> None:
        state = self.committer.ledger.state
        table = state.tables.get("d")
        marks = (state.service_epoch, state.generation)
        require(marks[0] >= self.highest[0], "I6: the service epoch only rises")
        self.highest = (marks[0], marks[1])
        if table is None:
            return
        self.check_leases()
        found = [table.states.count(bytes([number])) for number in range(5)]
        require(found == table.counts and sum(found) == self.spec.num_shards, "I8: counts add up")
        if hasattr(self, "acknowledged") and table.epoch == self.epoch:
            mine = [shard for epoch, shard in self.acknowledged if epoch == self.epoch]
            require(all(map(self.is_done, mine)), "I3: no acknowledged Complete is forgotten")

    def check_leases(self) -> None:
        state = self.committer.ledger.state
        held = [lease.position for lease in state.leases.values()]
        require(len(held) == len(set(held)), "I2: at most one live token a shard")
        require(state.tables["d"].counts[1] == len(held), "I8: every DOING shard has a token")
