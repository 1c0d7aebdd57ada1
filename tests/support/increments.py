"""A stream of increments by hand: ordinary datasets, each of which names the one before it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from metaio import Features, FeatureSpec, Provenance, Rows, TableSpec, open_dataset, write_dataset
from metaio.format.layout import RESET_FOLDER
from metaio.format.manifest import StreamPlace

# Rows of both tables in each increment, of which the data uses two in three: capacity.
CAPACITIES = (30, 100, 300)
QUERY_ROWS = SUPPORT_ROWS = 3


def some_rows(
    num_tasks: int, first_task: int, used: int, seed: int, unused: Sequence[int] = ()
) -> Rows:
    """Tasks of six rows whose click follows the item, with ids below `used` but for `unused`."""
    rng = np.random.default_rng(seed)
    lengths = np.full(num_tasks, SUPPORT_ROWS + QUERY_ROWS)
    num_rows = int(lengths.sum())
    ids_NF = rng.choice(np.setdiff1d(np.arange(used), unused), (num_rows, 2))
    clicked_N = rng.random(num_rows) < 0.2 + 0.6 * (ids_NF[:, 0] % 2)
    return Rows(
        task_T=first_task + np.arange(num_tasks), row_lengths_T=lengths,
        support_lengths_T=np.full(num_tasks, SUPPORT_ROWS), label_N=clicked_N.astype(np.float32),
        dense_NK=rng.random((num_rows, 1), dtype=np.float32), ids_NF=ids_NF,
        multi_ids_V=np.zeros(0, np.int64), multi_lengths_NM=np.zeros((num_rows, 0), np.int32),
    )  # fmt: skip


def features_of(num_rows: int) -> Features:
    """Two columns with a table each of so many rows, and a number."""
    return Features(
        tables=(TableSpec("item", num_rows), TableSpec("city", num_rows)),
        single=(FeatureSpec("item", "item"), FeatureSpec("city", "city")),
        multi=(),
        dense=("price",),
    )


def write_increments(
    folder: Path, capacities: Sequence[int] = CAPACITIES, stream: str = "shop",
    reset_rows: Sequence[int] = (), num_tasks: int = 48, reset_in: Sequence[int] = (2, 3),
    gate_tasks: Sequence[int] = (), label: Callable[[Rows], Any] = lambda rows: rows.label_N,
) -> list[Path]:  # fmt: skip
    """An increment of so many tasks for each capacity, and a quarter of them in the gate, unless
    `gate_tasks` says of each how many, with this `label`. Those of `reset_in` reuse `reset_rows` of
    the table `item`, which their own data does not use."""
    paths: list[Path] = []
    parent = ""
    for number, capacity in enumerate(capacities, start=1):
        path = folder / f"{number:06d}"
        with write_dataset(
            str(path), features_of(capacity), Provenance("user", "click"), block_rows=60
        ) as writer:
            used, first = capacity * 2 // 3, 1000 * number
            unused = reset_rows if number in reset_in else ()
            trained = some_rows(num_tasks, first, used, number, unused)
            writer.split("train").write(replace(trained, label_N=label(trained)))
            judges = gate_tasks[number - 1] if gate_tasks else num_tasks // 4
            gate = writer.split("gate")
            if judges:
                judging = some_rows(judges, first + 500, used, 100 + number)
                gate.write(replace(judging, label_N=label(judging)))
            writer.stream = StreamPlace(stream, number, parent, (100 * number, 100 * number + 100))
            if reset_rows and number in reset_in:
                (writer.folder / RESET_FOLDER).mkdir()
                file = writer.folder / RESET_FOLDER / "item.parquet"
                pq.write_table(pa.table({"row": pa.array(reset_rows, pa.int64())}), file)
        parent = open_dataset(str(path)).fingerprint
        paths.append(path)
    return paths
