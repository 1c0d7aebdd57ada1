"""Views of stored episodes: which rows they hold, and that they are nobody's secret."""

from collections import Counter
from itertools import pairwise

import numpy as np
import torch

from gmeta.data.augment import resplit
from gmeta.data.row_groups import find_groups
from gmeta.data.support_views import STORED, SupportView
from gmeta.evaluation.baselines.episode_rows import EpisodeRows
from metaio.ragged import find_firsts
from metaio.read.batch import TaskBatch
from tests.data.test_augment import FEATURES, SIZES, Row, parts, rows_of, some_tasks
from tests.support.reference import batch_of


def sides_of(batch: TaskBatch) -> list[tuple[list[Row], list[Row]]]:
    """The support and the query rows of each episode."""
    support = batch.support_lengths_T.tolist()
    return [(rows[:size], rows[size:]) for rows, size in zip(rows_of(batch), support, strict=True)]


def stored() -> TaskBatch:
    batch = batch_of(some_tasks(), FEATURES)
    return TaskBatch(**{**vars(batch), "row_id_N": torch.arange(batch.num_rows) * 10})


def test_draw_zero_is_what_is_stored() -> None:
    batch = stored()
    assert STORED.of(batch) is batch
    assert SupportView(draw=0) == STORED


def test_a_draw_shuffles_rows_inside_their_episodes_and_keeps_the_sizes() -> None:
    batch = stored()
    for draw in range(1, 6):
        drawn = SupportView(draw).of(batch)
        assert [(len(s), len(q)) for s, q in sides_of(drawn)] == list(SIZES)
        for before, after in zip(rows_of(batch), rows_of(drawn), strict=True):
            assert Counter(before) == Counter(after)
        label_of = dict(zip(batch.row_id_N.tolist(), batch.label_N.tolist(), strict=True))
        assert [label_of[row] for row in drawn.row_id_N.tolist()] == drawn.label_N.tolist()


def test_every_row_is_asked_for_in_about_its_share_of_draws() -> None:
    batch = batch_of(some_tasks()[:1], FEATURES)  # 4 support rows, 6 query rows
    asked: Counter[Row] = Counter()
    for draw in range(1, 401):
        asked.update(sides_of(SupportView(draw).of(batch))[0][1])
    # Binomial of 400 draws and p = 0.6: five standard deviations are 49.
    assert all(abs(asked[row] - 240) < 49 for row in rows_of(batch)[0])


def test_a_draw_uses_the_shuffle_of_training() -> None:
    """The same rows in the same order as resplit with the same key; only the sizes are its own."""
    from gmeta.data import support_views as views
    from gmeta.data.hash_rng import mix_key

    batch = stored()
    key = mix_key(views.SEED, views._DRAW_STREAM, 3)
    assert rows_of(SupportView(3).of(batch)) == rows_of(resplit(batch, 0.2, 0.8, key))


def test_few_support_rows_are_among_many_and_the_query_rows_stay() -> None:
    batch = stored()
    whole = sides_of(batch)
    shown = {most: sides_of(SupportView(max_support=most).of(batch)) for most in (0, 1, 3, 5, 20)}
    for most, episodes in shown.items():
        for (support, query), (all_support, all_query) in zip(episodes, whole, strict=True):
            assert query == all_query
            assert len(support) == min(most, len(all_support))
            assert not Counter(support) - Counter(all_support)
    for few, many in pairwise(shown.values()):
        for (less, _), (more, _) in zip(few, many, strict=True):
            assert more[: len(less)] == less
    assert Counter(map(tuple, (support for support, _ in shown[20]))) == Counter(
        tuple(sorted(support, key=more.index))
        for (support, _), (more, _) in zip(whole, shown[20], strict=True)
    )


def test_the_first_support_rows_are_no_special_ones() -> None:
    """Which of eight support rows is shown alone goes by the task: each place has its turn."""
    first = Counter(
        int(
            SupportView(max_support=1).order_rows(
                EpisodeRows(
                    np.array([task]),
                    np.array([0, 10]),
                    np.array([8]),
                    np.zeros(10),
                    np.zeros((10, 0), np.int64),
                    (),
                    np.zeros((10, 0), np.float32),
                )
            )[0][0]
        )
        for task in range(800)
    )
    assert set(first) == set(range(8))
    assert max(first.values()) < 160


def test_a_draw_keeps_a_positive_and_the_negatives_drawn_for_it_together() -> None:
    batch = stored()
    batch.label_N[:] = torch.arange(batch.num_rows) % 3 == 0
    group_of = dict(zip(batch.row_id_N.tolist(), find_groups(batch).tolist(), strict=True))
    torn = []
    for draw in range(1, 6):
        drawn = SupportView(draw, in_groups=True).of(batch)
        assert sorted(drawn.row_id_N.tolist()) == batch.row_id_N.tolist()
        support_N = find_firsts(np.diff(drawn.row_offsets_T1), drawn.support_lengths_T)
        group_N = np.array([group_of[row] for row in drawn.row_id_N.tolist()])
        assert not set(group_N[support_N]) & set(group_N[~support_N])
        torn += np.diff(group_N)[np.diff(drawn.row_id_N.numpy()) != 10].tolist()
    assert 0 not in torn  # rows of a group stay side by side, in their order


def test_a_view_of_a_part_is_a_part_of_the_view() -> None:
    tasks = some_tasks()
    for view in (SupportView(2), SupportView(max_support=2), SupportView(1, 3)):
        whole = sides_of(view.of(batch_of(tasks, FEATURES)))
        split = [sides_of(view.of(part)) for part in parts(tasks, [0, 2, 5, len(tasks)])]
        assert [one for part in split for one in part] == whole
