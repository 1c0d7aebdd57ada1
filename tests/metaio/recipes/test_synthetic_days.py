"""Logs by days whose best possible AUC is known, and what a stream makes of them."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from metaio import DataError
from metaio.prepare.schema.schema_file import load_schema
from metaio.recipes.synthetic_days import DaysConfig, auc, write_days
from metaio.stream.chain import open_stream
from metaio.stream.extend import extend
from tests.metaio.stream.logs import OPTIONS
from tests.support.refusals import catch_message

CONFIG = DaysConfig(days=3, users_per_day=60, live_items=50)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("days") / "logs"
    write_days(str(place), CONFIG)
    return place


def test_users_and_items_come_and_go_and_keep_what_they_are(logs: Path) -> None:
    days = [pq.read_table(path) for path in sorted(logs.glob("day=*/*.parquet"))]
    assert len(days) == 3
    for name in ("user", "item"):
        sets = [set(day[name].to_pylist()) for day in days]
        assert all(later - before for before, later in pairwise(sets))
        assert all(before & later for before, later in pairwise(sets))
        assert sets[0] - sets[2]
    of_user: dict[int, tuple[object, ...]] = {}
    for day in days:
        for row in day.select(["user", "age", "region", "device"]).to_pylist():
            own = (row["age"], row["region"], row["device"])
            assert of_user.setdefault(row["user"], own) == own
        assert (day["item_age"].to_numpy() >= 0).all()
        assert (np.diff(day["time"].cast("int64").to_numpy()) >= 0).all()


def test_no_score_is_better_than_the_probability_itself(logs: Path) -> None:
    for line in json.loads((logs / "days.json").read_text()):
        table = pq.read_table(logs / line["day"] / "clicks.parquet")
        clicks, probability = table["click"].to_numpy(), table["p_click"].to_numpy()
        pairs = probability[clicks == 1][:, None] - probability[clicks == 0][None, :]
        expected = float((pairs > 0).mean() + (pairs == 0).mean() / 2)
        assert line["auc_of_p_click"] == round(expected, 4)
        assert auc(table["price"].to_numpy(), clicks) < expected
        assert 0.7 < expected < 0.95
        assert clicks.mean() == pytest.approx(probability.mean(), abs=0.06)


def test_tastes_turn_by_the_hour(tmp_path: Path) -> None:
    """Rows of one user and genre agree within an hour or two; half a turn later they do not."""
    config = replace(CONFIG, days=1, users_per_day=40, min_rows=40, max_rows=60, drift=0.5)
    write_days(str(tmp_path / "logs"), config)
    (path,) = tmp_path.glob("logs/day=*/clicks.parquet")
    table = pq.read_table(path)
    logit = np.log(table["p_click"].to_numpy() / (1 - table["p_click"].to_numpy()))
    user, genre, hour = (table[name].to_numpy() for name in ("user", "genre", "hour"))
    best = json.loads((tmp_path / "logs" / "days.json").read_text())[0]["auc_of_p_click"]
    assert best == round(auc(table["p_click"].to_numpy(), table["click"].to_numpy()), 4) > 0.8
    first, other = np.triu_indices(len(user), 1)
    same = (user[first] == user[other]) & (genre[first] == genre[other])
    first, other = first[same], other[same]
    apart = np.abs(hour[first] - hour[other])
    near, far = apart < 2, apart > 20
    agreement = [np.corrcoef(logit[first[who]], logit[other[who]])[0, 1] for who in (near, far)]
    assert agreement[0] > 0.5
    assert agreement[1] < -0.3
    schema = load_schema(tmp_path / "logs" / "schema.toml")
    assert schema.events is not None
    assert schema.events.where == "click = 1"


def test_what_most_users_like_does_not_turn_with_their_tastes(tmp_path: Path) -> None:
    """Half a turn later the share of clicks of an item is what it was."""
    config = DaysConfig(1, users_per_day=600, live_items=20, min_rows=40, max_rows=60, drift=0.5)
    write_days(str(tmp_path / "logs"), config)
    (path,) = tmp_path.glob("logs/day=*/clicks.parquet")
    table = pq.read_table(path)
    probability, item, hour = (table[name].to_numpy() for name in ("p_click", "item", "hour"))
    shares = [
        np.bincount(item[rows], probability[rows]) / np.bincount(item[rows])
        for rows in (hour < 4, hour >= 20)
    ]
    assert np.corrcoef(*shares)[0, 1] > 0.7


def test_a_stream_reads_logs_by_schema_without_probability(logs: Path, tmp_path: Path) -> None:
    schema = load_schema(logs / "schema.toml")
    assert "p_click" not in schema.columns
    for number, path in enumerate(sorted(logs.glob("day=*")), start=1):
        record = extend([f"{path}/*.parquet"], str(tmp_path / "s"), schema, OPTIONS)
        assert record.number == number
        assert (record.report["tasks"]["train"]["returning"] > 0) == (number > 1)
    assert open_stream(str(tmp_path / "s")).dataset(3).manifest.support_is_past


def test_late_clicks_are_seen_by_the_day_and_corrected_on_the_next(
    logs: Path, tmp_path: Path
) -> None:
    write_days(str(tmp_path / "late"), replace(CONFIG, delay_h=12.0))
    text = (tmp_path / "late" / "schema.toml").read_text()
    assert text.replace('matures = "24h"\n', "") == (logs / "schema.toml").read_text()
    seen: dict[int, int] = {}
    last: dict[int, int] = {}
    corrected = 0
    for path in sorted(logs.glob("day=*/*.parquet")):
        whole = pq.read_table(path)
        table = pq.read_table(tmp_path / "late" / path.relative_to(logs))
        own = set(whole["row"].to_pylist())
        rows = table.select(["row", "click", "click_at_last"]).to_pylist()
        assert {row["row"] for row in rows} >= own
        for row in rows:
            if row["row"] not in own:  # a correction
                assert (seen[row["row"]], row["click"]) == (0, 1)
                corrected += 1
            seen[row["row"]] = row["click"]
            assert last.setdefault(row["row"], row["click_at_last"]) == row["click_at_last"]
        clicks = dict(zip(whole["row"].to_pylist(), whole["click"].to_pylist(), strict=True))
        assert all(last[row] <= click for row, click in clicks.items())
        newest = own
    assert corrected > 50
    # Once the next day is there everything is known.
    assert all(seen[row] == last[row] for row in seen if row not in newest)
    assert any(seen[row] != last[row] for row in newest)


def test_logs_are_not_overwritten_unasked(logs: Path) -> None:
    with pytest.raises(DataError, match=r"exists\. Choose another place"):
        write_days(str(logs), CONFIG)


def test_nothing_but_such_logs_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "work.txt").write_text("years of it")
    assert catch_message(DataError, write_days, str(tmp_path / "mine"), CONFIG, overwrite=True) == (
        f"{tmp_path}/mine exists and has no days.json: it is not what this recipe makes. Choose a "
        "place that does not exist"
    )
    assert (tmp_path / "mine" / "work.txt").read_text() == "years of it"
