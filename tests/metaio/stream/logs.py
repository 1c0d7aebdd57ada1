"""Small logs with times, whose rows have numbers, and what a slow reading makes of them."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from metaio import Dataset
from metaio.prepare.job import PrepareOptions
from metaio.prepare.schema.schema import Schema
from metaio.prepare.schema.schema_file import parse_schema
from metaio.stream.chain import IncrementRecord
from metaio.stream.extend import extend

DAY = 86_400
OPTIONS = PrepareOptions(threads=1, block_rows=64)


def schema(**stream: object) -> Schema:
    """Users who click on items of cities, with tags and a price."""
    return parse_schema(
        {
            "task": {"column": "user"},
            "label": {"column": "click"},
            "time": {"column": "time"},
            "row_id": {"column": "row"},
            "single": [
                {"column": "item", "vocabulary": 2},
                {"column": "city", "vocabulary": 1},
                {"column": "age", "hash": 20},
            ],
            "multi": [{"column": "tags", "vocabulary": 1, "separator": "|"}],
            "dense": [{"column": "price", "standardise": True, "fill": 0.0}],
            "episodes": {"by": "last", "query_rows": 2, "min_rows": 3, "max_rows": 50},
            "stream": {"capacity_block": 16, "gate": 0.25, "support": 4, **stream},
        }
    )


def log(first_day: int, days: int = 1, rows: int = 400, seed: int = 0) -> pa.Table:
    """Rows of some days: items, cities and users come and go."""
    rng = np.random.default_rng([seed, first_day])
    day = np.sort(rng.integers(first_day, first_day + days, rows))
    tags = rng.integers(0, 9, (rows, 2)) + day[:, None]
    return pa.table(
        {
            "row": first_day * 100_000 + np.arange(rows),
            "user": rng.integers(0, 40, rows) + 5 * day, "click": rng.integers(0, 2, rows),
            "time": day * DAY + rng.permutation(DAY)[:rows],
            "item": rng.integers(0, 60, rows) + 10 * day,
            "city": [f"city {n}" for n in rng.integers(0, 6, rows) + day],
            "age": rng.integers(0, 90, rows), "tags": ["|".join(map(str, own)) for own in tags],
            "price": rng.normal(5.0, 2.0, rows),
        }
    )  # fmt: skip


def changed(table: pa.Table, column: str, values: Any) -> pa.Table:
    """The table with other values in a column."""
    return table.set_column(table.schema.get_field_index(column), column, pa.array(values))


def append(stream: Path, table: pa.Table, name: str = "", **how: Any) -> IncrementRecord:
    """Write a table to a file of its own, and make it the next increment of the stream."""
    place = stream.parent / "logs" / (name or f"{len(table)}-{table['row'][0]}.parquet")
    place.parent.mkdir(exist_ok=True)
    pq.write_table(table, place)
    return extend([str(place)], str(stream), how.pop("schema", None), OPTIONS, **how)


Episode = tuple[int, tuple[int, ...], tuple[int, ...]]  # task, support rows, query rows


def episodes(dataset: Dataset, split: str) -> set[Episode]:
    """The episodes of a split by the numbers of their rows."""
    found = set()
    for block in (dataset.read_block(split, i) for i in range(dataset.split(split).num_blocks)):
        rows = block.row_id_N.tolist()
        bounds = zip(block.row_offsets_T1, block.row_offsets_T1[1:], strict=False)
        for task, support, (first, stop) in zip(
            block.task_T.tolist(), block.support_lengths_T.tolist(), bounds, strict=True
        ):
            own = rows[first:stop]
            found.add((task, tuple(own[:support]), tuple(own[support:])))
    return found


def slow_episodes(tables: Iterable[pa.Table], start: int, support: int = 4) -> set[Episode]:
    """The episodes of the last table, which begins at `start`, given all before it: task by task.
    Rows of one time would be ordered by a hash; these logs have none within a task."""
    by_task: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for table in tables:
        for row in table.select(["user", "time", "row"]).to_pylist():
            by_task[row["user"]].append((row["time"], row["row"]))
    found: set[Episode] = set()
    for task, rows in by_task.items():
        rows.sort()
        past = [row for time, row in rows if time < start][-support:]
        own = [row for time, row in rows if time >= start]
        if own and not past and len(own) >= 3:
            found.add((task, tuple(own[:-2]), tuple(own[-2:])))
        if own and past and len(own) + len(past) >= 3:
            found.add((task, tuple(past), tuple(own)))
    return found
