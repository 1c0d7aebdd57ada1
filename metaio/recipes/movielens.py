"""MovieLens-1M in MeLU's cold-start protocol: user = task, four states, last 10 of a seeded shuffle
= query. Source: Lee et al.: MeLU, KDD 2019 (arXiv 1908.00413), and its code.

Shape suffixes: T tasks, N rows, F single-id or pooled features, M multi-id features, V values, K
dense columns, A items"""

# Movies up to 1997 and a random 80 % of the users are warm; within a state only users with 13 to
# 100 ratings take part.
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from metaio.errors import DataError, SchemaError
from metaio.format.block import Rows
from metaio.format.dataset_writer import Provenance, write_dataset
from metaio.format.features import Features, FeatureSpec, TableSpec
from metaio.ragged import Int64, index_entries, offsets
from metaio.recipes.movielens_files import (
    Movies,
    Ratings,
    read_melu_split,
    read_movies,
    read_ratings,
    read_users,
    read_vocabulary,
)
from metaio.recipes.movielens_history import liked_before, with_history

State = dict[int, tuple[Int64, Int64]]  # user -> movies, ratings (1 to 5)

_STATES = ("train", "user-cold", "item-cold", "user-item-cold")
_USER_COLUMNS = ("gender", "age", "occupation", "zip")
_VOCABULARY_FILES = {"zip": "zipcode"}
_MULTI = ("genre", "director", "actor")


@dataclass(frozen=True)
class MovieLensConfig:
    """The protocol's numbers; the defaults are MeLU's."""

    min_ratings: int = 13  # of a user in a state
    max_ratings: int = 100
    query_rows: int = 10
    seed: int = 2019
    last_warm_year: int = 1997
    cold_user_share: float = 0.2  # used where melu_split/ is absent
    order: str = "shuffle"  # "time": support is the past (needs ratings.dat)
    validation: bool = False  # also carve fit and valid-* out of the warm users and movies
    # With validation: warm movies after it are held back, 15 % of the ratings.
    last_fit_year: int = 1995
    item_min_count: int = 1  # movies with fewer training ratings share row 0
    history: int = 0  # longest history of liked movies that each rating carries; 0: none

    def __post_init__(self) -> None:
        if self.order not in ("shuffle", "time"):
            raise SchemaError(
                f"order is {self.order!r}; it must be shuffle or time. Choose one of them"
            )
        if not 1 <= self.query_rows < self.min_ratings <= self.max_ratings:
            raise SchemaError(
                f"min_ratings {self.min_ratings}, max_ratings {self.max_ratings}, query_rows "
                f"{self.query_rows}: 1 <= query < min <= max is needed. Change them"
            )


def derive_states(ratings: Ratings, movies: Movies, config: MovieLensConfig) -> list[State]:
    """Return MeLU's four states, derived from raw ratings: seeded users, movies by year."""
    rng = np.random.default_rng(config.seed)
    # Sorted by user id: the draw must not depend on the order of the file.
    users = rng.permutation(np.unique(ratings.user_N))
    cold = set(users[: round(config.cold_user_share * len(users))].tolist())
    # Movies without attributes are left out.
    known = np.isin(ratings.movie_N, np.fromiter(movies.year, dtype=np.int64))
    order = np.flatnonzero(known)
    if not order.size:
        raise DataError(
            f"none of the {len(ratings.movie_N):,} ratings is of a movie in movies.dat: the files "
            "are not of one dataset. Download them again"
        )
    order = order[np.argsort(ratings.user_N[order], kind="stable")]
    whole: State = {}
    for rows in np.split(order, np.flatnonzero(np.diff(ratings.user_N[order])) + 1):
        own_ratings = ratings.rating_N[rows].astype(np.int64)
        whole[int(ratings.user_N[rows[0]])] = ratings.movie_N[rows], own_ratings
    return divide(
        whole, lambda user: user in cold, lambda movie: movies.year[movie] > config.last_warm_year
    )


def divide(
    state: State, is_cold_user: Callable[[int], bool], is_cold_movie: Callable[[int], bool]
) -> list[State]:
    """Return warm, user-cold, item-cold, user-item-cold; users and movies keep their order."""
    found: list[State] = [{}, {}, {}, {}]
    for user, (movies, ratings) in state.items():
        cold_N = np.array([is_cold_movie(int(movie)) for movie in movies])
        for cold_movie in (False, True):
            chosen = cold_N == cold_movie
            if chosen.any():
                found[2 * cold_movie + is_cold_user(user)][user] = (movies[chosen], ratings[chosen])
    return found


def hold_back(warm: State, movies: Movies, config: MovieLensConfig) -> list[State]:
    """Return fit, valid-user-cold, valid-item-cold, valid-user-item-cold out of the warm state."""
    # A generator of its own: validation must not change any other split.
    rng = np.random.default_rng([config.seed, 1])
    users = rng.permutation(np.fromiter(warm, dtype=np.int64))
    held_back = set(users[: round(config.cold_user_share * len(users))].tolist())
    last = config.last_fit_year
    return divide(warm, lambda user: user in held_back, lambda movie: movies.year[movie] > last)


def select_tasks(
    states: list[State], config: MovieLensConfig, times: Mapping[tuple[int, int], int] | None
) -> list[State]:
    """Return users with min_ratings to max_ratings ratings, ordered so that query comes last."""
    rng = np.random.default_rng(config.seed)
    found = []
    for state in states:
        chosen: State = {}
        for user, (movies, ratings) in state.items():
            if not config.min_ratings <= len(movies) <= config.max_ratings:
                continue
            # Drawn even if time decides, to keep the generator's place in the sequence. One
            # generator for all states in file order is the shuffle of other implementations.
            order = rng.permutation(len(movies))
            if times is not None:
                order = np.argsort([times[user, int(movie)] for movie in movies], kind="stable")
            chosen[user] = (movies[order], ratings[order])
        found.append(chosen)
    return found


def _timestamps(ratings: Ratings) -> dict[tuple[int, int], int]:
    if ratings.time_N is None:
        raise DataError(
            "order is time, but there is no ratings.dat with timestamps. Put it into PATH, or use "
            "order shuffle"
        )
    keys = zip(ratings.user_N.tolist(), ratings.movie_N.tolist(), strict=True)
    return dict(zip(keys, ratings.time_N.tolist(), strict=True))


class _Encoder:
    """Ids of users, movies and their attributes; row 0 of a table is for unknown values."""

    def __init__(self, folder: Path, movies: Movies, history: int) -> None:
        self._history = history
        self._users = read_users(folder)
        self._movies = movies
        values: dict[str, list[str]] = {
            name: [user[index] for user in self._users.values()]
            for index, name in enumerate(_USER_COLUMNS)
        }
        # Without movies_extrainfos.dat only genres are known.
        self.multi = _MULTI if movies.has_extra else _MULTI[:1]
        for name in self.multi:
            values[name] = [value for many in getattr(movies, name).values() for value in many]
        if movies.has_extra:
            values["rate"] = list(movies.rate.values())
        self.vocabulary = {
            name: _vocabulary(read_vocabulary(folder, _VOCABULARY_FILES.get(name, name)), found)
            for name, found in values.items()
        }
        self.single = ("rate",) * movies.has_extra + _USER_COLUMNS

    def features(self, num_items: int) -> Features:
        """Return tables and columns; the movie itself is the last single feature."""
        names = self.single + self.multi
        tables = [TableSpec(name, len(self.vocabulary[name]) + 1) for name in names]
        return Features(
            tables=(*tables, TableSpec("item", num_items + 1)),
            single=tuple(FeatureSpec(name, name) for name in (*self.single, "item")),
            multi=(
                *(FeatureSpec(name, name) for name in self.multi),
                *(FeatureSpec("history", "item") for _ in range(self._history > 0)),
            ),
            dense=(),
        )

    def rows(self, state: State, item_ids: Mapping[int, int], query_rows: int) -> Rows:
        """Return all tasks of a state; movies that `item_ids` lacks get row 0."""
        users = list(state)
        lengths_T = np.array([len(movies) for movies, _ in state.values()], dtype=np.int64)
        movie_N = _concat([movies for movies, _ in state.values()])
        distinct_A, movie_index_N = np.unique(movie_N, return_inverse=True)
        user_ids = np.array([self._user_ids(user) for user in users], dtype=np.int64)
        user_ids = user_ids.reshape(-1, len(_USER_COLUMNS))
        columns = [user_ids[:, index].repeat(lengths_T) for index in range(len(_USER_COLUMNS))]
        if self._movies.has_extra:
            rate = self.vocabulary["rate"]
            rates = [rate.get(self._movies.rate[movie], 0) for movie in distinct_A.tolist()]
            rate_A = np.array(rates, dtype=np.int64)
            columns.insert(0, rate_A[movie_index_N])
        item_A = np.array([item_ids.get(movie, 0) for movie in distinct_A.tolist()], dtype=np.int64)
        item_N = item_A[movie_index_N]
        rating_N = _concat([ratings for _, ratings in state.values()])
        multi_ids_V, multi_lengths_NM = self._multi(distinct_A, movie_index_N)
        if self._history:
            liked = liked_before(lengths_T, lengths_T - query_rows, item_N, rating_N, self._history)
            multi_ids_V, multi_lengths_NM = with_history(multi_ids_V, multi_lengths_NM, *liked)
        return Rows(
            task_T=np.array(users, dtype=np.int64),
            row_lengths_T=lengths_T,
            support_lengths_T=lengths_T - query_rows,
            label_N=rating_N.astype(np.float32),
            dense_NK=np.zeros((len(movie_N), 0), dtype=np.float32),
            ids_NF=np.stack([*columns, item_N], axis=1),
            multi_ids_V=multi_ids_V,
            multi_lengths_NM=multi_lengths_NM,
        )

    def _user_ids(self, user: int) -> list[int]:
        if user not in self._users:
            raise DataError(
                f"user {user} has ratings but is not in users.dat. Download both files again"
            )
        pairs = zip(_USER_COLUMNS, self._users[user], strict=True)
        return [self.vocabulary[name].get(value, 0) for name, value in pairs]

    def _multi(
        self, distinct_A: Int64, movie_index_N: Int64
    ) -> tuple[Int64, npt.NDArray[np.int32]]:
        """Return the values of each rating's movie: sorted, without repeats, feature by feature."""
        lists = [
            sorted({self.vocabulary[name].get(v, 0) for v in getattr(self._movies, name)[movie]})
            for movie in distinct_A.tolist()
            for name in self.multi
        ]
        lengths_AM = np.array([len(ids) for ids in lists], dtype=np.int64)
        lengths_AM = lengths_AM.reshape(len(distinct_A), len(self.multi))
        values = np.array([value for ids in lists for value in ids], dtype=np.int64)
        chosen = index_entries(offsets(lengths_AM.sum(axis=1)), movie_index_N)
        return values[chosen], lengths_AM[movie_index_N].astype(np.int32)


def _vocabulary(listed: list[str] | None, found: list[str]) -> dict[str, int]:
    # MeLU's own lists keep their order, so that ids are those of MeLU.
    names = listed if listed is not None else sorted(set(found))
    return {name: row for row, name in enumerate(names, start=1)}


def _concat(arrays: list[Int64]) -> Int64:
    joined: Int64 = np.concatenate([np.zeros(0, dtype=np.int64), *arrays])
    return joined


def _item_ids(train: State, min_count: int) -> dict[int, int]:
    rated = _concat([movies for movies, _ in train.values()])
    movies, counts = np.unique(rated, return_counts=True)
    return {movie: row for row, movie in enumerate(movies[counts >= min_count].tolist(), start=1)}


def prepare_movielens(
    path: str, out: str, config: MovieLensConfig, overwrite: bool = False
) -> None:
    """Write the dataset at URL `out` from the ml-1m folder `path`."""
    # Splits train, user-cold, item-cold, user-item-cold; with validation also fit and valid-*,
    # which are carved from the warm users and movies alone.
    folder = Path(path)
    movies = read_movies(folder)
    melu_states = read_melu_split(folder)
    times = _timestamps(read_ratings(folder)) if config.order == "time" else None
    states = melu_states or derive_states(read_ratings(folder), movies, config)
    splits = dict(zip(_STATES, select_tasks(states, config, times), strict=True))
    known = {name: _item_ids(splits["train"], config.item_min_count) for name in splits}
    if config.validation:
        names = ("fit", *(f"valid-{name}" for name in _STATES[1:]))
        parts = select_tasks(hold_back(states[0], movies, config), config, times)
        stored_movies = dict(zip(names, parts, strict=True))
        # Movies that fit never saw must look unseen, but keep the row they have for train.
        fitted = _item_ids(stored_movies["fit"], config.item_min_count)
        row_of = known["train"]
        row_of_fitted = {movie: row_of[movie] for movie in fitted if movie in row_of}
        known |= dict.fromkeys(stored_movies, row_of_fitted)
        splits |= stored_movies
    encoder = _Encoder(folder, movies, config.history)
    protocol = f"MeLU, {'its own split' if melu_states else 'derived split'}, order {config.order}"
    recipe = {"name": "movielens-1m", **vars(config)}
    provenance = Provenance("user", "rating", config.seed, protocol=protocol, recipe=recipe)
    features = encoder.features(len(known["train"]))
    with write_dataset(out, features, provenance, overwrite=overwrite) as writer:
        for name, state in splits.items():
            split = writer.split(name)
            if state:
                split.write(encoder.rows(state, known[name], config.query_rows))
