"""Text files: nothing is lost because the first rows looked narrower than later ones."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from metaio import DataError, Dataset, open_dataset
from metaio.format.layout import VOCABULARY_FOLDER
from metaio.prepare.engines.local import prepare
from metaio.prepare.schema.schema_file import parse_schema
from tests.support.refusals import catch_message

GUESSED_FROM = 30_000  # more rows than DuckDB looks at

SCHEMA: dict[str, Any] = {
    "task": {"column": "user"}, "label": {"column": "y"},
    "single": [{"column": "item", "vocabulary": 1}], "episodes": {"by": "last", "query_rows": 1},
}  # fmt: skip

INTEGERS = ", but its first rows look like integers"
AS_TEXT = (
    ", and as one it would be another id. Write all of its values alike, or declare the column as "
    'text in the schema (type = "text")'
)
AS_INTEGER = INTEGERS + AS_TEXT + ' or as integers, of which 007 is 7 (type = "integer")'


def prepared(tmp_path: Path, texts: list[str], **parts: Any) -> Dataset:
    for index, text in enumerate(texts):
        (tmp_path / f"{index}.csv").write_text(text)
    prepare([str(tmp_path / "*.csv")], str(tmp_path / "out"), parse_schema(SCHEMA | parts))
    return open_dataset(str(tmp_path / "out"))


def refused(tmp_path: Path, texts: list[str], **parts: Any) -> str:
    return catch_message(DataError, prepared, tmp_path, texts, **parts)


def test_decimals_behind_integers_stay_decimals(tmp_path: Path) -> None:
    first = "user,item,y,price\n1,7,1,4\n1,8,0,5\n"
    dense = [{"column": "price"}]
    block = prepared(
        tmp_path, [first, "user,item,y,price\n2,7,0.5,9.5\n2,8,1,5\n"], dense=dense
    ).read_block("train", 0)
    assert sorted(block.dense_NK[:, 0].tolist()) == [4.0, 5.0, 5.0, 9.5]
    assert sorted(block.label_N.tolist()) == [0.0, 0.5, 1.0, 1.0]


def test_decimals_behind_many_integers_of_one_file_stay_decimals(tmp_path: Path) -> None:
    rows = "".join(f"{row // 10},7,1,4\n" for row in range(GUESSED_FROM))
    dataset = prepared(
        tmp_path, [f"user,item,y,price\n{rows}0,7,1,5.25\n"], dense=[{"column": "price"}]
    )
    assert np.unique(dataset.read_block("train", 0).dense_NK).tolist() == [4.0, 5.25]


@pytest.mark.parametrize(
    ("column", "row", "told"),
    [
        ("user", "1.5,7,1,4", f"'1.5'{INTEGERS}{AS_TEXT}"),
        ("user", "007,7,1,4", f"'007'{AS_INTEGER}"),
        ("item", "2,1e2,1,4", f"'1e2'{AS_INTEGER}"),
        ("item", "2,+7,1,4", f"'+7'{AS_INTEGER}"),
        (
            "at",
            "2,7,1,1.5",
            f"1.5{INTEGERS}, and as one it would be rounded. Write all with a decimal point",
        ),
    ],
)
def test_ids_and_times_among_integers_are_not_made_others(
    tmp_path: Path, column: str, row: str, told: str
) -> None:
    texts = ["user,item,y,at\n1,7,1,4\n1,8,0,5\n", f"user,item,y,at\n{row}\n2,8,0,5\n"]
    assert refused(tmp_path, texts, time={"column": "at"}) == f"column {column} holds {told}"


def test_what_a_refusal_of_ids_advises_is_read(tmp_path: Path) -> None:
    texts = ["user,item,y\n1,7,1\n1,8,0\n", "user,item,y\n1,007,1\n1,8,0\n"]
    for kind, values in (("text", ["007", "7", "8"]), ("integer", [7, 8])):
        single = [{"column": "item", "vocabulary": 1, "type": kind}]
        folder = tmp_path / kind
        folder.mkdir()
        assert values_of(prepared(folder, texts, single=single), "item") == values


def test_truth_values_written_in_one_way_are_no_other_ids(tmp_path: Path) -> None:
    text = "user,item,y\n1,yes,1\n1,no,0\n1,yes,0\n"
    assert values_of(prepared(tmp_path, [text]), "item") == [0, 1]


def test_splits_are_called_as_they_are_written(tmp_path: Path) -> None:
    texts = ["user,item,y,part\n1,7,1,0\n1,8,0,0\n", "user,item,y,part\n2,7,1,late\n2,8,0,late\n"]
    dataset = prepared(tmp_path, texts, splits={"column": "part", "train": "0"})
    assert [*dataset.splits] == ["0", "late"]


def test_integers_written_with_a_decimal_point_stay_integers(tmp_path: Path) -> None:
    """As pandas writes them where the column has a null elsewhere."""
    texts = ["user,item,y\n1,7,1\n1,8,0\n", "user,item,y\n1.0,7.0,1\n1,9007199254740993,0\n"]
    dataset = prepared(tmp_path, texts)
    assert dataset.split("train").num_episodes == 1
    assert dataset.features.tables[0].num_rows == 4  # 7, 8, the large one and the unknown


def test_times_behind_dates_do_not_lose_their_hour(tmp_path: Path) -> None:
    texts = [
        "user,item,y,at\n1,7,1,2026-01-01\n1,8,0,2026-01-02\n",
        "user,item,y,at\n2,7,1,2026-01-01 18:00:00\n2,8,0,2026-01-01 09:00:00\n",
    ]
    assert refused(tmp_path, texts, time={"column": "at"}) == (
        "column at holds '2026-01-01 09:00:00', but its first rows look like dates, and as one it "
        "would lose its hour. Write all of its times alike"
    )


@pytest.mark.parametrize("dates", [("2026-01-02", "2026-01-15"), ("02.01.2026", "15.01.2026")])
def test_dates_are_read_however_they_are_written(tmp_path: Path, dates: tuple[str, str]) -> None:
    first, last = dates
    text = f"user,item,y,at\n1,7,0.25,{last}\n1,8,0.75,{first}\n"
    block = prepared(tmp_path, [text], time={"column": "at"}).read_block("train", 0)
    assert block.label_N.tolist() == [0.75, 0.25]


def test_times_with_a_zone_are_not_mixed_with_others(tmp_path: Path) -> None:
    texts = [
        "user,item,y,at\n1,7,1,2026-01-01 10:00:00\n1,8,0,2026-01-02 10:00:00\n",
        "user,item,y,at\n2,7,1,2026-01-01 10:00:00+09:00\n2,8,0,2026-01-02 10:00:00+09:00\n",
    ]
    assert refused(tmp_path, texts, time={"column": "at"}) == (
        f"column at is TIMESTAMP WITH TIME ZONE in {tmp_path}/1.csv and TIMESTAMP in "
        f"{tmp_path}/0.csv. Cast one of them, so that all files agree"
    )


@pytest.mark.parametrize("zone", [" UTC", " GMT", " Etc/UTC", ".250 UTC", " Europe/Berlin"])
def test_times_that_all_name_a_zone_are_taken(tmp_path: Path, zone: str) -> None:
    """BigQuery writes " UTC" behind each."""
    text = f"user,item,y,at\n1,7,.25,2026-01-02 09:00:00{zone}\n1,8,.75,2026-01-02 08:00:00{zone}\n"
    block = prepared(tmp_path, [text], time={"column": "at"}).read_block("train", 0)
    assert block.label_N.tolist() == [0.75, 0.25]


def test_ids_written_with_a_decimal_point_are_told_the_type_that_reads_them(tmp_path: Path) -> None:
    text = "user,item,y\n1,7.0,1\n1,8.0,0\n"
    assert refused(tmp_path, [text]) == (
        "column item holds numbers such as 1.0; ids are integers or text. If they are integers, "
        'set type = "integer" beside the column in the schema, else type = "text"'
    )
    single = [{"column": "item", "vocabulary": 1, "type": "integer"}]
    assert values_of(prepared(tmp_path, [text], single=single), "item") == [7, 8]


@pytest.mark.parametrize(
    ("times", "warns"),
    [
        ([1_700_000_000, 1_700_000_001_000], True),
        ([1_700_000_000.5, 1_700_000_001_000.5], True),
        ([1_700_000_000_000, 1_700_000_000_000_000], True),
        ([999_999_999, 1_000_000_000], False),  # seconds of September 2001
        ([0, 1_700_000_000], False),  # no time
        ([5, 7_000_000], False),  # a count of rows
    ],
)
def test_times_in_two_units_warn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, times: list[float], warns: bool
) -> None:
    text = "user,item,y,at\n" + "".join(f"1,{i},1,{time}\n" for i, time in enumerate(times))
    prepared(tmp_path, [text], time={"column": "at"})
    digits = [len(str(int(time))) for time in times]
    warning = (
        f"warning: time column at holds numbers of {digits[0]} and of {digits[1]} digits, and none "
        "between, as if seconds and milliseconds were mixed: its order may be wrong. Write all of "
        "its times in one unit"
    )
    assert caplog.messages == [warning] * warns


def test_a_column_to_be_split_is_text_whatever_its_first_rows_hold(tmp_path: Path) -> None:
    """A file in which every row has one integer tag."""
    texts = ["user,item,y,tags\n1,7,1,4\n1,8,0,5\n", "user,item,y,tags\n2,7,1,4|6\n2,8,0,5\n"]
    multi = [{"column": "tags", "separator": "|", "vocabulary": 1}]
    dataset = prepared(tmp_path, texts, multi=multi)
    expected = {"item": 3, "tags": 4}
    assert {table.name: table.num_rows for table in dataset.features.tables} == expected
    assert sorted(dataset.read_block("train", 0).multi_lengths_NM[:, 0].tolist()) == [1, 1, 1, 2]


def of_json(tmp_path: Path, column: str, values: Sequence[object], **parts: Any) -> Dataset:
    """A dataset of JSON lines, a file for each two of the values; other columns hold what suits."""
    for index in range(0, len(values), 2):
        lines = (
            json.dumps({"user": 1, "item": row, "y": row % 2} | {column: values[row]}) + "\n"
            for row in (index, index + 1)
        )
        (tmp_path / f"{index}.json").write_text("".join(lines))
    out = str(tmp_path / "out")
    prepare([str(tmp_path / "*.json")], out, parse_schema(SCHEMA | parts))
    return open_dataset(out)


def values_of(dataset: Dataset, table: str) -> list[Any]:
    path = f"{dataset.url}/{VOCABULARY_FOLDER}/{table}.parquet"
    found: list[Any] = pq.read_table(path)["value"].to_pylist()
    return found


def test_decimals_behind_integers_stay_decimals_in_vectors_of_json(tmp_path: Path) -> None:
    vectors = [[0, 1], [1, 0], [0.5, 1.25], [1, 0.75]]
    vector = [{"column": "v", "width": 2}]
    block = of_json(tmp_path, "v", vectors, vector=vector).read_block("train", 0)
    assert sorted(block.dense_NK.tolist()) == sorted(vectors)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        (
            "list",
            [[1, 2], [3], [1.5, 4], []],
            f"column list holds 1.5{INTEGERS}, and as one it would be another id. Write all of its "
            "values alike",
        ),
        (
            "y",
            [True, False, 0.3, 1],
            "column y holds '0.3', but its first rows look like truth values, and as one it would "
            "be true. Write numbers in all rows",
        ),
        (
            "item",
            [True, False, 1, 7],
            f"column item holds '7', but its first rows look like truth values{AS_TEXT}",
        ),
    ],
)
def test_numbers_of_json_are_not_turned_into_what_first_rows_hold(
    tmp_path: Path, column: str, values: list[object], message: str
) -> None:
    multi = [{"column": "list", "hash": 100}] if column == "list" else []
    assert catch_message(DataError, of_json, tmp_path, column, values, multi=multi) == message


def test_truth_values_of_json_may_be_0_and_1_later(tmp_path: Path) -> None:
    block = of_json(tmp_path, "y", [True, False, 0, 1]).read_block("train", 0)
    assert sorted(block.label_N.tolist()) == [0.0, 0.0, 1.0, 1.0]


def test_uuids_of_json_stay_as_they_are_written(tmp_path: Path) -> None:
    """A request would name them as the log does."""
    uuids = [f"{start}-E29B-41d4-a716-446655440000" for start in ("550E8400", "550e8400")]
    assert values_of(of_json(tmp_path, "item", uuids), "item") == uuids
    lists = [uuids[:1], uuids[1:]]
    folder = tmp_path / "lists"
    folder.mkdir()
    multi = [{"column": "many", "vocabulary": 1}]
    assert values_of(of_json(folder, "many", lists, multi=multi), "many") == uuids


def test_lists_of_json_stay_lists_where_text_would_be_split(tmp_path: Path) -> None:
    multi = [{"column": "many", "vocabulary": 1, "separator": "|"}]
    dataset = of_json(tmp_path, "many", [[1, 2], [3]], multi=multi)
    assert values_of(dataset, "many") == [1, 2, 3]


@pytest.mark.parametrize("kind", [{}, {"type": "integer"}, {"type": "text"}])
@pytest.mark.parametrize("others", ["1234567890123", "1.23457E+12", "u7"])
@pytest.mark.parametrize("role", ["user", "item"])
def test_ids_that_a_spreadsheet_has_cut_are_refused(
    tmp_path: Path, role: str, others: str, kind: dict[str, str]
) -> None:
    """Each has lost its last digits, so that different ids have become one."""
    lines = [(others, i % 2) for i in range(4)] + [("1.23457E+12", 0), ("1.23457E+12", 1)]
    swap = role == "item"
    text = "user,item,y\n" + "".join(f"1,{i},{y}\n" if swap else f"{i},1,{y}\n" for i, y in lines)
    columns: dict[str, Any] = {
        "task": {"column": "user"},
        "single": [{"column": "item", "hash": 99}],
    }
    (columns["single"][0] if swap else columns["task"]).update(kind)
    message = refused(tmp_path, [text], **columns)
    if not kind and others != "u7":
        assert 'set type = "integer" beside the column' in message
    elif kind.get("type") == "integer" and others == "u7":
        assert 'holds "u7", which is no BIGINT' in message
    else:
        assert message == (
            f"column {role} holds '1.23457E+12', a number that a spreadsheet has cut to its first "
            "digits: different ids became one. Export the log anew, with that column as text"
        )


def test_hexadecimal_ids_are_no_cut_numbers(tmp_path: Path) -> None:
    text = "user,item,y\n" + "".join(
        f"{user},1,{y}\n" for user in ("1e12", "2E10", "3a+7") for y in (0, 1)
    )
    task = {"column": "user", "type": "text"}
    assert prepared(tmp_path, [text], task=task).split("train").num_episodes == 3
