"""What the ledger refuses: the whole message, and that nothing of the call was applied."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gmeta.access.errors import RefusedError
from gmeta.antdt.errors import StoreFailedError
from gmeta.antdt.ledger import checkpoints, offers, table
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.ledger import operator_actions as operate
from gmeta.antdt.manifests.shard_manifest import DatasetManifest, ShardManifest
from gmeta.antdt.model import DatasetSpec
from gmeta.antdt.storage.committer import Committer
from gmeta.antdt.storage.store import MemoryDisk, MemoryStore
from tests.antdt.driver import FakeClock, Process, Service, counts, drain_epoch
from tests.support.refusals import catch_message

Scene = tuple[Service, Process]
Call = Callable[[Service, Process], Any]


@pytest.fixture
def scene() -> Scene:
    """One dataset of five shards, the first of them in the hands of worker a."""
    service = Service()
    service.register_dataset(shuffle=False)
    worker = service.worker("a")
    worker.grant()
    return service, worker


def refused(scene: Scene, call: Call) -> tuple[str, str, str]:
    """Code, reason and message; the ledger holds not one event more than before."""
    service = scene[0]
    before = service.committer.ledger.head
    with pytest.raises(RefusedError) as error:
        call(*scene)
    assert service.committer.ledger.head == before
    return error.value.code, error.value.reason, str(error.value)


@pytest.mark.parametrize(
    ("call", "code", "reason", "message"),
    [
        (
            lambda service, worker: service.call(cmd.Requeue("o", "d", (1, 0))),
            "FAILED_PRECONDITION",
            "WRONG_STATE",
            "shard 1 of dataset 'd' is todo; allowed is quarantined, skipped. Nothing was "
            "changed. List shards with 'gmeta shards ls'.",
        ),
        (
            lambda service, worker: service.call(cmd.Skip("o", "other", (0,), "")),
            "NOT_FOUND",
            "UNKNOWN_DATASET",
            "dataset 'other' is unknown; registered: d. Name one of these, or register it.",
        ),
    ],
)
def test_what_is_not_there_cannot_be_changed(
    scene: Scene, call: Call, code: str, reason: str, message: str
) -> None:
    assert refused(scene, call) == (code, reason, message)


def test_a_finished_epoch_can_no_longer_be_changed_by_an_operator() -> None:
    service = Service()
    service.register_dataset()
    worker = service.worker("a")
    list(drain_epoch(worker))
    for change in (cmd.Requeue("o", "d", (0,)), cmd.Skip("o", "d", (0,), "late")):
        assert refused((service, worker), lambda s, w, change=change: s.call(change)) == (
            "FAILED_PRECONDITION",
            "WRONG_STATE",
            "epoch 0 of dataset 'd' is finished and workers were told so; its shards can no longer "
            "change. Do it in the next epoch.",
        )
    assert counts(service)["DONE"] == 5


def test_a_shard_that_is_named_twice_is_changed_once(scene: Scene) -> None:
    service, _ = scene
    assert service.call(cmd.Skip("o1", "d", (3, 3), "bad")) == cmd.ChangeReply(1)
    assert service.call(cmd.Requeue("o2", "d", (3, 3))) == cmd.ChangeReply(1)
    assert counts(service)["READY"] == 4


def test_another_workers_action_cannot_be_acknowledged(scene: Scene) -> None:
    service, _ = scene
    service.worker("b")
    service.call(cmd.PostAction("b", "x1", 5, 0, {}))
    message = refused(scene, lambda s, a: s.call(cmd.AckAction(a.caller, "x1", 1, "")))[2]
    assert message == (
        "action 'x1' is not open for worker 'a'. Acknowledge only actions that a heartbeat brought."
    )


def test_a_process_of_an_earlier_rendezvous_round_is_told_to_stop(scene: Scene) -> None:
    scene[0].worker("b", rdzv_round=2)
    assert refused(scene, lambda service, _: service.worker("c", rdzv_round=1)) == (
        "ABORTED",
        "FENCED_GENERATION",
        "worker 'c' comes from rendezvous round 1, the job is in round 2. This process was left "
        "behind: stop it.",
    )


def test_a_process_that_was_replaced_cannot_take_its_worker_back(scene: Scene) -> None:
    scene[0].worker("a", "p1")
    assert refused(scene, lambda service, _: service.worker("a", "p0")) == (
        "ABORTED",
        "FENCED_INCARNATION",
        "process 'p0' of worker 'a' was replaced by 'p1'; one process speaks for a worker. Stop "
        "this process, or give it a worker id of its own.",
    )


def test_a_process_from_before_a_restart_of_the_job_cannot_join_it_again(scene: Scene) -> None:
    service, worker = scene
    service.worker("b", rdzv_round=1)
    assert refused(scene, lambda _, worker: worker.register()) == (
        "ABORTED",
        "FENCED_GENERATION",
        "worker 'a' is of generation 1, the job is at 2: it was restarted or rolled back. Stop "
        "this process; the restarted job has its own.",
    )
    # One that knows the round it comes from is of the new job.
    assert worker.register(rdzv_round=1).run_generation == 2


def test_an_id_of_a_checkpoint_stands_for_one_step_and_one_manifest(scene: Scene) -> None:
    service, worker = scene
    prepared = worker.prepare("c", step=1)
    assert worker.prepare("c", step=1) == prepared
    assert refused(scene, lambda _, worker: worker.prepare("c", step=2)) == (
        "ALREADY_EXISTS",
        "WRONG_STATE",
        "checkpoint 'c' was prepared at step 1, the call says 2; an id stands for one step. Put "
        "the step into the id.",
    )
    other = cmd.CommitCheckpoint(worker.caller, "c", "f" * 64)
    assert refused(scene, lambda service, _: service.call(other)) == (
        "FAILED_PRECONDITION",
        "WRONG_STATE",
        f"checkpoint 'c' was prepared with digest {prepared.digest[:12]}, the call commits "
        "'ffffffffffff'. Commit the manifest that PrepareCheckpoint returned.",
    )
    commit = cmd.CommitCheckpoint(worker.caller, "c", prepared.digest)
    service.call(commit)
    assert service.call(commit) == cmd.ChangeReply(0)


def test_a_manifest_of_another_job_or_cut_is_refused_before_a_rollback(scene: Scene) -> None:
    manifest_json = scene[1].prepare("c").manifest_json
    clock = FakeClock()
    elsewhere = Service()
    elsewhere.committer = Committer(MemoryStore(MemoryDisk()), clock, job="other")
    stranger = elsewhere.worker("a")
    assert refused((elsewhere, stranger), lambda _, w: w.restore(manifest_json, "r")) == (
        "FAILED_PRECONDITION",
        "BAD_MANIFEST",
        "the manifest belongs to job 'default', this service serves 'other'. Restore the job's own "
        "checkpoint, or start the service with --job.",
    )
    recut = Service()
    new = recut.register_dataset(shuffle=False, units_per_shard=5)
    old = scene[0].state.tables["d"].spec
    worker = recut.worker("a")
    assert refused((recut, worker), lambda _, w: w.restore(manifest_json, "r")) == (
        "FAILED_PRECONDITION",
        "SPEC_CONFLICT",
        f"the manifest's dataset 'd' is {old}, registered is {new}. The data or its cut changed "
        "since the checkpoint: train from the old data, or begin without the checkpoint.",
    )
    assert recut.state.generation == 1


def test_a_store_of_another_job_is_not_served(scene: Scene) -> None:
    store = MemoryStore(scene[0].disk)
    assert catch_message(StoreFailedError, Committer, store, FakeClock(), job="other") == (
        "the store belongs to job 'default', this service is for 'other'. Start it with that "
        "--job, or name another --store."
    )


@pytest.mark.parametrize(
    ("limit", "call", "message"),
    [
        (
            (table, "MAX_DATASETS"),
            lambda service, worker: service.register_dataset(name="e"),
            "1 datasets are registered; at most 1 are allowed. Start another service.",
        ),
        (
            (offers, "MAX_LEASES_PER_WORKER"),
            lambda service, worker: worker.grant(),
            "worker 'a' holds 1 leases and asks for 1 more; at most 1 are allowed. Complete or "
            "release some first, or cut the dataset into larger shards.",
        ),
    ],
)
def test_a_limit_is_told_with_what_is_there(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, limit: tuple[Any, str], call: Call,
    message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(*limit, 1)
    assert refused(scene, call) == ("RESOURCE_EXHAUSTED", "LIMIT", message)


def test_actions_that_nobody_answers_end(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operate, "MAX_ACTIONS", 1)
    first, second = (cmd.PostAction("a", name, 5, 0, {}) for name in ("x1", "x2"))
    scene[0].call(first)
    assert refused(scene, lambda service, _: service.call(second)) == (
        "INVALID_ARGUMENT",
        "BAD_ARGUMENT",
        "1 actions are open; at most 1 are allowed. Wait.",
    )
    # The same one again asks for no place.
    scene[0].call(first)
    scene[0].call(cmd.AckAction(scene[1].caller, "x1", 1, ""))
    scene[0].call(second)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"num_units": 0}, "num_units is 0; allowed is 1 to 281474976710656. Correct the request."),
        (
            {"name": "two words"},
            "dataset name is 'two words'; allowed are 1 to 128 letters, digits and _.:@/- . Choose "
            "such a name.",
        ),
        (
            {"num_units": 100_000_001, "units_per_shard": 1},
            "dataset d would have 100000001 shards; at most 100000000 are allowed. Use "
            "units_per_shard >= 2.",
        ),
    ],
)
def test_a_dataset_out_of_bounds_is_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedError) as error:
        DatasetSpec(**{"name": "d", "num_units": 20, "units_per_shard": 4, **spec})
    assert (error.value.code, error.value.reason) == ("INVALID_ARGUMENT", "BAD_ARGUMENT")
    assert str(error.value) == message


def test_a_dataset_of_one_unit_is_one_shard_and_ends_after_it() -> None:
    service = Service()
    service.register_dataset(num_units=1, units_per_shard=100)
    worker = service.worker("a")
    (only,) = drain_epoch(worker)
    assert (only.shard_index, only.start_unit, only.num_units) == (0, 0, 1)


def test_every_checkpoint_that_is_held_can_be_found() -> None:
    service = Service()
    service.register_dataset()
    worker = service.worker("a")
    for step in range(3):
        worker.prepare(f"c{step}", step)
    assert checkpoints.find_checkpoint(service.state, "c0").step == 0
    with pytest.raises(RefusedError) as error:
        checkpoints.find_checkpoint(service.state, "c" * 20_000)
    assert str(error.value).startswith(f"checkpoint '{129 * 'c'} is not among")
    assert catch_message(RefusedError, checkpoints.find_checkpoint, service.state, "c7") == (
        "checkpoint 'c7' is not among the last 3 prepared ones ['c0', 'c1', 'c2']. Audit an older "
        "one offline: gmeta shards audit FOLDER."
    )


def test_shards_of_all_datasets_are_bounded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that a manifest brings: each is a byte of the service's memory."""
    monkeypatch.setattr(table, "MAX_SHARDS_IN_ALL", 9)
    too_many = (
        "RESOURCE_EXHAUSTED",
        "LIMIT",
        "all datasets would have 10 shards; at most 9 are allowed. Start another service.",
    )
    other = DatasetSpec("other", 20, 4)
    assert refused(scene, lambda s, w: s.call(cmd.RegisterDataset(other))) == too_many
    brought = ShardManifest("default", "c", 1, 1, "", 7, "00", (DatasetManifest(other, 0),))
    assert refused(scene, lambda s, w: w.restore(brought.to_json(), "r")) == too_many
    assert scene[0].call(cmd.RegisterDataset(replace(other, num_units=16))).created
