"""Rows that stand more than once, against a search through all of them."""

import numpy as np
import pytest

from gmeta.tables.repeated_rows import Ints, RepeatedRows, ascend

NUM_ROWS = 90


def expected_places(rows: list[int]) -> list[tuple[int, int]]:
    """(place, last place of the same row) of every row that stands again later."""
    last = {row: place for place, row in enumerate(rows)}
    return [(place, last[row]) for place, row in enumerate(rows) if last[row] != place]


def some_parts(ranks: int, ascending: bool) -> list[Ints]:
    """What so many ranks ask for, the last of them for little."""
    generator = np.random.default_rng(ranks)
    parts = [np.flatnonzero(generator.random(NUM_ROWS) < 0.3) for _ in range(ranks)]
    parts[-1] = parts[-1][:4]
    return parts if ascending else [generator.permutation(part) for part in parts]


@pytest.mark.parametrize("ascending", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_places_of_rows_that_stand_again_are_found(ranks: int, ascending: bool) -> None:
    repeated = RepeatedRows(NUM_ROWS)
    # Whatever an earlier search left behind.
    for parts in (some_parts(5, ascending), some_parts(ranks, ascending)):
        again_A, last_A = repeated.places(parts, ascending)
        found = list(zip(again_A.tolist(), last_A.tolist(), strict=True))
        assert found == expected_places(np.concatenate(parts).tolist())
        assert again_A.dtype == last_A.dtype == np.int64


def test_rows_of_one_part_may_repeat() -> None:
    parts = [np.array([4, 9, 4, 2]), np.array([9, 4])]
    again_A, last_A = RepeatedRows(NUM_ROWS).places(parts, ascend=False)
    assert again_A.tolist() == [0, 1, 2]
    assert last_A.tolist() == [5, 4, 5]


def test_rows_that_stand_once_have_no_places() -> None:
    for parts in ([np.arange(5)], [np.arange(5), np.arange(5, 9)], [np.arange(9)[::-1]]):
        in_order = all(map(ascend, parts))
        again_A, last_A = RepeatedRows(NUM_ROWS).places(parts, in_order)
        assert again_A.size == last_A.size == 0


def test_rows_ascend_where_each_is_above_the_one_before() -> None:
    for rows in ([], [4], [2, 4, 9]):
        assert ascend(np.array(rows, np.int64))
    for rows in ([4, 4], [2, 9, 4]):
        assert not ascend(np.array(rows, np.int64))
