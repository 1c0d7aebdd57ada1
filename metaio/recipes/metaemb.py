"""MovieLens-1M in MetaEmb's protocol: movie = task, old movies train, new ones warm up in three
steps of 20 ratings. Source: Pan et al.: Warm up cold-start advertisements, SIGIR 2019 (arXiv
1904.11547), and its code.

Shape suffix: N rows"""

# Old movies have at least 300 ratings, new ones 80 to 299. In file order rows 1 to 20, 21 to 40 and
# 41 to 60 of a new movie are warm-a to warm-c, the rest is test. A click is a rating of 4 or 5.
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from metaio.errors import DataError, SchemaError
from metaio.hashing import splitmix64, unit_interval
from metaio.ragged import Int64, places
from metaio.recipes.by_schema import keep_shared_words, prepare_table
from metaio.recipes.movielens_files import Ratings, read_ratings, read_titles, read_users

_WARM_ROWS = 20
# How many rows of a new movie each stage has seen.
STAGES = {"cold": 0, "warm-a": _WARM_ROWS, "warm-b": 2 * _WARM_ROWS, "warm-c": 3 * _WARM_ROWS}
_WARM_UP = max(STAGES.values())
# Rows, their split and side, and whether a model may know their movies by their ids.
_Part = tuple[Int64, str, str | None, bool]


@dataclass(frozen=True)
class MetaEmbConfig:
    """The protocol's numbers; the defaults are MetaEmb's but for `episode_rows`, which is ours."""

    min_old: int = 300  # least ratings of an old movie
    min_new: int = 80  # and of a new one
    episode_rows: int = 80  # of a training episode, half of them support
    validation: bool = False  # also carve fit and valid-* out of the old movies
    validation_share: float = 0.2  # of the old movies that play new ones
    seed: int = 2019

    def __post_init__(self) -> None:
        if not _WARM_UP < self.min_new < self.min_old:
            raise SchemaError(
                f"min_new {self.min_new}, min_old {self.min_old}: {_WARM_UP} < min_new < min_old "
                "is needed. Change them"
            )


def prepare_metaemb(path: str, out: str, config: MetaEmbConfig, overwrite: bool = False) -> None:
    """Write the dataset at URL `out` from the ml-1m folder `path`; ratings need no timestamps."""
    # Splits train, and cold, warm-a to warm-c: the same query rows of new movies after 0 to 60
    # support rows. With validation also fit, and valid-*, where held-back old movies play new ones.
    folder = Path(path)
    ratings = read_ratings(folder)
    chosen, split, side, is_known = assign_rows(ratings.movie_N, config)
    table = _table(folder, ratings, chosen, is_known)
    table = table.append_column("split", pa.array(split))
    table = table.append_column("side", pa.array(side))
    protocol, recipe = "MetaEmb: new movies after 0, 20, 40 and 60 ratings", vars(config)
    prepare_table(table, out, _schema(config), {"name": "metaemb", **recipe}, protocol, overwrite)


def assign_rows(
    movie_N: Int64, config: MetaEmbConfig
) -> tuple[Int64, list[str], list[str | None], npt.NDArray[np.bool_]]:
    """Return the rows of all splits, with the split, the side, and if the movie's id is known."""
    movies, movie_of_N, counts = np.unique(movie_N, return_inverse=True, return_counts=True)
    count_N, place_N = counts[movie_of_N], _count_earlier_rows(movie_of_N)
    old_N = count_N >= config.min_old
    new_N = (count_N >= config.min_new) & ~old_N
    if not old_N.any() or not new_N.any():
        raise DataError(
            f"of {len(movies):,} movies {int((counts >= config.min_old).sum()):,} have "
            f"{config.min_old} ratings or more: training movies and others are needed. Point PATH "
            "at the whole of ml-1m"
        )
    train = np.flatnonzero(old_N), "train", None, True
    parts: list[tuple[Int64, str, str | None, bool]] = [train]
    parts += _make_stages("", new_N, place_N)
    if config.validation:
        # Drawn by the movie's number: the draw depends on no other movie.
        order = unit_interval(splitmix64(movies.view(np.uint64) ^ np.uint64(config.seed)))
        is_held_back_N = old_N & (order < config.validation_share)[movie_of_N]
        parts.append((np.flatnonzero(old_N & ~is_held_back_N), "fit", None, True))
        # Cut to the length of a new movie: their first rows are as old as those of a young movie.
        parts += _make_stages("valid-", is_held_back_N & (place_N < config.min_old - 1), place_N)
    chosen = np.concatenate([rows for rows, _, _, _ in parts])
    split = [name for rows, name, _, _ in parts for _ in range(len(rows))]
    side = [side for rows, _, side, _ in parts for _ in range(len(rows))]
    known = np.concatenate([np.full(len(rows), is_known) for rows, _, _, is_known in parts])
    return chosen, split, side, known


def _make_stages(prefix: str, rows_N: npt.NDArray[np.bool_], place_N: Int64) -> list[_Part]:
    """Return support and query rows of each stage of these movies."""
    query = np.flatnonzero(rows_N & (place_N >= _WARM_UP))
    found: list[_Part] = []
    for name, seen in STAGES.items():
        support = np.flatnonzero(rows_N & (place_N < seen))
        found += [(support, f"{prefix}{name}", "support", False)]
        found += [(query, f"{prefix}{name}", "query", False)]
    return found


def _count_earlier_rows(movie_of_N: Int64) -> Int64:
    """Return how many rows of the same movie stand before each row."""
    order_N = np.argsort(movie_of_N, kind="stable")
    place_N = np.empty(len(movie_of_N), dtype=np.int64)
    place_N[order_N] = places(np.bincount(movie_of_N))
    return place_N


def _table(
    folder: Path, ratings: Ratings, chosen: Int64, is_known: npt.NDArray[np.bool_]
) -> pa.Table:
    """Return the chosen ratings with the columns of MetaEmb's code."""
    titles, users = read_titles(folder), read_users(folder)
    movies, movie_of = np.unique(ratings.movie_N[chosen], return_inverse=True)
    found, user_of = np.unique(ratings.user_N[chosen], return_inverse=True)
    missing = [user for user in found.tolist() if user not in users]
    if missing:
        raise DataError(
            f"user {missing[0]} has ratings but is not in users.dat. Download both files again"
        )
    # Words are counted over all movies: knowing them takes no rating.
    shared = keep_shared_words(title for title, _, _ in titles.values())
    words = dict(zip(titles, shared, strict=True))
    unknown: tuple[str, str, list[str]] = ("", "", [])
    of_movie = [titles.get(movie, unknown) for movie in movies.tolist()]
    movie_columns = {
        "movie": pa.array(movies),
        "title": pa.array([words.get(movie) for movie in movies.tolist()], pa.string()),
        "year": pa.array([year or None for _, year, _ in of_movie], pa.string()),
        "genre": pa.array(["|".join(genres) or None for _, _, genres in of_movie], pa.string()),
    }
    user_columns = {
        name: pa.array([users[user][index] for user in found.tolist()])
        for index, name in enumerate(("gender", "age", "occupation"))
    }
    columns = {
        "row": pa.array(chosen),
        **{name: column.take(pa.array(movie_of)) for name, column in movie_columns.items()},
        "item": pa.array(ratings.movie_N[chosen], mask=~is_known),
        "user": pa.array(ratings.user_N[chosen]),
        **{name: column.take(pa.array(user_of)) for name, column in user_columns.items()},
        "rating": pa.array(ratings.rating_N[chosen]),
    }
    return pa.table(columns)


def _schema(config: MetaEmbConfig) -> dict[str, Any]:
    singles = ["item", "year", "user", "gender", "age", "occupation"]
    limits = {"min_rows": 2, "max_rows": config.episode_rows}
    return {
        "seed": config.seed,
        "task": {"column": "movie"},
        "label": {"column": "rating", "threshold": 4},
        "row_id": {"column": "row"},
        "single": [{"column": name, "vocabulary": 1, "null": "unknown"} for name in singles],
        "multi": [
            {"column": "title", "separator": " ", "vocabulary": 1, "null": "unknown"},
            {"column": "genre", "separator": "|", "vocabulary": 1, "null": "unknown"},
        ],
        "episodes": {"by": "random", "query_share": 0.5, **limits},
        "splits": {"column": "split"},
        # As many as any movie has: the protocol, not this limit, decides a stage's support.
        "membership": {"column": "side", "max_rows": config.min_old + _WARM_UP},
    }
