"""Method: hypothesis walks the ledger and the reference model side by side; every answer and every
count must agree. Restarts go through the store, so what is compared after one is what recovery made
of the log."""

import itertools
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gmeta.access.errors import RefusedError
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.manifests.shard_manifest import parse_manifest
from gmeta.antdt.model import Outcome
from tests.antdt.driver import TTL_S, Process, Service, counts
from tests.antdt.reference_model import Model

WORKERS = st.sampled_from(["a", "b", "c"])
EXAMPLES = 60


class LedgerAgainstModel(RuleBasedStateMachine):
    @initialize(
        num_units=st.integers(1, 23), seed=st.integers(0, 3), shuffle=st.booleans(),
        max_attempts=st.integers(1, 2), speculative=st.booleans(),
    )  # fmt: skip
    def begin(
        self, num_units: int, seed: int, shuffle: bool, max_attempts: int, speculative: bool
    ) -> None:
        self.service = Service(snapshot_every_events=5)
        spec = self.service.register_dataset(
            # Second leases come with the last shards: few, so that there are many last ones.
            num_units=min(num_units, 7) if speculative else num_units,
            units_per_shard=3,
            seed=seed,
            shuffle=shuffle,
            num_epochs=2,
            max_attempts=max_attempts,
            speculative=speculative,
        )
        self.model = Model(spec, TTL_S)
        self.counter = itertools.count()
        self.processes: dict[str, Process] = {}
        self.tokens: list[tuple[int, str]] = [(99, "a")]
        self.manifests: list[tuple[str, str]] = []
        for worker in ("a", "b", "c"):
            self.processes[worker] = self.service.worker(worker)

    def tick(self) -> None:
        """Both expire what is due before anything else happens."""
        self.service.call(cmd.Tick())
        self.model.expire(self.service.clock.now_s)

    def own_token(self, data: st.DataObject, worker: str) -> int:
        live = [token for token, owner in self.model.holder.items() if owner == worker]
        return data.draw(st.sampled_from([*live, *(token for token, _ in self.tokens)]))

    @rule(
        worker=WORKERS, max_shards=st.integers(1, 4), epoch=st.integers(0, 1), retry=st.booleans()
    )
    def lease(self, worker: str, max_shards: int, epoch: int, retry: bool) -> None:
        self.tick()
        process = self.processes[worker]
        command = process.lease_command(max_shards, epoch)
        got = process.numbered(command)
        tokens = [grant.token for grant in getattr(got, "grants", ())]
        self.tokens.extend((token, worker) for token in tokens)
        expected = self.model.lease(worker, tokens, epoch, max_shards, self.service.clock.now_s)
        assert answer_of(got) == expected
        if retry and tokens:
            assert self.service.call(command) == got

    @rule(worker=WORKERS)
    def worker_is_slow(self, worker: str) -> None:
        self.tick()
        got = self.service.call(cmd.BackUp("slow", worker))
        assert got == cmd.ChangeReply(self.model.back_up(worker))

    @rule(slow=WORKERS, fast=WORKERS)
    def the_last_shards_are_a_slow_workers(self, slow: str, fast: str) -> None:
        self.lease(slow, 4, self.model.epoch, False)
        self.worker_is_slow(slow)
        self.lease(fast, 1, self.model.epoch, True)

    @rule(worker=WORKERS, data=st.data(), retry=st.booleans())
    def complete(self, worker: str, data: st.DataObject, retry: bool) -> None:
        self.tick()
        process, token = self.processes[worker], self.own_token(data, worker)
        command = cmd.Complete(process.caller, process.seq + 1, (token,))
        got = process.numbered(command)
        assert names(got) == [self.model.complete(worker, token)]
        if retry:
            assert self.service.call(command) == got

    @rule(worker=WORKERS, data=st.data(), units_done=st.integers(1, 4))
    def progress(self, worker: str, data: st.DataObject, units_done: int) -> None:
        self.tick()
        token = self.own_token(data, worker)
        got = self.processes[worker].progress(token, units_done)
        assert got.name == self.model.progress(worker, token, units_done, self.service.clock.now_s)

    @rule(worker=WORKERS, data=st.data(), attempt=st.booleans())
    def give_back(self, worker: str, data: st.DataObject, attempt: bool) -> None:
        self.tick()
        process, token = self.processes[worker], self.own_token(data, worker)
        got = (
            process.fail(token)
            if attempt
            else process.numbered(cmd.Release(process.caller, process.seq + 1, (token,)))
        )
        assert names(got) == [self.model.release(worker, token, attempt)]

    @rule(worker=WORKERS)
    def heartbeat(self, worker: str) -> None:
        self.tick()
        mine = [token for token, owner in self.tokens if owner == worker]
        beat = self.processes[worker].heartbeat(*mine)
        held = [token for token in mine if self.model.holder.get(token) == worker]
        assert set(beat.revoked) == set(mine) - set(held)
        for token in held:
            self.model.expires_s[token] = self.service.clock.now_s + TTL_S

    @rule(seconds=st.sampled_from([1.0, 14.0, 29.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.service.clock.advance(seconds)
        self.tick()

    @rule(worker=WORKERS)
    def process_is_replaced(self, worker: str) -> None:
        old = self.processes[worker]
        self.processes[worker] = self.service.worker(worker, f"p{next(self.counter)}x")
        self.model.give_back_all(worker)
        assert reason_of(lambda: old.lease()) == "FENCED_INCARNATION"
        assert reason_of(old.register) == "FENCED_INCARNATION"

    @rule()
    def service_restarts(self) -> None:
        self.tick()
        self.service.restart()
        stale = self.processes["a"]
        assert reason_of(lambda: stale.lease()) == "FENCED_SERVICE_EPOCH"
        for token in self.model.expires_s:
            self.model.expires_s[token] = self.service.clock.now_s + TTL_S
        for worker, process in self.processes.items():
            reply = process.register()
            found = {g.token for g in reply.leases}
            assert found == {t for t, w in self.model.holder.items() if w == worker}

    @rule()
    def job_restarts_in_a_new_round(self) -> None:
        self.tick()
        old = self.processes["b"]
        rdzv_round = next(self.counter) + 1
        for worker in list(self.processes):
            self.processes[worker] = self.service.worker(worker, f"r{rdzv_round}", rdzv_round)
        self.model.give_back_all()
        assert reason_of(lambda: old.lease()) == "FENCED_INCARNATION"

    @rule(worker=WORKERS)
    def prepare(self, worker: str) -> None:
        self.tick()
        name = f"c{next(self.counter)}"
        manifest = self.processes[worker].prepare(name)
        self.model.save(name)
        self.manifests.append((name, manifest.manifest_json))
        assert self.processes[worker].prepare(name) == manifest

    @rule(worker=WORKERS, data=st.data(), on_empty_service=st.booleans())
    def restore(self, worker: str, data: st.DataObject, on_empty_service: bool) -> None:
        self.tick()
        name, manifest = data.draw(st.sampled_from([(None, ""), *self.manifests]))
        if on_empty_service and manifest:
            self.service = Service(snapshot_every_events=5, clock=self.service.clock)
            self.processes[worker] = self.service.worker(worker, f"e{next(self.counter)}")
        process = self.processes[worker]
        stale = process.caller
        restored = process.restore(manifest, f"r{next(self.counter)}")
        self.model.restore(name)
        assert restored.digest == (parse_manifest(manifest).digest if manifest else "")
        found = reason_of(lambda: self.service.call(cmd.ReportProgress(stale, ())))
        assert found == "FENCED_GENERATION"
        for other in set(self.processes) - {worker}:
            self.processes[other] = self.service.worker(other, f"n{next(self.counter)}")

    @rule(data=st.data(), skip=st.booleans())
    def operator(self, data: st.DataObject, skip: bool) -> None:
        self.tick()
        index = data.draw(st.integers(0, self.model.spec.num_shards - 1))
        request_id = f"o{next(self.counter)}"
        command = (
            cmd.Skip(request_id, "d", (index,), "broken")
            if skip
            else cmd.Requeue(request_id, "d", (index,))
        )
        (shard,) = [shard for shard in self.model.shards if shard.index == index]
        allowed = ("READY", "DOING", "QUARANTINED") if skip else ("QUARANTINED", "SKIPPED")
        if self.model.finished() or shard.state not in allowed:
            assert reason_of(lambda: self.service.call(command)) == "WRONG_STATE"
        else:
            assert self.service.call(command) == self.service.call(command) == cmd.ChangeReply(1)
            self.model.set_state(index, "SKIPPED" if skip else "READY")

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "model"):
            assert counts(self.service) == self.model.counts()
            assert self.service.state.tables["d"].counts == list(self.model.counts().values())

    @invariant()
    def offsets_agree(self) -> None:
        if hasattr(self, "model"):
            table = self.service.state.tables["d"]
            for position, shard in enumerate(self.model.shards):
                assert table.order.index_of(position) == shard.index
                assert table.units_done.get(position, 0) == shard.units_done
                assert table.attempts.get(position, 0) == shard.attempts

    @invariant()
    def leases_agree(self) -> None:
        if hasattr(self, "model"):
            table = self.service.state.tables["d"]
            held = [
                (lease.token, table.order.index_of(lease.position), lease.worker_id)
                for lease in self.service.state.leases.values()
            ]
            assert sorted(held) == sorted(
                (token, shard.index, self.model.holder[token])
                for shard in self.model.shards
                for token in shard.tokens
            )


def names(reply: Any) -> list[str]:
    return [Outcome(outcome).name for outcome in reply.outcomes]


def answer_of(reply: Any) -> object:
    if isinstance(reply, cmd.GrantReply):
        return [(grant.shard_index, grant.units_done, grant.attempts) for grant in reply.grants]
    return type(reply).__name__.upper()


def reason_of(call: Any) -> str:
    try:
        call()
    except RefusedError as error:
        return error.reason
    return "ACCEPTED"


TestLedgerAgainstModel = LedgerAgainstModel.TestCase
TestLedgerAgainstModel.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=40, deadline=None, derandomize=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
