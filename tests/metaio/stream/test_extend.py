"""Increments against a slow reading of all logs up to theirs."""

import errno
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metaio import DataError, Dataset, FormatError, SchemaError
from metaio.errors import QuarantinedError
from metaio.format.inspection import find_damage
from metaio.prepare.episodes.encode import Encoder, FittedEncoding
from metaio.prepare.schema.schema_file import parse_schema
from metaio.stream.chain import open_stream, read_reset_rows
from metaio.stream.engine import LocalEngine
from metaio.stream.extend import extend
from metaio.stream.quarantine import RefusedFilesError, list_quarantine
from metaio.stream.stream_state import load_state
from metaio.stream.taken_files import InputFile
from tests.metaio.stream.logs import (
    DAY,
    OPTIONS,
    append,
    changed,
    episodes,
    log,
    schema,
    slow_episodes,
)
from tests.support.refusals import catch_message
from tests.support.sealed import seal


def vocabulary(dataset: Dataset, table: str) -> list[object]:
    values = pq.read_table(pa.BufferReader(dataset.read_file(f"vocabulary/{table}.parquet")))
    return list(values["value"].to_pylist())


def test_support_is_the_newest_rows_before_the_window_the_gate_untrained(tmp_path: Path) -> None:
    stream, tables = tmp_path / "s", [log(day) for day in range(4)]
    trained: set[int] = set()
    gate: set[int] = set()
    for number, table in enumerate(tables, start=1):
        record = append(stream, table, schema=schema())
        dataset = open_stream(str(stream)).dataset(number)
        start, stop = record.window
        assert stop == table["time"].to_numpy().max() + 1
        found = {name: episodes(dataset, name) for name in ("train", "gate")}
        assert found["train"] | found["gate"] == slow_episodes(tables[:number], start)
        trained |= {task for task, *_ in found["train"]}
        gate |= {task for task, *_ in found["gate"]}
        assert find_damage(dataset) == []
    assert not trained & gate
    assert 0.1 < len(gate) / len(trained | gate) < 0.45
    records = open_stream(str(stream)).records
    assert [record.number for record in records] == [1, 2, 3, 4]
    assert [r.parent for r in records] == ["", *(r.fingerprint for r in records[:-1])]
    assert [r.window[0] for r in records[1:]] == [r.window[1] for r in records[:-1]]


def test_rows_that_come_while_others_are_read_are_taken_later(tmp_path: Path) -> None:
    late = tmp_path / "late.parquet"
    late.touch()

    class Filling(LocalEngine):
        """Somebody writes the file once it was found empty."""

        def describe_files(self, names: list[str]) -> list[InputFile]:
            pq.write_table(log(1), late)
            return super().describe_files(names)

    pq.write_table(log(0), tmp_path / "first.parquet")
    place, first = str(tmp_path / "s"), [str(tmp_path / "first.parquet"), str(late)]
    extend(first, place, schema(), OPTIONS, engine_of=Filling)
    extend([str(late)], place, options=OPTIONS)
    assert [one.report["rows"] for one in open_stream(place).records] == [400, 400]


def test_labels_that_are_not_there_yet_are_quarantined_from_csv_too(tmp_path: Path) -> None:
    days = [log(0), changed(log(1), "click", [None] * 400)]
    for day, table in enumerate(days):
        pa.csv.write_csv(table, tmp_path / f"{day}.csv")
    extend([str(tmp_path / "0.csv")], str(tmp_path / "s"), schema(), OPTIONS)
    with pytest.raises(
        QuarantinedError, match="400 of 400 rows are quarantined: label click is null"
    ):
        extend([str(tmp_path / "1.csv")], str(tmp_path / "s"), options=OPTIONS)


def test_lines_that_are_left_out_are_in_the_account(tmp_path: Path) -> None:
    file = tmp_path / "0.csv"
    pa.csv.write_csv(log(0), file)
    file.write_bytes(file.read_bytes() + b"1,2\n")
    skipping = parse_schema(schema().to_json() | {"text": {"bad_lines": "skip"}})
    account = extend([str(file)], str(tmp_path / "s"), skipping, OPTIONS).report["account"]
    assert (account.pop("read"), account["bad_lines"]) == (401, 1)
    assert sum(account.values()) == 401


def test_lists_that_were_empty_so_far_may_be_filled_while_other_tasks_wait(tmp_path: Path) -> None:
    stream, tables = tmp_path / "s", [log(day) for day in range(3)]
    for number in (0, 2):
        tables[number] = changed(tables[number], "tags", [""] * len(tables[number]))
    for number, table in enumerate(tables, start=1):
        start = append(stream, table, schema=schema()).window[0]
        dataset = open_stream(str(stream)).dataset(number)
        found = episodes(dataset, "train") | episodes(dataset, "gate")
        assert found == slow_episodes(tables[:number], start)
        assert find_damage(dataset) == []


@settings(
    max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.integers(DAY, 3 * DAY - 1), min_size=1, max_size=3, unique=True))
def test_ids_have_the_same_rows_however_the_log_was_cut(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    table = log(0, days=3, rows=900)
    time = table["time"].to_numpy()
    append(folder / "whole", table, "whole.parquet", schema=schema())
    bounds = [0, *sorted(cuts), 3 * DAY]
    for start, stop in itertools.pairwise(bounds):
        part = table.filter(pa.array((time >= start) & (time < stop)))
        if len(part):
            # Whether a window is usual is another test's question.
            append(folder / "cut", part, f"{start}.parquet", schema=schema(), accept=True)
    whole, cut = (open_stream(str(folder / name)) for name in ("whole", "cut"))
    ends = [one.dataset(one.numbers[-1]) for one in (whole, cut)]
    for name in ("item", "city", "tags"):
        assert vocabulary(ends[0], name) == vocabulary(ends[1], name)
    assert ends[0].features == ends[1].features


def test_rows_are_encoded_by_the_vocabulary_that_stands_in_the_increment(tmp_path: Path) -> None:
    for day in range(3):
        append(tmp_path / "s", log(day), schema=schema())
    stream = open_stream(str(tmp_path / "s"))
    dataset, own = stream.dataset(3), parse_schema(stream.description["schema"])
    vocabularies = {name: pa.array(vocabulary(dataset, name)) for name in ("item", "city", "tags")}
    moments = {name: (m[0], m[1]) for name, m in stream.description["moments"].items()}
    encoder = Encoder(own, FittedEncoding(vocabularies, moments))
    (batch,) = log(2).to_batches()
    expected = encoder.encode(batch, with_label=False)
    rows = dict(zip(batch["row"].to_pylist(), range(batch.num_rows), strict=True))
    compared = 0
    for split in ("train", "gate"):
        for block in (dataset.read_block(split, i) for i in range(dataset.split(split).num_blocks)):
            for place, row in enumerate(block.row_id_N.tolist()):
                if row in rows:
                    ids = block.unique_ids_U[block.positions_NF[place]]
                    assert ids.tolist() == expected.ids_NF[rows[row]].tolist()
                    assert block.dense_NK[place] == expected.dense_NK[rows[row]]
                    compared += 1
    assert compared > 300
    price = log(0)["price"].to_numpy()
    users = {task for task, *_ in episodes(stream.dataset(1), "gate")}
    mean = float(np.mean(price))
    assert moments["price"][0] == pytest.approx(mean, abs=0.5)  # frozen, and of training rows
    assert users
    assert dataset.manifest.recipe["moments"]["price"] == list(moments["price"])


def test_forgotten_ids_lose_their_rows_which_others_take_lowest_first(tmp_path: Path) -> None:
    ttl = {"ttl": 2.0 * DAY, "grace": 1.0 * DAY}
    vocabularies: list[list[object]] = []
    freed = 0
    for day in range(7):
        record = append(tmp_path / "s", log(day), schema=schema(**ttl))
        stream = open_stream(str(tmp_path / "s"))
        dataset = stream.dataset(record.number)
        vocabularies.append(vocabulary(dataset, "item"))
        place = dataset.manifest.stream
        assert place is not None
        resets = read_reset_rows(dataset).get("item", np.zeros(0)).tolist()
        # A row that had a value in an earlier increment and has another one now.
        now = vocabularies[-1]
        ever = [{v[row] for v in vocabularies[:-1] if row < len(v)} for row in range(len(now))]
        changed_rows = [
            row + 1
            for row, value in enumerate(now)
            if value is not None and ever[row] - {None, value} and value != vocabularies[-2][row]
        ]
        assert resets == changed_rows
        if len(vocabularies) > 1:
            pairs = zip(vocabularies[-2], now, strict=False)
            lost = sum(old is not None and old != new for old, new in pairs)
            assert place.freed["item"] == lost
            freed += lost
        # Rows of tasks never speak of an id that is no longer known.
        state = load_state(tmp_path / "s", record.number)
        ids = state.open_newest_rows("train", schema(**ttl)).read_bucket(0, 1).ids_NF[:, 0]
        assert all(now[row - 1] is not None for row in set(ids.tolist()) - {0})
    assert freed > 20


def test_late_rows_are_support_or_dropped_and_counted(tmp_path: Path) -> None:
    stream = tmp_path / "s"
    first, second = log(0), log(1)
    end = append(stream, first, schema=schema(late=3_600.0)).window[1]
    time = second["time"].to_numpy().copy()
    time[:50] = end - 1 - np.arange(50)
    time[50:80] = end - 3_601 - np.arange(30)
    second = changed(second, "time", time)
    record = append(stream, second)
    assert (record.report["late"], record.report["too_late"]) == (50, 30)
    assert record.window[0] == end
    told = record.report["alarms"][0]
    assert told == "80 of 400 rows are late, 30 of them dropped (stream.late_share 0.05)"
    kept = second.filter(pa.array(time >= end - 3_600))
    dataset = open_stream(str(stream)).dataset(2)
    found = episodes(dataset, "train") | episodes(dataset, "gate")
    assert found == slow_episodes([first, kept], end)


def test_files_that_are_mostly_late_are_given_along_with_newer_ones(tmp_path: Path) -> None:
    stream, logs = tmp_path / "s", tmp_path / "logs"
    end = append(stream, log(0), schema=schema(late=DAY)).window[1]
    late, new = log(1), log(2)
    time = late["time"].to_numpy().copy()
    time[:201] = end - 1 - np.arange(201)
    late = changed(late, "time", time)
    assert catch_message(QuarantinedError, append, stream, late, "late.parquet") == (
        f"input {logs}/late.parquet is quarantined: 201 of its 400 rows are from before the "
        f"window, which begins at {end:,}. Give newer files and --along {logs}/late.parquet, "
        "as gmeta follow does"
    )
    assert [note["with_next"] for note in list_quarantine(stream)] == [True]
    shutil.copytree(stream, tmp_path / "t")
    both = append(stream, new, "new.parquet", along=[str(logs / "late.parquet")])
    assert (both.report["rows"], both.report["late"]) == (800, 201)
    expected = ["new.parquet", "late.parquet"]
    assert [Path(one["name"]).name for one in both.report["inputs"]] == expected
    taken = extend([str(logs / "late.parquet")], str(tmp_path / "t"), None, OPTIONS, accept=True)
    assert (taken.report["rows"], taken.report["late"]) == (400, 201)
    assert list_quarantine(stream) == list_quarantine(tmp_path / "t") == []


def test_what_comes_along_and_does_not_fit_is_left_out_and_told(tmp_path: Path) -> None:
    stream, logs, told = tmp_path / "s", tmp_path / "logs", list[RefusedFilesError]()
    append(stream, log(0), schema=schema())
    (logs / "late").mkdir()
    for part in (0, 1):
        late = log(0, seed=part + 1)
        pq.write_table(
            changed(late, "city", late["age"].to_numpy()), logs / f"late/part-{part}.parquet"
        )
    along = [str(logs / "late")]
    with pytest.raises(DataError, match=r"input .*/typo does not exist. Check the path"):
        append(stream, log(1), "new.parquet", along=[*along, str(logs / "typo")])
    assert open_stream(str(stream)).numbers == [1]
    record = append(stream, log(1), "new.parquet", along=along, left_out=told.append)
    assert [Path(one["name"]).name for one in record.report["inputs"]] == ["new.parquet"]
    reason = (
        f"column city is BIGINT in {logs}/late/part-0.parquet and VARCHAR in {logs}/new.parquet. "
        "Cast one of them, so that all files agree"
    )
    (refusal,) = told
    assert refusal.names == f"{logs}/late/part-0.parquet and 1 more"
    assert refusal.reasons == [reason]
    (note,) = list_quarantine(stream)
    assert [Path(one["name"]).name for one in note["files"]] == ["part-0.parquet", "part-1.parquet"]
    assert (note["reasons"], "with_next" in note) == ([reason], False)


def test_a_full_disk_is_no_reason_to_leave_out_what_comes_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = tmp_path / "s"
    append(stream, log(0), schema=schema())
    append(tmp_path / "other", log(1), "late.parquet", schema=schema())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("metaio.stream.increment.write_tables", full)
    with pytest.raises(DataError, match="Free space or choose another place"):
        append(stream, log(2), "new.parquet", along=[str(tmp_path / "logs/late.parquet")])
    assert list_quarantine(stream) == []


def test_a_damaged_note_refuses_an_increment_before_its_commit(tmp_path: Path) -> None:
    stream = tmp_path / "s"
    append(stream, log(0), schema=schema())
    (stream / "quarantine").mkdir()
    (stream / "quarantine" / "x.json").write_text("{")
    with pytest.raises(FormatError, match=r"quarantine/x.json"):
        append(stream, log(1))
    assert open_stream(str(stream)).numbers == [1]
    (stream / "quarantine" / "x.json").unlink()
    assert append(stream, log(1)).number == 2


def test_a_file_is_taken_once_whatever_its_name(tmp_path: Path) -> None:
    stream = tmp_path / "s"
    end = append(stream, log(0), "a.parquet", schema=schema()).window[1]
    file = tmp_path / "logs" / "a.parquet"
    assert catch_message(DataError, append, stream, log(0), "b.parquet") == (
        f"input {tmp_path}/logs/b.parquet was taken into increment 1 already, as {file}: its rows "
        "would be trained twice. Leave it out"
    )
    assert catch_message(DataError, append, stream, log(1), "a.parquet") == (
        f"input {file} was taken into increment 1 with other content: it was rewritten since, and "
        "increments do not change. Give new rows in a file of a new name, with --backfill the file "
        "as it is, or begin a new stream"
    )
    old = log(0, seed=1)
    old = old.filter(pa.array(old["time"].to_numpy() < end))
    with pytest.raises(QuarantinedError, match="rows are from before the window, which begins at"):
        append(stream, old, "c.parquet")
    assert open_stream(str(stream)).numbers == [1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda table: table.drop_columns(["city"]),
            "input {file} has no column city; it has row, user, click, time, item, age, tags, "
            "price. Correct the schema",
        ),
        (
            lambda table: changed(table, "city", list(range(len(table)))),
            "column city of input {file} holds integer values, in the stream {stream} it holds "
            "text. Cast it, or begin a new stream",
        ),
        (
            lambda table: changed(table, "time", table["time"].cast(pa.timestamp("s")).to_pylist()),
            "column time of input {file} holds timestamp[us] values, in the stream {stream} it "
            "holds int64. Cast it, or begin a new stream",
        ),
    ],
)
def test_a_column_that_is_missing_or_of_another_type_is_refused_by_name(
    tmp_path: Path, change: object, message: str
) -> None:
    stream = tmp_path / "s"
    append(stream, log(0), schema=schema())
    assert callable(change)
    with pytest.raises(DataError) as error:
        append(stream, change(log(1)), "b.parquet", strict=True)
    file = tmp_path / "logs" / "b.parquet"
    reason = message.format(file=file, stream=stream)
    assert str(error.value) == reason
    assert not isinstance(error.value, QuarantinedError)
    with pytest.raises(QuarantinedError):
        append(stream, change(log(1)), "b.parquet")
    (note,) = list_quarantine(stream)
    assert (note["reasons"], note["kind"], note["rows"]) == ([reason], "rows", 400)


def test_a_column_that_nobody_reads_is_told(tmp_path: Path) -> None:
    append(tmp_path / "s", log(0), schema=schema())
    more = log(1).append_column("mood", pa.array(["good"] * 400))
    assert append(tmp_path / "s", more).report["new_columns"] == ["mood"]


def test_what_a_stream_cannot_be_is_said(tmp_path: Path) -> None:
    stream = tmp_path / "s"
    assert catch_message(DataError, append, stream, log(0)) == (
        f"{stream} holds no stream yet, and no schema is given: the first increment needs it. Pass "
        "--schema"
    )
    append(stream, log(0), schema=schema())
    assert catch_message(SchemaError, append, stream, log(1), schema=schema(gate=0.1)) == (
        f"the schema differs from that of the stream {stream} in stream: rows of both would not "
        "mean the same. Inputs may join, and policies change (docs/streams.md); else leave "
        "--schema out, or begin a new stream"
    )
    body = schema().to_json()
    with pytest.raises(SchemaError, match="a stream is ordered by event time"):
        parse_schema({name: part for name, part in body.items() if name != "time"})
    with pytest.raises(SchemaError, match=r"the schema has \[splits\], which a stream has no use"):
        parse_schema(body | {"splits": {"shares": {"train": 0.5, "valid": 0.5}}})


def test_a_damaged_state_or_a_missing_increment_is_refused(tmp_path: Path) -> None:
    stream = tmp_path / "s"
    for day in range(3):
        append(stream, log(day), schema=schema())
    assert sorted(path.name for path in (stream / "state").iterdir()) == ["000002", "000003"]
    file = stream / "state" / "000003" / "table-item.arrow"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(FormatError, match=r"table-item\.arrow is missing or differs from its"):
        append(stream, log(3))
    # The newest can be taken back: the state before it is still there.
    (stream / "increments" / "000003").rename(tmp_path / "taken-back")
    again = append(stream, log(2))
    assert again.fingerprint == open_stream(str(stream)).newest.fingerprint
    (stream / "increments" / "000002").rename(tmp_path / "gone")
    with pytest.raises(FormatError, match="increment 3 does not continue increment 1"):
        _ = open_stream(str(stream)).records


def test_a_report_or_description_that_somebody_made_up_is_refused_by_name(tmp_path: Path) -> None:
    append(tmp_path / "s", log(0), schema=schema())
    manifest = tmp_path / "s" / "increments" / "000001" / "manifest.json"
    made_up: list[tuple[Path, Callable[[dict[str, Any]], object]]] = [
        (manifest, lambda body: body["stream"].update(window=[1])),
        (manifest, lambda body: body["report"].update(stream=None)),
        (manifest, lambda body: body["report"]["stream"].update(alarms=[1])),
        (manifest, lambda body: body["report"]["stream"]["tables"]["item"].pop("new")),
        (tmp_path / "s" / "stream.json", lambda body: body.update(time_unit="week")),
        (tmp_path / "s" / "stream.json", lambda body: body.pop("columns")),
    ]
    for path, change in made_up:
        before = path.read_text()
        seal(path, change)
        with pytest.raises(FormatError, match=rf"^{path}.* The program that wrote it is at fault"):
            _ = open_stream(str(tmp_path / "s")).records
        path.write_text(before)
