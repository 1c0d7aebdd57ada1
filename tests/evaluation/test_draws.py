"""`gmeta evaluate` shows other draws, fewer support rows and row ids, alike on one rank and two."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metaio.prepare.engines.local import prepare
from metaio.prepare.job import PrepareOptions
from metaio.prepare.schema.schema_file import parse_schema
from tests.support.commands import SMALL_MODEL, evaluate, gmeta, succeed, write_config

SCHEMA: dict[str, Any] = {
    "task": {"column": "user"}, "label": {"column": "clicked"}, "row_id": {"column": "row"},
    "item": {"column": "item"},
    "single": [{"column": "item", "hash": 60}, {"column": "user", "hash": 60}],
    "episodes": {"by": "random", "query_rows": 4, "min_rows": 6},
    "splits": {"shares": {"train": 0.5, "cold": 0.5}},
}  # fmt: skip


def raw_table() -> pa.Table:
    """40 users of 6 to 20 rows."""
    rng = np.random.default_rng(0)
    user_N = np.repeat(np.arange(40), rng.integers(6, 21, 40))
    return pa.table(
        {
            "row": rng.permutation(user_N.size) + 10_000, "user": user_N,
            "item": rng.integers(0, 50, user_N.size), "clicked": rng.integers(0, 2, user_N.size),
            "ts": np.arange(user_N.size),
            "side": np.where(np.arange(user_N.size) % 3, "support", "query"),
        }
    )  # fmt: skip


def prepared(folder: Path, **parts: Any) -> Path:
    pq.write_table(raw_table(), folder / "raw.parquet")
    out = folder / "data"
    options = PrepareOptions(threads=1)
    prepare([str(folder / "raw.parquet")], str(out), parse_schema({**SCHEMA, **parts}), options)
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draws")
    config = write_config(folder / "train.toml", prepared(folder), folder / "run")
    succeed("train", config, *SMALL_MODEL, "run.max_steps=2")
    return folder / "run"


def evaluated(run: Path, out: str, *arguments: str) -> tuple[pa.Table, dict[str, Any]]:
    folder = run.parent / out
    asked = ("--draws", "2", "--support-sizes", "0,3", "--no-trees", "--out", folder)
    result = evaluate(run, *asked, *arguments)
    assert result.returncode == 0, result.stderr
    table = pq.read_table(folder / "predictions.parquet")
    return table, json.loads((folder / "evaluation.json").read_text())


@pytest.mark.distributed
def test_draws_sizes_and_ids_are_the_same_on_one_rank_and_two(run: Path) -> None:
    table, evaluation = evaluated(run, "one", 'evaluation.metrics=["mae","hr@2"]')
    again, on_two = evaluated(
        run, "two", 'evaluation.metrics=["mae","hr@2"]', "--nproc-per-node", "2"
    )
    raw = {row["row"]: row for row in raw_table().to_pylist()}
    asked: dict[int, set[int]] = {0: set(), 1: set()}
    sizes: dict[int, int] = {}
    named = 0
    for row in table.to_pylist():
        if row["run"] != "run":
            continue
        own = raw[row["row_id"]]
        assert (own["user"], own["clicked"]) == (row["task"], row["label"])
        assert row["task_id"] == own["user"]
        named += row["item_id"] is not None
        assert row["item_id"] in (own["item"], None)  # null: another item shares its row
        asked[row["draw"]].add(row["row_id"])
        sizes[row["task"]] = row["task_rows"]
    assert named > 20
    assert len(asked[0]) == len(asked[1])
    assert asked[0] != asked[1]
    assert sizes == {user: sum(1 for row in raw.values() if row["user"] == user) for user in sizes}
    order = [("run", "ascending"), ("draw", "ascending"), ("row_id", "ascending")]
    one, two = (part.sort_by(order).to_pydict() for part in (table, again))
    found = {name: one[name] for name in ("task", "label")}
    assert found == {name: two[name] for name in ("task", "label")}
    mine = np.array(one["run"]) == "run"
    for name in ("before", "after"):
        values = [np.array(part[name], np.float64)[mine] for part in (one, two)]
        assert values[0] == pytest.approx(values[1], rel=1e-5)
    assert list(evaluation["metrics"]) == ["mae", "hr@2"]
    (group,), (of_two,) = evaluation["groups"], on_two["groups"]
    assert [limit["max_support_rows"] for limit in group["by_support_limit"]] == [0, 3]
    for limit, other in zip(group["by_support_limit"], of_two["by_support_limit"], strict=True):
        assert [result["run"] for result in limit["results"]] == ["run", "bias model"]
        for here, there in zip(limit["results"], other["results"], strict=True):
            found = here["metrics"]["mae"]["value"]
            assert found == pytest.approx(there["metrics"]["mae"]["value"], rel=1e-5)


@pytest.mark.distributed
def test_without_support_rows_nothing_adapts(run: Path) -> None:
    _, evaluation = evaluated(run, "none")
    (group,) = evaluation["groups"]
    of_draw = next(
        one["metrics"]["auc"][0]
        for one in group["by_draw"]
        if (one["run"], one["stage"]) == ("run", "before")
    )
    limit = group["by_support_limit"][0]["results"][0]
    assert (limit["run"], limit["stage"]) == ("run", "after")
    assert limit["metrics"]["auc"]["value"] == pytest.approx(of_draw, rel=1e-6)


FIXED: dict[str, dict[str, Any]] = {
    "past": {"time": {"column": "ts"}, "episodes": {"by": "last", "query_rows": 4, "min_rows": 6}},
    "membership": {"membership": {"column": "side"}},
    "windows": {"time": {"column": "ts"}, "splits": {"by_time": {"train": 0.6, "cold": 0.4}}},
}


@pytest.mark.parametrize("protocol", FIXED)
def test_a_support_that_the_protocol_gives_is_not_drawn_anew(tmp_path: Path, protocol: str) -> None:
    data = prepared(tmp_path, **FIXED[protocol])
    config = write_config(tmp_path / "train.toml", data, tmp_path / "run")
    assert gmeta("train", config, *SMALL_MODEL, "run.max_steps=1").returncode == 0
    result = evaluate(tmp_path / "run", "--draws", "2", "--no-trees")
    assert result.returncode == 0, result.stderr
    note = (
        f"--draws = 2, but the protocol of {data} says which rows of a task are support, and which "
        "of them its query: one draw, intervals over tasks alone"
    )
    assert note in " ".join(result.stderr.split())
    found = json.loads((tmp_path / "run" / "evaluation" / "evaluation.json").read_text())
    assert (found["interval"]["draws"], found["notes"][-1]) == (1, note)
    table = pq.read_table(tmp_path / "run" / "evaluation" / "predictions.parquet")
    assert set(table["draw"].to_pylist()) == {0}
