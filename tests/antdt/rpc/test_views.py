"""What operators are shown, and how much of the ledger is looked at for it."""

import pytest

from gmeta.antdt.ledger.table import ShardTable
from gmeta.antdt.model import ShardState
from gmeta.antdt.rpc import operator_views as views
from gmeta_protos.antdt.v1 import shard_service_pb2 as pb
from tests.antdt.driver import Service

COMMITTED, OPEN = pb.SHARD_STATE_DONE_COMMITTED, pb.SHARD_STATE_DONE_OPEN


def positions(service: Service, state: int, page_size: int = 1000) -> list[int]:
    """Of all pages, one after the other."""
    found, token = list[int](), ""
    while True:
        page = views.list_shards(service.committer.ledger, "d", state, page_size, token)
        found += [shard.position for shard in page.shards]
        token = page.next_page_token
        if not token:
            return found


def table_of(service: Service, num_shards: int) -> ShardTable:
    service.register_dataset(num_units=num_shards, units_per_shard=1)
    table: ShardTable = service.state.tables["d"]
    return table


@pytest.mark.parametrize("page_size", [1, 2, 1000])
def test_done_shards_are_listed_as_committed_or_open(page_size: int) -> None:
    service = Service()
    table = table_of(service, 12)
    for position in (0, 1, 4, 5, 6, 9, 11):
        table.set_state(position, ShardState.DONE)
    table.committed = [(0, 1), (4, 6)]
    assert positions(service, COMMITTED, page_size) == [0, 4, 5]
    assert positions(service, OPEN, page_size) == [1, 6, 9, 11]
    assert positions(service, pb.SHARD_STATE_TODO, page_size) == [2, 3, 7, 8, 10]


def test_a_list_of_few_shards_looks_at_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer answers it: a look at each of millions of shards would keep all others waiting."""
    service = Service()
    table = table_of(service, 3_000_000)
    table.states[:] = bytes([ShardState.DONE]) * 3_000_000
    table.recount()
    table.committed = [(0, 2_999_998)]
    asked = []
    real = ShardTable.state_of
    monkeypatch.setattr(ShardTable, "state_of", lambda self, at: asked.append(at) or real(self, at))
    assert positions(service, OPEN) == [2_999_998, 2_999_999]
    table.committed = []
    assert positions(service, COMMITTED) == []
    assert len(asked) <= 4
