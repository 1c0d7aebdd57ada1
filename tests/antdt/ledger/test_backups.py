"""Second leases of a speculative dataset's last shards: who gets one, who wins, how each ends."""

import hashlib
import json
from collections.abc import Callable
from typing import NamedTuple

import pytest

from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.manifests.shard_manifest import parse_manifest
from gmeta.antdt.model import DatasetSpec, Grant, Outcome
from tests.antdt.driver import TTL_S, Process, Service, counts

ACCEPTED, ALREADY, FENCED, INVALID = Outcome.ACCEPTED, Outcome.ALREADY, Outcome.FENCED, 4


def speculative(num_units: int = 4, **spec: object) -> Service:
    service = Service()
    service.register_dataset(num_units=num_units, speculative=True, **spec)
    return service


def back_up(service: Service, worker_id: str, action_id: str = "1.1.1") -> int:
    reply: cmd.ChangeReply = service.call(cmd.BackUp(action_id, worker_id))
    return reply.num_changed


class Pair(NamedTuple):
    """One shard in two workers' hands, and a third worker without any."""

    service: Service
    slow: Process
    fast: Process
    idle: Process
    first: Grant
    second: Grant


def pair(**spec: object) -> Pair:
    service = speculative(**spec)  # type: ignore[arg-type]
    slow, fast, idle = (service.worker(name) for name in ("slow", "fast", "idle"))
    first = slow.grant()
    assert back_up(service, "slow") == 1
    return Pair(service, slow, fast, idle, first, fast.grant())


def holders(service: Service) -> list[str]:
    return [lease.worker_id for lease in service.state.leases.values()]


def test_the_last_shard_of_a_slow_worker_is_leased_to_another_one_too() -> None:
    case = pair()
    assert case.second == case.first._replace(token=case.second.token)
    assert case.second.speculative
    assert case.second.token > case.first.token
    assert counts(case.service)["DOING"] == 1


def test_a_shard_has_two_leases_at_most() -> None:
    case = pair()
    assert back_up(case.service, "slow", "1.1.2") == back_up(case.service, "fast", "1.1.3") == 0
    assert isinstance(case.idle.lease(), cmd.Wait)


def test_nobody_gets_a_second_lease_unless_the_controller_says_so() -> None:
    service = speculative()
    service.worker("slow").grant()
    assert isinstance(service.worker("fast").lease(), cmd.Wait)


def test_a_dataset_that_is_not_speculative_has_one_lease_a_shard() -> None:
    service = Service()
    service.register_dataset(num_units=4)
    service.worker("slow").grant()
    assert back_up(service, "slow") == 0
    assert isinstance(service.worker("fast").lease(), cmd.Wait)


def test_nothing_is_done_twice_while_shards_are_left_that_nobody_holds() -> None:
    service = speculative(num_units=8)
    slow, fast = service.worker("slow"), service.worker("fast")
    held = slow.grant()
    assert back_up(service, "slow") == 0
    assert fast.grant().shard_index != held.shard_index
    assert back_up(service, "slow") == 1
    assert fast.grant().shard_index == held.shard_index


def test_a_shard_that_comes_back_goes_before_a_second_lease() -> None:
    service = speculative(num_units=8)
    slow, other, idle = (service.worker(name) for name in ("slow", "other", "idle"))
    slow.grant()
    returned = other.grant()
    back_up(service, "slow")
    other.release(returned.token)
    assert idle.grant().shard_index == returned.shard_index


def test_a_decision_is_about_the_shards_held_at_that_moment() -> None:
    service = speculative(num_epochs=2)
    slow, fast = service.worker("slow"), service.worker("fast")
    held = slow.grant()
    back_up(service, "slow")
    slow.complete(held.token)
    slow.grant(epoch=1)
    assert isinstance(fast.lease(epoch=1), cmd.Wait)
    assert back_up(service, "slow", "1.1.2") == 1
    assert fast.grant(epoch=1).epoch == 1


def test_an_idle_worker_gets_one_at_a_time_however_many_it_asks_for() -> None:
    service = speculative(num_units=12)
    slow, fast, idle = (service.worker(name) for name in ("slow", "fast", "idle"))
    held = slow.lease(3).grants
    assert back_up(service, "slow") == 3
    granted = [process.lease(5).grants for process in (fast, idle, fast)]
    found = [[grant.shard_index for grant in grants] for grants in granted]
    assert found == [[grant.shard_index] for grant in held]


def test_slow_workers_get_no_second_lease_themselves() -> None:
    service = speculative(num_units=8)
    one, two = service.worker("one"), service.worker("two")
    one.grant(), two.grant()
    back_up(service, "one"), back_up(service, "two", "1.1.2")
    assert isinstance(one.lease(), cmd.Wait)
    assert isinstance(two.lease(), cmd.Wait)


def test_second_leases_are_of_the_dataset_that_was_asked_for() -> None:
    service = speculative()
    service.register_dataset(name="e", num_units=4, speculative=True)
    service.worker("slow").grant()
    back_up(service, "slow")
    fast = service.worker("fast")
    (own,) = fast.numbered(fast.lease_command(1, 0, "e")).grants
    assert own.dataset == "e"
    assert isinstance(fast.numbered(fast.lease_command(1, 0, "e")), cmd.Wait)
    assert fast.grant().dataset == "d"


def test_drained_workers_get_no_second_lease() -> None:
    service = speculative()
    service.worker("slow").grant()
    fast = service.worker("fast")
    back_up(service, "slow")
    service.call(cmd.Drain("r", "fast", False))
    assert fast.lease().cause == cmd.CAUSE_DRAINING


@pytest.mark.parametrize("winner", ["slow", "fast"])
def test_the_first_complete_wins_and_the_other_worker_is_told(winner: str) -> None:
    case = pair()
    ends = [(case.slow, case.first.token), (case.fast, case.second.token)]
    (first, won), (second, lost) = ends if winner == "slow" else reversed(ends)
    assert first.complete(won) == (ACCEPTED,)
    assert second.heartbeat(lost).revoked == (lost,)
    assert second.complete(lost) == (FENCED,)
    assert second.release(lost) == (FENCED,)
    assert first.complete(won) == (ALREADY,)
    assert counts(case.service)["DONE"] == 1
    assert isinstance(case.idle.lease(), cmd.End)


def test_two_completes_in_one_batch_are_accepted_once() -> None:
    case = pair()
    answers = case.service.committer.commit(
        [
            cmd.Complete(case.fast.caller, case.fast.seq + 1, (case.second.token,)),
            cmd.Complete(case.slow.caller, case.slow.seq + 1, (case.first.token,)),
        ]
    )
    assert [answer.outcomes for answer in answers] == [(ACCEPTED,), (FENCED,)]


def test_a_part_of_a_speculative_shard_never_counts() -> None:
    """Not even while it has one lease: the other one would begin where this one stands."""
    service = speculative()
    slow = service.worker("slow")
    held = slow.grant()
    assert slow.progress(held.token, 1) == INVALID
    back_up(service, "slow")
    fast = service.worker("fast")
    backup = fast.grant()
    assert backup.units_done == 0
    assert fast.progress(backup.token, 3) == INVALID
    assert service.state.tables["d"].units_done == {}


def expire(process: Process, token: int) -> None:
    """Only this lease: all others are renewed."""
    service = process.service
    service.clock.advance(TTL_S - 1)
    for other in service.state.workers.values():
        if other.worker_id != process.worker_id:
            caller = process.caller._replace(
                worker_id=other.worker_id, incarnation=other.incarnation
            )
            service.call(cmd.Heartbeat(caller, tuple(other.tokens), ()))
    service.clock.advance(2.0)
    service.call(cmd.Tick())


ENDS: dict[str, tuple[Callable[[Process, int], object], int]] = {  # and the attempts it counts
    "released": (lambda process, token: process.release(token), 0),
    "failed": (lambda process, token: process.fail(token), 1),
    "expired": (expire, 1),
    "replaced": (lambda process, _: process.service.worker(process.worker_id, "p9"), 0),
    "drained": (lambda p, _: p.service.call(cmd.Drain("x", p.worker_id, False)), 0),
}


@pytest.mark.parametrize("who", ["slow", "fast"])
@pytest.mark.parametrize("how", ENDS)
def test_when_one_of_two_leases_ends_the_other_is_the_only_one(how: str, who: str) -> None:
    case = pair()
    ends = [(case.slow, case.first.token), (case.fast, case.second.token)]
    (ended, token), (stays, other) = ends if who == "slow" else reversed(ends)
    end, attempts = ENDS[how]
    end(ended, token)
    assert counts(case.service)["DOING"] == 1
    assert holders(case.service) == [stays.worker_id]
    assert sum(case.service.state.tables["d"].attempts.values()) == attempts
    assert case.service.state.backups.twins == {}
    assert stays.complete(other) == (ACCEPTED,)
    assert isinstance(case.idle.lease(), cmd.End)


def test_a_second_lease_that_ends_is_given_to_the_next_idle_worker() -> None:
    case = pair()
    case.fast.release(case.second.token)
    assert case.idle.grant().shard_index == case.first.shard_index


def test_after_the_slow_worker_left_its_backup_needs_a_decision_of_its_own() -> None:
    case = pair()
    case.slow.release(case.first.token)
    assert isinstance(case.idle.lease(), cmd.Wait)
    assert back_up(case.service, "fast", "1.1.2") == 1
    assert case.idle.grant().shard_index == case.first.shard_index


def test_a_shard_is_quarantined_only_when_its_last_lease_ends() -> None:
    case = pair(max_attempts=1)
    assert case.fast.fail(case.second.token).quarantined is False
    again = case.idle.grant()
    assert case.idle.fail(again.token).quarantined is False  # more often than allowed
    assert isinstance(case.fast.lease(), cmd.Wait)  # so nobody else gets it
    assert counts(case.service)["DOING"] == 1
    case.slow.release(case.first.token)
    assert counts(case.service)["QUARANTINED"] == 1


def test_the_last_holder_may_still_complete_a_shard_that_failed_too_often_elsewhere() -> None:
    case = pair(max_attempts=1)
    case.fast.fail(case.second.token)
    case.idle.fail(case.idle.grant().token)
    assert case.slow.complete(case.first.token) == (ACCEPTED,)
    assert isinstance(case.idle.lease(), cmd.End)


def test_a_failure_of_the_last_lease_says_that_the_shard_is_quarantined() -> None:
    case = pair(max_attempts=1)
    case.fast.fail(case.second.token)
    assert case.slow.fail(case.first.token).quarantined is True
    assert counts(case.service)["QUARANTINED"] == 1


def test_skip_ends_both_leases_and_requeue_offers_the_shard_once() -> None:
    service = speculative(num_units=8)
    slow, fast, idle = (service.worker(name) for name in ("slow", "fast", "idle"))
    first, _ = slow.grant(), idle.grant()
    back_up(service, "slow")
    second = fast.grant()
    service.call(cmd.Skip("s", "d", (first.shard_index,), "broken"))
    assert holders(service) == ["idle"]
    assert slow.complete(first.token) == fast.complete(second.token) == (FENCED,)
    service.call(cmd.Requeue("q", "d", (first.shard_index,)))
    assert slow.grant().shard_index == first.shard_index
    assert isinstance(fast.lease(), cmd.Wait)


def test_a_requeued_shard_has_one_lease_again() -> None:
    case = pair(max_attempts=1)
    case.fast.fail(case.second.token)
    case.slow.fail(case.first.token)
    case.service.call(cmd.Requeue("q", "d", (case.first.shard_index,)))
    case.slow.grant()
    assert isinstance(case.fast.lease(), cmd.Wait)


def test_a_new_generation_puts_the_shard_back_once() -> None:
    case = pair()
    case.service.worker("slow", "p1", 1)
    assert counts(case.service) == {
        "READY": 1, "DOING": 0, "DONE": 0, "SKIPPED": 0, "QUARANTINED": 0,
    }  # fmt: skip
    assert case.service.state.tables["d"].attempts == {}


def test_a_checkpoint_beside_two_leases_names_the_shard_once_and_restores_it_untrained() -> None:
    case = pair()
    prepared = case.slow.prepare("c")
    (entry,) = parse_manifest(prepared.manifest_json).datasets
    (held,) = entry.partial
    assert (held.units_done, held.worker_id) == (0, "fast")  # the last holder
    case.fast.complete(case.second.token)
    case.slow.restore(prepared.manifest_json, "r")
    assert holders(case.service) == []
    assert case.service.state.backups.twins == {}
    assert case.slow.grant().shard_index == case.first.shard_index


@pytest.mark.parametrize("every", [1, 1000], ids=["from a snapshot", "from the log"])
def test_a_restarted_service_knows_both_leases_and_who_is_slow(every: int) -> None:
    service = Service(snapshot_every_events=every)
    service.register_dataset(num_units=8, speculative=True)
    slow, fast, idle = (service.worker(name) for name in ("slow", "fast", "idle"))
    first, later = slow.lease(2).grants
    back_up(service, "slow")
    second = fast.grant()
    service.restart()
    assert [grant.token for grant in fast.register().leases] == [second.token]
    for process in (slow, idle):
        process.register()
    assert idle.grant().shard_index == later.shard_index
    assert fast.complete(second.token) == (ACCEPTED,)
    assert slow.complete(first.token) == (FENCED,)


def test_a_retried_lease_returns_the_same_second_lease_even_after_a_restart() -> None:
    service = speculative()
    service.worker("slow").grant()
    back_up(service, "slow")
    fast = service.worker("fast")
    command = fast.lease_command()
    granted = fast.numbered(command)
    assert service.call(command) == granted
    service.restart()
    fast.register()
    assert service.call(cmd.LeaseShards(fast.caller, *command[1:])) == granted
    assert len(service.state.leases) == 2


def test_a_spec_without_the_flag_keeps_the_digest_of_earlier_versions() -> None:
    spec = DatasetSpec("d", 20, 4)
    fields = {
        "name": "d", "num_units": 20, "units_per_shard": 4, "seed": 0, "num_epochs": 1,
        "fingerprint": "", "shuffle": True, "max_attempts": 5,
    }  # fmt: skip
    assert spec.digest == hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    assert DatasetSpec("d", 20, 4, speculative=True).digest != spec.digest


def test_the_flag_is_part_of_what_a_manifest_says_about_its_data() -> None:
    case = pair()
    text = case.slow.prepare("c").manifest_json
    assert parse_manifest(text).datasets[0].spec.speculative
    assert parse_manifest(text).to_json() == text
    plain = Service()
    plain.register_dataset()
    text = plain.worker("a").prepare("c").manifest_json
    assert "speculative" not in text
    assert parse_manifest(text).to_json() == text
