"""The two workloads in plain numpy: MeLU's protocol on MovieLens-1M, and tables of a million rows.

Shape suffixes: T tasks, N rows, V values"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]

WIDTH = 32  # MeLU (KDD'19), section 4: embeddings of 32, two decision layers of 64
HIDDEN = 64
TASKS_PER_STEP = 32
QUERY_ROWS = 10
EPOCH_SEED = 1000  # task order of epoch 0 in the shared data's protocol
ADAGRAD_EPS = 1e-8  # of every peer's tables: fbgemm's default
MOVIELENS = Path(__file__).resolve().parents[3] / "shared" / "data" / "ml-1m-melu"
ITEM_FIELDS = ("rate", "genre", "director", "actor")
USER_FIELDS = ("gender", "age", "occupation", "zip")


@dataclass(frozen=True)
class Field:
    """One sparse column and its own table of `num_rows` rows; multi-id ones pool by the mean."""

    name: str
    num_rows: int
    multi: bool


@dataclass(frozen=True)
class Jagged:
    """The ids of one field: row n holds ids_V[offsets_N1[n] : offsets_N1[n + 1]], at least one."""

    ids_V: NDArray[np.int64]
    offsets_N1: NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """The tasks of one outer step: rows of a task are contiguous, support rows first."""

    row_offsets_T1: NDArray[np.int64]
    support_lengths_T: NDArray[np.int64]
    label_N: NDArray[np.float32]
    ids: Mapping[str, Jagged]

    @property
    def num_tasks(self) -> int:
        """Tasks of the step, T."""
        return len(self.support_lengths_T)

    @property
    def num_rows(self) -> int:
        """Their rows, support and query, N."""
        return len(self.label_N)


@dataclass(frozen=True)
class Workload:
    """Fields in the order in which they enter fc1, and the batches to train on in turn."""

    name: str
    fields: tuple[Field, ...]
    batches: tuple[Batch, ...]
    large_tables: bool  # a gradient of the size of the tables costs more than the rest of the step


@dataclass(frozen=True)
class Rates:
    """Rates of the inner step, of the decision layers' Adam and of the tables' Adagrad."""

    inner: float
    outer: float
    tables: float


def load_workload(
    name: str, rows_per_table: int, num_batches: int, movielens: Path = MOVIELENS
) -> Workload:
    """`movielens` (made up in the same shape where the data is absent) or `large` tables."""
    if name == "large":
        return large_workload(rows_per_table, num_batches)
    tasks = (
        dict(np.load(movielens / "tasks.npz")) if has_movielens(movielens) else synthetic_tasks()
    )
    return movielens_workload(tasks, num_batches)


def has_movielens(folder: Path = MOVIELENS) -> bool:
    """Whether the real tasks are there."""
    return (folder / "tasks.npz").exists()


def movielens_workload(tasks: Mapping[str, Array], num_batches: int) -> Workload:
    """The first steps of epoch 0: 32 warm users each, whose last 10 ratings are the query."""
    multi_rows = {"genre": 25, "director": 2186, "actor": 8030}
    single_rows = {"rate": 6, "gender": 2, "age": 7, "occupation": 21, "zip": 3402}
    fields = tuple(
        Field(name, {**multi_rows, **single_rows}[name], name in multi_rows)
        for name in ITEM_FIELDS + USER_FIELDS
    )
    order = np.random.default_rng(EPOCH_SEED).permutation(len(tasks["warm_state_user"]))
    steps = order[: num_batches * TASKS_PER_STEP].reshape(num_batches, TASKS_PER_STEP)
    return Workload(
        "movielens",
        fields,
        tuple(_movielens_batch(tasks, step) for step in steps),
        large_tables=False,
    )


def _movielens_batch(tasks: Mapping[str, Array], chosen_T: Array) -> Batch:
    starts_T, ends_T = tasks["warm_state_off"][chosen_T], tasks["warm_state_off"][chosen_T + 1]
    lengths_T = ends_T - starts_T
    rows_N = np.concatenate(
        [np.arange(start, end) for start, end in zip(starts_T, ends_T, strict=True)]
    )
    item_N = tasks["warm_state_item"][rows_N]
    user_N = np.repeat(tasks["warm_state_user"][chosen_T], lengths_T)
    ids = {"rate": single_ids(tasks["item_rate"][item_N])}
    for name in ("genre", "director", "actor"):
        ids[name] = _take(Jagged(tasks[f"item_{name}_idx"], tasks[f"item_{name}_off"]), item_N)
    for column, name in enumerate(USER_FIELDS):
        ids[name] = single_ids(tasks["user_feat"][user_N, column])
    return Batch(
        offsets_of(lengths_T),
        lengths_T - QUERY_ROWS,
        tasks["warm_state_y"][rows_N].astype(np.float32),
        ids,
    )


def synthetic_tasks(num_users: int = 2653, num_items: int = 3881) -> dict[str, Array]:
    """tasks.npz's arrays with random contents: 13 to 100 ratings a user, 46 on average."""
    rng = np.random.default_rng(0)
    # 13 at least, as MeLU keeps users; 87 more at most.
    lengths_T = 13 + np.minimum(rng.exponential(38, num_users).astype(np.int64), 87)
    num_rows = int(lengths_T.sum())
    tasks: dict[str, Array] = {
        "item_rate": rng.integers(0, 6, num_items),
        "user_feat": np.stack(
            [rng.integers(0, size, num_users) for size in (2, 7, 21, 3402)], axis=1
        ),
        # Named as in tasks.npz: MeLU calls its groups of users states.
        "warm_state_user": np.arange(num_users),
        "warm_state_off": offsets_of(lengths_T),
        "warm_state_item": rng.integers(0, num_items, num_rows),
        "warm_state_y": rng.integers(1, 6, num_rows).astype(np.float32),
    }
    for name, most, size in (("genre", 4, 25), ("director", 1, 2186), ("actor", 4, 8030)):
        offsets = offsets_of(rng.integers(1, most + 1, num_items))
        tasks |= {
            f"item_{name}_off": offsets,
            f"item_{name}_idx": rng.integers(0, size, offsets[-1]),
        }
    return tasks


def large_workload(rows_per_table: int, num_batches: int, support_rows: int = 10) -> Workload:
    """Four user and four item fields with a table each; popular ids repeat in a step."""
    user_fields, item_fields = [f"user{i}" for i in range(4)], [f"item{i}" for i in range(4)]
    rng = np.random.default_rng(1)
    lengths_T = np.full(TASKS_PER_STEP, support_rows + QUERY_ROWS)

    def zipf(count: int) -> NDArray[np.int64]:
        """Ids of which a few are drawn often."""
        # the inverse of log-uniform: id i is drawn about in proportion to 1 / (i + 1)
        return (rows_per_table ** rng.random(count)).astype(np.int64) - 1

    def batch() -> Batch:
        ids = {name: single_ids(np.repeat(zipf(TASKS_PER_STEP), lengths_T)) for name in user_fields}
        ids |= {name: single_ids(zipf(int(lengths_T.sum()))) for name in item_fields}
        label_N = rng.integers(1, 6, lengths_T.sum()).astype(np.float32)
        return Batch(offsets_of(lengths_T), lengths_T - QUERY_ROWS, label_N, ids)

    fields = tuple(Field(name, rows_per_table, multi=False) for name in item_fields + user_fields)
    return Workload("large", fields, tuple(batch() for _ in range(num_batches)), large_tables=True)


def initial_parameters(
    workload: Workload, movielens: Path = MOVIELENS
) -> dict[str, NDArray[np.float32]]:
    """`emb.<field>` [rows, WIDTH], and the layers' weights and biases; the data's own if there."""
    if workload.name == "movielens" and has_movielens(movielens):
        return dict(np.load(movielens / "init_seed0.npz"))
    rng = np.random.default_rng(0)

    def uniform(*shape: int, bound: float) -> NDArray[np.float32]:
        """Values between -bound and bound."""
        values = rng.random(shape, dtype=np.float32)
        values -= 0.5  # in place: a table is 128 MB
        values *= 2 * bound
        return values

    init = {
        f"emb.{field.name}": uniform(field.num_rows, WIDTH, bound=0.5) for field in workload.fields
    }
    inputs = WIDTH * len(workload.fields)
    for name, rows, columns in (
        ("fc1", HIDDEN, inputs),
        ("fc2", HIDDEN, HIDDEN),
        ("linear_out", 1, HIDDEN),
    ):
        init[f"{name}.weight"] = uniform(rows, columns, bound=columns**-0.5)
        init[f"{name}.bias"] = uniform(rows, bound=columns**-0.5)
    return init


def offsets_of(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, then the running sum of the lengths."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def single_ids(ids_N: Array) -> Jagged:
    """One id a row."""
    return Jagged(ids_N.astype(np.int64), np.arange(len(ids_N) + 1))


def _take(source: Jagged, rows_N: Array) -> Jagged:
    lengths_N = np.diff(source.offsets_N1)[rows_N]
    offsets_N1 = offsets_of(lengths_N)
    # 0, 1, 2, ... within each row.
    within_V = np.arange(offsets_N1[-1]) - np.repeat(offsets_N1[:-1], lengths_N)
    return Jagged(
        source.ids_V[np.repeat(source.offsets_N1[rows_N], lengths_N) + within_V], offsets_N1
    )
