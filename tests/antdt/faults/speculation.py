"""Workers that score a speculative dataset, each by itself: as simulation.py, but a shard's result
is put into effect only once Complete was accepted, and slow workers' last shards have two leases.
What a killed worker had not put into effect its successor asks about. At the end every shard must
have been put into effect exactly once an epoch."""

from collections import Counter
from dataclasses import dataclass, field

from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.model import Grant, Outcome, ShardState
from tests.antdt.driver import TTL_S
from tests.antdt.faults.simulation import MAX_STEPS, JobMustRestart, Rank, Simulation, require


@dataclass
class Scorer(Rank):
    """`finished` survives the process: results that may or may not count."""

    epoch: int = 0
    finished: dict[int, Grant] = field(default_factory=dict)


@dataclass
class SpeculativeJob(Simulation):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.results: Counter[tuple[int, int]] = Counter()  # (epoch, shard) -> times in effect
        self.num_backups = 0

    def make_spec(self) -> None:
        super().make_spec(speculative=True)

    def run(self) -> None:
        """Raises Violation, or ends with every result in effect exactly once."""
        self.ask(None, lambda: cmd.RegisterDataset(self.spec))
        self.scorers = [Scorer(f"w{number}", "") for number in range(self.rng.randint(2, 4))]
        for number in range(MAX_STEPS):
            self.crashing = number < 120
            alive = [worker for worker in self.scorers if worker.epoch < self.num_epochs]
            if not alive:
                break
            worker = self.rng.choice(alive)
            try:
                if not worker.incarnation:
                    self.begin(worker)
                self.act(worker)
            except JobMustRestart:
                worker.incarnation = ""  # only this one
        require(not alive, "I9: END comes within a bound once faults stop")
        every = {(e, s) for e in range(self.num_epochs) for s in range(self.spec.num_shards)}
        require(set(self.results) == every, "I1: every result is in effect")
        require(set(self.results.values()) <= {1}, "I1: no result is in effect twice")

    def begin(self, worker: Scorer) -> None:
        """A new process of the worker puts into effect what the one before had won."""
        self.names += 1
        worker.incarnation, worker.seq = f"p{self.names}", 0
        worker.held.clear()
        self.register(worker)
        for token, grant in list(worker.finished.items()):
            self.settle(worker, token, grant)

    def act(self, worker: Scorer) -> None:
        luck = self.rng.random()
        if self.crashing and luck < 0.12:
            self.suffer(worker, luck)
        if luck > 0.7:
            self.ask(None, lambda: cmd.BackUp(f"b{self.names}", self.rng.choice(self.scorers).name))
        if not worker.held:
            self.lease(worker)
        elif luck > 0.4:
            token, grant = next(iter(worker.held.items()))
            items = ((token, self.rng.randint(1, grant.num_units)),)
            parts = self.ask(worker, lambda: cmd.ReportProgress(worker.caller, items)).outcomes
            require(Outcome.ACCEPTED not in parts, "no part of a speculative shard counts")
            self.beat(worker)
            if token in worker.held:
                worker.finished[token] = worker.held.pop(token)
                self.settle(worker, token, grant)

    def suffer(self, worker: Scorer, luck: float) -> None:
        if luck < 0.04:
            raise JobMustRestart
        if luck < 0.06:
            self.clock.advance(self.rng.choice([1.0, TTL_S + 1]))
        elif luck < 0.08:
            self.recover()
        elif luck < 0.10 and worker.held:
            self.give_up_a_shard(worker)
        elif self.limbo:
            self.late(self.limbo.pop(self.rng.randrange(len(self.limbo))))

    def lease(self, worker: Scorer) -> None:
        number = self.rng.randint(1, 3)
        answer = self.ask(
            worker,
            lambda: cmd.LeaseShards(worker.caller, worker.seq + 1, "d", worker.epoch, number),
        )
        worker.seq = answer.last_seq
        worker.epoch += isinstance(answer, cmd.End)
        worker.held.update((grant.token, grant) for grant in getattr(answer, "grants", ()))
        state = self.committer.ledger.state
        self.num_backups += any(token in state.backups.twins for token in worker.held)
        if getattr(answer, "cause", 0) == cmd.CAUSE_QUARANTINED:
            table = state.tables["d"]
            stuck = table.positions_in(ShardState.QUARANTINED)
            indices = tuple(map(table.order.index_of, stuck))
            self.names += 1
            self.ask(None, lambda: cmd.Requeue(f"q{self.names}", "d", indices))

    def beat(self, worker: Scorer) -> None:
        """Shards that another worker completed first, or that ran out, are dropped."""
        beat = self.ask(worker, lambda: cmd.Heartbeat(worker.caller, tuple(worker.held), ()))
        for token in beat.revoked:
            worker.held.pop(token, None)

    def settle(self, worker: Scorer, token: int, grant: Grant) -> None:
        """Complete, and put the result into effect if it counts; killed between the two."""
        reply = self.ask(worker, lambda: cmd.Complete(worker.caller, worker.seq + 1, (token,)))
        worker.seq = reply.last_seq
        if self.crashing and self.rng.random() < 0.1:
            raise JobMustRestart
        del worker.finished[token]
        if Outcome.FENCED not in reply.outcomes:
            self.results[grant.epoch, grant.shard_index] += 1

    def check_leases(self) -> None:
        state = self.committer.ledger.state
        table = state.tables["d"]
        held = Counter(lease.position for lease in state.leases.values())
        owners = {(lease.position, lease.worker_id) for lease in state.leases.values()}
        require(max(held.values(), default=0) <= 2, "I2: at most two live tokens a shard")
        require(len(owners) == held.total(), "I2: of two workers")
        require(table.counts[1] == len(held), "I8: every DOING shard has a token")
        twins = sum(number == 2 for number in held.values())
        require(len(state.backups.twins) == 2 * twins, "I8: twins are leases of one shard")
        require(state.backups.wanted <= state.leases.keys(), "I8: who is slow holds it still")
