"""Behaviours of the ledger, each with the whole message that a caller would see."""

from typing import Any

import pytest

from gmeta.access.errors import RefusedError
from gmeta.antdt.errors import StoreFullError
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.manifests.shard_manifest import parse_manifest
from gmeta.antdt.model import Caller, DatasetSpec, Outcome
from gmeta.antdt.storage.store_records import RecordBatch
from tests.antdt.driver import TTL_S, Process, Service, counts, drain_epoch
from tests.antdt.trained import trained_ranges


@pytest.fixture
def service() -> Service:
    service = Service()
    service.register_dataset()
    return service


def refused(call: Any) -> tuple[str, str, str]:
    with pytest.raises(RefusedError) as error:
        call()
    return error.value.code, error.value.reason, str(error.value)


def test_each_shard_of_an_epoch_is_granted_exactly_once(service: Service) -> None:
    a, b = service.worker("a"), service.worker("b")
    grants = [*drain_epoch(a), *drain_epoch(b)]
    assert sorted(grant.shard_index for grant in grants) == [0, 1, 2, 3, 4]
    assert sum(grant.num_units for grant in grants) == 20


def test_the_next_epoch_opens_only_after_the_one_before() -> None:
    service = Service()
    service.register_dataset(num_units=8, num_epochs=2)
    a, b = service.worker("a"), service.worker("b")
    held = a.grant()
    early = b.lease(epoch=1)
    assert early.cause == cmd.CAUSE_EARLIER_EPOCH
    assert early.message == "epoch 0 of dataset 'd' is not finished, 1 comes after it"
    a.complete(held.token)
    list(drain_epoch(a))
    first, second = (list(drain_epoch(b, epoch=epoch)) for epoch in (0, 1))
    assert first == []
    assert len(second) == 2
    assert isinstance(a.lease(epoch=0), cmd.End)
    assert refused(lambda: a.lease(epoch=2)) == (
        "INVALID_ARGUMENT",
        "BAD_ARGUMENT",
        "epoch 2 of dataset 'd' was asked for; it has epochs 0 to 1. Stop at the last END, or "
        "register the dataset with more epochs.",
    )


def test_a_retried_lease_returns_the_same_grants_even_after_a_restart(service: Service) -> None:
    worker = service.worker("a")
    command = worker.lease_command(2)
    granted = worker.numbered(command)
    assert service.call(command) == granted
    service.restart()
    worker.register()
    again = cmd.LeaseShards(worker.caller, *command[1:])
    assert service.call(again) == granted
    assert counts(service)["DOING"] == 2


def test_a_late_copy_of_a_lease_that_was_told_to_wait_takes_nothing(service: Service) -> None:
    a, b = service.worker("a"), service.worker("b")
    held = a.lease(5).grants
    copy = b.lease_command()
    assert isinstance(b.numbered(copy), cmd.Wait)
    a.release(held[0].token)
    assert isinstance(service.call(copy), cmd.Wait)
    assert b.grant().shard_index == held[0].shard_index


def test_calls_out_of_order_are_refused(service: Service) -> None:
    worker = service.worker("a")
    worker.grant()
    skipping = cmd.Complete(worker.caller, 5, ())
    assert refused(lambda: service.call(skipping)) == (
        "OUT_OF_RANGE",
        "BAD_SEQ",
        "worker 'a' sent call number 5; allowed are 1 (the last one again) and 2. Number calls "
        "one by one, one at a time.",
    )
    other = cmd.Complete(worker.caller, 1, ())
    assert refused(lambda: service.call(other)) == (
        "INVALID_ARGUMENT",
        "BAD_SEQ",
        "worker 'a' used call number 1 for two different calls; a number may only be repeated "
        "with the same content. Count one up for each new call.",
    )


def fenced_caller(worker: Process, **changed: Any) -> Caller:
    return worker.caller._replace(**changed)


@pytest.mark.parametrize(
    ("changed", "reason", "message"),
    [
        (
            {"service_epoch": 9},
            "FENCED_SERVICE_EPOCH",
            "the call carries service epoch 9, the service is at 1: it was restarted. Call "
            "Register with the same incarnation, then repeat the call.",
        ),
        (
            {"run_generation": 9},
            "FENCED_GENERATION",
            "worker 'a' is of generation 9, the job is at 1: it was restarted or rolled back. "
            "Stop this process; the restarted job has its own.",
        ),
        (
            {"incarnation": "other"},
            "FENCED_INCARNATION",
            "process 'other' of worker 'a' was replaced by 'p0'; one process speaks for a worker. "
            "Stop this process, or give it a worker id of its own.",
        ),
    ],
)
def test_every_mutation_of_a_worker_passes_the_fences(
    service: Service, changed: dict[str, Any], reason: str, message: str
) -> None:
    worker = service.worker("a")
    token = worker.grant().token
    caller = fenced_caller(worker, **changed)
    head = service.committer.ledger.head
    for command in (
        cmd.LeaseShards(caller, 2, "d", 0, 1),
        cmd.Heartbeat(caller, (token,), ()),
        cmd.ReportProgress(caller, ((token, 1),)),
        cmd.Complete(caller, 2, (token,)),
        cmd.Release(caller, 2, (token,)),
        cmd.Fail(caller, 2, token, "x", "y"),
        cmd.PrepareCheckpoint(caller, "c", 1),
        cmd.CommitCheckpoint(caller, "c", "d"),
        cmd.Restore(caller, "", "r"),
        cmd.AckAction(caller, "x", 1, ""),
    ):
        expected = ("ABORTED", reason, message)
        assert refused(lambda command=command: service.call(command)) == expected
    assert service.committer.ledger.head == head


def test_an_unregistered_worker_is_told_to_register(service: Service) -> None:
    stranger = Process(service, "z", "p0")
    assert refused(lambda: stranger.lease()) == (
        "FAILED_PRECONDITION",
        "NOT_REGISTERED",
        "worker 'z' is unknown to this service; only registered workers may call. Call Register.",
    )


def test_a_silent_workers_shard_goes_on_with_its_offset_after_one_ttl(service: Service) -> None:
    silent, heir = service.worker("a"), service.worker("b")
    held = silent.grant()
    silent.progress(held.token, 3)
    service.clock.advance(TTL_S - 0.1)
    assert counts(service)["DOING"] == 1
    service.clock.advance(0.2)
    again = heir.grant()
    assert (again.shard_index, again.units_done, again.attempts) == (held.shard_index, 3, 1)
    assert silent.heartbeat(held.token).revoked == (held.token,)


def test_a_heartbeat_renews_what_it_names_and_nothing_else(service: Service) -> None:
    worker = service.worker("a")
    named, unknown = worker.lease(2).grants
    for _ in range(3):
        service.clock.advance(TTL_S / 2)
        worker.heartbeat(named.token)
    assert worker.complete(named.token, unknown.token) == (Outcome.ACCEPTED, Outcome.FENCED)


def test_after_a_restart_every_lease_has_a_full_ttl(service: Service) -> None:
    worker = service.worker("a")
    token = worker.grant().token
    service.clock.advance(TTL_S - 1)
    service.restart()
    service.clock.advance(TTL_S - 1)
    assert [grant.token for grant in worker.register().leases] == [token]
    assert worker.complete(token) == (Outcome.ACCEPTED,)


def test_progress_is_monotone_and_bounded(service: Service) -> None:
    worker = service.worker("a")
    token = worker.grant().token
    outcomes = [worker.progress(token, units) for units in (2, 1, 2, 4, 5)]
    expected = ["ACCEPTED", "ALREADY", "ALREADY", "ACCEPTED", "INVALID"]
    assert [outcome.name for outcome in outcomes] == expected


def test_a_token_named_twice_completes_once(service: Service) -> None:
    worker = service.worker("a")
    token = worker.grant().token
    assert worker.complete(token, token) == (Outcome.ACCEPTED, Outcome.ALREADY)
    assert worker.complete(token) == (Outcome.ALREADY,)
    assert counts(service)["DONE"] == 1


def test_another_spec_under_the_name_is_refused_with_the_difference(service: Service) -> None:
    other = DatasetSpec("d", 21, 4)
    assert service.call(cmd.RegisterDataset(DatasetSpec("d", 20, 4))).created is False
    assert refused(lambda: service.call(cmd.RegisterDataset(other))) == (
        "ALREADY_EXISTS",
        "SPEC_CONFLICT",
        "dataset 'd' is registered with {'num_units': 20}, the call says {'num_units': 21}; a "
        "name stands "
        "for one dataset. Register the other data under another name, or start a service with an "
        "empty store.",
    )


def test_a_manifest_rebuilds_an_empty_service_exactly(service: Service) -> None:
    worker = service.worker("a")
    done, part = worker.lease(2).grants
    worker.complete(done.token)
    worker.progress(part.token, 2)
    manifest = worker.prepare("c1", 10)
    fresh = Service()
    rank0 = fresh.worker("x")
    rank0.restore(manifest.manifest_json, "r1")
    left = list(drain_epoch(rank0))
    assert {g.shard_index: g.units_done for g in left if g.units_done} == {part.shard_index: 2}
    assert {g.shard_index for g in left} == {0, 1, 2, 3, 4} - {done.shard_index}
    entry = parse_manifest(manifest.manifest_json).datasets[0]
    units = [unit for start, end in trained_ranges(entry) for unit in range(start, end)]
    assert len(units) == len(set(units)) == done.num_units + 2


def test_the_same_checkpoint_id_after_a_rollback_gets_a_new_manifest(service: Service) -> None:
    worker = service.worker("a")
    first = worker.prepare("step-1", 1)
    assert worker.prepare("step-1", 1) == first
    worker.restore("", "r1")
    worker.complete(worker.grant().token)
    second = worker.prepare("step-1", 1)
    assert parse_manifest(second.manifest_json).datasets[0].num_done == 1


def test_a_retried_restore_starts_one_generation_only(service: Service) -> None:
    worker = service.worker("a")
    command = cmd.Restore(worker.caller, "", "r1")
    assert service.call(command) == service.call(command) == cmd.RestoreReply(2, "")


def test_a_restore_takes_back_whatever_was_trained_since(service: Service) -> None:
    worker = service.worker("a")
    manifest = worker.prepare("c", 1)
    lost = worker.lease(5).grants
    worker.complete(*(grant.token for grant in lost))
    assert isinstance(worker.lease(), cmd.End)
    worker.restore(manifest.manifest_json, "r")
    assert len(list(drain_epoch(worker))) == 5


def test_a_checkpoint_that_is_restored_is_committed(service: Service) -> None:
    """A crash may have come between its rename and the call that says so."""
    worker = service.worker("a")
    prepared = worker.prepare("c", 1)
    worker.prepare("later", 2)
    worker.restore(prepared.manifest_json, "r")
    expected = {"c": True, "later": False}
    assert {c.checkpoint_id: c.committed for c in service.state.checkpoints.values()} == expected


def test_an_altered_manifest_is_refused(service: Service) -> None:
    worker = service.worker("a")
    text = worker.prepare("c", 1).manifest_json.replace('"step":1', '"step":2')
    code, reason, message = refused(lambda: worker.restore(text, "r"))
    assert (code, reason) == ("INVALID_ARGUMENT", "BAD_MANIFEST")
    assert message.startswith(
        "the manifest was altered after it was written: its content has digest "
    )


def test_a_skipped_shard_needs_no_holder_to_end_the_epoch(service: Service) -> None:
    worker = service.worker("a")
    held = worker.grant()
    assert service.call(cmd.Skip("o1", "d", (held.shard_index,), "corrupt")) == cmd.ChangeReply(1)
    assert worker.complete(held.token) == (Outcome.FENCED,)
    list(drain_epoch(worker))
    assert counts(service) == {"READY": 0, "DOING": 0, "DONE": 4, "SKIPPED": 1, "QUARANTINED": 0}
    manifest = parse_manifest(worker.prepare("c", 1).manifest_json)
    assert [item.note for item in manifest.datasets[0].skipped] == ["corrupt"]


def test_draining_a_worker_gives_its_shards_to_others_at_once(service: Service) -> None:
    a, b = service.worker("a"), service.worker("b")
    held = a.grant()
    assert service.call(cmd.Drain("o1", "a", False)) == cmd.ChangeReply(1)
    assert a.lease().message == (
        "worker a is draining: no shard is handed out. Lift it with 'gmeta shards drain --undo'."
    )
    assert b.grant().shard_index == held.shard_index
    service.call(cmd.Drain("o2", "a", True))
    assert isinstance(a.lease(), cmd.GrantReply)


def test_an_action_is_delivered_until_acknowledged_and_applied_once(service: Service) -> None:
    worker = service.worker("a")
    action = cmd.PostAction("a", "x1", 5, 0, {})
    service.call(action)
    service.call(action)
    assert worker.heartbeat().actions == worker.heartbeat().actions == (action,)
    acked = [service.call(cmd.AckAction(worker.caller, "x1", 1, "")).outcomes for _ in range(2)]
    assert acked == [(Outcome.ACCEPTED,), (Outcome.ALREADY,)]
    service.call(action)
    assert worker.heartbeat().actions == ()
    found = refused(lambda: service.call(cmd.AckAction(worker.caller, "x2", 1, "")))[1]
    assert found == "UNKNOWN_ACTION"


def test_end_is_not_told_of_a_completion_that_the_store_did_not_take(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both came in one group. Who asks again under the same number must not hear what the lost
    group would have answered: nobody would train the shard if its worker died now."""
    worker, other = service.worker("a"), service.worker("b")
    *done, last = worker.lease(5).grants
    worker.complete(*(grant.token for grant in done))
    assert isinstance(other.lease(), cmd.Wait)
    asking = cmd.LeaseShards(other.caller, other.seq + 1, "d", 0, 1)
    group = [cmd.Complete(worker.caller, worker.seq + 1, (last.token,)), asking]

    def refuse(batch: RecordBatch) -> None:
        raise StoreFullError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(service.store, "append", refuse)
        told = service.committer.commit(group)
    assert [each.reason for each in told] == ["STORE_FULL", "STORE_FULL"]
    assert isinstance(service.call(asking), cmd.Wait)
    assert worker.complete(last.token) == (Outcome.ACCEPTED,)
    assert service.call(asking._replace(seq=other.seq + 2)) == cmd.End(other.seq + 2)
