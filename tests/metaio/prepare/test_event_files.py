"""Events of another log: what a row knows of them is what was known at its time, nothing later."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from metaio import DataError, SchemaError, open_dataset
from metaio.prepare.engines.local import prepare
from metaio.prepare.job import PrepareOptions
from metaio.prepare.schema.schema_file import parse_schema
from tests.metaio.prepare.test_events import NUM_USERS, StoredRow, log, prepared, rows_of, schema
from tests.support.refusals import catch_message

NUM_VIEWS = 2_000


def views(seed: int = 3) -> dict[str, np.ndarray]:
    """Another log of the same tasks and some more, whose numbers are above those of the rows."""
    rng = np.random.default_rng(seed)
    return {
        "user": rng.integers(0, NUM_USERS + 5, NUM_VIEWS),
        "item": rng.integers(1, 120, NUM_VIEWS),  # some are in no row
        "number": np.arange(NUM_VIEWS, dtype=np.float64) + 10_000,
        "seen": rng.integers(0, 2, NUM_VIEWS),
        "time": rng.integers(0, 400, NUM_VIEWS),
        "page": rng.integers(0, 9, NUM_VIEWS),  # of no interest
    }


def write(folder: Path, columns: dict[str, Any], kind: str = "parquet") -> str:
    """Write a log in two files of a kind; return their glob."""
    folder.mkdir(parents=True, exist_ok=True)
    table, half = pa.table(columns), len(columns["user"]) // 2
    for at, part in enumerate((table.slice(0, half), table.slice(half))):
        path = folder / f"{at}.{kind}"
        if kind == "parquet":
            pq.write_table(part, path)
        elif kind == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in part.to_pylist()))
        else:
            mark = "\t" if kind == "tsv" else ","
            options = pyarrow.csv.WriteOptions(delimiter=mark)
            pyarrow.csv.write_csv(part, path, options)
    return f"{folder}/*.{kind}"


def rule(files: str, **changes: Any) -> dict[str, Any]:
    return {"columns": ["item"], "dense": ["number"], "longest": 0, "files": files, **changes}


def known_to(
    rows: dict[str, np.ndarray], events: dict[str, np.ndarray], number: int, delay: int, where: bool
) -> list[int]:
    """The times of the events that a row of this number knows, one by one."""
    return sorted(
        int(events["time"][at])
        for at in range(len(events["user"]))
        if events["user"][at] == rows["user"][number]
        and events["time"][at] < rows["time"][number] - delay
        and (events["seen"][at] or not where)
    )


def check_known(
    found: list[StoredRow],
    rows: dict[str, np.ndarray],
    events: dict[str, np.ndarray],
    delay: int = 0,
    where: bool = False,
) -> None:
    for row in found:
        times = events["time"][np.array(row.events, int) - 10_000].tolist()
        assert times == known_to(rows, events, row.number, delay, where)


@pytest.mark.parametrize(
    ("kind", "changes", "options"),
    [
        ("parquet", {}, {}),
        ("csv", {"delay": 9}, {"threads": 2}),
        ("tsv", {"where": "seen = 1"}, {"block_rows": 100}),
        ("jsonl", {"where": "seen = 1", "delay": 2}, {"bundle_tasks": 3}),
    ],
)
def test_a_row_knows_earlier_events_of_its_task_in_another_log(
    tmp_path: Path, kind: str, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    rows, events = log(), views()
    files = write(tmp_path / "views", events, kind)
    path = prepared(tmp_path, rows, schema(events=rule(files, **changes)), **options)
    found = rows_of(path)
    assert len(found) > 1_000
    check_known(found, rows, events, changes.get("delay", 0), "where" in changes)
    # As items of rows, by one table.
    vocabulary = pq.read_table(f"{path}/vocabulary/item.parquet")["value"].to_numpy()
    for row in found[:50]:
        numbers = np.array(row.events, int) - 10_000
        ids = np.array(row.items, int)
        assert vocabulary[ids - 1].tolist() == events["item"][numbers].tolist()


def test_rows_and_splits_are_those_without_events(tmp_path: Path) -> None:
    rows, files = log(), write(tmp_path / "views", views())
    hashed = [{"column": "item", "hash": 500}, {"column": "kind", "hash": 50}]
    shares = {"shares": {"train": 0.6, "valid": 0.4}}
    body = schema(single=hashed, splits=shares, events=rule(files))
    with_events = open_dataset(prepared(tmp_path / "a", rows, body))
    del body["events"]
    without = open_dataset(prepared(tmp_path / "b", rows, body))
    for split in ("train", "valid"):
        one, other = (one.read_block(split, 0) for one in (with_events, without))
        for name in ("label_N", "dense_NK", "row_offsets_T1", "support_lengths_T", "task_T"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert with_events.manifest.report["dropped"] == without.manifest.report["dropped"]


@pytest.mark.parametrize(
    ("splits", "more"),
    [
        ({"shares": {"train": 0.5, "valid": 0.5}}, {}),
        ({"by_time": {"train": 0.6, "valid": 0.2, "test": 0.2}, "new_tasks": "apart"}, {}),
        ({"column": "split"}, {}),
        ({"column": "split"}, {"membership": {"column": "side"}}),
        ({}, {"membership": {"column": "side"}}),
        ({}, {"negatives": {"item": "item", "columns": ["kind"], "per_positive": 2}}),
        ({}, {"episodes": {"by": "random", "query_rows": 3, "min_rows": 5, "max_rows": 60}}),
    ],
)
def test_every_split_and_side_knows_what_was_before_it(
    tmp_path: Path, splits: dict[str, Any], more: dict[str, Any]
) -> None:
    rows, events = log(), views()
    rng = np.random.default_rng(8)
    rows["split"] = np.array(["train", "test"])[rng.integers(0, 2, len(rows["user"]))]
    rows["side"] = np.array(["support", "query"])[rng.integers(0, 2, len(rows["user"]))]
    files = write(tmp_path / "views", events)
    body = schema(events=rule(files, delay=1), splits=splits, **more)
    path = prepared(tmp_path, rows, body)
    names = list(open_dataset(path).manifest.splits)
    assert len(names) == (1 if not splits else 2 if "by_time" not in splits else 5)
    for name in names:
        if open_dataset(path).split(name).num_episodes:
            check_known(rows_of(path, name), rows, events, 1)


@pytest.mark.parametrize("by_time", [False, True])
def test_later_events_change_nothing(tmp_path: Path, by_time: bool) -> None:
    rows, events, moment = log(), views(), 250
    later = np.flatnonzero(events["time"] >= moment)
    changed = {name: column.copy() for name, column in events.items()}
    changed["item"][later] = changed["item"][later][::-1]
    changed["time"][later] = moment + (changed["time"][later] * 7) % 150
    windows = {"splits": {"by_time": {"train": 0.7, "test": 0.3}}} if by_time else {}
    found = []
    for at, one in enumerate((events, changed)):
        files = write(tmp_path / f"views{at}", one)
        # A hash, since values of later events get rows of a vocabulary, too.
        single = [{"column": "item", "hash": 5_000}, {"column": "kind", "hash": 50}]
        body = schema(events=rule(files, longest=6), single=single, **windows)
        path = prepared(tmp_path / str(at), rows, body)
        found.append({row.number: row for row in rows_of(path)})
    compared = 0
    for number, row in found[0].items():
        if rows["time"][number] <= moment:
            other = found[1][number]
            assert (row.events[-6:], row.items[-6:]) == (other.events[-6:], other.items[-6:])
            compared += len(row.events) > 0
    assert compared > 300


def test_only_events_of_training_tasks_give_values_rows(tmp_path: Path) -> None:
    rows, events = log(), views()
    events["item"] = 1_000 + events["user"]
    files = write(tmp_path / "views", events)
    body = schema(events=rule(files), splits={"shares": {"train": 0.5, "valid": 0.5}})
    path = prepared(tmp_path, rows, body)
    vocabulary = set(pq.read_table(f"{path}/vocabulary/item.parquet")["value"].to_pylist())
    train, valid = (
        {1_000 + int(rows["user"][row.number]) for row in rows_of(path, split)}
        for split in ("train", "valid")
    )
    assert train <= vocabulary
    assert valid
    assert not valid & vocabulary


def test_the_order_of_files_and_threads_changes_no_byte(tmp_path: Path) -> None:
    rows, events = log(), views()
    order = np.random.default_rng(2).permutation(NUM_VIEWS)
    turned = {name: column[order] for name, column in events.items()}
    found = []
    for at, (one, threads) in enumerate(((events, 1), (turned, 3))):
        folder = tmp_path / "views"
        files = write(folder, one)
        path = prepared(tmp_path / str(at), rows, schema(events=rule(files)), threads=threads)
        found.append(open_dataset(path).manifest.fingerprint)
    assert found[0] == found[1]


def test_an_event_that_no_row_has_is_stored_nowhere(tmp_path: Path) -> None:
    rows, events = log(), views()
    events["user"][:] = NUM_USERS + 1
    files = write(tmp_path / "views", events)
    dataset = open_dataset(prepared(tmp_path, rows, schema(events=rule(files))))
    assert dataset.read_block("train", 0).num_events_T.sum() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda views: views.pop("user"), "has no column user"),
        (lambda views: views.pop("time"), "has no column time"),
        (lambda views: views.pop("item"), "has no column item"),
        (lambda views: views.pop("seen"), "has no column seen"),
        (
            lambda views: views.update(user=views["user"].astype(str)),
            "column user of the files of [events] holds text, and integer in the log: none would "
            "be equal. Cast one of them",
        ),
        (
            lambda views: views.update(time=views["time"].astype(float)),
            "column time of the files of [events] holds floats, and integers in the log",
        ),
        (
            lambda views: views.update(item=[None, *views["item"][1:].tolist()]),
            "column item has 1 null",
        ),
        (
            lambda views: views.update(item=views["item"].astype(str)),
            "column item of the files of [events] holds text, and integer in the log",
        ),
    ],
)
def test_what_is_missing_in_the_other_log_is_said(
    tmp_path: Path, change: Any, message: str
) -> None:
    events = views()
    change(events)
    if "user" in events:
        files = write(tmp_path / "views", events)
    else:
        folder = tmp_path / "views"
        folder.mkdir()
        pq.write_table(pa.table(events), folder / "0.parquet")
        files = str(folder)
    body = schema(events=rule(files, where="seen = 1"))
    out = tmp_path / "data"
    pq.write_table(pa.table(log()), tmp_path / "log.parquet")
    run = [str(tmp_path / "log.parquet")], str(out), parse_schema(body), PrepareOptions()
    found = catch_message(DataError, prepare, *run)
    assert message in found
    assert "\n" not in found
    assert not out.exists()


def test_held_back_items_and_files_of_events_exclude_each_other(tmp_path: Path) -> None:
    splits = {"shares": {"train": 1.0}, "validation_from": "train", "validation_items": 0.1}
    body = schema(splits=splits, events=rule("views/*"), item={"column": "item"})
    message = catch_message(SchemaError, parse_schema, body)
    assert message == (
        "splits.validation_items holds back items, which the files of [events] would show. Leave "
        "one of them out"
    )
