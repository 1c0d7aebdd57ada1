"""MetaEmb's protocol: its published counts, and its stages against a loop over the file."""

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from metaio import Dataset, open_dataset
from metaio.recipes.metaemb import STAGES, MetaEmbConfig, assign_rows, prepare_metaemb
from metaio.recipes.movielens_files import read_ratings
from tests.metaio.conftest import whole_split
from tests.metaio.recipes.test_movielens import SHARED, needs_shared

OLD, NEW = 90, 70  # of the small copy; movies 1 to 4 are old, 5 to 7 new, 8 is neither
COUNTS = {1: 90, 2: 100, 3: 120, 4: 95, 5: 70, 6: 80, 7: 89, 8: 69}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small ml-1m whose line n rates 5 where n is divisible by 3, else 3."""
    rng = np.random.default_rng(0)
    movies = rng.permutation(np.repeat(list(COUNTS), list(COUNTS.values())))
    lines = [
        f"{1 + number % 9}::{movie}::{3 if number % 3 else 5}"
        for number, movie in enumerate(movies.tolist())
    ]
    (tmp_path / "ratings_notime.dat").write_text("\n".join(lines))
    users = [f"{user}::{'MF'[user % 2]}::{18 + user % 2 * 7}::4::12345" for user in range(1, 10)]
    (tmp_path / "users.dat").write_text("\n".join(users))
    titles = [f"{m}::Tale of {'Two' if m % 2 else 'Old'} ({1990 + m})::Drama|War" for m in COUNTS]
    (tmp_path / "movies.dat").write_text("\n".join(titles))
    return tmp_path


def prepared(folder: Path, validation: bool = False) -> Dataset:
    out = str(folder / f"out-{validation}")
    config = MetaEmbConfig(OLD, NEW, episode_rows=20, validation=validation, validation_share=0.5)
    prepare_metaemb(str(folder), out, config)
    return open_dataset(out)


def labels(folder: Path) -> dict[int, list[float]]:
    """The clicks of each movie in the order of the file."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for line in (folder / "ratings_notime.dat").read_text().splitlines():
        _, movie, rating = line.split("::")
        found[int(movie)].append(float(int(rating) >= 4))
    return found


def test_each_stage_scores_the_same_rows_after_more_of_the_file(folder: Path) -> None:
    dataset, of_movie = prepared(folder), labels(folder)
    assert list(dataset.splits) == ["train", "cold", "warm-a", "warm-b", "warm-c"]
    queries = defaultdict(set)
    for stage, seen in STAGES.items():
        found = whole_split(dataset, stage)
        assert sorted(movie for movie, _, _ in found) == [5, 6, 7]
        for movie, support, rows in found:
            clicks = [row[0] for row in rows]  # type: ignore[index]
            assert support == seen
            assert sorted(clicks[:support]) == sorted(of_movie[movie][:seen])
            assert sorted(clicks[support:]) == sorted(of_movie[movie][60:])
            # Ids of new movies are in no vocabulary, their titles' words are.
            assert {row[2][0] for row in rows} == {0}  # type: ignore[index]
            assert all(id_ > 0 for row in rows for id_ in row[3][0])  # type: ignore[index]
            queries[movie].add(repr(sorted(map(repr, rows[support:]))))
    assert {len(rows) for rows in queries.values()} == {1}


def test_old_movies_train_in_episodes_of_a_stated_length(folder: Path) -> None:
    found = whole_split(prepared(folder), "train")
    sizes: defaultdict[int, list[int]] = defaultdict(list)
    for movie, support, rows in found:
        sizes[movie].append(len(rows))
        assert support == len(rows) // 2
    assert {movie: sum(own) for movie, own in sizes.items()} == {m: COUNTS[m] for m in (1, 2, 3, 4)}
    assert max(max(own) for own in sizes.values()) == 20


def test_held_back_old_movies_play_new_ones(folder: Path) -> None:
    dataset, of_movie = prepared(folder, validation=True), labels(folder)
    known = {movie for movie, _, _ in whole_split(dataset, "fit")}
    held = {movie for movie, _, _ in whole_split(dataset, "valid-cold")}
    assert known
    assert held
    assert known | held == {1, 2, 3, 4}
    assert not known & held
    for stage, seen in STAGES.items():
        for movie, support, rows in whole_split(dataset, f"valid-{stage}"):
            clicks = [row[0] for row in rows]  # type: ignore[index]
            assert support == seen
            assert sorted(clicks[support:]) == sorted(of_movie[movie][60 : OLD - 1])
            # It is in train's vocabulary, and yet must look new to a model of fit.
            assert {row[2][0] for row in rows} == {0}  # type: ignore[index]
    # Turning validation on leaves every other split as it was.
    without = prepared(folder)
    for name in without.splits:
        assert whole_split(dataset, name) == whole_split(without, name)


@needs_shared
@pytest.mark.shared_data
def test_movielens_1m_gives_the_published_counts() -> None:
    movie_N = read_ratings(SHARED / "ml-1m").movie_N
    chosen, split, side, _ = assign_rows(movie_N, MetaEmbConfig())
    counts = Counter(zip(split, side, strict=True))
    expected = {("train", None): 765_669} | {
        (stage, "query"): 123_787 for stage in ("cold", "warm-a", "warm-b", "warm-c")
    }
    assert counts == expected | {
        (f"warm-{step}", "support"): 1_127 * rows
        for step, rows in (("a", 20), ("b", 40), ("c", 60))
    }
    movies = {name: np.unique(movie_N[chosen[np.array(split) == name]]) for name in set(split)}
    assert {name: len(own) for name, own in movies.items()} == {
        "train": 1_058, "cold": 1_127, "warm-a": 1_127, "warm-b": 1_127, "warm-c": 1_127,
    }  # fmt: skip
