"""A first schema from a log's first rows: what each column is taken for, and that it prepares."""

import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from metaio.errors import DataError
from metaio.format.dataset import open_dataset
from metaio.prepare.guess import first_rows, guess, schema_toml
from tests.commands import gmeta

ROWS = 4_000


def log() -> pa.Table:
    """Clicks of 80 users, with a column of every kind."""
    rng = np.random.default_rng(0)
    genres = np.array(["a|b", "b", "c|a", "c"])
    price = rng.uniform(1, 5_000, ROWS).round(2)
    return pa.table(
        {
            "user_id": rng.integers(1, 81, ROWS),
            "item": rng.integers(1, 300, ROWS),
            "session": [f"s{number % 3_900}" for number in range(ROWS)],
            "genres": genres[rng.integers(0, 4, ROWS)],
            "tags": [[1, 2], [3]] * (ROWS // 2),
            "price": pa.array(price, mask=rng.random(ROWS) < 0.1),
            "country": ["fi"] * ROWS,
            "note": [f"note {number}" for number in range(ROWS)],
            "ts": 1_700_000_000 + np.arange(ROWS),
            "click": rng.integers(0, 2, ROWS),
        }
    )


def test_each_column_is_taken_for_what_it_looks_like() -> None:
    found = guess(log(), {})
    assert found.roles == {
        "user_id": "task",
        "item": "single",
        "session": "single",
        "genres": "multi",
        "tags": "multi",
        "price": "dense",
        "country": "left out",
        "note": "left out",
        "ts": "time",
        "click": "label",
    }
    schema = tomllib.loads(schema_toml(found, ["log.csv"]))
    assert schema["single"] == [
        {"column": "item", "vocabulary": 2},
        {"column": "session", "hash": 1_000_000},  # nearly every row has its own
    ]
    assert schema["multi"][0] == {"column": "genres", "vocabulary": 2, "separator": "|"}
    assert schema["dense"] == [{"column": "price", "fill": 0.0, "log1p": True, "standardise": True}]
    assert not found.is_rating
    ratings = log().append_column("stars", pa.array(np.arange(ROWS) % 5 + 1))
    rated = guess(ratings, {"label": "stars"})
    assert (rated.is_rating, rated.mean_label, rated.roles["click"]) == (True, 3.0, "single")


def test_names_may_be_headings() -> None:
    heads = {"user_id": "Customer ID", "ts": "When", "click": "Bought?"}
    renamed = log().rename_columns([heads.get(name, name) for name in log().column_names])
    roles = guess(renamed, {}).roles
    assert [roles[name] for name in heads.values()] == ["task", "time", "label"]


@pytest.mark.parametrize(
    ("given", "dropped", "told"),
    [
        ({}, ["click"], "looks like the label. Name it with --label"),
        ({}, ["user_id"], "looks like the task. Name it with --task"),
        ({"label": "clik"}, [], "there is no column 'clik' for the label: the log has user_id, "),
        ({"label": "note"}, [], "column 'note' is string: a label is a number or a truth value"),
        (
            {},
            ["item", "session", "genres", "tags"],
            "no column is left that holds ids: a model needs at least one",
        ),
    ],
)
def test_what_cannot_be_guessed_is_asked_for(
    given: dict[str, str], dropped: list[str], told: str
) -> None:
    with pytest.raises(DataError) as caught:
        guess(log().drop_columns(dropped), given)  # type: ignore[arg-type]
    assert told in str(caught.value)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_what_init_writes_prepares_and_fits(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"my log.{suffix}"
    if suffix == "csv":
        pyarrow.csv.write_csv(log().drop_columns("tags"), path)
    else:
        pq.write_table(log(), path)
    made = gmeta("init", path.name, "--out", "made", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert "left out: note" in made.stdout
    assert f"gmeta prepare --schema made/schema.toml 'my log.{suffix}' made/data" in made.stdout
    again = gmeta("init", path.name, "--out", "made", cwd=tmp_path)
    assert (again.returncode, again.stderr) == (
        2,
        "error: made/schema.toml is there: it would be lost. Give another folder (--out), or add "
        "--overwrite\n",
    )
    prepared = gmeta(
        "prepare", "--schema", "made/schema.toml", path.name, "made/data", cwd=tmp_path
    )
    assert prepared.returncode == 0, prepared.stderr
    assert open_dataset(str(tmp_path / "made" / "data")).splits["train"].num_episodes > 50
    checked = gmeta("config", "made/train.toml", "--check", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout == (
        "made/train.toml is right: maml with dlrm on made/data, into made/runs/maml\n"
    )
    written = tomllib.loads((tmp_path / "made" / "train.toml").read_text())
    # The baselines of an evaluation know what training rows say of an item: so does the model.
    assert written["item_features"] == {"columns": ["item"]}  # not the session
    assert written["support_features"]["residual_of"] == "item"
    assert "augment" not in written  # the log has a time column: support is the past


def test_a_log_that_cannot_be_read_gets_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("user_id,click\n")
    with pytest.raises(DataError, match="has 0 rows"):
        first_rows([str(tmp_path / "empty.csv")])
    (tmp_path / "log.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="cannot be read"):
        first_rows([str(tmp_path / "log.parquet")])


def test_lists_of_numbers_are_vectors_where_all_are_as_long(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    texts = pa.FixedSizeListArray.from_arrays(pa.array(rng.random(ROWS * 8), pa.float32()), 8)
    rows = log().append_column("text", texts)
    rows = rows.append_column("picture", pa.array([[0.5, number] for number in range(ROWS)]))
    rows = rows.append_column("ragged", pa.array([[0.5] * (1 + n % 2) for n in range(ROWS)]))
    pq.write_table(rows, tmp_path / "log.parquet")
    found = guess(first_rows([str(tmp_path / "log.parquet")]), {})
    assert [found.roles[name] for name in ("text", "picture", "ragged", "tags")] == [
        "vector", "vector", "left out", "multi"
    ]  # fmt: skip
    schema = tmp_path / "schema.toml"
    schema.write_text(schema_toml(found, ["log.parquet"]))
    assert tomllib.loads(schema.read_text())["vector"] == [
        {"column": "text", "width": 8},
        {"column": "picture", "width": 2},
    ]
    made = gmeta("prepare", "--schema", schema, tmp_path / "log.parquet", tmp_path / "data")
    assert made.returncode == 0, made.stderr
