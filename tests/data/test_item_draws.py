"""Items that are drawn for a step: the same for all ranks, by their share, beside a batch's ids."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from gmeta.data.event_layout import EventColumns
from gmeta.data.item_counts import count_items
from gmeta.data.item_draws import ItemDraws
from metaio import Dataset, open_dataset
from metaio.read.batch import TaskBatch
from metaio.read.compose import compose
from tests.metaio.prepare.test_events import log, prepared, schema

COLUMNS = 0, 1  # the item, and its kind


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return open_dataset(prepared(tmp_path_factory.mktemp("draws"), log(), schema()))


def draws_of(dataset: Dataset, number: int) -> ItemDraws:
    ids_AM, count_A = count_items(dataset, "train", COLUMNS)
    tables = dataset.features.table_of_single[list(COLUMNS)]
    return ItemDraws(ids_AM, count_A / count_A.sum(), tables, number, seed=3)


def batch_of(dataset: Dataset, first: int, stop: int) -> TaskBatch:
    block = dataset.read_block("train", 0)
    return compose(dataset.features, [(block, np.arange(first, stop))])


def test_items_are_counted_in_the_rows_of_a_split(dataset: Dataset) -> None:
    ids_AM, count_A = count_items(dataset, "train", COLUMNS)
    counted: dict[int, int] = {}
    for index in range(dataset.split("train").num_blocks):
        block = dataset.read_block("train", index)
        for one in block.unique_ids_U[block.positions_NF[:, 0]].tolist():
            counted[one] = counted.get(one, 0) + 1
    counted.pop(0, None)
    assert dict(zip(ids_AM[:, 0].tolist(), count_A.tolist(), strict=True)) == counted
    assert ids_AM[:, 0].tolist() == sorted(counted)


def test_items_are_drawn_by_their_share_anew_each_step(dataset: Dataset) -> None:
    draws = draws_of(dataset, number=500)
    steps = [draws.draw_AM(*place) for place in ((0, 0), (0, 1), (1, 0))]
    assert not np.array_equal(steps[0], steps[1])
    assert not np.array_equal(steps[0], steps[2])
    np.testing.assert_array_equal(steps[0], draws_of(dataset, 500).draw_AM(0, 0))
    drawn = np.concatenate([draws.draw_AM(0, step)[:, 0] for step in range(200)])
    found_A = np.searchsorted(draws.ids_AM[:, 0], drawn)
    count_A = np.bincount(found_A, minlength=len(draws.share_A))
    expected_A = draws.share_A * len(drawn)
    # A sum of as many squares as there are items, each of mean 1.
    chi_square = float(((count_A - expected_A) ** 2 / expected_A).sum())
    assert chi_square < len(count_A) + 5 * (2 * len(count_A)) ** 0.5


def test_a_batch_gets_the_ids_of_the_steps_items(dataset: Dataset) -> None:
    draws = draws_of(dataset, number=40)
    batches = [batch_of(dataset, 0, 4), batch_of(dataset, 4, 9), batch_of(dataset, 0, 0)]
    longer = list(draws.add_to(batches, 2, 7))
    for at, (before, after) in enumerate(zip(batches[:2], longer[:2], strict=True)):
        np.testing.assert_array_equal(ids_at(after, "drawn_positions"), draws.draw_AM(2, 7 + at))
        for name in ("positions_NF", "event_positions"):
            np.testing.assert_array_equal(ids_at(after, name), ids_at(before, name))
            np.testing.assert_array_equal(tables_at(after, name), tables_at(before, name))
        np.testing.assert_array_equal(
            tables_at(after, "drawn_positions"), np.tile(draws.table_M, (40, 1))
        )
        # Twice drawn, or of two items, an id is asked for once.
        added = after.unique_ids_U.numel() - before.unique_ids_U.numel()
        distinct = [np.unique(column) for column in draws.draw_AM(2, 7 + at).T]
        assert added == sum(map(len, distinct))
        part = after.tasks(1, 3)
        assert torch.equal(part.drawn_positions, after.drawn_positions)
    # A rank without rows asks for none.
    assert longer[2].unique_ids_U.numel() == 0
    layout = draws.lay_out(longer[0])
    assert layout is not None
    share = dict(zip(draws.ids_AM[:, 0].tolist(), draws.share_A.tolist(), strict=True))
    wanted = np.log([40 * share[item] for item in layout.item_A.tolist()])
    np.testing.assert_allclose(layout.log_expected_A, wanted, rtol=1e-6)
    assert draws.lay_out(batches[0]) is None
    columns = EventColumns(COLUMNS)
    assert columns.lay_out(batches[0]).drawn is None
    assert replace(columns, draws=draws).lay_out(longer[0]).drawn is not None


def ids_at(batch: TaskBatch, name: str) -> Any:
    return batch.unique_ids_U[getattr(batch, name).to(torch.int64)].numpy()


def tables_at(batch: TaskBatch, name: str) -> Any:
    table_U = torch.arange(batch.unique_lengths_B.numel()).repeat_interleave(batch.unique_lengths_B)
    return table_U[getattr(batch, name).to(torch.int64)].numpy()
