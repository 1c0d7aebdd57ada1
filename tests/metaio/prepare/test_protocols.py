"""Windows of time, given membership, carved validation, dropped tasks: against loops over rows."""

import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from metaio import DataError, Dataset, SchemaError, open_dataset
from metaio.prepare.engines.local import prepare
from metaio.prepare.episodes.splits import WindowSearch
from metaio.prepare.job import PrepareOptions
from metaio.prepare.schema.schema_file import parse_schema
from tests.metaio.conftest import whole_split
from tests.support.refusals import catch_message

Row = dict[str, Any]
Episodes = list[tuple[int, list[float], list[float]]]  # task, labels of support and of query

EPISODES = {"by": "ratio", "query_share": 0.5, "min_rows": 2, "max_rows": 60}
SCHEMA: dict[str, Any] = {
    "task": {"column": "user"}, "label": {"column": "number"}, "time": {"column": "ts"},
    "row_id": {"column": "row"}, "single": [{"column": "item", "vocabulary": 1}],
    "episodes": EPISODES,
}  # fmt: skip


def log(num_rows: int = 500, users: int = 25, seed: int = 0) -> pa.Table:
    """Rows whose label is their number, of users of whom some begin late."""
    rng = np.random.default_rng(seed)
    user = rng.integers(0, users, num_rows)
    return pa.table(
        {
            "user": user,
            "item": rng.integers(0, 40, num_rows),
            # Few distinct times, so that windows begin among equal ones.
            "ts": rng.integers(0, 80, num_rows) + 4 * user,
            "row": rng.permutation(num_rows),
            "number": np.arange(num_rows),
        }
    )


def prepared(folder: Path, table: pa.Table, **parts: Any) -> Dataset:
    pq.write_table(table, folder / "raw.parquet")
    out = str(folder / f"out{len(list(folder.iterdir()))}")
    schema = parse_schema({**SCHEMA, **parts})
    prepare([str(folder / "raw.parquet")], out, schema, PrepareOptions(threads=1, block_rows=50))
    return open_dataset(out)


def episodes(dataset: Dataset, split: str) -> Episodes:
    found = []
    for task, support, rows in whole_split(dataset, split):
        labels: list[float] = [row[0] for row in rows]  # type: ignore[index]
        found.append((task, labels[:support], labels[support:]))
    return found


def numbers(rows: list[Row]) -> list[float]:
    return sorted(row["number"] for row in rows)


def as_sets(found: Episodes) -> list[tuple[int, list[float], list[float]]]:
    return sorted((task, sorted(support), sorted(query)) for task, support, query in found)


def windows_by_hand(
    table: pa.Table, bounds: list[int], window: int
) -> tuple[Episodes, dict[int, list[Row]]]:
    """Episodes of tasks known before the window, and the rows of those that are new in it."""
    known: Episodes = []
    new: dict[int, list[Row]] = {}
    by_task: defaultdict[int, list[Row]] = defaultdict(list)
    for row in table.to_pylist():
        by_task[row["user"]].append(row)
    end = bounds[window] if window < len(bounds) else math.inf
    for task, rows in by_task.items():
        before = [row for row in rows if row["ts"] < bounds[window - 1]]
        inside = [row for row in rows if bounds[window - 1] <= row["ts"] < end]
        if inside and before:
            known.append((task, numbers(before), numbers(inside)))
        elif inside:
            new[task] = inside
    return sorted(known), new


def test_windows_by_shares_support_from_before_and_query_in_them(tmp_path: Path) -> None:
    table = log()
    shares = {"train": 0.5, "valid": 0.2, "test": 0.3}
    data = prepared(tmp_path, table, splits={"by_time": shares, "new_tasks": "apart"})
    assert list(data.splits) == ["train", "valid", "test", "valid-cold", "test-cold"]
    times = sorted(table["ts"].to_pylist())
    bounds = [times[250], times[350]]
    new_tasks = 0
    for window, name in ((1, "valid"), (2, "test")):
        known, new = windows_by_hand(table, bounds, window)
        assert as_sets(episodes(data, name)) == known
        assert known
        cold = {task: (support, query) for task, support, query in episodes(data, f"{name}-cold")}
        kept = {task: rows for task, rows in new.items() if len(rows) >= 2}
        new_tasks += len(kept)
        assert set(cold) == set(kept)
        time_of = dict(zip(table["number"].to_pylist(), table["ts"].to_pylist(), strict=True))
        for task, rows in kept.items():
            support, query = cold[task]
            assert sorted(support + query) == numbers(rows)
            assert len(query) == math.ceil(len(rows) / 2)
            assert max(time_of[n] for n in support) <= min(time_of[n] for n in query)
    assert new_tasks > 2
    trained = [n for _, support, query in episodes(data, "train") for n in support + query]
    assert sorted(trained) == numbers(
        [
            row
            for row in table.to_pylist()
            if row["ts"] < bounds[0] and count_before(table, row["user"], bounds[0]) >= 2
        ]
    )
    seen = {row["item"] for row in table.to_pylist() if row["ts"] < bounds[0]}
    assert data.features.tables[0].num_rows == len(seen) + 1


def count_before(table: pa.Table, user: int, end: int) -> int:
    return sum(row["user"] == user and row["ts"] < end for row in table.to_pylist())


@pytest.mark.parametrize("new_tasks", ["together", "drop"])
def test_windows_by_dates_keep_or_drop_tasks_begun_in_them(tmp_path: Path, new_tasks: str) -> None:
    table = log()
    stamps = pa.array(table["ts"].to_numpy() * 86_400_000_000, pa.timestamp("us"))
    dated = table.set_column(table.schema.get_field_index("ts"), "ts", stamps)
    splits = {"by_time": {"valid": "1970-03-02", "test": "1970-04-01"}, "new_tasks": new_tasks}
    dataset = prepared(tmp_path, dated, splits=splits)
    dropped = dataset.manifest.report["dropped"]
    known, new = windows_by_hand(table, [60, 90], 2)
    _, new_before = windows_by_hand(table, [60, 90], 1)
    found = as_sets(episodes(dataset, "test"))
    assert [one for one in found if one[0] not in new] == known
    if new_tasks == "drop":
        assert [one for one in found if one[0] in new] == []
        assert dropped["new_tasks"] == len(new) + len(new_before)
        rows = [len(rows) for rows in (*new.values(), *new_before.values())]
        assert dropped["new_rows"] == sum(rows)
    else:
        kept = {task for task, rows in new.items() if len(rows) >= 2}
        assert {one[0] for one in found if one[0] in new} == kept
        assert "new_tasks" not in dropped


def test_support_from_before_a_window_is_cut_to_its_newest_rows(tmp_path: Path) -> None:
    table = log(400, users=2)
    rule = {**EPISODES, "max_rows": 40}
    splits = {"by_time": {"train": 0.8, "test": 0.2}}
    dataset = prepared(tmp_path, table, splits=splits, episodes=rule)
    time_of = dict(zip(table["number"].to_pylist(), table["ts"].to_pylist(), strict=True))
    start = sorted(time_of.values())[320]
    known, _ = windows_by_hand(table, [start], 1)
    found = episodes(dataset, "test")
    assert max(len(support) + len(query) for _, support, query in found) <= 40
    for task, before, inside in known:
        own = [(support, query) for one, support, query in found if one == task]
        assert sorted(n for _, query in own for n in query) == inside
        for support, query in own:
            assert len(support) >= 20
            left_out = set(before) - set(support)
            assert max(time_of[n] for n in left_out) <= min(time_of[n] for n in support)
            assert abs(len(query) - len(own[0][1])) <= 1
    assert len(found) == sum(math.ceil(len(inside) / 20) for _, _, inside in known)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_windows_begin_at_the_row_of_their_rank(seed: int) -> None:
    rng = np.random.default_rng(seed)
    spread = (5, 1_000, 1 << 62)[seed]
    times = rng.integers(-spread, spread, 997)
    search = WindowSearch([0.25, 0.5, 0.25])
    while not search.is_done:
        search.narrow(search.count(times[:300]) + search.count(times[300:]))
    ordered = np.sort(times)
    assert search.starts == (ordered[997 // 4], ordered[997 * 3 // 4])


def sided(table: pa.Table) -> pa.Table:
    """A side for each row: user 0 has no support, 1 no query, those above 20 no side at all."""

    def side(row: Row) -> str | None:
        if row["user"] > 20:
            return None
        choices = {0: "query", 1: "support"}
        return choices.get(row["user"], "support" if row["number"] % 3 else "query")

    return table.append_column("side", pa.array([side(row) for row in table.to_pylist()]))


@pytest.mark.parametrize("order", [{"time": SCHEMA["time"]}, {}])
@pytest.mark.parametrize("keeps", ["keep", "drop"])
def test_a_column_says_what_is_support(tmp_path: Path, keeps: str, order: dict[str, Any]) -> None:
    table = sided(log())
    membership = {"column": "side", "without_support": keeps}
    schema = {name: part for name, part in SCHEMA.items() if name != "time"} | order
    pq.write_table(table, tmp_path / "raw.parquet")
    schema |= {"membership": membership}
    prepare([str(tmp_path / "raw.parquet")], str(tmp_path / "out"), parse_schema(schema))
    dataset = open_dataset(str(tmp_path / "out"))
    expected = []
    for user in range(21):
        rows = [row for row in table.to_pylist() if row["user"] == user]
        support = numbers([row for row in rows if row["side"] == "support"])
        query = numbers([row for row in rows if row["side"] == "query"])
        if query and (support or keeps == "keep"):
            expected.append((user, support, query))
    found = as_sets(episodes(dataset, "train"))
    assert [one for one in found if one[0] <= 20] == expected
    assert (0 in {task for task, _, _ in expected}) == (keeps == "keep")
    halves = {one[0]: (len(one[1]), len(one[2])) for one in found if one[0] > 20}
    counts = Counter(table["user"].to_pylist())
    assert halves == {user: (counts[user] // 2, -(-counts[user] // 2)) for user in range(21, 25)}
    lost = dataset.manifest.report["dropped"]["one_sided_rows"]
    assert lost == counts[1] + (keeps == "drop") * counts[0]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_the_name_of_its_file_says_a_rows_side(tmp_path: Path, suffix: str) -> None:
    table = sided(log())
    table = table.filter(pa.compute.is_valid(table["side"]))
    by_column = prepared(tmp_path, table, membership={"column": "side"})
    folder = tmp_path / "files"
    folder.mkdir()
    write = pa_csv.write_csv if suffix == "csv" else pq.write_table
    for side in ("support", "query"):
        own = table.filter(pa.compute.equal(table["side"], side)).drop_columns("side")
        write(own.slice(0, 50), folder / f"{side}-0.{suffix}")
        write(own.slice(50), folder / f"{side}-1.{suffix}")
    schema = {**SCHEMA, "membership": {"support": "support-*", "query": "query-*"}}
    out = str(tmp_path / "by-files")
    options = PrepareOptions(threads=2, block_rows=50)
    prepare([str(folder)], out, parse_schema(schema), options)
    assert open_dataset(out).fingerprint == by_column.fingerprint
    schema["membership"] = {"support": "*", "query": "query-*"}
    with pytest.raises(DataError) as caught:
        prepare([str(folder)], str(tmp_path / "x"), parse_schema(schema), options)
    assert str(caught.value) == (
        f"input {folder}/query-0.{suffix} matches both of the patterns '*' (support) and "
        "'query-*' (query); one of them is needed. Correct [membership], or leave the file out"
    )


@pytest.mark.parametrize("longer", ["episodes", "truncate", "drop"])
def test_a_long_task_of_given_sides_is_cut_to_new_support(tmp_path: Path, longer: str) -> None:
    table = log(400, users=2)
    side = ["query" if number % 3 == 0 else "support" for number in range(400)]
    # User 0 is long, user 1 is not.
    table = table.filter(
        pa.array([u == 0 or n % 4 == 0 for n, u in enumerate(table["user"].to_pylist())])
    )
    table = table.append_column("side", pa.array([side[n] for n in table["number"].to_pylist()]))
    dataset = prepared(
        tmp_path,
        table,
        membership={"column": "side", "max_rows": 90},
        episodes={**EPISODES, "longer": longer},
    )
    found = episodes(dataset, "train")
    long, short = ([one for one in found if one[0] == user] for user in (0, 1))
    rows = sorted(table.to_pylist(), key=lambda row: row["ts"])
    sides = {
        (user, name): [row for row in rows if row["user"] == user and row["side"] == name]
        for user in (0, 1)
        for name in ("support", "query")
    }
    support, query = sides[0, "support"], sides[0, "query"]
    assert len(support) > 90
    assert len(query) > 50
    assert as_sets(short) == [(1, numbers(sides[1, "support"]), numbers(sides[1, "query"]))]
    dropped = dataset.manifest.report["dropped"]
    if longer == "drop":
        assert long == []
        assert (dropped["long_tasks"], dropped["long_rows"]) == (1, len(support) + len(query))
        return
    most = max(90 - len(query), 45) if longer == "episodes" else 90 - len(query)
    assert sorted(n for _, _, own in long for n in own) == numbers(query)
    assert len(long) == (math.ceil(len(query) / (90 - most)) if longer == "episodes" else 1)
    assert {len(own) for _, own, _ in long} == {most}
    assert dropped["truncated_rows"] == len(support) - most
    time_of = {row["number"]: row["ts"] for row in support}
    for _, own, _ in long:
        assert min(time_of[n] for n in own) >= max(time_of[n] for n in time_of if n not in set(own))


def test_a_carved_validation_split_takes_whole_tasks_of_one_split(tmp_path: Path) -> None:
    table = log(3_000, users=200)
    part = pa.array(["train" if user % 4 else "later" for user in table["user"].to_pylist()])
    table = table.append_column("part", part)
    whole = prepared(tmp_path, table, splits={"column": "part"})
    splits = {"column": "part", "validation_from": "train", "validation_share": 0.3}
    carved = prepared(tmp_path, table, splits=splits)
    assert list(carved.splits) == ["train", "later", "valid"]
    kept, held = episodes(carved, "train"), episodes(carved, "valid")
    assert as_sets(kept + held) == as_sets(episodes(whole, "train"))
    assert not {task for task, _, _ in kept} & {task for task, _, _ in held}
    assert 0.15 < len(held) / (len(kept) + len(held)) < 0.45
    assert episodes(carved, "later") == episodes(whole, "later")
    # What is learnt from the data is not learnt from them.
    rows = {row["number"]: row for row in table.to_pylist()}
    seen = {rows[int(n)]["item"] for _, support, query in kept for n in support + query}
    assert carved.features.tables[0].num_rows == len(seen) + 1


def test_validation_items_leave_training_and_make_groups_of_tasks(tmp_path: Path) -> None:
    table = log(6_000, users=110)
    # A row without an item is of no new one.
    item = [None if row % 50 == 0 else one for row, one in enumerate(table["item"].to_pylist())]
    table = table.set_column(1, "item", pa.array(item, pa.int64()))
    common = {
        "single": [{"column": "item", "vocabulary": 1, "null": "unknown"}],
        "item": {"column": "item"},
    }
    shares = {"train": 0.7, "test": 0.3}
    tasks_alone = {"shares": shares, "validation_from": "train", "validation_share": 0.2}
    plain = prepared(tmp_path, table, splits=tasks_alone, **common)
    dataset = prepared(tmp_path, table, splits={**tasks_alone, "validation_items": 0.25}, **common)
    assert list(dataset.splits) == ["train", "test", "valid", "valid-item-cold", "valid-both-cold"]
    rows = {row["number"]: row for row in table.to_pylist()}

    def items(split: str) -> set[int | None]:
        found = [support + query for _, support, query in episodes(dataset, split)]
        return {rows[int(number)]["item"] for numbers in found for number in numbers}

    def tasks(of: Dataset, split: str) -> set[int]:
        return {task for task, _, _ in episodes(of, split)}

    held = items("valid-item-cold")
    assert 3 <= len(held) <= 20  # of 40, each with 0.25
    assert items("valid-both-cold") == held
    assert not held & (items("train") | items("valid"))
    assert None in items("train")
    # Who is new is decided as without held-back items, and so is the test split.
    assert tasks(dataset, "valid") == tasks(plain, "valid") == tasks(dataset, "valid-both-cold")
    assert tasks(dataset, "train") == tasks(plain, "train") == tasks(dataset, "valid-item-cold")
    assert episodes(dataset, "test") == episodes(plain, "test")
    groups = ("train", "valid-item-cold"), ("valid", "valid-both-cold")
    for whole, parts in zip(("train", "valid"), groups, strict=True):
        kept = [one for split in parts for one in episodes(dataset, split)]
        numbers_kept = sorted(n for _, support, query in kept for n in support + query)
        assert numbers_kept == sorted(
            n for _, support, query in episodes(plain, whole) for n in support + query
        )
    # To a model the held-back items are unknown.
    known = (items("train") - {None}) & set(range(40))
    assert dataset.features.tables[0].num_rows == len(known) + 1


def test_longer_drop_leaves_whole_tasks_out_and_counts_them(tmp_path: Path) -> None:
    table = log()
    rule = {**EPISODES, "max_rows": 20, "longer": "drop"}
    dataset = prepared(tmp_path, table, episodes=rule)
    counts = Counter(table["user"].to_pylist())
    kept = {user for user, count in counts.items() if count <= 20}
    assert {task for task, _, _ in episodes(dataset, "train")} == kept
    dropped = dataset.manifest.report["dropped"]
    assert dropped["long_tasks"] == len(counts) - len(kept) > 0
    assert dropped["long_rows"] == sum(count for count in counts.values() if count > 20)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"splits": {"by_time": {"test": 0.5, "train": 0.5}}},
            "splits.by_time begins with test; the oldest rows are those of train. List it first",
        ),
        (
            {"splits": {"validation_from": "test"}},
            "splits.validation_from is test, which is no split: there are train. Name one of them",
        ),
        (
            {"membership": {"support": "a*"}},
            "membership needs a column that says support or query, or two patterns of file names, "
            "support and query. Give the column, or both patterns",
        ),
    ],
)
def test_rules_that_do_not_go_together_are_refused(parts: dict[str, Any], message: str) -> None:
    body = {name: part for name, part in {**SCHEMA, **parts}.items() if part is not None}
    assert catch_message(SchemaError, parse_schema, body) == message


def test_a_side_of_another_name_is_refused(tmp_path: Path) -> None:
    table = log(20).append_column("side", pa.array(["support"] * 19 + ["test"]))
    assert catch_message(DataError, prepared, tmp_path, table, membership={"column": "side"}) == (
        "membership column side holds 'test'; support and query, or 0 and 1, and null are allowed. "
        "Correct those rows"
    )


def test_a_task_with_sides_for_some_rows_only_is_refused(tmp_path: Path) -> None:
    table = log(60, users=1)
    side = pa.array(["support", "query", None] * 20)
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, table.append_column("side", side), membership={"column": "side"})
    assert str(caught.value) == (
        "task 0 has rows whose membership is null beside others. Fill in all rows of a task in a "
        "split, or none"
    )
