"""Negatives against loops over rows and items."""

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metaio import DataError, Dataset, SchemaError, open_dataset
from metaio.format.features import Features
from metaio.prepare.engines.local import prepare
from metaio.prepare.job import PrepareOptions
from metaio.prepare.schema.schema_file import parse_schema
from tests.metaio.conftest import whole_split
from tests.support.refusals import catch_message

PER_POSITIVE = 3
SCHEMA: dict[str, Any] = {
    "task": {"column": "user"},
    "label": {"column": "click"},
    "time": {"column": "ts"},
    "row_id": {"column": "ts"},
    "single": [
        {"column": "item", "vocabulary": 1},
        {"column": "hour", "vocabulary": 1},
        {"column": "brand", "vocabulary": 1},
    ],
    "multi": [
        {"column": "seen", "separator": "|", "vocabulary": 1},
        {"column": "tags", "separator": "|", "vocabulary": 1},
    ],
    "dense": [{"column": "price"}, {"column": "age"}],
    "episodes": {"by": "last", "query_rows": 2, "min_rows": 4},
    "splits": {"shares": {"train": 0.6, "test": 0.4}},
    "negatives": {
        "item": "item",
        "columns": ["brand", "tags", "price"],
        "per_positive": PER_POSITIVE,
    },
}


def log(num_rows: int = 900, clicks: float = 1.0) -> pa.Table:
    """Clicks on 60 items; brand, tags and price follow from the item, the rest from the row."""
    rng = np.random.default_rng(0)
    item = np.minimum(rng.geometric(0.06, num_rows) - 1, 59)
    return pa.table(
        {
            "user": rng.integers(0, 40, num_rows), "item": item, "brand": item % 7,
            "tags": [f"t{one % 5}|t{one % 3 + 5}"[: 2 if one % 2 else 5] for one in item.tolist()],
            "price": item * 0.5, "hour": np.arange(num_rows) % 24,
            "seen": [f"{number % 9}" for number in range(num_rows)],
            "age": np.arange(num_rows).astype(np.float32), "ts": np.arange(num_rows),
            "click": (rng.random(num_rows) < clicks).astype(np.int64),
        }
    )  # fmt: skip


def prepared(folder: Path, table: pa.Table, threads: int = 1, **parts: Any) -> Dataset:
    pq.write_table(table, folder / "raw.parquet")
    out = str(folder / f"out{len(list(folder.iterdir()))}")
    schema = parse_schema({**SCHEMA, **parts})
    options = PrepareOptions(threads=threads, block_rows=64)
    prepare([str(folder / "raw.parquet")], out, schema, options)
    return open_dataset(out)


@pytest.mark.parametrize("by", ["popularity", "uniform"])
def test_each_positive_is_followed_by_items_that_its_task_lacks(tmp_path: Path, by: str) -> None:
    table = log(clicks=0.8)
    rule = {**SCHEMA["negatives"], "by": by}
    dataset = prepared(tmp_path, table, negatives=rule)
    assert Features.from_json(dataset.features.to_json()).draws_negatives
    plain = prepared_plain(tmp_path, table)
    drawn = 0
    for split in dataset.splits:
        # The price is an item's own; items that train lacks share the table's row 0.
        known = {row[1][0]: attributes(row) for row in rows_of(plain, "train", "test")}
        own: defaultdict[int, set[int]] = defaultdict(set)
        for task, _, rows in whole_split(plain, split):
            own[task] |= {row[1][0] for row in rows}  # type: ignore[index]
        pairs = zip(whole_split(dataset, split), whole_split(plain, split), strict=True)
        for (task, support, rows), (same_task, plain_support, positives) in pairs:
            assert task == same_task
            place = 0
            for index, positive in enumerate(positives):
                if index == plain_support:
                    assert place == support
                assert rows[place] == positive
                count = PER_POSITIVE * int(positive[0] > 0)  # type: ignore[index]
                negatives = rows[place + 1 : place + 1 + count]
                items = [row[1][0] for row in negatives]  # type: ignore[index]
                assert len(set(items)) == count
                assert not own[task] & set(items)
                for row in negatives:
                    label, (price, age), (item, hour, brand), (seen, tags) = row  # type: ignore[misc]
                    assert label == 0
                    assert (age, hour, seen) == context(positive)
                    assert (item, brand, tags) == known[price]
                place += 1 + count
                drawn += count
            assert place == len(rows)
    assert drawn > 1_000


def prepared_plain(folder: Path, table: pa.Table) -> Dataset:
    pq.write_table(table, folder / "raw.parquet")
    body = {name: part for name, part in SCHEMA.items() if name != "negatives"}
    prepare([str(folder / "raw.parquet")], str(folder / "plain"), parse_schema(body))
    return open_dataset(str(folder / "plain"))


def rows_of(dataset: Dataset, *splits: str) -> list[Any]:
    return [row for split in splits for _, _, rows in whole_split(dataset, split) for row in rows]


def attributes(row: Any) -> tuple[Any, ...]:
    _, _, (item, _, brand), (_, tags) = row
    return item, brand, tags


def context(row: Any) -> tuple[Any, ...]:
    _, (_, age), (_, hour, _), (seen, _) = row
    return age, hour, seen


def test_popular_items_are_drawn_as_often_as_their_rows_say(tmp_path: Path) -> None:
    """Of tasks of four rows each, which exclude four items of 60 at most."""
    table = log(4_000)
    table = table.set_column(0, "user", pa.array(np.arange(4_000) // 4))
    found = {}
    for by in ("popularity", "uniform"):
        rule = {**SCHEMA["negatives"], "by": by, "per_positive": 1}
        dataset = prepared(tmp_path, table, negatives=rule, splits={})
        clicks = Counter(row[2][0] for row in rows_of(dataset, "train") if row[0])
        drawn = Counter(row[2][0] for row in rows_of(dataset, "train") if not row[0])
        found[by] = [(clicks[item], drawn[item]) for item in clicks]
    popular, uniform = (np.array(found[by]).T for by in ("popularity", "uniform"))
    assert np.corrcoef(popular)[0, 1] > 0.95
    assert abs(np.corrcoef(uniform)[0, 1]) < 0.6
    assert uniform[1].max() < 2.5 * uniform[1].mean()


def test_training_draws_no_item_that_comes_later(tmp_path: Path) -> None:
    table = log(1_200)
    late = table["ts"].to_numpy() >= 900
    table = table.set_column(
        1,
        "item",
        pa.array(np.where(late, table["item"].to_numpy() + 100, table["item"].to_numpy())),
    )
    splits = {"by_time": {"train": 0.75, "test": 0.25}}
    dataset = prepared(tmp_path, table, splits=splits)
    negatives = {
        split: [row[2][0] for row in rows_of(dataset, split) if not row[0]]
        for split in dataset.splits
    }
    # Row 0 of the table is for what train never had.
    assert 0 not in negatives["train"]
    assert 0 in negatives["test"]


def test_order_and_threads_change_nothing_but_the_seed_does(tmp_path: Path) -> None:
    table = log()
    shuffled = table.take(np.random.default_rng(1).permutation(table.num_rows))
    first = prepared(tmp_path, table)
    assert prepared(tmp_path, shuffled, threads=3).fingerprint == first.fingerprint
    assert prepared(tmp_path, table, seed=1).fingerprint != first.fingerprint


def test_where_an_item_has_two_brands_order_says_nothing(tmp_path: Path) -> None:
    table = log()
    brand = table.schema.get_field_index("brand")
    table = table.set_column(brand, "brand", pa.array(np.arange(900) % 3))
    shuffled = table.take(np.random.default_rng(1).permutation(table.num_rows))
    first = prepared(tmp_path, table)
    assert prepared(tmp_path, shuffled).fingerprint == first.fingerprint


def test_a_task_with_nearly_all_items_gets_what_is_left_or_is_refused(tmp_path: Path) -> None:
    num_rows = 40
    table = pa.table(
        {
            "user": [0] * 30 + [1] * 10, "item": [*range(30), *range(25, 35)],
            "ts": range(num_rows), "click": [1] * num_rows,
        }
    )  # fmt: skip
    parts = {
        "single": [{"column": "item", "vocabulary": 1}], "multi": [], "dense": [], "splits": {},
    }  # fmt: skip
    rule = {"item": "item", "per_positive": 5}
    dataset = prepared(tmp_path, table, negatives=rule, **parts)
    for task, _, rows in whole_split(dataset, "train"):
        if task == 0:
            drawn = [row[2][0] for row in rows if not row[0]]  # type: ignore[index]
            assert Counter(drawn) == dict.fromkeys(range(31, 36), 30)
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, table, negatives={**rule, "per_positive": 6}, **parts)
    assert str(caught.value) == (
        "task 0 lacks 5 of the 35 items that negatives are drawn from, negatives.per_positive is "
        "6. Lower it, or leave out tasks that have nearly every item (episodes.longer = 'drop')"
    )


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            {"item": "item", "columns": ["colour"]},
            "negatives names the column colour, which is no [[single]], [[multi]], [[dense]] "
            "or [[vector]] column: no input would change with the item. Add the column, or take "
            "the name out",
        ),
        (
            {"item": "user"},
            "negatives.item is user, which is the task: another item would be another task. Name "
            "the column that changes within a task",
        ),
    ],
)
def test_rules_that_make_no_sense_are_refused(rule: dict[str, Any], message: str) -> None:
    assert catch_message(SchemaError, parse_schema, {**SCHEMA, "negatives": rule}) == message
