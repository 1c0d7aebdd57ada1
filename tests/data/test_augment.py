"""Augmented batches: what may change, what must not, and that chance depends on names alone."""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from gmeta.config.inputs import AugmentConfig
from gmeta.data.augment import augment_batch, augment_batches, check_augment, drop_ids, resplit
from metaio import open_dataset
from metaio.format.features import OOV_ROW, Features
from metaio.read.batch import TaskBatch, empty_batch
from metaio.read.compose import compose
from tests.metaio.prepare.test_events import log, prepared, schema, stored_rows
from tests.support.commands import SMALL_MODEL, losses, succeed, write_config
from tests.support.reference import Task, batch_of, random_task, some_features

FEATURES = some_features(2, 2, 1)
TABLES = [table.name for table in FEATURES.tables]
SIZES = ((4, 6), (1, 0), (0, 3), (7, 2), (1, 1), (12, 9), (0, 1))

# A row as a model sees it: single ids, bags, dense values, label.
Row = tuple[tuple[int, ...], tuple[tuple[int, ...], ...], tuple[float, ...], float]


def some_tasks(seed: int = 0) -> list[Task]:
    rng = random.Random(seed)
    return [random_task(FEATURES, support, query, rng) for support, query in SIZES]


def rows_of(batch: TaskBatch) -> list[list[Row]]:
    """The rows of every episode, read out one by one."""
    ids = batch.unique_ids_U.tolist()
    bags = iter(batch.multi_positions_V.tolist())
    rows: list[Row] = [
        (
            tuple(ids[position] for position in batch.positions_NF[row].tolist()),
            tuple(
                tuple(ids[next(bags)] for _ in range(length))
                for length in batch.multi_lengths_NM[row].tolist()
            ),
            tuple(batch.dense_NK[row].tolist()),
            float(batch.label_N[row]),
        )
        for row in range(batch.num_rows)
    ]
    offsets = batch.row_offsets_T1.tolist()
    return [rows[start:stop] for start, stop in itertools.pairwise(offsets)]


def one_batch(
    config: AugmentConfig, batch: TaskBatch, seed: int = 0, epoch: int = 0, step: int = 0
) -> TaskBatch:
    (changed,) = augment_batches([batch], config, FEATURES, seed, epoch, step)
    return changed


def positions_seen_by_table(
    batch: TaskBatch, features: Features
) -> list[dict[tuple[str, int], set[int]]]:
    """For every episode, the positions at which each (table, id) stands."""
    ids = batch.unique_ids_U.tolist()
    bags = iter(batch.multi_positions_V.tolist())
    offsets = batch.row_offsets_T1.tolist()
    seen: list[dict[tuple[str, int], set[int]]] = [{} for _ in offsets[1:]]
    for episode, (start, stop) in enumerate(itertools.pairwise(offsets)):
        for row in range(start, stop):
            pairs = list(zip(features.single, batch.positions_NF[row].tolist(), strict=True))
            for feature, length in zip(
                features.multi, batch.multi_lengths_NM[row].tolist(), strict=True
            ):
                pairs += [(feature, next(bags)) for _ in range(length)]
            for feature, position in pairs:
                key = (feature.table, ids[position])
                seen[episode].setdefault(key, set()).add(position)
    return seen


def dropped_by_hand(
    rows: list[list[Row]], dropped: set[tuple[str, int]], features: Features
) -> list[list[Row]]:
    """The rows with every dropped (table, id) replaced by the unknown id."""

    def mapped(table: str, one: int) -> int:
        return OOV_ROW if (table, one) in dropped else one

    return [
        [
            (
                tuple(mapped(f.table, one) for f, one in zip(features.single, single, strict=True)),
                tuple(
                    tuple(mapped(f.table, one) for one in bag)
                    for f, bag in zip(features.multi, bags, strict=True)
                ),
                dense,
                label,
            )
            for single, bags, dense, label in episode
        ]
        for episode in rows
    ]


def dropped_ids(before: TaskBatch, after: TaskBatch) -> set[tuple[str, int]]:
    """The (table, id) of the single columns that became unknown."""
    return {
        (feature.table, was)
        for olds, news in zip(rows_of(before), rows_of(after), strict=True)
        for old, new in zip(olds, news, strict=True)
        for feature, was, now in zip(FEATURES.single, old[0], new[0], strict=True)
        if was != now
    }


def test_nothing_changes_unless_asked_for() -> None:
    batch = batch_of(some_tasks(), FEATURES)
    assert one_batch(AugmentConfig(), batch) is batch


def test_a_resplit_keeps_every_row_in_its_episode() -> None:
    batch = batch_of(some_tasks(), FEATURES)
    changed = one_batch(AugmentConfig(resplit_support=True), batch)
    for before, after in zip(rows_of(batch), rows_of(changed), strict=True):
        assert Counter(before) == Counter(after)
    assert torch.equal(changed.row_offsets_T1, batch.row_offsets_T1)
    assert torch.equal(changed.task_T, batch.task_T)
    assert rows_of(changed) != rows_of(batch)


def test_a_resplit_without_shares_keeps_how_many_rows_support_a_task() -> None:
    batch = batch_of(some_tasks(), FEATURES)
    changed = resplit(batch, 0.2, 0.0, key=1)
    assert changed.support_lengths_T.equal(batch.support_lengths_T)
    assert not changed.label_N.equal(batch.label_N)


def test_a_resplit_leaves_both_sides_a_row_and_single_rows_alone() -> None:
    batch = batch_of(some_tasks(), FEATURES)
    for share in (1e-9, 0.5, 1.0):
        changed = resplit(batch, share, share, key=1)
        for (support, query), drawn in zip(SIZES, changed.support_lengths_T.tolist(), strict=True):
            rows = support + query
            wanted = support if rows == 1 else min(max(round(share * rows), 1), rows - 1)
            assert drawn == wanted


def test_support_shares_fill_the_range_evenly() -> None:
    tasks = [random_task(FEATURES, 50, 50, random.Random(0))] * 400
    batch = batch_of(tasks, FEATURES)
    support_T = resplit(batch, 0.2, 0.8, key=5).support_lengths_T.numpy()
    assert support_T.min() >= 20
    assert support_T.max() <= 80
    counts, _ = np.histogram(support_T, bins=6, range=(20, 80))
    assert counts.min() > 400 / 6 * 0.6


def test_every_row_supports_in_some_epochs_and_is_asked_in_others() -> None:
    batch = batch_of([random_task(FEATURES, 4, 4, random.Random(3))], FEATURES)
    batch.label_N = torch.arange(8, dtype=torch.float32)
    config = AugmentConfig(resplit_support=True, min_support_share=0.5, max_support_share=0.5)
    times_in_support = np.zeros(8)
    for epoch in range(200):
        changed = one_batch(config, batch, epoch=epoch)
        times_in_support[changed.label_N[:4].long().numpy()] += 1
    # 100 are expected of each row, with a standard deviation of 7.
    assert times_in_support.min() > 65
    assert times_in_support.max() < 135


def test_dropped_ids_become_the_unknown_id_everywhere_in_the_batch() -> None:
    batch = batch_of(some_tasks(), FEATURES)
    changed = one_batch(AugmentConfig(oov_dropout=0.4), batch)
    unknown = dropped_ids(batch, changed)
    for episode_before, episode_after in zip(rows_of(batch), rows_of(changed), strict=True):
        for old, new in zip(episode_before, episode_after, strict=True):
            for feature, bag, now in zip(FEATURES.multi, old[1], new[1], strict=True):
                unknown |= {(feature.table, a) for a, b in zip(bag, now, strict=True) if a != b}
    assert unknown
    assert rows_of(changed) == dropped_by_hand(rows_of(batch), unknown, FEATURES)


@pytest.mark.parametrize("shared_table", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_an_episode_sees_every_id_at_one_position(shared_table: bool, rate: float) -> None:
    features = some_features(2, 2, 1, shared_table=shared_table)
    rng = random.Random(1)
    batch = batch_of([random_task(features, 5, 5, rng) for _ in range(6)], features)
    changed = drop_ids(batch, rate, np.ones(len(features.tables), dtype=bool), key=9)
    for episode in positions_seen_by_table(changed, features):
        assert {len(positions) for positions in episode.values()} == {1}
    # What is fetched is what is used, table by table.
    used = {*changed.positions_NF.flatten().tolist(), *changed.multi_positions_V.tolist()}
    assert used == set(range(changed.unique_ids_U.numel()))
    assert changed.unique_lengths_B.sum() == changed.unique_ids_U.numel()
    if rate == 1.0:
        assert changed.unique_ids_U.unique().tolist() == [OOV_ROW]


def test_an_id_that_the_batch_fetches_twice_is_dropped_twice() -> None:
    # Two blocks joined: id 2 of the only table stands at positions 0 and 2, one for each episode.
    batch = TaskBatch(
        task_T=torch.tensor([0, 1]), row_offsets_T1=torch.tensor([0, 1, 2]),
        support_lengths_T=torch.tensor([0, 0]), label_N=torch.zeros(2), dense_NK=torch.zeros(2, 0),
        unique_ids_U=torch.tensor([2, 0, 2]), unique_lengths_B=torch.tensor([3]),
        positions_NF=torch.tensor([[0, 1], [2, 1]], dtype=torch.int32),
        multi_positions_V=torch.zeros(0, dtype=torch.int32),
        multi_lengths_NM=torch.zeros(2, 0, dtype=torch.int32),
    )  # fmt: skip
    changed = drop_ids(batch, 1.0, np.array([True]), key=0)
    assert changed.unique_ids_U.tolist() == [OOV_ROW]
    assert changed.positions_NF.tolist() == [[0, 0], [0, 0]]


def test_the_share_of_dropped_ids_is_the_rate() -> None:
    num_ids = 20_000
    batch = empty_batch(1, 1, 0, 0)
    batch.unique_ids_U = torch.arange(1, num_ids + 1)
    batch.unique_lengths_B = torch.tensor([num_ids])
    kept = drop_ids(batch, 0.1, np.array([True]), key=4).unique_ids_U
    # The standard deviation of the share is 0.002.
    assert 1 - (kept.numel() - 1) / num_ids == pytest.approx(0.1, abs=0.01)


def test_only_the_named_tables_lose_ids() -> None:
    batch = batch_of(some_tasks(), FEATURES)
    changed = one_batch(AugmentConfig(oov_dropout=1.0, oov_tables=("s1",)), batch)
    everything_of_s1 = {("s1", one) for one in range(FEATURES.tables[TABLES.index("s1")].num_rows)}
    assert rows_of(changed) == dropped_by_hand(rows_of(batch), everything_of_s1, FEATURES)


def parts(tasks: Sequence[Task], cuts: Sequence[int]) -> list[TaskBatch]:
    """The step's tasks as consecutive ranks would get them."""
    whole = batch_of(tasks, FEATURES)
    batches = []
    for start, stop in itertools.pairwise(cuts):
        batch = batch_of(tasks[start:stop], FEATURES)
        batch.task_T = whole.task_T[start:stop]
        batches.append(batch)
    return batches


def test_ranks_change_their_share_as_one_rank_changes_the_whole() -> None:
    tasks = some_tasks()
    config = AugmentConfig(resplit_support=True, oov_dropout=0.3)
    whole = one_batch(config, batch_of(tasks, FEATURES), seed=7, epoch=2, step=5)
    for cuts in ((0, 3, 7), (0, 1, 2, 6, 7), (0, 0, 7)):
        shares = [one_batch(config, batch, seed=7, epoch=2, step=5) for batch in parts(tasks, cuts)]
        assert [episode for share in shares for episode in rows_of(share)] == rows_of(whole)
        support = torch.cat([share.support_lengths_T for share in shares])
        assert torch.equal(support, whole.support_lengths_T)


def test_a_resumed_epoch_goes_on_as_it_would_have() -> None:
    batches = [batch_of(some_tasks(seed), FEATURES) for seed in range(4)]
    config = AugmentConfig(resplit_support=True, oov_dropout=0.3)
    whole = [rows_of(one) for one in augment_batches(batches, config, FEATURES, 1, 3, 0)]
    rest = [rows_of(one) for one in augment_batches(batches[2:], config, FEATURES, 1, 3, 2)]
    assert rest == whole[2:]


def test_seeds_epochs_and_steps_draw_differently() -> None:
    batch = batch_of(some_tasks(), FEATURES)
    split = AugmentConfig(resplit_support=True)
    drop = AugmentConfig(oov_dropout=0.5)
    for config, others in (
        (split, ({"seed": 1}, {"epoch": 1})),
        (drop, ({"seed": 1}, {"epoch": 1}, {"step": 1})),
    ):
        first = rows_of(one_batch(config, batch))
        assert rows_of(one_batch(config, batch)) == first
        for other in others:
            assert rows_of(one_batch(config, batch, **other)) != first
    # The split of a task lasts for an epoch, whichever step it comes in.
    assert rows_of(one_batch(split, batch, step=1)) == rows_of(one_batch(split, batch))


def test_a_batch_is_never_changed_in_place() -> None:
    # A batch may share the memory of a cached block.
    batch = batch_of(some_tasks(), FEATURES)
    copy = batch.map(torch.clone)
    one_batch(AugmentConfig(resplit_support=True, oov_dropout=0.5), batch)
    for name in vars(copy):
        assert torch.equal(getattr(batch, name), getattr(copy, name))


def test_a_rank_without_episodes_stays_without() -> None:
    empty = empty_batch(len(TABLES), 2, 2, 1)
    changed = one_batch(AugmentConfig(resplit_support=True, oov_dropout=0.5), empty)
    assert changed.num_tasks == changed.num_rows == changed.unique_ids_U.numel() == 0
    assert changed.unique_lengths_B.tolist() == [0] * len(TABLES)


@pytest.mark.distributed
def test_augmented_training_is_the_same_on_1_rank_and_2(tmp_path: Path, click_logs: Path) -> None:
    config = write_config(tmp_path / "train.toml", click_logs, tmp_path / "stored")
    asked = ["augment.resplit_support=true", "augment.oov_dropout=0.2", "outer.lr_schedule=linear"]
    found = {}
    for name, arguments in {
        "stored": [],
        "one": [*asked, f"run.dir={tmp_path / 'one'}"],
        "two": [*asked, f"run.dir={tmp_path / 'two'}", "--nproc-per-node=2"],
    }.items():
        succeed("train", config, *SMALL_MODEL, *arguments)
        found[name] = losses(tmp_path / name)
    assert found["two"] == pytest.approx(found["one"], rel=1e-5)
    assert found["one"] != pytest.approx(found["stored"], rel=1e-2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            AugmentConfig(min_support_share=0.9),
            "augment.min_support_share = 0.9 is above augment.max_support_share = 0.8: "
            "a share between them is drawn. Swap them",
        ),
        (
            AugmentConfig(oov_tables=("s0", "item")),
            "augment.oov_tables names 'item', which is no table of the dataset: "
            "it has s0, s1, m0, m1. Name some of them, or [] for all",
        ),
    ],
)
def test_a_config_that_does_not_fit_is_refused(config: AugmentConfig, message: str) -> None:
    with pytest.raises(ValueError, match="augment") as caught:
        check_augment(config, FEATURES)
    assert str(caught.value) == message


def test_rows_on_new_sides_know_the_events_that_they_knew(tmp_path: Path) -> None:
    body = schema(negatives={"item": "item", "columns": ["kind"], "per_positive": 1})
    dataset = open_dataset(prepared(tmp_path, log(), body))
    block = dataset.read_block("train", 0)
    batch = compose(dataset.features, [(block, np.arange(block.num_episodes))])
    config = AugmentConfig(resplit_support=True, min_support_share=0.2, max_support_share=0.6)
    found = augment_batch(batch, config, dataset.features, 3, 1, 0)
    assert not torch.equal(found.dense_NK, batch.dense_NK)
    # By the row's number; a negative has its positive's.
    known = {row.number: row.events for row in stored_rows(batch)}
    for row in stored_rows(found):
        assert row.events == known[row.number]
