"""prepare against a slow and obvious one: dictionaries of lists, sorted row by row."""

import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from metaio import DataError, Dataset, open_dataset
from metaio.errors import UrlError
from metaio.prepare.engines.local import prepare
from metaio.prepare.episodes.vocabulary import TextIndex
from metaio.prepare.job import PrepareOptions
from metaio.prepare.schema.schema import Schema
from metaio.prepare.schema.schema_file import parse_schema
from tests.metaio.conftest import Episode, episodes_of_batch, whole_split
from tests.support.refusals import catch_message

BASE: dict[str, Any] = {
    "task": {"column": "user"},
    "label": {"column": "clicked"},
    "time": {"column": "ts"},
    "single": [
        {"column": "item", "vocabulary": 2},
        {"column": "shop", "hash": 50},
        {"column": "city", "vocabulary": 1},
    ],
    "multi": [{"column": "tags", "separator": "|", "hash": 20, "null": "unknown"}],
    "dense": [{"column": "price", "log1p": True}, {"column": "age", "fill": 5.0}],
    "episodes": {"by": "last", "query_rows": 2, "min_rows": 4, "max_rows": 50},
}


def raw_table(num_rows: int = 800, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    tags = [
        "|".join(f"t{t}" for t in rng.integers(0, 9, rng.integers(1, 4))) for _ in range(num_rows)
    ]
    cities = [f"c{c}" for c in rng.integers(0, 7, num_rows)]
    return pa.table(
        {
            "user": rng.integers(0, 40, num_rows), "item": rng.integers(0, 300, num_rows),
            "shop": rng.integers(-5, 99, num_rows), "city": cities,
            "tags": [tag if rng.random() < 0.9 else None for tag in tags],
            "price": rng.random(num_rows).round(3),
            "age": [int(a) if rng.random() < 0.9 else None for a in rng.integers(1, 99, num_rows)],
            "ts": rng.permutation(num_rows), "clicked": rng.integers(0, 2, num_rows),
            "part": rng.choice(["train", "later"], num_rows),
        }
    )  # fmt: skip


def prepared(tmp_path: Path, table: pa.Table, schema: Schema, **options: Any) -> Dataset:
    pq.write_table(table, tmp_path / "raw.parquet")
    out = str(tmp_path / f"out{len(list(tmp_path.iterdir()))}")
    prepare([str(tmp_path / "raw.parquet")], out, schema, PrepareOptions(threads=1, **options))
    return open_dataset(out)


def changed(**parts: Any) -> Schema:
    return parse_schema({**BASE, **parts})


def slow_tasks(table: pa.Table) -> dict[int, list[dict[str, Any]]]:
    """Rows of each task by time, values as prepare should turn them out (vocabularies, dense)."""
    rows = table.to_pylist()
    counts: defaultdict[int, int] = defaultdict(int)
    for row in rows:
        counts[row["item"]] += 1
    items = sorted(item for item, count in counts.items() if count >= 2)
    cities = sorted({row["city"] for row in rows})
    tasks: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["ts"]):
        tasks[row["user"]].append(
            {
                "label": float(row["clicked"]),
                "item": items.index(row["item"]) + 1 if row["item"] in items else 0,
                "city": cities.index(row["city"]) + 1,
                "dense": [np.float32(math.log1p(row["price"])), np.float32(row["age"] or 5)],
                "num_tags": len((row["tags"] or "").split("|")) if row["tags"] else 0,
                "shop": row["shop"],
            }
        )
    return tasks


def agrees(episode: Episode, rows: list[dict[str, Any]], num_query: int) -> bool:
    _, support, found = episode
    facts = [
        (label, *dense, ids[0], ids[2], len(lists[0]))
        for label, dense, ids, lists in found  # type: ignore[misc]
    ]
    wanted = [(r["label"], *r["dense"], r["item"], r["city"], r["num_tags"]) for r in rows]
    return support == len(rows) - num_query and facts == wanted


def test_rows_tasks_and_values_are_those_of_the_slow_way(tmp_path: Path) -> None:
    table = raw_table()
    dataset = prepared(tmp_path, table, changed(), block_rows=100)
    episodes = whole_split(dataset, "train")
    tasks = {task: rows for task, rows in slow_tasks(table).items() if len(rows) >= 4}
    assert {task for task, _, _ in episodes} == set(tasks)
    assert all(agrees(episode, tasks[episode[0]], 2) for episode in episodes)


def test_equal_raw_values_share_a_hashed_row_and_others_mostly_do_not(tmp_path: Path) -> None:
    table = raw_table()
    tasks = slow_tasks(table)
    rows_of: defaultdict[int, set[int]] = defaultdict(set)
    for task, _, rows in whole_split(prepared(tmp_path, table, changed()), "train"):
        for (_, _, ids, _), raw in zip(rows, tasks[task], strict=True):  # type: ignore[misc]
            rows_of[raw["shop"]].add(ids[1])
    assert all(len(rows) == 1 and rows <= set(range(1, 50)) for rows in rows_of.values())
    assert len(set().union(*rows_of.values())) > 30


@pytest.mark.parametrize("seed", [0, 1])
def test_order_of_input_files_format_and_threads_change_nothing(tmp_path: Path, seed: int) -> None:
    table = raw_table(seed=seed)
    schema = changed(splits={"shares": {"train": 0.7, "user-cold": 0.3}})
    first = prepared(tmp_path, table, schema, block_rows=64)
    shuffled = table.take(np.random.default_rng(seed).permutation(table.num_rows))
    folder = tmp_path / "files"
    folder.mkdir()
    pa_csv.write_csv(shuffled.slice(0, 300), folder / "a.csv")
    pa_csv.write_csv(shuffled.slice(300), folder / "b.csv")
    out = str(tmp_path / "again")
    options = PrepareOptions(threads=3, block_rows=64, memory_bytes=256 << 20)
    prepare([str(folder / "*.csv")], out, schema, options)
    again = open_dataset(out)
    assert again.fingerprint == first.fingerprint
    for file in sorted(Path(first.url).rglob("*.parquet")):
        assert file.read_bytes() == (Path(out) / file.relative_to(first.url)).read_bytes()


def test_a_large_split_stands_in_bundles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others do not: they are read in order, and would look ids up more often."""
    table = raw_table()
    schema = changed(splits={"shares": {"train": 0.7, "user-cold": 0.3}})
    monkeypatch.setattr("metaio.format.layout.BUNDLED_ROWS", 100)
    monkeypatch.setattr("metaio.format.layout.BUNDLE_TASKS", 3)
    large = prepared(tmp_path, table, schema)
    expected = {"train": 3, "user-cold": 0}
    assert {name: split.blocks.bundle_tasks for name, split in large.splits.items()} == expected
    monkeypatch.setattr("metaio.format.layout.BUNDLED_ROWS", table.num_rows)
    small, asked = (
        prepared(tmp_path, table, schema),
        prepared(tmp_path, table, schema, bundle_tasks=3),
    )
    assert small.split("train").blocks.bundle_tasks == 0
    assert small.fingerprint != large.fingerprint == asked.fingerprint
    for split in small.splits:
        assert whole_split(large, split) == whole_split(small, split)


def test_bundles_beside_a_shard_without_an_episode(tmp_path: Path) -> None:
    """One task in two shards of eight blocks of four rows."""
    table = raw_table(60)
    table = table.set_column(0, "user", pa.array([1] * 60))
    plain, bundles = (
        prepared(tmp_path, table, changed(), block_rows=4, bundle_tasks=num) for num in (0, 2)
    )
    assert min(shard.num_rows for shard in bundles.split("train").shards) == 0
    assert bundles.split("train").blocks.bundle_tasks == 2
    assert whole_split(bundles, "train") == whole_split(plain, "train")


def test_what_has_no_ids_stands_in_no_bundles(tmp_path: Path) -> None:
    table, schema = raw_table(), changed(single=[], multi=[])
    plain, asked = (prepared(tmp_path, table, schema, bundle_tasks=num) for num in (0, 3))
    assert asked.split("train").blocks.bundle_tasks == 0
    assert whole_split(asked, "train") == whole_split(plain, "train")


def test_every_folder_that_a_glob_matches_is_read(tmp_path: Path) -> None:
    """What Spark calls day-1.parquet is a folder; its _SUCCESS holds no rows."""
    table = raw_table()
    schema = changed()
    first = prepared(tmp_path, table, schema)
    for day, rows in enumerate((table.slice(0, 300), table.slice(300))):
        folder = tmp_path / "days" / f"{day}.parquet"
        folder.mkdir(parents=True)
        pq.write_table(rows, folder / "part-0.parquet")
        (folder / "_SUCCESS").touch()
    for inputs in ("days/*.parquet", "days/**", "days"):
        out = str(tmp_path / f"of-{len(inputs)}")
        prepare([str(tmp_path / inputs)], out, schema, PrepareOptions(threads=1))
        assert open_dataset(out).fingerprint == first.fingerprint


def test_a_fill_between_two_whole_numbers_stays_what_it_is(tmp_path: Path) -> None:
    dense = [{"column": "age", "fill": 0.5}]
    dataset = prepared(tmp_path, raw_table(), changed(dense=dense))
    found = {
        values[0]
        for _, _, rows in whole_split(dataset, "train")
        for _, values, _, _ in rows  # type: ignore[misc]
    }
    assert {value for value in found if value < 1} == {0.5}


def sizes(dataset: Dataset, split: str = "train") -> dict[int, list[tuple[int, int]]]:
    """(support, query) of each task's episodes in stored order."""
    found: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for task, support, rows in whole_split(dataset, split):
        found[task].append((support, len(rows) - support))
    return dict(found)


def task_sizes(table: pa.Table) -> dict[int, int]:
    return {task: len(rows) for task, rows in slow_tasks(table).items()}


def test_ratio_gives_every_episode_support_and_query(tmp_path: Path) -> None:
    table = raw_table()
    rule = {"by": "ratio", "query_share": 0.3, "min_rows": 2, "max_rows": 99}
    found = sizes(prepared(tmp_path, table, changed(episodes=rule)))
    for task, count in task_sizes(table).items():
        if count >= 2:
            query = min(max(math.ceil(count * 0.3), 1), count - 1)
            assert found[task] == [(count - query, query)]


def test_time_cuts_support_from_query_and_drops_one_sided_tasks(tmp_path: Path) -> None:
    table = raw_table()
    rule = {"by": "time", "at": 400, "min_rows": 2, "max_rows": 99}
    dataset = prepared(tmp_path, table, changed(episodes=rule))
    times = defaultdict(list)
    for row in table.to_pylist():
        times[row["user"]].append(row["ts"])
    wanted = {
        task: [(sum(t < 400 for t in own), sum(t >= 400 for t in own))]
        for task, own in times.items()
    }
    assert sizes(dataset) == {task: pair for task, pair in wanted.items() if 0 not in pair[0]}


def test_time_reads_dates_of_timestamp_columns(tmp_path: Path) -> None:
    table = raw_table()
    stamps = pa.array(table["ts"].to_numpy() * 86_400_000_000, pa.timestamp("us"))
    table = table.set_column(table.schema.get_field_index("ts"), "ts", stamps)
    rule = {"by": "time", "min_rows": 2, "max_rows": 99}
    dates = sizes(prepared(tmp_path, table, changed(episodes={**rule, "at": "1971-02-05"})))
    numbers = sizes(prepared(tmp_path, raw_table(), changed(episodes={**rule, "at": 400})))
    assert dates == numbers


def test_random_is_a_seeded_shuffle(tmp_path: Path) -> None:
    rule = {**BASE["episodes"], "by": "random"}
    labels = []
    for seed in (0, 0, 1):
        dataset = prepared(tmp_path, raw_table(), changed(episodes=rule, seed=seed))
        labels.append([row[0] for _, _, rows in whole_split(dataset, "train") for row in rows])  # type: ignore[index]
    assert labels[0] == labels[1] != labels[2]


def test_a_long_task_becomes_equal_episodes_in_time(tmp_path: Path) -> None:
    table = raw_table(2_000).set_column(0, "user", pa.array([7] * 1_000 + [8] * 1_000))
    rule = {"by": "last", "query_rows": 2, "min_rows": 4, "max_rows": 300}
    dataset = prepared(tmp_path, table, changed(episodes=rule), block_rows=128)
    assert sizes(dataset) == {7: [(248, 2)] * 4, 8: [(248, 2)] * 4}
    joined = [
        row[0] for task, _, rows in whole_split(dataset, "train") for row in rows if task == 7
    ]  # type: ignore[index]
    assert joined == [row["label"] for row in slow_tasks(table)[7]]


@pytest.mark.parametrize(
    ("rows", "limits", "episodes", "truncated"),
    [
        (14, (13, 13), [(3, 10)], 1), (27, (13, 13), [(3, 10)] * 2, 1),
        (30, (13, 20), [(5, 10)] * 2, 0), (20, (13, 20), [(10, 10)], 0),
        (21, (13, 20), [(10, 10)], 1),
    ],
)  # fmt: skip
def test_no_part_of_a_long_task_falls_below_min_rows(
    tmp_path: Path, rows: int, limits: tuple[int, int], episodes: list[tuple[int, int]],
    truncated: int,
) -> None:  # fmt: skip
    table = raw_table(rows).set_column(0, "user", pa.array([7] * rows))
    rule = {"by": "last", "query_rows": 10, "min_rows": limits[0], "max_rows": limits[1]}
    dataset = prepared(tmp_path, table, changed(episodes=rule))
    assert sizes(dataset) == {7: episodes}
    assert dataset.manifest.report["dropped"]["truncated_rows"] == truncated


def test_truncate_keeps_the_last_rows(tmp_path: Path) -> None:
    table = raw_table(900).set_column(0, "user", pa.array([7] * 900))
    rule = {"by": "last", "query_rows": 2, "max_rows": 10, "longer": "truncate"} | {"min_rows": 3}
    dataset = prepared(tmp_path, table, changed(episodes=rule))
    ((_, support, rows),) = whole_split(dataset, "train")
    labels = [row[0] for row in rows]  # type: ignore[index]
    assert (support, labels) == (8, [row["label"] for row in slow_tasks(table)[7][-10:]])
    assert dataset.manifest.report["dropped"]["truncated_rows"] == 890


def test_refuse_names_the_longest_task(tmp_path: Path) -> None:
    table = raw_table(900).set_column(0, "user", pa.array([7] * 600 + [8] * 300))
    rule = {"by": "last", "query_rows": 2, "min_rows": 3, "max_rows": 50, "longer": "refuse"}
    assert catch_message(DataError, prepared, tmp_path, table, changed(episodes=rule)) == (
        "task 7 has 600 rows, episodes.max_rows is 50. Raise it, or set episodes.longer to "
        "'episodes', 'truncate' or 'drop'"
    )


def test_short_tasks_are_dropped_and_counted(tmp_path: Path) -> None:
    table = raw_table(60)
    dataset = prepared(tmp_path, table, changed())
    short = [count for count in task_sizes(table).values() if count < 4]
    dropped = dataset.manifest.report["dropped"]
    assert (dropped["short_tasks"], dropped["short_rows"]) == (len(short), sum(short))
    assert dataset.splits["train"].num_rows == 60 - sum(short)


def test_a_column_names_the_splits_and_vocabularies_come_from_train(tmp_path: Path) -> None:
    table = raw_table()
    rule = {"by": "last", "query_rows": 1, "min_rows": 2, "max_rows": 99}
    dataset = prepared(tmp_path, table, changed(splits={"column": "part"}, episodes=rule))
    assert list(dataset.splits) == ["train", "later"]
    train = table.filter(pa.compute.equal(table["part"], "train"))
    counts = defaultdict(int)
    for item in train["item"].to_pylist():
        counts[item] += 1
    known = sum(count >= 2 for count in counts.values())
    assert dataset.features.tables[0].num_rows == known + 1
    later = [row[2][0] for _, _, rows in whole_split(dataset, "later") for row in rows]  # type: ignore[index]
    assert 0 in later
    assert max(later) <= known


def test_shares_split_by_task_and_not_by_row(tmp_path: Path) -> None:
    schema = changed(splits={"shares": {"train": 0.5, "valid": 0.25, "user-cold": 0.25}})
    dataset = prepared(tmp_path, raw_table(4_000), schema)
    tasks = [set(sizes(dataset, name)) for name in dataset.splits]
    assert sum(map(len, tasks)) == 40
    assert not tasks[0] & tasks[1]
    assert not tasks[0] & tasks[2]


@pytest.mark.parametrize(("first", "step"), [(1_760_000_000, 1), (0.1, 0.0), (1_760_000_007, 0)])
def test_columns_are_standardised_far_from_0_and_constant_ones_too(
    tmp_path: Path, first: float, step: float
) -> None:
    table = raw_table(40_000)
    price = pa.array(first + step * (np.arange(40_000) % 300))
    table = table.set_column(table.column_names.index("price"), "price", price)
    dense = [{"column": "price", "standardise": True}]
    dataset = prepared(tmp_path, table, changed(dense=dense))
    values = [row[1][0] for _, _, rows in whole_split(dataset, "train") for row in rows]  # type: ignore[index]
    assert abs(np.mean(values)) < 1e-4
    assert abs(np.std(values) - bool(step)) < 1e-4


def test_a_threshold_makes_labels_binary(tmp_path: Path) -> None:
    label = {"column": "paid", "threshold": 0.5}
    table = raw_table()
    table = table.append_column("paid", table["price"])
    dataset = prepared(tmp_path, table, changed(label=label))
    prices = {0.0: [], 1.0: []}  # type: dict[float, list[float]]
    for _, _, rows in whole_split(dataset, "train"):
        for label_value, dense, *_ in rows:  # type: ignore[misc]
            prices[label_value].append(math.expm1(dense[0]))
    assert max(prices[0.0]) < 0.5 <= min(prices[1.0]) + 1e-6


def test_text_tasks_are_hashed(tmp_path: Path) -> None:
    table = raw_table()
    names = pa.array([f"user {u}" for u in table["user"].to_pylist()])
    dataset = prepared(tmp_path, table.set_column(0, "user", names), changed())
    assert dataset.manifest.task_kind == "hashed"
    lengths = sorted(count for count in task_sizes(table).values() if count >= 4)
    assert sorted(s + q for ((s, q),) in sizes(dataset).values()) == lengths


def test_collisions_of_hashed_columns_are_reported(tmp_path: Path) -> None:
    single = [{"column": "item", "hash": 101}]
    dataset = prepared(tmp_path, raw_table(4_000), changed(single=single))
    report = dataset.manifest.report["hashed_tables"]["item"]
    assert report["rows"] == 100
    assert report["rows_used"] <= 100
    # 300 values in 100 rows: about 95 rows used.
    assert 200 < report["values_estimated"] < 450


def refused(tmp_path: Path, table: pa.Table, schema: Schema) -> str:
    message = catch_message(DataError, prepared, tmp_path, table, schema)
    assert [path.name for path in tmp_path.iterdir()] == ["raw.parquet"]
    return message


def with_column(name: str, values: Any) -> pa.Table:
    table = raw_table(40)
    return table.set_column(table.schema.get_field_index(name), name, pa.array(values))


def test_nulls_are_refused_with_column_and_count(tmp_path: Path) -> None:
    table = with_column("clicked", [None, None, *[1] * 38])
    found = refused(tmp_path, table, changed())
    assert found == "column clicked has 2 nulls; none are allowed. Remove those rows"
    table = with_column("shop", [None, *[1] * 39])
    assert refused(tmp_path, table, changed()) == (
        "column shop has 1 null; none are allowed. Remove those rows, or allow it in the schema: "
        'null = "unknown"'
    )
    table = with_column("price", [None, *[1.0] * 39])
    assert refused(tmp_path, table, changed()) == (
        "column price has 1 null; none are allowed. Remove those rows, or allow it in the schema: "
        "fill = VALUE"
    )


def test_a_place_that_is_taken_is_told_before_anything_is_read(tmp_path: Path) -> None:
    raw, out = tmp_path / "raw.parquet", str(tmp_path / "out")
    pq.write_table(raw_table(200), raw)
    prepare([str(raw)], out, changed())
    raw.unlink()
    assert catch_message(DataError, prepare, [str(raw)], out, changed()) == (
        f"{out} holds a dataset already. Choose another place, or pass --overwrite to replace it"
    )


@pytest.mark.parametrize(
    "work",
    [
        lambda raw, out: open_dataset("nowhere://x"),
        lambda raw, out: prepare(["nowhere://x"], out, changed()),
        lambda raw, out: prepare([raw], "nowhere://x", changed()),
    ],
)
def test_an_unknown_url_is_one_line(tmp_path: Path, work: Callable[[str, str], object]) -> None:
    pq.write_table(raw_table(40), tmp_path / "raw.parquet")
    assert catch_message(UrlError, work, str(tmp_path / "raw.parquet"), str(tmp_path / "out")) == (
        "nowhere://x cannot be opened: Protocol not known: nowhere. Give a path, or a URL of a "
        "kind that an installed package of fsspec reads"
    )


def test_a_missing_column_names_the_nearest(tmp_path: Path) -> None:
    message = refused(tmp_path, raw_table(40), changed(label={"column": "click"}))
    assert message == (
        f"input {tmp_path}/raw.parquet has no column click; did you mean clicked? Correct the "
        "schema"
    )


def test_a_task_column_of_the_wrong_type_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, raw_table(40), changed(task={"column": "price"})) == (
        "task column price has type double; integer or text is needed. Cast it, or choose another "
        "column"
    )


def test_labels_and_dense_values_must_be_numbers(tmp_path: Path) -> None:
    assert refused(tmp_path, raw_table(40), changed(label={"column": "part"})) == (
        "label column part has type string; a number is needed. Cast it, or choose another column"
    )
    table = with_column("price", [math.inf, *[1.0] * 39])
    assert refused(tmp_path, table, changed()) == (
        "dense column price holds inf; finite numbers are needed. Replace those values, or make "
        "them null and give fill"
    )
    table = with_column("price", [-2.0, *[1.0] * 39])
    assert refused(tmp_path, table, changed()) == (
        "dense column price holds -2; log1p needs values above -1. Clip the column, or leave out "
        "log1p"
    )


@pytest.mark.parametrize("column", ["price", "clicked", "ts", "shop", "tags"])
def test_durations_are_refused_and_are_no_bare_numbers(tmp_path: Path, column: str) -> None:
    """Parquet has no such type: all but Arrow's own note in the file calls them integers."""
    durations = pa.array([60] * 40, pa.duration("ns"))
    multi = [{"column": "tags", "hash": 20}] if column == "tags" else BASE["multi"]
    if column == "tags":
        durations = pa.array([[60]] * 40, pa.list_(pa.duration("ns")))
    assert refused(tmp_path, with_column(column, durations), changed(multi=multi)) == (
        f"column {column} has type {durations.type} in {tmp_path}/raw.parquet; a number, text, "
        "date or timestamp is needed. Cast it to a number of a unit of your choice, such as seconds"
    )


def test_durations_in_columns_that_nobody_reads_are_no_matter(tmp_path: Path) -> None:
    table = raw_table()
    waited = pa.array([60] * table.num_rows, pa.duration("s"))
    dataset = prepared(tmp_path, table.append_column("waited", waited), changed())
    assert dataset.fingerprint == prepared(tmp_path, table, changed()).fingerprint


@pytest.mark.parametrize("threshold", [{}, {"threshold": 0.5}])
def test_a_label_that_is_no_number_is_refused_and_no_click_of_0(
    tmp_path: Path, threshold: dict[str, float]
) -> None:
    table = with_column("clicked", [math.nan, *[1.0] * 39])
    label = {"column": "clicked", **threshold}
    assert refused(tmp_path, table, changed(label=label)) == (
        "label column clicked holds nan; finite numbers up to 3.4e38 are needed. "
        "Replace those values"
    )


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_time_that_is_no_number_is_refused_and_not_newest(tmp_path: Path, sign: float) -> None:
    times = [math.copysign(math.nan, sign), *(float(ts) for ts in range(39))]
    by_time = {"by": "time", "at": 20, "min_rows": 2, "max_rows": 99}
    for episodes in (BASE["episodes"], by_time):
        assert refused(tmp_path, with_column("ts", times), changed(episodes=episodes)) == (
            "time column ts holds NaN, which is no time. Repair those rows, or drop them"
        )


def test_a_list_column_needs_lists_or_a_separator(tmp_path: Path) -> None:
    multi = [{"column": "tags", "hash": 9, "null": "unknown"}]
    assert refused(tmp_path, raw_table(40), changed(multi=multi)) == (
        "multi column tags has type string; a list is needed, or text with a separator. "
        "Give separator in the schema"
    )


def test_an_empty_or_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "raw.csv").touch()
    for name, message in (
        ("raw.csv", f"input {tmp_path}/raw.csv is empty. Remove it, or write its rows"),
        ("no.csv", f"input {tmp_path}/no.csv does not exist. Check the path"),
    ):
        with pytest.raises(DataError) as caught:
            prepare([str(tmp_path / name)], str(tmp_path / "out"), changed())
        assert str(caught.value) == message


def test_schema_drift_between_files_names_file_and_column(tmp_path: Path) -> None:
    table = raw_table(40)
    pq.write_table(table, tmp_path / "a.parquet")
    cast = table.set_column(1, "item", table["item"].cast(pa.string()))
    for other, message in (
        (
            cast,
            "column item is VARCHAR in {0}/b.parquet and BIGINT in {0}/a.parquet. Cast one of "
            "them, so that all files agree",
        ),
        (
            table.drop_columns("item"),
            "input {0}/b.parquet has no column item, but {0}/a.parquet has. Make the files agree",
        ),
    ):
        pq.write_table(other, tmp_path / "b.parquet")
        with pytest.raises(DataError) as caught:
            prepare([str(tmp_path / "*.parquet")], str(tmp_path / "out"), changed())
        assert str(caught.value) == message.format(tmp_path)


def test_a_declared_type_keeps_leading_zeros(tmp_path: Path) -> None:
    rows = "".join(f"1,{code},1\n" for code in ["007", "07", "7", "7"])
    (tmp_path / "raw.csv").write_text(f"user,code,clicked\n{rows}")
    found = []
    for kind in ("text", "integer"):
        schema = parse_schema(
            {
                "task": {"column": "user"},
                "label": {"column": "clicked"},
                "single": [{"column": "code", "vocabulary": 1, "type": kind}],
                "episodes": {"query_rows": 1},
            }
        )
        out = str(tmp_path / kind)
        prepare([str(tmp_path / "raw.csv")], out, schema)
        found.append(open_dataset(out).features.tables[0].num_rows)
    assert found == [4, 2]


def test_batches_of_a_prepared_dataset_follow_the_reader(tmp_path: Path) -> None:
    from metaio import BatchReader

    dataset = prepared(tmp_path, raw_table(), changed(), block_rows=50)
    with BatchReader(dataset, "train", tasks_per_step=5, seed=2) as reader:
        read = [episode for batch in reader.batches(0) for episode in episodes_of_batch(batch)]
    stored = whole_split(dataset, "train")
    assert sorted(read, key=lambda e: e[0]) == sorted(stored, key=lambda e: e[0])


def test_replacing_a_dataset_whose_column_changed_its_kind_is_refused(tmp_path: Path) -> None:
    table = raw_table()
    pq.write_table(table, tmp_path / "raw.parquet")
    out = str(tmp_path / "out")
    overwrite = PrepareOptions(overwrite=True)  # allowed where there is nothing yet
    prepare([str(tmp_path / "raw.parquet")], out, changed(), overwrite)
    expected = {"item": "integer", "shop": "integer", "city": "text", "tags": "text"}
    assert open_dataset(out).manifest.recipe["kinds"] == expected
    before = open_dataset(out).fingerprint
    text = table.set_column(2, "shop", table["shop"].cast(pa.string()))
    pq.write_table(text, tmp_path / "raw.parquet")
    with pytest.raises(DataError) as caught:
        prepare([str(tmp_path / "raw.parquet")], out, changed(), overwrite)
    assert str(caught.value) == (
        f"column shop holds text values, in the dataset at {out} it held integer: its ids would "
        "change. Cast the column to integer, or remove that dataset"
    )
    assert open_dataset(out).fingerprint == before


def test_text_is_looked_up_as_by_a_dictionary(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    words = sorted({f"w{value}" for value in rng.integers(0, 5_000, 2_000)} | {"", "\u00e9"})
    column = [f"w{value}" for value in rng.integers(0, 5_000, 3_000)] + ["", "\u00e9", "zzz"]
    rows = {word: row for row, word in enumerate(words, 1)}
    expected = [rows.get(word, 0) for word in column]
    assert TextIndex(pa.array(words)).rows(pa.array(column)).tolist() == expected
    assert TextIndex(pa.array([], pa.string())).rows(pa.array(["a"])).tolist() == [0]
    # A hash of eight values: known words collide with each other, then unknown ones with known.
    monkeypatch.setattr(
        "metaio.prepare.episodes.vocabulary.hash_values",
        lambda array, kind: np.array([len(w) % 8 for w in array.to_pylist()], np.uint64),
    )
    assert TextIndex(pa.array(words)).rows(pa.array(column)).tolist() == expected
    assert TextIndex(pa.array(["ab", "c"])).rows(pa.array(["xy", "c", "ab"])).tolist() == [0, 2, 1]


def test_a_bucket_is_one_shard_however_many_blocks_its_tasks_need(tmp_path: Path) -> None:
    # Five buckets are planned for 2,000 rows in blocks of 50; the larger task fills one of them.
    users = pa.array(np.where(np.arange(2_000) % 9, 7, 8))
    skewed = raw_table(2_000).set_column(0, "user", users)
    dataset = prepared(tmp_path, skewed, changed(), block_rows=50)
    shards = dataset.splits["train"].shards
    assert len(shards) == 5
    assert max(shard.num_blocks for shard in shards) > 16
    assert len(whole_split(dataset, "train")) == dataset.splits["train"].num_episodes == 41


def test_ids_beyond_2_to_the_63_have_rows_of_their_own(tmp_path: Path) -> None:
    table = raw_table(40)
    large = [(1 << 63) + 5, 3] * 20
    table = table.append_column("device", pa.array(large, pa.uint64()))
    single = [{"column": "device", "vocabulary": 1}]
    dataset = prepared(tmp_path, table, changed(single=single))
    assert dataset.features.tables[0].num_rows == 3
    values = pq.read_table(tmp_path / "out1" / "vocabulary" / "device.parquet")["value"]
    assert values.to_pylist() == [5 - (1 << 63), 3]
    block = dataset.read_block("train", 0)
    assert 0 not in block.unique_ids_U[: int(block.unique_offsets_B1[1])]


@pytest.mark.parametrize("kind", [pa.uint64(), pa.bool_()])
def test_integers_beside_text_are_found_as_counted(tmp_path: Path, kind: pa.DataType) -> None:
    table = raw_table(40)
    large = (1 << 63) + 5 if pa.types.is_integer(kind) else True
    table = table.append_column("device", pa.array([large] * 40, kind))
    single = [
        {"column": "device", "vocabulary": 1, "table": "any"},
        {"column": "city", "vocabulary": 1, "table": "any"},
    ]
    dataset = prepared(tmp_path, table, changed(single=single))
    block = dataset.read_block("train", 0)
    assert 0 not in block.unique_ids_U[: int(block.unique_offsets_B1[1])]
