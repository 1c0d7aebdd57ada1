"""What the trees read of a row's newest events, against a loop over its events."""

import numpy as np
import pytest

from gmeta.evaluation.baselines import block_rows
from gmeta.evaluation.baselines.block_rows import read_rows, sample_rows
from gmeta.evaluation.baselines.episode_rows import EpisodeRows
from gmeta.evaluation.baselines.tree_features import make_recency_columns
from metaio import Dataset, open_dataset
from tests.metaio.prepare.test_events import log, prepared, schema

MOST = 4


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return open_dataset(prepared(tmp_path_factory.mktemp("events"), log(), schema()))


@pytest.fixture(autouse=True)
def _few_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_rows, "NEWEST_EVENTS", MOST)


def known_by(dataset: Dataset, rows: EpisodeRows, column: int) -> list[list[int]]:
    """The newest events that each row knows, the newest first, read off the stored block."""
    (block,) = (dataset.read_block("train", at) for at in range(dataset.split("train").num_blocks))
    num_multi, found = len(dataset.features.multi), []
    starts = np.concatenate([[0], np.cumsum(block.multi_lengths_NM.sum(axis=1))])
    for row in range(rows.num_rows):
        first = int(rows.row_offsets_T1[rows.episode_N[row]])
        lengths = block.multi_lengths_NM[first].tolist()
        begin = int(starts[first]) + sum(lengths[: num_multi + column])
        positions = block.multi_positions_V[begin : begin + int(block.events_before_N[row])]
        found.append(block.unique_ids_U[positions][::-1][:MOST].tolist())
    return found


def test_the_newest_events_of_a_rows_own_value_are_counted(dataset: Dataset) -> None:
    (rows,) = read_rows(dataset, "train")
    columns = make_recency_columns(rows, dataset.features)
    for at, feature in enumerate(dataset.features.events):
        name = feature.name.removeprefix("events.")
        own = [one.name for one in dataset.features.single].index(name)
        of_rows = known_by(dataset, rows, at)
        same = [
            [one == ids for one in known]
            for known, ids in zip(of_rows, rows.ids_NF[:, own], strict=True)
        ]
        assert columns["known events"].tolist() == list(map(len, of_rows))
        assert columns[f"{feature.name}: same"].tolist() == list(map(sum, same))
        ago = [each.index(True) + 1 if any(each) else np.nan for each in same]
        np.testing.assert_array_equal(columns[f"{feature.name}: events ago"], ago)
        assert sum(map(any, same)) > 20
        assert max(map(len, of_rows)) == MOST


def test_rows_take_their_events_along(dataset: Dataset) -> None:
    (rows,) = read_rows(dataset, "train")
    columns = make_recency_columns(rows, dataset.features)
    some = make_recency_columns(rows.select_episodes(np.array([3, 0])), dataset.features)
    begin, end = rows.row_offsets_T1[:-1], rows.row_offsets_T1[1:]
    order = np.concatenate([np.arange(begin[task], end[task]) for task in (3, 0)])
    for name, values in columns.items():
        np.testing.assert_array_equal(some[name], values[order])
    sampled = make_recency_columns(sample_rows(dataset, "train", 10**6, 0), dataset.features)
    for name, values in columns.items():
        np.testing.assert_array_equal(sampled[name], values)
