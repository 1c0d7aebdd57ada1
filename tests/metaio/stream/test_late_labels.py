"""Labels that mature: a row is learnt once, when its label is final, and corrected until then."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from gmeta.cli.commands.inspect_stream import inspect_stream
from metaio import Dataset, SchemaError
from metaio.errors import QuarantinedError
from metaio.format.inspection import find_damage
from metaio.prepare.schema.schema import Schema
from metaio.prepare.schema.schema_file import parse_schema
from metaio.stream.chain import open_stream
from tests.metaio.stream.logs import DAY, append, log, schema
from tests.support.refusals import catch_message

DAYS, SUPPORT = 5, 4
HOUR = 3_600
Sided = tuple[int, tuple[tuple[int, str], ...], tuple[tuple[int, str], ...]]


def late_schema(*labels: dict[str, Any], **more: object) -> Schema:
    """The schema of the logs, whose clicks, or other labels, mature after 30 hours."""
    label = labels or ({"column": "click", "matures": "30h"},)
    return parse_schema(schema(late=2.0 * DAY).to_json() | {"label": list(label)} | more)


class LateLog(NamedTuple):
    """Days as they are seen: with the labels that have come by their end, and with corrections."""

    days: list[pa.Table]
    last: dict[int, int]  # by row: the label once all is known


def late_log() -> LateLog:
    """Days whose ones come up to 40 hours after their row, the last of them too late to be
    learnt."""
    rng, days, last = np.random.default_rng(3), [log(day, rows=250) for day in range(DAYS)], {}
    comes: list[dict[str, Any]] = []
    for day in days:
        comes += [{**row, "comes": row["time"] + int(rng.integers(0, 40 * HOUR))}
                  for row in day.to_pylist()]  # fmt: skip
    seen = []
    for at, day in enumerate(days):
        stop = (at + 1) * DAY
        own = [
            {**row, "click": int(row["click"] and row["comes"] < stop)}
            for row in comes
            if at * DAY <= row["time"] < stop
        ]
        own += [
            row
            for row in comes
            if row["click"] and row["time"] < at * DAY and at * DAY <= row["comes"] < stop
        ]
        last |= {row["row"]: row["click"] for row in own}
        seen.append(pa.Table.from_pylist(own).select(day.column_names))
    # The first increment has two days: in one alone no row would be ripe.
    return LateLog([pa.concat_tables(seen[:2]), *seen[2:]], last)


def sided_episodes(
    dataset: Dataset, splits: tuple[str, ...] = ("train", "gate")
) -> Iterator[Sided]:
    """The episodes of some splits: task, support and query, rows with their labels."""
    for split in splits:
        for block in (dataset.read_block(split, i) for i in range(dataset.split(split).num_blocks)):
            labels = [str(one) for one in block.label_N.tolist()]
            rows = list(zip(block.row_id_N.tolist(), labels, strict=True))
            bounds = zip(block.row_offsets_T1, block.row_offsets_T1[1:], strict=False)
            for task, support, (first, stop) in zip(
                block.task_T.tolist(), block.support_lengths_T.tolist(), bounds, strict=True
            ):
                own = rows[first:stop]
                yield task, tuple(own[:support]), tuple(own[support:])


class SlowReader:
    """The same episodes, row by row and with nothing forgotten."""

    def __init__(self, delay: int) -> None:
        self.rows: dict[int, tuple[int, int, float]] = {}  # by id: task, time, label
        self.delay, self.learnt = delay, -1

    def read(self, day: pa.Table, stop: int) -> set[Sided]:
        """The episodes of the next increment, whose window ends at `stop`."""
        came: dict[int, float] = {}
        for row in day.to_pylist():
            came[row["row"]] = max(float(row["click"]), came.get(row["row"], 0.0))
            self.rows.setdefault(row["row"], (row["user"], row["time"], 0.0))
        for row, label in came.items():
            self.rows[row] = (*self.rows[row][:2], label)
        begin, end = self.learnt, max(self.learnt, stop - self.delay)
        self.learnt, found = end, set()
        by_task: defaultdict[int, list[tuple[int, int, str]]] = defaultdict(list)
        for row, (task, time, label) in self.rows.items():
            by_task[task].append((time, row, str(label)))
        for task, rows in by_task.items():
            rows.sort()
            past = tuple((row, label) for time, row, label in rows if time < begin)[-SUPPORT:]
            own = tuple((row, label) for time, row, label in rows if begin <= time < end)
            if own and len(own) + len(past) >= 3:
                found.add((task, past, own) if past else (task, own[:-2], own[-2:]))
        return found


def test_each_row_is_learnt_once_with_its_last_label_and_support_is_corrected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, slow = late_log(), SlowReader(30 * HOUR)
    learnt: Counter[int] = Counter()
    wrong = corrected = too_late = 0
    for number, day in enumerate(seen.days, start=1):
        record = append(tmp_path / "s", day, f"{number}.parquet", schema=late_schema())
        dataset = open_stream(str(tmp_path / "s")).dataset(number)
        found = list(sided_episodes(dataset))
        assert len(found) == len(set(found))
        assert set(found) == slow.read(day, record.window[1])
        assert find_damage(dataset) == []
        for _, _, query in found:
            learnt.update(row for row, _ in query)
            wrong += sum(float(label) != seen.last[row] for row, label in query)
        account = dict(record.report["account"])
        assert account.pop("read") == sum(account.values())
        for counts in record.report["labels"].values():
            corrected += counts["click"]["corrected"]
            too_late += counts["click"]["too_late"]
        assert not [alarm for alarm in record.report["alarms"] if "late" in alarm]
    assert max(learnt.values()) == 1
    assert len(learnt) > 500
    # Only the ones that came after 30 hours.
    assert 0 < wrong <= too_late < corrected / 4
    inspect_stream(str(tmp_path / "s"), verify=False)
    told = " ".join(capsys.readouterr().out.split())
    assert "; the sum closes" in told
    assert f"; {corrected} corrected in time, {too_late} too late to be learnt" in told


def test_one_increment_of_all_days_learns_what_is_ripe(tmp_path: Path) -> None:
    seen = late_log()
    whole = pa.concat_tables(seen.days)  # a row and its correction come together
    record = append(tmp_path / "s", whole, schema=late_schema())
    found = set(sided_episodes(open_stream(str(tmp_path / "s")).dataset(1)))
    assert found == SlowReader(30 * HOUR).read(whole, record.window[1])
    assert sum(counts["click"]["waiting"] for counts in record.report["labels"].values()) > 200


def test_a_label_that_waits_is_masked_where_another_is_learnt_at_once(tmp_path: Path) -> None:
    seen, begins, learnt = late_log(), 0, 0
    labels = ({"column": "shown"}, {"column": "click", "matures": "30h"})
    time_of = {row["row"]: row["time"] for day in seen.days for row in day.to_pylist()}
    shown_of: Counter[int] = Counter()
    click_of: Counter[int] = Counter()

    def read(sided: tuple[tuple[int, str], ...]) -> Iterator[tuple[int, float, float]]:
        for row, text in sided:
            shown, click = (float(one) for one in text.strip("[]").split(","))
            assert np.isnan(shown) or shown == row % 2
            yield time_of[row], shown, click

    for number, day in enumerate(seen.days, start=1):
        day = day.append_column("shown", pa.array(day["row"].to_numpy() % 2))
        stop = append(tmp_path / "s", day, f"{number}.parquet", schema=late_schema(*labels)).window[
            1
        ]
        ripe = stop - 30 * HOUR
        for _, support, query in sided_episodes(open_stream(str(tmp_path / "s")).dataset(number)):
            is_first = not np.isnan(next(read(query))[1])
            (shown_of if is_first else click_of).update(row for row, _ in query)
            for time, shown, click in read(query):
                assert begins <= time if is_first else learnt <= time < ripe
                assert (np.isnan(shown), np.isnan(click)) == (not is_first, is_first)
            for time, shown, click in read(support):
                if is_first:  # what is not ripe when the window begins is not known
                    assert (np.isnan(shown), np.isnan(click)) == (False, time >= learnt)
                else:  # of a new task the first rows of the window itself are support
                    assert (np.isnan(shown), np.isnan(click)) == (time >= learnt, False)
        begins, learnt = stop, ripe
    assert max(shown_of.values()) == max(click_of.values()) == 1
    assert len(click_of) > 500


def test_rows_wait_over_a_window_that_a_person_sets_back(tmp_path: Path) -> None:
    learnt: Counter[int] = Counter()
    for number, how in enumerate(({}, {}, {"begin": "420000"}, {}), start=1):
        append(tmp_path / "s", log(2 * number, days=2), schema=late_schema(), **how)
        for _, _, query in sided_episodes(open_stream(str(tmp_path / "s")).dataset(number)):
            learnt.update(row for row, _ in query)
    assert max(learnt.values()) == 1


def test_what_matures_needs_ids_a_stream_and_time_to_wait() -> None:
    def refused(label: dict[str, Any], **more: object) -> str:
        body = late_schema().to_json()
        body = {name: part for name, part in body.items() if name not in more or more[name]}
        return catch_message(SchemaError, parse_schema, body | {"label": label})

    late = {"column": "click", "matures": "24h"}
    assert refused(late, row_id=None) == (
        "label click matures, and the schema has no [row_id]: a row waits in a stream, and is "
        "corrected by its id. Add it, or leave matures out"
    )
    assert refused(late, stream=None) == (
        "label click matures, and the schema has no [stream]: a row waits in a stream, and is "
        "corrected by its id. Add it, or leave matures out"
    )
    assert refused({"column": "click", "matures": "a day"}) == (
        "label.matures is 'a day'; a number and one of s, m, h, d is allowed, as in '10m'. "
        "Correct it"
    )
    body = late_schema().to_json()
    body["stream"]["ttl"] = 3_600.0
    assert catch_message(SchemaError, parse_schema, body) == (
        "stream.ttl is 3600 s, and labels mature after 108000 s: rows would be forgotten while "
        "they wait. Raise ttl"
    )


def test_files_wait_until_a_label_is_ripe(tmp_path: Path) -> None:
    with pytest.raises(QuarantinedError) as refused:
        append(tmp_path / "s", log(0), "0.parquet", schema=late_schema())
    first = f"{tmp_path}/logs/0.parquet"
    assert str(refused.value) == (
        f"input {first} is quarantined: no row is as old as label click needs to mature, 30h: "
        f"there is nothing to learn yet. Give newer files and --along {first}, as gmeta follow does"
    )
    record = append(tmp_path / "s", log(1), schema=late_schema(), along=[first])
    assert record.report["rows"] == 800


def test_a_weighed_label_is_shown_as_0_at_once_and_once_more_when_it_has_risen(
    tmp_path: Path,
) -> None:
    """In the same episode, but for the labels: only they may tell the two from each other."""
    seen = late_log()
    weighed = {"column": "click", "matures": "30h", "unripe": "weigh"}
    shown: Counter[int] = Counter()
    risen: Counter[int] = Counter()
    episode_of: dict[int, tuple[Any, ...]] = {}  # by query row: its rows, and what support shows
    for number, day in enumerate(seen.days, start=1):
        name = f"{number}.parquet"
        append(tmp_path / "s", day, name, schema=late_schema(weighed))
        append(tmp_path / "w", day, name, schema=late_schema())
        both = [open_stream(str(tmp_path / one)).dataset(number) for one in ("s", "w")]
        # What is judged waits.
        assert set(sided_episodes(both[0], ("gate",))) == set(sided_episodes(both[1], ("gate",)))
        for task, support, query in sided_episodes(both[0], ("train",)):
            labels, rows = {label for _, label in query}, tuple(row for row, _ in query)
            episode = (task, support, rows)
            if labels == {"0.0"}:
                shown.update(rows)
                episode_of |= dict.fromkeys(rows, episode)
            else:
                assert labels <= {"1.0", "nan"}
                own = [row for row, label in query if label == "1.0"]
                risen.update(own)
                assert all(seen.last[row] for row in own)
                assert all(episode_of[row] == episode for row in rows)
            # Support rows are those whose label was final, or those of a new task.
            is_new = {label == "nan" for _, label in support}
            assert len(is_new) == 1
    assert max(shown.values()) == max(risen.values()) == 1
    assert set(risen) <= set(shown)
    assert len(shown) > 500
    ones = {row for row in shown if seen.last[row]}
    assert len(ones - set(risen)) < len(ones) / 4  # those that came after 30 hours
