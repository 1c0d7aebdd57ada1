"""Lines that cannot be read: all of them told at once, or left out, counted and kept apart."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from metaio import Dataset
from tests.metaio.prepare.test_text_files import HEAD, MANY, ROWS, prepared, refused

BAD = {
    "1,2,1,9": "it has 4 fields, the header has 3",
    "1,2": "it has 2 fields, the header has 3",
    "1,x,1": 'column item holds "x", which is no BIGINT',
    "0,0,zz": 'column y holds "zz", which is no DOUBLE',
}
SKIP: dict[str, Any] = {"bad_lines": "skip"}


def with_bad_lines(rows: str) -> tuple[str, str]:
    """Rows with the lines of BAD after each portion of `rows`, and without them."""
    return HEAD + "".join(f"{rows}{line}\n" for line in BAD), HEAD + rows * len(BAD)


def read_bad_lines(dataset: Dataset) -> list[dict[str, Any]]:
    path = Path(dataset.url, "bad_lines.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("rows", [ROWS, MANY])
def test_all_lines_that_cannot_be_read_are_told_at_once(tmp_path: Path, rows: str) -> None:
    # Without its type the column would be text, as a line of BAD is among the first rows.
    single = [{"column": "item", "hash": 99, "type": "integer"}]
    bad, _ = with_bad_lines(rows)
    each = rows.count("\n") + 1
    places = [f"line {i * each + 1}: {why}" for i, why in enumerate(BAD.values(), start=1)]
    assert refused(tmp_path, {"a.csv": HEAD + ROWS, "b.csv": bad, "c.csv": bad}, single=single) == (
        f"8 lines cannot be read: input b.csv, {'; '.join(places)}; input c.csv, "
        f"{'; '.join(places)}. Correct them, or have them left out and counted: bad_lines = "
        '"skip" under [text] in the schema'
    )


def test_of_many_bad_lines_the_first_are_told(tmp_path: Path) -> None:
    found = refused(tmp_path, {"a.csv": HEAD + "1,2,1,9\n" * 50 + ROWS})
    assert found.startswith("50 lines cannot be read, the first 20: input a.csv, line 2: it has 4")
    assert "line 21: it has 4 fields, the header has 3. Correct them" in found


@pytest.mark.parametrize("rows", [ROWS, MANY])
@pytest.mark.parametrize(
    ("encoding", "end"), [("utf-8", "\n"), ("utf-8", "\r\n"), ("latin-1", "\n"), ("utf-16", "\n")]
)
def test_bad_lines_are_left_out_as_if_they_were_not_there(
    tmp_path: Path, rows: str, encoding: str, end: str
) -> None:
    options: dict[str, Any] = {"text": SKIP | {"encoding": encoding}}
    bad, good = (text.replace("\n", end).encode(encoding) for text in with_bad_lines(f"{rows}\n"))
    files: dict[str, str | bytes] = {"day=1/a.csv": bad, "day=1/b.csv.gz": gzip.compress(bad)}
    (tmp_path / "in" / "day=1").mkdir(parents=True)
    columns = {"item": "integer", "day": "text"}
    options["single"] = [{"column": c, "hash": 99, "type": kind} for c, kind in columns.items()]
    dataset = prepared(tmp_path, files, **options)
    each = rows.count("\n") + 2
    assert read_bad_lines(dataset) == [
        {"input": f"{tmp_path}/in/{name}", "line": i * each + 1, "text": text, "reason": reason}
        for name in files
        for i, (text, reason) in enumerate(BAD.items(), start=1)
    ]
    report = dataset.manifest.report["dropped"]
    assert (report["bad_lines"], report["blank_lines"]) == (8, 8)
    same = prepared(
        tmp_path, {"day=1/a.csv": good, "day=1/b.csv.gz": gzip.compress(good)}, **options
    )
    assert (same.fingerprint, read_bad_lines(same)) == (dataset.fingerprint, [])


def test_files_that_differ_in_how_they_are_packed_keep_their_own_rows(tmp_path: Path) -> None:
    bad, other = (with_bad_lines(rows)[0].encode() for rows in (ROWS, ROWS.replace("1,", "8,")))
    together = prepared(tmp_path, {"a.csv": bad, "a.csv.gz": gzip.compress(other)}, text=SKIP)
    (tmp_path / "in/a.csv.gz").unlink()
    apart = prepared(tmp_path, {"a.csv": bad, "b.csv.gz": gzip.compress(other)}, text=SKIP)
    assert together.fingerprint == apart.fingerprint


def test_the_last_line_or_all_may_be_bad(tmp_path: Path) -> None:
    found = refused(tmp_path, {"a.csv": HEAD + "1,2\n" * 3}, text=SKIP)
    assert found == "the inputs hold no rows: a.csv. Check the path"
    report = prepared(tmp_path, {"a.csv": f"{HEAD}{ROWS}1,2"}, text=SKIP).manifest.report["dropped"]
    assert (report["bad_lines"], report.get("blank_lines", 0)) == (1, 0)


def test_more_bad_lines_than_allowed_are_refused(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {"a.csv": with_bad_lines(ROWS)[0]}
    message = refused(tmp_path, files, text=SKIP | {"max_bad_lines": 2})
    assert message.startswith("3 lines cannot be read: input a.csv, line 14: it has 4 fields")
    assert message.endswith("max_bad_lines under [text] is 2. Correct them, or raise it")


def test_of_an_open_quote_one_line_is_lost_and_of_a_bad_row_all(tmp_path: Path) -> None:
    quoted = '1,"2",1\n'
    bad = f'{HEAD}{quoted}{MANY}1,"open,1\n{MANY}{quoted}1,"a\nb",1,9\n{ROWS}'
    dataset = prepared(tmp_path, {"a.csv": bad}, text=SKIP)
    good = f"{HEAD}{quoted}{MANY}{MANY}{quoted}{ROWS}"
    assert dataset.fingerprint == prepared(tmp_path, {"a.csv": good}, text=SKIP).fingerprint
    assert [one["text"] for one in read_bad_lines(dataset)] == ['1,"open,1', '1,"a', 'b",1,9']


def as_it_is(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def test_bad_lines_do_not_reach_a_transform_and_keep_the_side_of_their_file(tmp_path: Path) -> None:
    bad, good = with_bad_lines(ROWS)
    rule = {"function": f"{__name__}:as_it_is"}
    ragged = bad.replace("1,x,1\n", "").replace("0,0,zz\n", "")
    dataset = prepared(tmp_path, {"a.csv": ragged}, text=SKIP, transform=rule)
    assert [one["line"] for one in read_bad_lines(dataset)] == [14, 27]
    sides = {"support": "*_s.csv.gz", "query": "*_q.csv"}
    (tmp_path / "in/a.csv").unlink()
    files: dict[str, str | bytes] = {"a_s.csv.gz": gzip.compress(bad.encode()), "a_q.csv": good}
    dataset = prepared(tmp_path, files, text=SKIP, membership=sides)
    assert dataset.read_block("train", 0).support_lengths_T.tolist() == [16, 16, 16]
