"""The workloads follow the protocol, and gmeta's TaskBatch of one reads the same ids."""

import numpy as np
import pytest
import torch
from peers.ours import features_of, task_batch
from peers.workload import (
    MOVIELENS,
    Workload,
    has_movielens,
    initial_parameters,
    large_workload,
    movielens_workload,
    synthetic_tasks,
)

needs_movielens = pytest.mark.skipif(not has_movielens(), reason=f"{MOVIELENS} holds no tasks.npz")


@pytest.fixture(scope="module")
def tasks() -> dict[str, np.ndarray]:
    return synthetic_tasks(num_users=70, num_items=300)


def test_rows_are_the_ratings_of_each_user_in_order(tasks: dict[str, np.ndarray]) -> None:
    batch = movielens_workload(tasks, num_batches=2).batches[1]
    users = np.random.default_rng(1000).permutation(70)[32:64]
    row = 0
    for task, user in enumerate(users):
        assert batch.row_offsets_T1[task] == row
        ratings = range(tasks["warm_state_off"][user], tasks["warm_state_off"][user + 1])
        assert batch.support_lengths_T[task] == len(ratings) - 10
        for rating in ratings:
            item = tasks["warm_state_item"][rating]
            assert batch.label_N[row] == tasks["warm_state_y"][rating]
            assert batch.ids["rate"].ids_V[row] == tasks["item_rate"][item]
            found = batch.ids["zip"].ids_V[row]
            assert found == tasks["user_feat"][tasks["warm_state_user"][user], 3]
            actors = batch.ids["actor"]
            expected = slice(tasks["item_actor_off"][item], tasks["item_actor_off"][item + 1])
            np.testing.assert_array_equal(
                actors.ids_V[actors.offsets_N1[row] : actors.offsets_N1[row + 1]],
                tasks["item_actor_idx"][expected],
            )
            row += 1
    assert batch.num_rows == row


@needs_movielens
@pytest.mark.shared_data
def test_synthetic_tasks_have_the_arrays_and_sizes_of_the_real_ones() -> None:
    made_up, real = synthetic_tasks(), dict(np.load(MOVIELENS / "tasks.npz"))
    assert set(made_up) <= set(real)
    for name, values in made_up.items():
        assert values.dtype == real[name].dtype, name
        assert values.ndim == real[name].ndim, name
    lengths = np.diff(made_up["warm_state_off"])
    assert (lengths.min(), lengths.max()) == (13, 100)
    assert lengths.mean() == pytest.approx(np.diff(real["warm_state_off"]).mean(), rel=0.05)


@needs_movielens
@pytest.mark.shared_data
def test_movielens_ids_fit_the_shared_initial_tables() -> None:
    workload = movielens_workload(dict(np.load(MOVIELENS / "tasks.npz")), num_batches=82)
    init = initial_parameters(workload)
    for field in workload.fields:
        assert init[f"emb.{field.name}"].shape == (field.num_rows, 32)
        assert all(batch.ids[field.name].ids_V.max() < field.num_rows for batch in workload.batches)


def test_large_ids_fit_their_tables_and_repeat_like_popular_items() -> None:
    workload = large_workload(rows_per_table=1000, num_batches=4)
    ids = np.concatenate([batch.ids["item0"].ids_V for batch in workload.batches])
    assert ids.min() == 0
    assert ids.max() < 1000
    assert np.bincount(ids)[0] > 10 * len(ids) / 1000
    batch = workload.batches[0]
    assert batch.num_rows == 640
    user_ids = batch.ids["user3"].ids_V.reshape(32, 20)
    assert (user_ids == user_ids[:, :1]).all()


def test_initial_parameters_are_the_same_each_time() -> None:
    workload = large_workload(rows_per_table=100, num_batches=1)
    first, second = initial_parameters(workload), initial_parameters(workload)
    assert first.keys() == second.keys()
    for name, values in first.items():
        np.testing.assert_array_equal(values, second[name])
        assert values.dtype == np.float32


def read_by_hand(workload: Workload, number: int) -> list[list[tuple[str, int]]]:
    """(field, id) of each row of a batch, in the order of gmeta's features: single, then multi."""
    batch = workload.batches[number]
    fields = sorted(workload.fields, key=lambda field: field.multi)
    rows = []
    for row in range(batch.num_rows):
        pairs = []
        for field in fields:
            ids = batch.ids[field.name]
            pairs += [
                (field.name, int(i))
                for i in ids.ids_V[ids.offsets_N1[row] : ids.offsets_N1[row + 1]]
            ]
        rows.append(pairs)
    return rows


@pytest.mark.parametrize("name", ["movielens", "large"])
def test_a_task_batch_reads_the_same_ids(name: str, tasks: dict[str, np.ndarray]) -> None:
    workload = movielens_workload(tasks, 1) if name == "movielens" else large_workload(300, 1)
    features = features_of(workload)
    batch = task_batch(workload.batches[0], features)
    tables = [
        table.name
        for table, length in zip(features.tables, batch.unique_lengths_B.tolist(), strict=True)
        for _ in range(length)
    ]
    fetched = list(zip(tables, batch.unique_ids_U.tolist(), strict=True))
    assert len(set(fetched)) == len(fetched)
    lengths_N = batch.multi_lengths_NM.sum(dim=1).tolist()
    rows = []
    for singles, multis in zip(
        batch.positions_NF.tolist(), torch.split(batch.multi_positions_V, lengths_N), strict=True
    ):
        rows.append([fetched[position] for position in singles + multis.tolist()])
    assert rows == read_by_hand(workload, 0)
    assert batch.label_N.tolist() == workload.batches[0].label_N.tolist()
