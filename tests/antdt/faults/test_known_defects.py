"""Six defects of the nearest public relative, each as the behaviour that must hold here instead."""

import time

import pytest

from gmeta.access.errors import RefusedError
from gmeta.antdt.client.client import ShardClient
from gmeta.antdt.errors import ServiceUnavailableError
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.model import DatasetSpec, Outcome
from gmeta.antdt.service.shard_server import ServiceConfig, ShardServer
from tests.antdt.driver import TTL_S, Service, counts, drain_epoch


def test_a_shard_that_fails_too_often_is_kept_for_an_operator_and_the_epoch_does_not_end() -> None:
    """There: after four failures the shard is dropped in silence and the job reports success."""
    service = Service()
    service.register_dataset(num_units=8, units_per_shard=4, max_attempts=3)
    worker = service.worker("a")
    other = worker.grant()
    poison = worker.grant()
    for attempt in range(4):
        reply = worker.fail(poison.token, "corrupt-page", "page 7")
        assert reply.quarantined == (attempt == 3)
        if attempt < 3:
            poison = worker.grant()
    worker.complete(other.token)
    waiting = worker.lease()
    assert (waiting.cause, waiting.message) == (
        cmd.CAUSE_QUARANTINED,
        "shards of dataset 'd' quarantined because they failed too often: 1. Look with 'gmeta "
        "shards ls --state quarantined', then 'gmeta shards requeue' or 'gmeta shards skip' them.",
    )
    assert counts(service) == {"READY": 0, "DOING": 0, "DONE": 1, "SKIPPED": 0, "QUARANTINED": 1}
    service.call(cmd.Requeue("r1", "d", (poison.shard_index,)))
    assert [grant.shard_index for grant in drain_epoch(worker)] == [poison.shard_index]
    assert isinstance(worker.lease(), cmd.End)


def test_a_zombies_late_report_cannot_close_the_new_holders_shard() -> None:
    """There: the report names the shard, so whoever holds it now loses it."""
    service = Service()
    service.register_dataset(num_units=4, units_per_shard=4)
    zombie, heir = service.worker("a"), service.worker("b")
    old = zombie.grant()
    service.clock.advance(TTL_S + 1)
    new = heir.grant()
    assert (new.shard_index, new.token) != (old.shard_index, old.token)
    assert zombie.progress(old.token, 3) == Outcome.FENCED
    assert zombie.complete(old.token) == (Outcome.FENCED,)
    assert zombie.complete(new.token) == (Outcome.FENCED,)
    assert counts(service)["DOING"] == 1
    assert heir.complete(new.token) == (Outcome.ACCEPTED,)


def test_nobody_is_told_the_data_ended_while_a_shard_is_in_someones_hands() -> None:
    """There: END once nothing is left to hand out; the last shard is lost with its holder."""
    service = Service()
    service.register_dataset(num_units=4, units_per_shard=4)
    holder, idle = service.worker("a"), service.worker("b")
    token = holder.grant().token
    waiting = idle.lease()
    assert waiting.cause == cmd.CAUSE_IN_FLIGHT
    assert waiting.message == "shards of dataset 'd' in workers' hands: 1"
    service.clock.advance(TTL_S + 1)
    assert idle.complete(idle.grant().token) == (Outcome.ACCEPTED,)
    assert holder.complete(token) == (Outcome.FENCED,)
    assert isinstance(idle.lease(), cmd.End)


def test_tokens_never_repeat_over_restarts_so_a_stale_report_closes_nothing() -> None:
    """There: ids begin at 0 after a restart, and an old report closes another's shard."""
    service = Service()
    service.register_dataset(num_units=40, units_per_shard=4)
    worker = service.worker("a")
    before = [worker.grant().token for _ in range(3)]
    worker.release(*before)
    service.restart()
    worker.register()
    after = [worker.grant().token for _ in range(3)]
    assert min(after) > max(before)
    assert worker.complete(*before) == (Outcome.FENCED,) * 3
    assert counts(service)["DOING"] == 3


def test_a_report_during_recovery_leaves_no_shard_doing_for_ever() -> None:
    """There: recovery and reporting race, and a shard stays with a worker that never had it."""
    service = Service()
    service.register_dataset(num_units=8, units_per_shard=4)
    reporting, silent = service.worker("a"), service.worker("b")
    mine, theirs = reporting.grant(), silent.grant()
    service.restart()
    with pytest.raises(RefusedError) as refused:
        reporting.complete(mine.token)
    assert refused.value.reason == "FENCED_SERVICE_EPOCH"
    assert [grant.token for grant in reporting.register().leases] == [mine.token]
    assert reporting.complete(mine.token) == (Outcome.ACCEPTED,)
    service.clock.advance(TTL_S + 1)
    assert [grant.shard_index for grant in drain_epoch(reporting)] == [theirs.shard_index]
    assert isinstance(reporting.lease(), cmd.End)


def test_an_outage_is_an_error_and_never_an_end_of_data() -> None:
    """There: an hour without an answer ends the loop as if the data had ended."""
    server = ShardServer(ServiceConfig("127.0.0.1:0"))
    client = ShardClient(server.address, "a", outage_budget_s=1.0)
    client.register_dataset(DatasetSpec("d", 40, 4))
    seen = []

    def train_until_the_service_is_gone() -> None:
        for lease in client.shards("d"):
            seen.append(lease.shard_index)
            if len(seen) == 2:
                server.stop(0.0)

    with pytest.raises(ServiceUnavailableError) as outage:
        train_until_the_service_is_gone()
    assert len(seen) < 10
    assert str(outage.value).endswith("or look into its log; the data has NOT ended.")
    began_s = time.monotonic()
    client.close()
    assert time.monotonic() - began_s < 60
