"""What late labels cost, and what waiting for them and fake-negative weights win back: a part of
delivery.py, on clicks of the recipe synthetic-days that are reported hours later."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _common import REPOSITORY

from gmeta.serving.bulk.predict_files import predict_files
from gmeta.serving.bulk.row_files import RowFiles
from gmeta.serving.model_loader import load
from metaio.recipes.synthetic_days import DaysConfig, auc, write_days
from metaio.stream.chain import name_increment_folder

DELAY_H, SUPPORT, DAY_US = 12.0, 20, 86_400 * 10**6
# They need a label that every row has, which is not so where rows are weighed.
NO_SUPPORT_INPUTS = (
    "support_features.task=false", "support_features.columns=[]", "item_features.columns=[]",
)  # fmt: skip
Stage = Callable[..., int]


@dataclass(frozen=True)
class Way:
    """What a stream is told of labels that are not final."""

    schema: str  # what stands in place of matures
    is_told_all: bool  # the oracle: each row has its last label at once
    is_corrected: bool  # rows that correct others are given

    def observe(self, day: pa.Table, start: int) -> pa.Table:
        """The log of a day as the stream gets it."""
        if not self.is_corrected:
            day = day.filter(pa.array(_time(day) >= start))
        return _with_click(day, "click_at_last") if self.is_told_all else day

    def support(self, rows: pa.Table, start: int) -> pa.Table:
        """The newest rows of each user before a day, with the labels that are known by then."""
        time_N = rows["time"].cast(pa.int64()).to_numpy()
        known_N = time_N < start
        if self.is_corrected:  # those that are final: a day old
            known_N &= time_N < start - DAY_US
        known = rows.filter(pa.array(known_N)).sort_by(
            [("user", "ascending"), ("time", "ascending")]
        )
        user_N = known["user"].to_numpy()
        ends_N = np.searchsorted(user_N, user_N, side="right")
        known = known.filter(pa.array(ends_N - np.arange(len(user_N)) <= SUPPORT))
        return (
            known
            if not (self.is_told_all or self.is_corrected)
            else _with_click(known, "click_at_last")
        )


WAYS = {
    "oracle": Way("", is_told_all=True, is_corrected=False),
    "ignore": Way("", is_told_all=False, is_corrected=False),
    "wait": Way('matures = "24h"', is_told_all=False, is_corrected=True),
    "weigh": Way('matures = "24h"\nunripe = "weigh"', is_told_all=False, is_corrected=True),
}  # fmt: skip


def late_labels(root: Path, days: int, users: int, run: Stage) -> dict[str, Any]:
    """Return how each way predicts the clicks of the next day, all of them known, and which share
    of the logloss between `ignore` and `oracle` the better of `wait` and `weigh` wins back."""
    root.mkdir()
    write_days(str(root / "logs"), DaysConfig(days, users, delay_h=DELAY_H))
    tables = [pq.ParquetFile(path).read() for path in sorted(root.glob("logs/day=*/*.parquet"))]
    starts = [int(_time(day).max()) // DAY_US * DAY_US for day in tables]
    # Each row as it was first seen, with its last label beside.
    rows = pa.concat_tables(
        day.filter(pa.array(_time(day) >= start)) for day, start in zip(tables, starts, strict=True)
    )
    scores = {
        name: _follow(root / name, way, tables, starts, rows, run) for name, way in WAYS.items()
    }
    gap = scores["ignore"]["logloss"] - scores["oracle"]["logloss"]
    auc_gap = scores["oracle"]["auc"] - scores["ignore"]["auc"]
    found: dict[str, Any] = {}
    for name in ("wait", "weigh"):
        closed = (scores["ignore"]["logloss"] - scores[name]["logloss"]) / gap
        found[f"late_label_gap_closed_{name}"] = round(closed, 3)
        closed = (scores[name]["auc"] - scores["ignore"]["auc"]) / auc_gap
        found[f"late_label_auc_gap_closed_{name}"] = round(closed, 3)
    best = max(found["late_label_gap_closed_wait"], found["late_label_gap_closed_weigh"])
    return {"late_label_gap_closed": best, **found, "late_labels": scores}


def _follow(
    root: Path, way: Way, tables: list[pa.Table], starts: list[int], rows: pa.Table, run: Stage
) -> dict[str, float]:
    """Train day after day, and return the mean scores of the next day from the third on."""
    root.mkdir()
    schema = root / "schema.toml"
    text = (root.parent / "logs" / "schema.toml").read_text()
    schema.write_text(text.replace('matures = "24h"', way.schema))
    seen = [way.observe(day, start) for day, start in zip(tables, starts, strict=True)]
    scores = []
    # The first two days are one increment: in one alone no label is final.
    for number, parts in enumerate([seen[:2], *([day] for day in seen[2:-1])], start=1):
        file = root / f"{number}.parquet"
        pq.write_table(pa.concat_tables(parts), file)
        run(root, "prepare", "--extend", root / "stream", "--schema", schema, file)
        place = root / "stream" / "increments" / name_increment_folder(number)
        arguments = [f'data.path="{place}"', f'run.dir="{root}/{number}"', "run.prequential=false"]
        if number > 1:
            arguments.append(f'run.continue_from="{root}/{number - 1}"')
        run(
            root, "train", REPOSITORY / "examples/stream/train.toml", *NO_SUPPORT_INPUTS, *arguments
        )
        if number > 1:
            run(root, "export", root / f"{number}", root / f"model-{number}")
            scores.append(_score(root, root / f"model-{number}", way, rows, starts[number + 1]))
    return {name: round(float(np.mean([one[name] for one in scores])), 5) for name in scores[0]}


def _score(root: Path, model: Path, way: Way, rows: pa.Table, start: int) -> dict[str, float]:
    """AUC, logloss and calibration of a day that begins at `start`."""
    is_own_N = (_time(rows) >= start) & (_time(rows) < start + DAY_US)
    places = [root / f"{name}.parquet" for name in ("support", "query", "predicted")]
    pq.write_table(way.support(rows, start), places[0])
    pq.write_table(rows.filter(pa.array(is_own_N)), places[1])
    support, query = (RowFiles(str(place)) for place in places[:2])
    places[2].unlink(missing_ok=True)
    predict_files(load(model), support, query, places[2], True, lambda *_: None)
    found = pq.read_table(places[2])
    name = next(one for one in found.column_names if one.startswith("prediction"))
    label_N = found["click_at_last"].to_numpy()
    p_N = np.clip(found[name].to_numpy().astype(np.float64), 1e-7, 1 - 1e-7)
    return {
        "auc": auc(p_N, label_N),
        "logloss": -float(np.mean(np.where(label_N, np.log(p_N), np.log1p(-p_N)))),
        "calibration": float(p_N.mean() / label_N.mean()),
    }


def _with_click(rows: pa.Table, source: str) -> pa.Table:
    return rows.set_column(rows.column_names.index("click"), "click", rows[source])


def _time(rows: pa.Table) -> Any:
    return rows["time"].cast(pa.int64()).to_numpy()
