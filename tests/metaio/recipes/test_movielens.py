"""The MovieLens recipe against the tasks that other implementations ran on, and on a tiny copy."""

import json
from pathlib import Path

import numpy as np
import pytest

from metaio import (
    BatchReader,
    DataError,
    Dataset,
    EpisodeRange,
    TaskBatch,
    open_dataset,
    read_ranges,
)
from metaio.recipes.movielens import MovieLensConfig, prepare_movielens
from metaio.recipes.movielens_files import read_melu_split
from tests.metaio.conftest import episodes_of_batch, whole_split
from tests.support.refusals import catch_message

SHARED = Path(__file__).parents[3] / "../shared/data"
NAMES = {
    "warm_state": "train", "user_cold_state": "user-cold", "item_cold_state": "item-cold",
    "user_and_item_cold_state": "user-item-cold",
}  # fmt: skip
needs_shared = pytest.mark.skipif(
    not (SHARED / "ml-1m").is_dir(), reason="MovieLens-1M does not stand beside the repository"
)


@pytest.fixture(scope="module")
def melu(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    out = str(tmp_path_factory.mktemp("ml") / "data")
    prepare_movielens(str(SHARED / "ml-1m"), out, MovieLensConfig(validation=True))
    return open_dataset(out)


def whole_batch(dataset: Dataset, split: str) -> TaskBatch:
    """All episodes of a split in stored order, as one batch."""
    with BatchReader(dataset, split, tasks_per_step=1 << 20, shuffle=False) as reader:
        return next(reader.batches(0))


@needs_shared
@pytest.mark.shared_data
def test_melu_split_and_seed_2019_give_the_common_tasks(melu: Dataset) -> None:
    tasks = np.load(SHARED / "ml-1m-melu/tasks.npz")
    item_row = {}
    for state, split in NAMES.items():
        offsets, ratings = tasks[f"{state}_off"], tasks[f"{state}_y"]
        batch = whole_batch(melu, split)
        assert batch.task_T.tolist() == tasks[f"{state}_user"].tolist()
        assert batch.row_offsets_T1.tolist() == offsets.tolist()
        assert batch.support_lengths_T.tolist() == (np.diff(offsets) - 10).tolist()
        assert batch.label_N.tolist() == ratings.tolist()
        ids_NF = batch.unique_ids_U[batch.positions_NF.long()].numpy()
        items = tasks[f"{state}_item"]
        if split == "train":
            item_row = dict(zip(items.tolist(), ids_NF[:, -1].tolist(), strict=True))
            assert len(set(item_row.values())) == len(item_row)
            assert 0 not in item_row.values()
        assert ids_NF[:, -1].tolist() == [item_row.get(item, 0) for item in items.tolist()]
        assert ids_NF[:, 0].tolist() == (tasks["item_rate"][items] + 1).tolist()
        users = tasks["user_feat"][np.repeat(tasks[f"{state}_user"], np.diff(offsets))]
        # Columns of the table are gender, age, occupation, zip; genders are listed M, F there.
        assert ids_NF[:, 2:5].tolist() == (users[:, 1:] + 1).tolist()
        assert len({*zip(users[:, 0].tolist(), ids_NF[:, 1].tolist(), strict=True)}) == 2


@needs_shared
@pytest.mark.shared_data
def test_multi_hot_features_are_those_of_the_common_tasks(melu: Dataset) -> None:
    tasks = np.load(SHARED / "ml-1m-melu/tasks.npz")
    ranges = [EpisodeRange("user-item-cold", 0, 40)]
    (batch,) = read_ranges(melu, ranges, tasks_per_batch=40)
    rows = [row for _, _, rows in episodes_of_batch(batch) for row in rows]
    items = tasks["user_and_item_cold_state_item"]
    for (_, _, _, lists), item in zip(rows, items.tolist(), strict=False):  # type: ignore[misc]
        for name, found in zip(("genre", "director", "actor"), lists, strict=True):
            bounds = tasks[f"item_{name}_off"][item : item + 2]
            listed = tasks[f"item_{name}_idx"][bounds[0] : bounds[1]] + 1
            assert found == sorted(listed.tolist())


@needs_shared
@pytest.mark.shared_data
def test_validation_splits_come_from_the_warm_state_alone(melu: Dataset) -> None:
    warm = json.loads((SHARED / "ml-1m/melu_split/warm_state.json").read_text())
    sizes = {int(user): len(movies) for user, movies in warm.items()}
    batches = {
        name: whole_batch(melu, name)
        for name in ("fit", "valid-user-cold", "valid-item-cold", "valid-user-item-cold")
    }
    tasks = {name: set(batch.task_T.tolist()) for name, batch in batches.items()}
    assert set().union(*tasks.values()) <= set(sizes)
    assert not tasks["fit"] & tasks["valid-user-cold"]
    assert not tasks["fit"] & tasks["valid-user-item-cold"]
    assert tasks["valid-user-cold"] & tasks["valid-user-item-cold"]
    unseen = batches["valid-item-cold"]
    assert (unseen.unique_ids_U[unseen.positions_NF[:, -1].long()] == 0).all()


def tiny_folder(folder: Path, with_time: bool = True) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(0)
    movies = [(m, 1990 + m % 12) for m in range(1, 61)]
    (folder / "movies.dat").write_bytes(
        "".join(f"{m}::Film é ({year})::Drama|War\n" for m, year in movies).encode("latin-1")
    )
    (folder / "users.dat").write_text(
        "".join(f"{u}::F::25::3::1234{u % 3}\n" for u in range(1, 41))
    )
    lines = [
        f"{user}::{movie}::{rng.integers(1, 6)}" + (f"::{1000 - movie}" if with_time else "") + "\n"
        for user in range(1, 41)
        for movie in rng.permutation(60)[:45] + 1
    ]
    name = "ratings.dat" if with_time else "ratings_notime.dat"
    (folder / name).write_text("".join(lines))
    return folder


@pytest.mark.parametrize("with_time", [True, False])
def test_raw_files_alone_give_the_protocol_s_splits(tmp_path: Path, with_time: bool) -> None:
    folder = tiny_folder(tmp_path / "raw", with_time)
    prepare_movielens(str(folder), str(tmp_path / "out"), MovieLensConfig(min_ratings=11))
    dataset = open_dataset(str(tmp_path / "out"))
    assert list(dataset.splits) == ["train", "user-cold", "item-cold", "user-item-cold"]
    train, cold = whole_split(dataset, "train"), whole_split(dataset, "user-cold")
    assert (len(train), len(cold)) == (32, 8)
    assert not {task for task, _, _ in train} & {task for task, _, _ in cold}
    assert all(len(rows) - support == 10 for _, support, rows in train)
    expected = [*("gender", "age", "occupation", "zip", "item", "genre")]
    assert [feature.name for feature in dataset.features.sparse] == expected


def test_order_by_time_makes_the_support_the_past(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "raw")
    config = MovieLensConfig(min_ratings=11, order="time")
    prepare_movielens(str(folder), str(tmp_path / "out"), config)
    for _, _, rows in whole_split(open_dataset(str(tmp_path / "out")), "train"):
        # Time falls with the movie id, and item rows rise with it.
        items = [ids[-1] for _, _, ids, _ in rows]  # type: ignore[misc]
        assert items == sorted(items, reverse=True)


def test_a_history_holds_the_liked_support_rows_and_never_the_row_itself(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "raw")
    config = MovieLensConfig(min_ratings=11, history=5)
    prepare_movielens(str(folder), str(tmp_path / "out"), config)
    dataset = open_dataset(str(tmp_path / "out"))
    history = dataset.features.multi[-1]
    assert (history.name, history.table) == ("history", "item")
    for _, support, rows in whole_split(dataset, "train"):
        liked = [(r, ids[-1]) for r, (label, _, ids, _) in enumerate(rows[:support]) if label >= 4]  # type: ignore[misc]
        for row, (_, _, _, lists) in enumerate(rows):  # type: ignore[misc]
            assert lists[-1] == [item for r, item in liked if r != row][-5:]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "users.dat",
            "1::F::25\n",
            "{path}, line 1: 3 fields, 5 separated by '::' are expected. Download the file again",
        ),
        (
            "ratings.dat",
            "1::1::9::5\n",
            "{path} holds rating 9; 1 to 5 are allowed. Download the file again",
        ),
    ],
)
def test_a_malformed_file_is_named_and_leaves_nothing(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    folder = tiny_folder(tmp_path / "raw")
    (folder / name).write_text(content)
    with pytest.raises(DataError) as caught:
        prepare_movielens(str(folder), str(tmp_path / "out"), MovieLensConfig())
    assert str(caught.value) == message.format(path=folder / name)
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_time_order_without_timestamps_is_refused(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "raw", with_time=False)
    with pytest.raises(DataError) as caught:
        prepare_movielens(str(folder), str(tmp_path / "out"), MovieLensConfig(order="time"))
    assert str(caught.value) == (
        "order is time, but there is no ratings.dat with timestamps. Put it into PATH, or use "
        "order shuffle"
    )


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert catch_message(
        DataError, prepare_movielens, str(tmp_path / "no"), str(tmp_path / "out"), MovieLensConfig()
    ) == (f"{tmp_path}/no/movies.dat does not exist. Point PATH at the unpacked ml-1m folder")


def melu_split(folder: Path, **changed: str) -> Path:
    """Four states of one user and two movies, in MeLU's files."""
    split = folder / "melu_split"
    split.mkdir()
    for state in NAMES:
        for suffix, values in (("", [1, 2]), ("_y", [3, 5])):
            name = f"{state}{suffix}"
            (split / f"{name}.json").write_text(changed.get(name, json.dumps({"7": values})))
    return folder


def test_melus_split_is_read_in_its_order(tmp_path: Path) -> None:
    assert read_melu_split(tmp_path) is None
    states = read_melu_split(melu_split(tmp_path))
    assert states is not None
    assert [
        {user: (movies.tolist(), ratings.tolist()) for user, (movies, ratings) in state.items()}
        for state in states
    ] == [{7: ([1, 2], [3, 5])}] * 4
