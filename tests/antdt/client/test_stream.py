"""UnitStream: what a synchronous rank takes, trains and reports, against a real service."""

import time
from collections.abc import Iterator

import pytest

from gmeta.antdt import DatasetSpec, LeaseLostError, ShardClient
from gmeta.antdt.client.stream import UnitRange, UnitStream
from tests.antdt.trained import trained_ranges
from tests.support.waiting import wait_until


@pytest.fixture
def client(address: str) -> Iterator[ShardClient]:
    with ShardClient(address, "rank0") as made:
        made.register_dataset(DatasetSpec("d", 10, 4, seed=2))
        yield made


@pytest.fixture
def stream(client: ShardClient) -> Iterator[UnitStream]:
    made = UnitStream(client, "d", 0, prefetch_shards=2)
    yield made
    made.close()


def units(taken: list[tuple[int, int]]) -> list[int]:
    return [unit for first, number in taken for unit in range(first, first + number)]


def in_model(client: ShardClient) -> int:
    """Units that the service knows to be in the model."""
    (entry,) = client.prepare_checkpoint(f"at-{time.monotonic()}", 0).datasets
    return sum(end - start for start, end in trained_ranges(entry))


def test_steps_of_any_size_take_each_unit_once_and_then_the_epoch_ends(
    client: ShardClient, stream: UnitStream
) -> None:
    taken = [units(stream.take_units(3)) for _ in range(4)]
    assert [len(step) for step in taken] == [3, 3, 3, 1]
    assert sorted(unit for step in taken for unit in step) == list(range(10))
    assert stream.take_units(3) == []
    assert not stream.ended
    for step in taken:
        stream.mark_trained(len(step))
    wait_until(lambda: stream.ended)
    assert client.held == []


def test_what_was_trained_is_reported_and_no_more(client: ShardClient, stream: UnitStream) -> None:
    stream.take_units(9)
    stream.mark_trained(3)
    stream.flush()
    assert in_model(client) == 3
    stream.mark_trained(2)  # the first shard's last unit and one of the next
    stream.flush()
    assert in_model(client) == 5


def test_what_was_put_back_comes_in_the_same_order(client: ShardClient, stream: UnitStream) -> None:
    first = units(stream.take_units(2))
    dropped = units(stream.take_units(6))  # over the ends of two shards
    stream.put_back(6)
    again = [units(stream.take_units(n)) for n in (1, 5, 2)]
    assert [unit for part in again[:2] for unit in part] == dropped
    assert sorted(first + [unit for part in again for unit in part]) == list(range(10))
    stream.mark_trained(10)
    wait_until(lambda: stream.ended)


def test_what_is_in_the_model_cannot_be_put_back(client: ShardClient, stream: UnitStream) -> None:
    stream.take_units(5)
    stream.mark_trained(2)
    with pytest.raises(ValueError, match=r"^2 more units were put back than were taken$"):
        stream.put_back(5)
    stream.mark_trained(0)


def test_progress_is_reported_without_being_asked(client: ShardClient, stream: UnitStream) -> None:
    stream.take_units(2)
    stream.mark_trained(2)
    wait_until(lambda: in_model(client) == 2)


def test_a_step_waits_for_no_other_rank(address: str, client: ShardClient) -> None:
    with ShardClient(address, "rank1") as other:
        (held,) = other.lease("d", 0, 1)
        stream = UnitStream(client, "d", 0, prefetch_shards=3)
        assert len(units(stream.take_units(10))) == 10 - held.num_units
        assert stream.take_units(10) == []
        stream.mark_trained(10 - held.num_units)
        assert not stream.ended
        other.release([held])
        rest: list[int] = []
        wait_until(lambda: bool(rest.extend(units(stream.take_units(10))) or rest))
        assert rest == list(range(held.start_unit, held.end_unit))
        stream.close()


def test_a_lost_shard_stops_the_rank(client: ShardClient, stream: UnitStream) -> None:
    taken = units(stream.take_units(4))
    client.restore(None)  # the job was rolled back behind this rank's back
    with pytest.raises(LeaseLostError) as lost:
        stream.mark_trained(len(taken))
    assert "the job was rolled back to a checkpoint" in str(lost.value)


def test_more_units_than_were_taken_cannot_have_been_trained(stream: UnitStream) -> None:
    stream.take_units(2)
    with pytest.raises(ValueError) as beyond:
        stream.mark_trained(5)
    assert str(beyond.value) == ("1 more units were trained than were taken. Count each unit once.")


def test_a_rank_may_hold_the_small_shards_of_many_large_batches(client: ShardClient) -> None:
    client.register_dataset(DatasetSpec("small", 6_000, 1))
    stream = UnitStream(client, "small", 0, prefetch_shards=256)
    for _ in range(3):  # one that trains, and those made ahead
        assert sum(number for _, number in stream.take_units(2_000)) == 2_000
    assert len(client.held) == 6_000
    stream.mark_trained(6_000)
    stream.flush()
    assert client.held == []
    stream.close()


def test_a_budget_takes_the_units_whose_costs_come_nearest(
    client: ShardClient, stream: UnitStream
) -> None:
    """Unit u costs u + 1; a unit belongs to the budget that holds more than half of it."""
    taken: list[list[int]] = []

    def costs_of(held: UnitRange) -> list[float]:
        return [unit + 1.0 for unit in units([held])]

    while step := units(stream.take_units(8.0, costs_of)):
        taken.append(step)
    order = [unit for step in taken for unit in step]
    assert sorted(order) == list(range(10))
    expected: list[list[int]] = []
    for unit in order:
        spent = sum(at + 1 for at in expected[-1]) if expected else 8
        if spent >= 8 or 8 - spent < (unit + 1) / 2:
            expected.append([])
        expected[-1].append(unit)
    assert taken == expected


def test_what_is_leased_ahead_is_taken_next(stream: UnitStream) -> None:
    (first,) = stream.take_units(1)
    wait_until(lambda: len(stream.leased_ahead) == 2)
    ahead = stream.leased_ahead
    assert {first.first, *(part.first for part in ahead)} == {0, 4, 8}
    taken = [unit for n in (9, 9) for unit in units(stream.take_units(n))]
    assert taken[-sum(part.number for part in ahead) :] == units(ahead)
    assert stream.leased_ahead == []
