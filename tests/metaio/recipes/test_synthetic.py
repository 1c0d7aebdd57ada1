"""The synthetic recipe: planted structure that adaptation can win, the same from the same seed."""

from pathlib import Path

import numpy as np
import pytest

from metaio import open_dataset
from metaio.recipes.synthetic import SyntheticConfig, prepare_synthetic
from tests.metaio.conftest import whole_split
from tests.metaio.recipes.synthetic_oracle import oracle

SMALL = SyntheticConfig(num_tasks=60, num_items=200)


def test_splits_hold_the_users_and_items_they_promise(tmp_path: Path) -> None:
    prepare_synthetic(str(tmp_path / "data"), SMALL)
    dataset = open_dataset(str(tmp_path / "data"))
    tasks, items = {}, {}
    for split in dataset.splits:
        episodes = whole_split(dataset, split)
        tasks[split] = {task for task, _, _ in episodes}
        items[split] = {row[2][0] for _, _, rows in episodes for row in rows}  # type: ignore[index]
        assert all(20 <= len(rows) <= 40 and len(rows) - s == 10 for _, s, rows in episodes)
    assert len(tasks["train"]) == 60
    assert not tasks["train"] & (tasks["valid"] | tasks["user-cold"])
    assert tasks["item-cold"] <= tasks["train"]
    assert tasks["user-item-cold"] == tasks["user-cold"]
    assert 0 not in items["train"] | items["user-cold"]
    assert items["item-cold"] == items["user-item-cold"] == {0}


def test_the_seed_decides_every_row(tmp_path: Path) -> None:
    prints = []
    for index, seed in enumerate((1, 1, 2)):
        out = str(tmp_path / str(index))
        prepare_synthetic(out, SyntheticConfig(num_tasks=20, num_items=50, seed=seed))
        prints.append(open_dataset(out).fingerprint)
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("cold_items", [False, True])
def test_there_is_much_to_win_by_adaptation_and_nothing_is_certain(cold_items: bool) -> None:
    found = oracle(SyntheticConfig(), num_users=150, num_tastes=1_000, cold_items=cold_items)
    assert 0.60 < found.without_adaptation < 0.70
    assert found.after_support > found.without_adaptation + 0.10
    assert found.after_support < found.knows_taste < 0.95


def test_clicks_follow_their_probabilities(tmp_path: Path) -> None:
    prepare_synthetic(str(tmp_path / "data"), SyntheticConfig(num_tasks=500))
    rows = whole_split(open_dataset(str(tmp_path / "data")), "train")
    labels = [row[0] for _, _, lines in rows for row in lines]  # type: ignore[index]
    assert set(labels) == {0.0, 1.0}
    assert 0.3 < np.mean(labels) < 0.5
