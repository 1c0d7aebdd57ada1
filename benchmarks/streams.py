"""Real logs as streams: is a model that goes on, increment after increment, worth what one is that
was trained anew on everything, and what is one worth that stays as it was?

MovieLens-100k and Amazon ratings (4 and 5 are clicks) are cut by time: a first part of 30 % of the
rows, then parts of equally many. `gmeta follow` goes from part to part; what it forecasts of an
increment, before it trains on it, is its prequential score, and its first version is scored on the
same rows. `retrained` is prepared and trained from nothing on all parts before the increment, and
scored on it too. Rows that are scored are those of all tasks but the gate's.

    benchmarks/streams.py --only ml-100k       a table of all parts, and one line of JSON
"""

import csv
import itertools
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _common import REPOSITORY, environment, finish, make_parser, positive_int

from gmeta.pipeline.follow_config import load_follow_config
from gmeta.pipeline.outcome_reader import read_days
from gmeta.pipeline.pipeline import Pipeline
from gmeta.pipeline.stage_process import last_line, run_stage
from gmeta.platform.files.checked_json import read_json

DATA = REPOSITORY.parent / "shared" / "data"
FIRST_SHARE = 0.3
MODELS = ("continued", "frozen", "retrained")
SCHEMA = """
[task]
column = "user"
[label]
column = "click"
[time]
column = "time"
[[single]]
column = "item"
vocabulary = 3
{columns}
[episodes]
by = "ratio"
query_share = 0.5
min_rows = 4
[stream]
gate = 0.1
support = 50
capacity_block = 1024
screen_after = 1000
"""
TRAIN = """
[data]
path = ""
tasks_per_step = 16
[support_features]
task = true
columns = ["*"]
[model]
hidden = [64, 32]
embedding_dim = 16
[algorithm]
name = "maml"
inner_lr = 0.1
adapt_embeddings = false
[outer]
dense_lr = 0.003
[run]
dir = ""
device = "cpu"
epochs = 2
prequential = true
"""
FOLLOW = """
[follow]
inputs = "{root}/logs/part=*"
schema = "{root}/schema.toml"
stream = "{root}/stream"
train = "{root}/train.toml"
runs = "{root}/runs"
channel = "{root}/channel"
[judge]
margin = 9
max_refused = 1000
"""


@dataclass(frozen=True)
class Log:
    """A log in the order of time, and the columns of its schema beside user, item, click, time."""

    table: pa.Table
    singles: Sequence[str]
    multis: Sequence[str]

    @property
    def schema(self) -> str:
        """Its schema.toml."""
        kinds = [("single", name) for name in self.singles]
        kinds += [("multi", name) for name in self.multis]
        columns = [f'[[{kind}]]\ncolumn = "{name}"\nvocabulary = 1\n' for kind, name in kinds]
        return SCHEMA.format(columns="".join(columns))


def movielens_100k(folder: Path) -> Log:
    """The log of u.data, with what ml-100k.user and ml-100k.item say of users and items."""
    users, items = (_atomic(folder / f"ml-100k.{name}") for name in ("user", "item"))
    lines = _lines(folder / "u.data")
    columns: dict[str, Any] = _events(lines)
    columns["age"] = [int(users[line[0]][0]) // 10 for line in lines]
    columns["occupation"] = [users[line[0]][2] for line in lines]
    columns["year"] = [items[line[1]][1] for line in lines]
    columns["genres"] = [items[line[1]][2].split() for line in lines]
    return Log(_by_time(columns), ("age", "occupation", "year"), ("genres",))


def amazon(folder: Path) -> Log:
    """The log of user_item.dat, with brands and categories."""
    lines = _lines(folder / "user_item.dat")
    brands = dict(_lines(folder / "item_brand.dat", ","))  # type: ignore[arg-type]
    categories: dict[str, list[str]] = {}
    for item, category in _lines(folder / "item_category.dat", ","):
        categories.setdefault(item, []).append(category)
    columns: dict[str, Any] = _events(lines)
    columns["brand"] = [brands.get(line[1], "") for line in lines]
    columns["categories"] = [categories.get(line[1], []) for line in lines]
    return Log(_by_time(columns), ("brand",), ("categories",))


LOGS = {"ml-100k": movielens_100k, "amazon": amazon}


def write_parts(log: Log, root: Path, parts: int) -> list[Path]:
    """Write a log as closed partitions below root/logs; rows of one time stay together."""
    time_N = log.table["time"].to_numpy()
    rest = (1 - FIRST_SHARE) / (parts - 1)
    shares = FIRST_SHARE + rest * np.arange(parts - 1)
    cuts_P = np.searchsorted(time_N, time_N[(shares * len(time_N)).astype(int)])
    bounds = [0, *cuts_P.tolist(), len(time_N)]
    folders = []
    for number, (begin, end) in enumerate(itertools.pairwise(bounds), start=1):
        folder = root / "logs" / f"part={number:02d}"
        folder.mkdir(parents=True)
        pq.write_table(log.table.slice(begin, end - begin), folder / "log.parquet")
        (folder / "_SUCCESS").touch()
        folders.append(folder)
    (root / "schema.toml").write_text(log.schema)
    (root / "train.toml").write_text(TRAIN)
    (root / "stream.toml").write_text(FOLLOW.format(root=root))
    return folders


def follow(root: Path) -> tuple[list[dict[str, Any]], float]:
    """Follow the parts; return a row an increment, and the seconds of training and preparing."""
    loop = Pipeline(load_follow_config(root / "stream.toml"), run_stage, last_line)
    took_s = 0.0
    while (done := loop.step()) is not None:
        took_s += done.took_s if done.stage in ("prepare", "train") else 0.0
    rows = [
        {
            "increment": day.record.number,
            "window": [f"{np.datetime64(int(at), 's')}"[:10] for at in day.window_s],
            "rows": day.record.num_rows,
            "new_tasks": day.record.report["tasks"]["train"]["new"],
            "tasks": sum(day.record.report["tasks"]["train"].values()),
            "new_ids": day.new,
            "continued": day.forecast.get("auc"),
            "frozen": day.frozen.get("auc"),
        }
        for day in read_days(loop)
    ]
    return rows, took_s


def retrain(root: Path, folders: Sequence[Path], number: int) -> tuple[float | None, float]:
    """Train on all parts before an increment, from nothing; return its AUC on the increment, and
    the seconds of preparing and training."""
    own = root / "retrained" / f"{number:02d}"
    files = [str(folder / "log.parquet") for folder in folders[: number - 1]]
    began_s = perf_counter()
    _stage(own, "prepare", "--schema", str(root / "schema.toml"), "--extend", f"{own}/s", *files)
    place = [f'data.path="{own}/s"', 'data.increment="1"', f'run.dir="{own}/run"']
    _stage(own, "train", str(root / "train.toml"), *place)
    took_s = perf_counter() - began_s
    _stage(own, "export", f"{own}/run", f"{own}/model")
    out = own / "scores.json"
    _stage(own, "score", f"{own}/model", "--on", f"{root}/stream:{number}", "--out", str(out))
    return read_json(out)["splits"]["train"]["scores"]["auc"], took_s


def measure(name: str, data: Path, work: Path, parts: int) -> dict[str, Any]:
    """Everything of one log."""
    root = work / name
    shutil.rmtree(root, ignore_errors=True)
    folders = write_parts(LOGS[name](data / name), root, parts)
    rows, continued_s = follow(root)
    retrained_s = 0.0
    for row in rows[1:]:
        row["retrained"], took_s = retrain(root, folders, row["increment"])
        retrained_s += took_s
    return {
        "rows": rows,
        "mean": {key: _mean(rows, key) for key in MODELS},
        "continued_minus_retrained": _difference(rows, "retrained"),
        "continued_minus_frozen": _difference(rows, "frozen"),
        "cost_of_retraining": retrained_s / continued_s,
    }


def table(name: str, found: Mapping[str, Any]) -> str:
    """The figures as Markdown."""
    lines = [
        f"| {name}: increment | days | rows | new users | new ids "
        "| continued | frozen | retrained |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in found["rows"]:
        scores = (_told(row.get(key)) for key in MODELS)
        share = f"{row['new_tasks'] / max(1, row['tasks']):.0%}"
        lines.append(
            f"| {row['increment']} | {row['window'][0]} to {row['window'][1]} | {row['rows']:,} | "
            f"{share} | {row['new_ids']:,} | {' | '.join(scores)} |"
        )
    means = " | ".join(_told(found["mean"][key]) for key in MODELS)
    return "\n".join([*lines, f"| mean | | | | | {means} |"])


def main() -> int:
    """Entry point; returns the exit status."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the raw data sets")
    parser.add_argument("--only", nargs="+", choices=list(LOGS), default=list(LOGS), metavar="NAME")
    parser.add_argument("--parts", type=positive_int, default=8, help="increments of each log")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "runs" / "streams")
    options = parser.parse_args()
    names, parts = options.only, options.parts
    if parts < 2:
        parser.error(f"--parts is {parts}: give 2 or more, a first part and an increment to score")
    if options.quick:
        names, parts = names[:1], 3
    found: dict[str, Any] = {}
    for name in names:
        if not (options.data / name).is_dir():
            print(f"{name}: skipped, there is no {options.data / name}", file=sys.stderr)
            continue
        found[name] = measure(name, options.data, options.work, parts)
        print(table(name, found[name]))
    finish("streams", {"logs": found, "parts": parts, "environment": environment()})
    return 0


def _stage(own: Path, *arguments: str) -> None:
    log = own / f"{arguments[0]}.log"
    if run_stage(arguments, log):
        raise SystemExit(f"{' '.join(arguments)}: {last_line(log)}")


def _lines(file: Path, separator: str = "\t") -> list[list[str]]:
    with file.open(newline="") as text:
        return list(csv.reader(text, delimiter=separator))


def _atomic(file: Path) -> dict[str, list[str]]:
    """The lines of one of RecBole's atomic files by their first column."""
    return {line[0]: line[1:] for line in _lines(file)[1:]}


def _events(lines: Sequence[Sequence[str]]) -> dict[str, Any]:
    return {
        "user": [int(line[0]) for line in lines],
        "item": [int(line[1]) for line in lines],
        "click": [float(int(line[2]) >= 4) for line in lines],
        "time": [int(line[3]) for line in lines],
    }


def _by_time(columns: Mapping[str, Any]) -> pa.Table:
    table = pa.table(dict(columns))
    return table.take(pa.array(np.argsort(table["time"].to_numpy(), kind="stable")))


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """The mean by their rows over the increments that all models have a score of: means over others
    would not compare."""
    known = [row for row in rows if all(row.get(each) is not None for each in MODELS)]
    if not known:
        return None
    return float(np.average([row[key] for row in known], weights=[row["rows"] for row in known]))


def _difference(rows: Sequence[Mapping[str, Any]], other: str) -> dict[str, float | None]:
    """The mean difference over the increments that both have a score of, and its standard error,
    paired by increment; one increment has no error, none no difference."""
    pairs = [(row.get("continued"), row.get(other)) for row in rows]
    found = [own - theirs for own, theirs in pairs if own is not None and theirs is not None]
    error = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else None
    return {"mean": statistics.fmean(found) if found else None, "standard_error": error}


def _told(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    sys.exit(main())
