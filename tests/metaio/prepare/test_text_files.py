"""Text files as people have them, and what is said of a line that cannot be read."""

import gzip
import json
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metaio import DataError, Dataset, open_dataset
from metaio.prepare.engines.local import prepare
from metaio.prepare.job import PrepareOptions
from metaio.prepare.schema.schema_file import parse_schema
from tests.metaio.conftest import whole_split

HEAD = "user,item,y\n"
LINES = [f"{i % 3},{i % 5},{i % 2}\n" for i in range(12)]
ROWS = "".join(LINES)
MANY = ROWS * 3_000  # more than DuckDB guesses types by
SEEN = "or declare the column's type in the schema, or, if it means a null, list it in null under"


def prepared(tmp_path: Path, files: dict[str, str | bytes], **schema: Any) -> Dataset:
    """The dataset of these files, whatever their kind."""
    folder = tmp_path / "in"
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    out = str(tmp_path / f"out{len(list(tmp_path.iterdir()))}")
    body = {
        "task": {"column": "user"}, "label": {"column": "y"},
        "single": [{"column": "item", "hash": 99}], "episodes": {"query_rows": 1},
    } | schema  # fmt: skip
    options = PrepareOptions(threads=2, memory_bytes=1 << 29)
    prepare([str(folder)], out, parse_schema(body), options)
    return open_dataset(out)


def refused(tmp_path: Path, files: dict[str, str | bytes], **schema: Any) -> str:
    """The one line that these files are refused with, and no dataset."""
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, files, **schema)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert str(caught.value).isprintable()
    return str(caught.value).replace(f"{tmp_path}/in/", "")


NO_ROW = "Correct that row; a line that is no row needs comment under [text] in the schema"


@pytest.mark.parametrize(
    ("rows", "line", "message"),
    [
        (ROWS, "1,2,1,9", f"it has 4 fields, the header has 3. {NO_ROW}"),
        (MANY, "1,2,1,9", f"it has 4 fields, the header has 3. {NO_ROW}"),
        (ROWS, "# exported", f"it has 1 fields, the header has 3. {NO_ROW}"),
        (ROWS * 800, "1,2", f"it has 2 fields, the header has 3. {NO_ROW}"),  # nobody's columns
        (MANY, "1,2", f"it has 2 fields, the header has 3. {NO_ROW}"),
        (
            MANY,
            "1,x,1",
            f'column item holds "x", which is no BIGINT. Correct that row, {SEEN} [text]',
        ),
    ],
)
def test_a_line_that_does_not_fit_is_told_with_file_and_line(
    tmp_path: Path, rows: str, line: str, message: str
) -> None:
    files: dict[str, str | bytes] = {"a.csv": HEAD + ROWS, "b.csv": f"{HEAD}{rows}{line}\n{ROWS}"}
    told = f"input b.csv, line {rows.count(chr(10)) + 2}: {message}"
    assert refused(tmp_path, files) == told
    (tmp_path / "in/a.csv").unlink()
    del files["a.csv"]
    assert refused(tmp_path, files) == told


def test_a_file_that_is_no_text_of_the_encoding_is_told(tmp_path: Path) -> None:
    told = refused(tmp_path, {"a.csv": (HEAD + ROWS * 800).encode("utf-16")})
    assert told == (
        "input a.csv, line 1: it is not UTF-8. Say how the file is written under [text] in the "
        'schema, such as encoding = "latin-1", or convert it to UTF-8'
    )


LATIN = b"6,caf\xe9 \x93,7,1\n"


@pytest.mark.parametrize("rows", ["6,caf,7,1\n" * 5, "6,caf,7,1\n" * 30_000])
def test_bytes_that_are_not_utf8_are_told_with_line_and_column(tmp_path: Path, rows: str) -> None:
    content = b"user,city,item,y\n" + rows.encode() + LATIN + rows.encode()
    files: dict[str, str | bytes] = {"a.csv": content}
    single = [{"column": "city", "hash": 99}]
    assert refused(tmp_path, files, single=single) == (
        f"input a.csv, line {rows.count(chr(10)) + 2}: column city is not UTF-8. Say how the file "
        'is written under [text] in the schema, such as encoding = "latin-1", or convert it to '
        "UTF-8"
    )


@pytest.mark.parametrize("rows", ["6,caf,7,1\n" * 5, "6,caf,7,1\n" * 30_000])
def test_bytes_that_are_not_utf8_in_an_unread_column_do_no_harm(tmp_path: Path, rows: str) -> None:
    content = b"user,city,item,y\n" + rows.encode() + LATIN + rows.encode()
    dataset = prepared(tmp_path, {"a.csv": content, "b.csv": content})
    assert dataset.split("train").num_rows == 2 * (2 * rows.count("\n") + 1)


@pytest.mark.parametrize(
    ("encoding", "written"), [("latin-1", "latin-1"), ("utf-16", "utf-16"), ("utf-16", "utf-16-le")]
)
def test_an_encoding_is_read_as_it_is_named(tmp_path: Path, encoding: str, written: str) -> None:
    text = "user,item,y\n" + "".join(f"1,{city},1\n1,{city},0\n" for city in ("café", "Ölper"))
    options: dict[str, Any] = {"single": [{"column": "item", "vocabulary": 1}]}
    text_rule = {"encoding": encoding}
    dataset = prepared(tmp_path, {"a.csv": text.encode(encoding)}, text=text_rule, **options)
    values = pq.read_table(f"{dataset.url}/vocabulary/item.parquet")["value"].to_pylist()
    assert values == ["café", "Ölper"]


def test_what_windows_writes_is_no_latin_1(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {"a.csv": (HEAD + ROWS).encode() + b"1,\x93two\x94,1\n"}
    single = [{"column": "item", "vocabulary": 1, "type": "text"}]
    told = refused(tmp_path, files, single=single, text={"encoding": "latin-1"})
    assert told == (
        "an input holds the bytes 80 to 9f, which are no letters of Latin-1; Windows' cp1252 has "
        "quotes there. Convert it: iconv -f cp1252 -t utf-8"
    )


def test_a_wrong_encoding_is_one_line(tmp_path: Path) -> None:
    message = refused(tmp_path, {"a.csv": (HEAD + ROWS).encode()}, text={"encoding": "utf-16"})
    assert message.startswith("input a.csv")


def test_words_for_null_are_nulls(tmp_path: Path) -> None:
    rows = "1,7,1\n1,\\N,0\n1,NULL,1\n1,NA,0\n1,,1\n1,8,0\n"
    single = [{"column": "item", "hash": 99, "null": "unknown"}]
    dataset = prepared(
        tmp_path, {"a.csv": HEAD + rows}, single=single, text={"null": ["\\N", "NULL", "NA"]}
    )
    assert dataset.manifest.recipe["kinds"] == {"item": "integer"}
    block = dataset.read_block("train", 0)
    assert int((block.unique_ids_U[block.positions_NF[:, 0]] == 0).sum()) == 4


def test_dates_of_a_format_are_read_by_it(tmp_path: Path) -> None:
    rows = "1,7,1,03/02/2026\n1,8,0,02/03/2026\n"
    for pattern, first in (("%d/%m/%Y", [1.0, 0.0]), ("%m/%d/%Y", [0.0, 1.0])):
        dataset = prepared(
            tmp_path, {"a.csv": f"user,item,y,at\n{rows}"}, time={"column": "at", "format": pattern}
        )
        assert dataset.read_block("train", 0).label_N.tolist() == first


def test_a_format_holds_for_text_in_parquet_too(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    rows = {"user": [1, 1], "item": [7, 8], "y": [1, 0], "at": ["3.2.2026", "2.3.2025"]}
    pq.write_table(pa.table(rows), tmp_path / "in/a.parquet")
    dataset = prepared(tmp_path, {}, time={"column": "at", "format": "%d.%m.%Y"})
    assert dataset.read_block("train", 0).label_N.tolist() == [0.0, 1.0]


def test_a_date_that_has_another_format_is_named(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {"a.csv": "user,item,y,at\n1,7,1,3.2.2026\n1,8,0,2026-02-03\n"}
    assert refused(tmp_path, files, time={"column": "at", "format": "%d.%m.%Y"}) == (
        '[time] holds "2026-02-03", which is not of its format "%d.%m.%Y". Correct one of them'
    )


def test_json_lines_give_the_dataset_of_a_csv(tmp_path: Path) -> None:
    rows = [
        dict(zip(("user", "item", "y"), map(int, line.split(",")), strict=True)) for line in LINES
    ]
    text = "\n".join(json.dumps(row | {"more": [{}]}) for row in rows)
    found = prepared(
        tmp_path / "json", {"a.jsonl": text, "b.jsonl.gz": gzip.compress(text.encode())}
    )
    told = found.fingerprint
    assert told == prepared(tmp_path, {"a.csv": HEAD + ROWS, "b.csv": HEAD + ROWS}).fingerprint


def test_a_json_line_that_is_none_is_told_with_its_line(tmp_path: Path) -> None:
    line = '{"user": 1, "item": 2, "y": 1}\n'
    found = refused(tmp_path, {"a.jsonl": line * 20 + "{oops\n" + line})
    assert found == "input a.jsonl, line 21: it is no JSON. Correct it"


def test_json_that_is_no_row_in_each_line_is_told_how_to_mend(tmp_path: Path) -> None:
    assert refused(tmp_path, {"a.json": '[{"user": 1, "item": 2, "y": 1}]'}) == (
        "input a.json has no JSON object in each line: it is one array, or holds values. Write a "
        "row in each line, as jq -c '.[]' does"
    )


def test_a_json_column_of_text_and_numbers_is_refused(tmp_path: Path) -> None:
    lines = '{"user": 1, "item": 2, "y": 1}\n{"user": 1, "item": "x", "y": 0}\n'
    assert refused(tmp_path, {"a.jsonl": lines}) == (
        "column item of input a.jsonl holds values of several kinds, or none. Write all as text or "
        "all as integers, or declare the column's type in the schema"
    )
    single = [{"column": "item", "hash": 99, "type": "text"}]
    assert prepared(tmp_path, {"a.jsonl": lines}, single=single).split("train").num_rows == 2


def test_an_archive_is_read_as_its_files(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with zipfile.ZipFile(tmp_path / "in/logs.zip", "w") as archive:
        archive.writestr("day/a.csv", HEAD + ROWS)
        archive.writestr("../b.csv", HEAD + ROWS)
        archive.writestr("__MACOSX/._a.csv", "no table")
    dataset = prepared(tmp_path, {})
    assert dataset.split("train").num_rows == 2 * len(LINES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out1"]
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["logs.zip"]


def test_what_is_no_archive_is_one_line(tmp_path: Path) -> None:
    assert refused(tmp_path, {"logs.zip": HEAD + ROWS}) == (
        "input logs.zip cannot be unpacked: File is not a zip file. Unpack it yourself, and give "
        "the files"
    )


def test_empty_files_among_others_are_left_out_and_counted(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {"a.csv": "", "b.csv": HEAD + ROWS, "c.csv": ""}
    dataset = prepared(tmp_path, files)
    assert dataset.split("train").num_rows == len(LINES)
    assert dataset.manifest.report["dropped"]["empty_files"] == 2


@pytest.mark.parametrize("blank", ["a.csv", "c.csv"])
def test_a_file_of_blank_lines_alone_is_named(tmp_path: Path, blank: str) -> None:
    message = refused(tmp_path, {blank: "\n\n", "b.csv": HEAD + ROWS})
    assert message == f"input {blank} holds only blank lines. Remove it, or write its rows"


@pytest.mark.parametrize("rows", [ROWS, MANY])
@pytest.mark.parametrize(("end", "odd"), [("\n", "\r\n"), ("\r\n", "\n"), ("\n", "\r")])
def test_a_line_that_ends_unlike_the_first_is_named(
    tmp_path: Path, rows: str, end: str, odd: str
) -> None:
    text = (HEAD + rows).replace("\n", end) + f"1,1,1{odd}1,2,0{end}"
    spelled = {"\n": "LF", "\r\n": "CRLF", "\r": "CR"}
    assert refused(tmp_path, {"b.csv": HEAD + ROWS, "c.csv": text}) == (
        f"input c.csv, line {rows.count(chr(10)) + 2}: it ends with {spelled[odd]}, line 1 with "
        f"{spelled[end]}. End all lines alike, as dos2unix does"
    )


def test_blank_lines_and_comments_are_counted(tmp_path: Path) -> None:
    text = f"{HEAD}\n{ROWS}# a remark\n\n{ROWS}\n"
    dataset = prepared(tmp_path, {"a.csv": text}, text={"comment": "#"})
    dropped = dataset.manifest.report["dropped"]
    assert (dropped["blank_lines"], dropped["comment_lines"]) == (3, 1)
    assert dataset.split("train").num_rows == 2 * len(LINES)


def test_blank_lines_within_quotes_are_no_lines_left_out_for_certain(tmp_path: Path) -> None:
    text = 'user,word,item,y\n1,"a\n\nb",3,1\n1,c,4,0\n'
    dropped = prepared(tmp_path, {"a.csv": text}).manifest.report["dropped"]
    assert dropped["blank_lines_at_most"] == 1


def test_a_value_that_begins_with_a_hash_sign_is_a_value(tmp_path: Path) -> None:
    rows = "".join(f"{word},1,{y}\n" for word in ("#1", "#2") for y in (0, 1))
    dataset = prepared(tmp_path, {"a.csv": HEAD + rows})
    assert dataset.split("train").num_episodes == 2


def test_the_first_quotes_may_come_late(tmp_path: Path) -> None:
    text = f'user,item,y,word\n{MANY.replace(chr(10), f",w{chr(10)}")}1,2,1,"a, ""b"""\n1,2,1,"c"\n'
    single = [{"column": "word", "vocabulary": 1}]
    dataset = prepared(tmp_path, {"a.csv": text}, single=single)
    values = pq.read_table(f"{dataset.url}/vocabulary/word.parquet")["value"].to_pylist()
    assert values == ['a, "b"', "c", "w"]


def test_a_long_field_is_refused_with_the_setting_that_allows_it(tmp_path: Path) -> None:
    long = "x" * 3_000_000
    files: dict[str, str | bytes] = {"a.csv": f"{HEAD}{MANY}1,{long},1\n"}
    single = [{"column": "item", "hash": 99, "type": "text"}]
    assert refused(tmp_path, files, single=single) == (
        f"input a.csv, line {MANY.count(chr(10)) + 2}: it has more than 2000000 bytes. Close a "
        "quote that is open, or raise max_line_bytes under [text] in the schema"
    )
    prepared(tmp_path, files, single=single, text={"max_line_bytes": 4_000_000})


@pytest.mark.parametrize("rows", ["1,3,1\n" * 3, "1,3,1\n" * 30_000])
def test_ids_from_2_to_the_63_keep_their_bits(tmp_path: Path, rows: str) -> None:
    large = [2**63, 2**64 - 1, 3]
    text = f"{HEAD}{rows}" + "".join(f"1,{item},0\n" for item in large[:2])
    dataset = prepared(tmp_path, {"a.csv": text}, episodes={"query_rows": 1, "max_rows": 1 << 20})
    table = pa.table(
        {
            "user": pa.array([1] * (rows.count("\n") + 2), pa.uint64()),
            "item": pa.array([3] * rows.count("\n") + large[:2], pa.uint64()),
            "y": [1.0] * rows.count("\n") + [0.0, 0.0],
        }
    )
    (tmp_path / "in/a.csv").unlink()
    pq.write_table(table, tmp_path / "in/a.parquet")
    expected = prepared(tmp_path, {}, episodes={"query_rows": 1, "max_rows": 1 << 20})
    assert dataset.fingerprint == expected.fingerprint


@pytest.mark.parametrize("zoned", [0, 1, 2])
@pytest.mark.parametrize("zone", ["Z", "+09:00", "+09", " UTC", " PST", " Europe/Berlin"])
def test_times_with_and_without_a_zone_are_refused(tmp_path: Path, zoned: int, zone: str) -> None:
    times = [f"2026-01-0{day} 10:00:00{zone if day - 1 == zoned else ''}" for day in (1, 2, 3)]
    text = "user,item,y,at\n" + "".join(f"1,7,1,{time}\n" for time in times)
    message = refused(tmp_path, {"a.csv": text}, time={"column": "at"})
    assert message.startswith("column at holds '2026-01-0")
    assert message.endswith("Write all of its times alike")
    rows = "1,7,1,2026-01-01 10:00:00\n" * 30_000
    late = f"user,item,y,at\n{rows}1,7,1,2026-01-01 10:00:00{zone}\n"
    assert refused(tmp_path, {"a.csv": late}, time={"column": "at"}) == (
        f"column at holds '2026-01-01 10:00:00{zone}', but its first rows look like times "
        "without a zone, and it would lose its own. Write all of its times alike"
    )


def test_a_column_name_that_stands_twice_is_refused(tmp_path: Path) -> None:
    text = "user,item,y,item\n1,7,1,8\n1,8,0,7\n"
    message = "has two columns item. Rename or remove one"
    assert refused(tmp_path, {"a.csv": text}) == f"input a.csv {message}"
    (tmp_path / "in/a.csv").unlink()
    columns = [pa.array([1, 1]), pa.array([7, 8]), pa.array([1, 0]), pa.array([8, 7])]
    table = pa.Table.from_arrays(columns, names=["user", "item", "y", "item"])
    pq.write_table(table, tmp_path / "in/a.parquet")
    assert refused(tmp_path, {}) == f"input a.parquet {message}"


def test_an_odd_name_beside_another_is_two_columns(tmp_path: Path) -> None:
    text = "user,item,y,item_1\n1,7,1,8\n1,8,0,7\n"
    assert whole_split(prepared(tmp_path, {"a.csv": text}), "train")


# In UTF-8 they have bytes that no letter of Latin-1 has.
BEYOND_LATIN = "ÉŁМ日🙂€"


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("note", ["x", "caf\xe9 \x80"])
def test_utf8_of_any_script_is_read_and_counted(tmp_path: Path, note: str, end: bytes) -> None:
    lines = [f"{i % 3},{BEYOND_LATIN}{i % 5},{i % 2},{note}\n".encode() for i in range(12)]
    if note != "x":  # of a column that nobody reads
        lines = [line.replace(note.encode(), note.encode("latin-1")) for line in lines]
    content = "\ufeffuser,item,y,größe 東\n\n".encode() + b"".join(lines) + b"\n"
    content = content.replace(b"\n", end)
    single = [{"column": "item", "vocabulary": 1}]
    data = prepared(tmp_path, {"a.csv": content, "b.csv.gz": gzip.compress(content)}, single=single)
    values = pq.read_table(f"{data.url}/vocabulary/item.parquet")["value"].to_pylist()
    assert values == [f"{BEYOND_LATIN}{i}" for i in range(5)]
    assert data.manifest.report["dropped"]["blank_lines"] == 4


JSON_ROWS: list[dict[str, Any]] = [{"user": i % 2, "y": i % 2} for i in range(6)]


def _json(**values: Any) -> str:
    return "".join(f"{json.dumps(row | values)}\n" for row in JSON_ROWS)


@pytest.mark.parametrize("first", [{}, {"m": None}, {"m": []}, {"m": [None]}])
@pytest.mark.parametrize(("own", "values"), [(["x", "y"], ["x", "y"]), ([7, 8], [7, 8])])
def test_json_lists_without_a_value_in_the_first_file_are_read_as_the_others(
    tmp_path: Path, first: dict[str, Any], own: list[Any], values: list[Any]
) -> None:
    multi = [{"column": "m", "vocabulary": 1, "null": "unknown"}]
    files: dict[str, str | bytes] = {"a.jsonl": _json(**first), "b.jsonl": _json(m=own)}
    dataset = prepared(tmp_path, files, single=[], multi=multi)
    assert pq.read_table(f"{dataset.url}/vocabulary/m.parquet")["value"].to_pylist() == values


@pytest.mark.parametrize("first", [{}, {"d": None, "item": None, "side": None}])
def test_json_that_leaves_out_nulls_is_read_as_json_that_writes_them(
    tmp_path: Path, first: dict[str, Any]
) -> None:
    files: dict[str, str | bytes] = {
        "a.jsonl": _json(**first),
        "b.jsonl": _json(d=0.5, item=4).replace('"user": ', '"side": "query", "user": 1'),
        "c.jsonl": _json(**first),
    }
    dataset = prepared(
        tmp_path, files, single=[{"column": "item", "vocabulary": 1, "null": "unknown"}],
        dense=[{"column": "d", "fill": 0.0}], membership={"column": "side"},
    )  # fmt: skip
    assert dataset.manifest.recipe["kinds"] == {"item": "integer"}
    block = dataset.read_block("train", 0)
    assert sorted(block.dense_NK[:, 0]) == [0.0] * 12 + [0.5] * 6
    # Two tasks by [episodes], two of query rows alone.
    assert sorted(block.support_lengths_T) == [0, 0, 5, 5]


@pytest.mark.parametrize("value", ["4.5", "abc"])
def test_a_dense_column_may_be_empty_in_the_first_file(tmp_path: Path, value: str) -> None:
    files: dict[str, str | bytes] = {
        "a.csv": "user,y,d\n1,1,\n1,0,\n",
        "b.csv": f"user,y,d\n1,1,{value}\n",
    }
    columns: dict[str, Any] = {"single": [], "dense": [{"column": "d", "fill": 0.0}]}
    if value == "abc":
        message = (
            'input b.csv, line 2: column d holds "abc", which is no DOUBLE. Correct that row, '
        )
        assert refused(tmp_path, files, **columns) == f"{message}{SEEN} [text]"
    else:
        block = prepared(tmp_path, files, **columns).read_block("train", 0)
        assert sorted(block.dense_NK[:, 0]) == [0.0, 0.0, 4.5]
