"""A first schema from a log's first rows: what each column is taken for, and that it prepares."""

import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from gmeta.cli.commands import init
from gmeta.cli.main import app
from gmeta.platform.files.checked_json import read_json
from metaio.errors import DataError
from metaio.format.dataset import open_dataset
from metaio.prepare.source.infer_roles import InferredRoles, infer_roles
from metaio.prepare.source.profile import LogSample, profile_column, read_log_sample
from metaio.prepare.source.schema_template import format_schema, propose_episodes
from tests.support.commands import environment, gmeta, succeed, without_pictures
from tests.support.forked import run_forked
from tests.support.refusals import catch_message

ROWS = 4_000
RUNS = ("maml", "maml-plain")


def log() -> pa.Table:
    """Clicks of 80 users, with a column of every kind."""
    rng = np.random.default_rng(0)
    genres = np.array(["a|b", "b", "c|a", "c"])
    price = rng.uniform(1, 5_000, ROWS).round(2)
    return pa.table(
        {
            "user_id": rng.integers(1, 81, ROWS), "item": rng.integers(1, 300, ROWS),
            "session": [f"s{number % 3_900}" for number in range(ROWS)],
            "genres": genres[rng.integers(0, 4, ROWS)], "tags": [[1, 2], [3]] * (ROWS // 2),
            "price": pa.array(price, mask=rng.random(ROWS) < 0.1), "country": ["fi"] * ROWS,
            "note": [f"note {number}" for number in range(ROWS)],
            "ts": 1_700_000_000 + np.arange(ROWS), "click": rng.integers(0, 2, ROWS),
        }
    )  # fmt: skip


def guessed(rows: pa.Table, **given: str) -> InferredRoles:
    """What the columns of a whole log are taken for."""
    return infer_roles(LogSample(rows), given)  # type: ignore[arg-type]


def test_each_column_is_taken_for_what_it_looks_like() -> None:
    found = guessed(log())
    assert found.roles == {
        "user_id": "task", "item": "single", "session": "single", "genres": "multi",
        "tags": "multi", "price": "dense", "country": "left out", "note": "left out",
        "ts": "time", "click": "label",
    }  # fmt: skip
    schema = tomllib.loads(format_schema(found, ["log.csv"]))
    assert schema["single"] == [
        {"column": "item", "vocabulary": 2},
        {"column": "session", "hash": 1_000_000},  # nearly every row has its own
    ]
    assert schema["multi"][0] == {"column": "genres", "vocabulary": 2, "separator": "|"}
    assert schema["dense"] == [{"column": "price", "fill": 0.0, "log1p": True, "standardise": True}]
    assert not found.is_rating
    ratings = log().append_column("stars", pa.array(np.arange(ROWS) % 5 + 1))
    rated = guessed(ratings, label="stars")
    assert (rated.is_rating, rated.mean_label, rated.roles["click"]) == (True, 3.0, "left out")


def test_words_for_nulls_and_a_second_label_are_no_inputs(tmp_path: Path) -> None:
    rows = ["u1,1,0.5,\\N,1,NA", "u1,2,NULL,b,0,", "u2,1,2,a,1,1", "u2,2,3e1,NA,0,0"] * 3
    path = tmp_path / "log.csv"
    path.write_text("\n".join(["user,item,bid,place,click,purchased", *rows]))
    found = infer_roles(read_log_sample([str(path)]), {})
    # NA may be a place's name; \N is none.
    assert found.text.null == ("\\N", "NULL", "NA")
    assert [column.name for column in found.select("dense")] == ["bid"]
    assert found.item == "item"
    assert found.reasons == {"purchased": "it looks like another label, known only afterwards"}
    expected = {"null": ["\\N", "NULL", "NA"]}
    assert tomllib.loads(format_schema(found, [str(path)]))["text"] == expected
    path.write_text(path.read_text().replace(",NA", ",").replace("\\N", "NA").replace("NULL", "4"))
    assert infer_roles(read_log_sample([str(path)]), {}).text.null == ()


def test_a_text_of_yes_and_no_that_is_named_as_a_label_is_no_input() -> None:
    said = log().append_column(
        "Purchased?", pa.array(["yes" if row % 3 else "no" for row in range(ROWS)])
    )
    found = guessed(said).reasons["Purchased?"]
    assert found == "it looks like another label, known only afterwards"


@pytest.mark.parametrize(
    "names",
    [("Customer ID", "When", "Bought?"), ("reviewerID:token", "unixReviewTime", "is_liked")],
)
def test_names_may_be_headings_and_spelled_otherwise(names: tuple[str, str, str]) -> None:
    heads = dict(zip(("user_id", "ts", "click"), names, strict=True))
    renamed = log().rename_columns([heads.get(name, name) for name in log().column_names])
    roles = guessed(renamed).roles
    assert [roles[name] for name in heads.values()] == ["task", "time", "label"]


@pytest.mark.parametrize(
    ("given", "dropped", "told"),
    [
        ({}, ["user_id"], "looks like the task. Name it with --task"),
        ({"label": "clik"}, [], "there is no column 'clik' for the label: the log has user_id, "),
        ({"label": "note"}, [], "column 'note' is string: a label is a number or a truth value"),
        ({"task": "note"}, [], "each value of note has one row: there is nothing that a model "),
    ],
)
def test_what_is_not_guessed_is_asked(given: dict[str, str], dropped: list[str], told: str) -> None:
    assert told in catch_message(DataError, guessed, log().drop_columns(dropped), **given)


def test_init_writes_both_files_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them would keep out the same call once the disk has room."""
    pq.write_table(log(), tmp_path / "log.parquet")

    def full(path: Path, content: bytes) -> None:
        if path.name == "train.toml":
            raise OSError("no space")
        path.write_bytes(content)

    monkeypatch.setattr(init, "write_atomically", full)
    call = ["init", str(tmp_path / "log.parquet"), "--out", str(tmp_path / "made")]
    assert str(CliRunner().invoke(app, call).exception) == "no space"
    assert list((tmp_path / "made").iterdir()) == []


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_what_init_writes_prepares_and_fits(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"my log.{suffix}"
    if suffix == "csv":
        pyarrow.csv.write_csv(log().drop_columns("tags"), path)
    else:
        pq.write_table(log(), path)
    made = succeed("init", path.name, "--out", "made", cwd=tmp_path)
    assert "left out: note: a text of its own in every row says nothing" in made.stdout
    assert f"gmeta prepare --schema made/schema.toml 'my log.{suffix}' made/data" in made.stdout
    again = gmeta("init", path.name, "--out", "made", cwd=tmp_path)
    assert (again.returncode, again.stderr) == (
        2,
        "error: made/schema.toml is there: it would be lost. Give another folder (--out), or add "
        "--overwrite\n",
    )
    succeed("prepare", "--schema", "made/schema.toml", path.name, "made/data", cwd=tmp_path)
    assert open_dataset(str(tmp_path / "made" / "data")).splits["train"].num_episodes > 50
    checked = succeed("config", "made/train.toml", "--check", cwd=tmp_path)
    found = checked.stdout
    assert found == "made/train.toml is right: maml with melu on made/data, into made/runs/maml\n"
    written = tomllib.loads((tmp_path / "made" / "train.toml").read_text())
    # The baselines of an evaluation know what training rows say of an item: so does the model.
    columns = ["item", "genres", "tags"] if suffix == "parquet" else ["item", "genres"]
    assert written["item_features"] == {"columns": columns, "log_odds": True}  # not the session
    assert written["support_features"]["residual_of"] == "item"
    assert written["model"]["linear_start"] is True
    assert "augment" not in written  # the log has a time column: support is the past


def test_events_are_proposed_ready_to_use(tmp_path: Path) -> None:
    rows = log().rename_columns([*log().column_names[:-1], "is click"])
    item_N = rows["item"].to_numpy()
    rows = rows.append_column("brand", pa.array(item_N % 7))
    rows = rows.append_column("device", pa.array(np.arange(ROWS) % 5))
    pq.write_table(rows.append_column("weight", pa.array(item_N * 0.25)), tmp_path / "log.parquet")
    told = succeed("init", "log.parquet", "--label", "is click", cwd=tmp_path).stdout
    path = tmp_path / "schema.toml"
    assert "events" not in tomllib.loads(path.read_text())
    before, line, proposed = path.read_text().partition("# [events]\n")
    rule, _, after = proposed.partition("\n\n")
    lines = [one.removeprefix("# ") for one in (line + rule).splitlines()]
    path.write_text("\n".join([before, *lines, "", after]))
    assert tomllib.loads(path.read_text())["events"] == {
        "columns": ["item", "brand"],
        "dense": ["weight"],
        "where": '"is click" = 1',
        "longest": 200,
        "delay": 0,
    }
    succeed("prepare", "--schema", "schema.toml", "log.parquet", "data", cwd=tmp_path)
    features = open_dataset(str(tmp_path / "data")).features
    assert [one.name for one in features.events] == ["events.item", "events.brand"]
    # The option that the command names writes the same, and a config that reads them.
    assert "add --events and --overwrite" in told
    schema, words = tomllib.loads(path.read_text()), ("--label", "is click", "--overwrite")
    told = succeed("init", "log.parquet", *words, "--events", cwd=tmp_path).stdout
    assert "--events" not in told
    assert tomllib.loads(path.read_text()) == schema
    config = tomllib.loads((tmp_path / "train.toml").read_text())
    assert config["item_features"]["columns"] == ["item", "brand", "genres", "tags"]
    assert config["model"]["events"] == "sasrec"
    assert config["model"]["hidden"] == [64, 64]
    assert "sparse_weight_decay" not in config["outer"]
    found = succeed("train", "train.toml", "run.max_steps=1", cwd=tmp_path)
    assert "trained: runs/maml" in found.stderr
    # Ratings are all events, and positives beside drawn items are.
    for label in (np.arange(ROWS) % 5 + 1, np.ones(ROWS, np.int64)):
        other = log().set_column(9, "click", pa.array(label))
        assert "where" not in format_schema(guessed(other, label="click"), ["log.csv"])
    without_times = log().drop_columns("ts")
    assert "events" not in format_schema(guessed(without_times), ["log.csv"])
    pq.write_table(without_times, tmp_path / "log.parquet")
    found = gmeta("init", "log.parquet", "--events", "--overwrite", cwd=tmp_path)
    assert found.returncode == 2
    assert "no column was found for the time. Name the time with --time" in found.stderr
    assert tomllib.loads(path.read_text()) == schema


def test_a_column_of_nothing_but_nulls_is_left_out(tmp_path: Path) -> None:
    pq.write_table(log().append_column("coupon", pa.nulls(ROWS)), tmp_path / "log.parquet")
    found = infer_roles(read_log_sample([str(tmp_path / "log.parquet")]), {})
    row_of(found, coupon="left out", country="left out")
    assert found.reasons["coupon"] == "it has no value"
    assert found.reasons["country"] == "it has one value"


def test_a_log_that_cannot_be_read_gets_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("user_id,click\n")
    with pytest.raises(DataError, match="has 0 rows"):
        read_log_sample([str(tmp_path / "empty.csv")])
    (tmp_path / "log.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"cannot be read: .* Write that file again$"):
        read_log_sample([str(tmp_path / "log.parquet")])
    rows = [f"{n % 9},{n},{n % 2}" for n in range(ROWS)]
    ragged = tmp_path / "ragged.csv"
    ragged.write_text("\n".join(["user,item,click", *rows[:50], "1,2", *rows[50:]]))
    assert catch_message(DataError, read_log_sample, [str(ragged)]) == (
        f"input {ragged}, line 52: it has 2 fields, the header has 3. Correct that row; a line "
        "that is no row needs comment under [text] in the schema"
    )


def test_commands_for_unusual_places_are_those_of_a_shell(tmp_path: Path) -> None:
    (tmp_path / "my logs").mkdir()
    pq.write_table(log(), tmp_path / "my logs" / "$1.parquet")
    made = succeed("init", "my logs/$1.parquet", "--out", "my logs/made", cwd=tmp_path)
    assert (
        "gmeta prepare --schema 'my logs/made/schema.toml' 'my logs/$1.parquet' "
        "'my logs/made/data'\n"
    ) in made.stdout
    assert "gmeta evaluate 'my logs/made/runs/maml' --against " in made.stdout


def test_lists_of_numbers_are_vectors_where_all_are_as_long(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    texts = pa.FixedSizeListArray.from_arrays(pa.array(rng.random(ROWS * 8), pa.float32()), 8)
    rows = log().append_column("text", texts)
    rows = rows.append_column("picture", pa.array([[0.5, number] for number in range(ROWS)]))
    rows = rows.append_column("ragged", pa.array([[0.5] * (1 + n % 2) for n in range(ROWS)]))
    pq.write_table(rows, tmp_path / "log.parquet")
    found = infer_roles(read_log_sample([str(tmp_path / "log.parquet")]), {})
    assert [found.roles[name] for name in ("text", "picture", "ragged", "tags")] == [
        "vector", "vector", "left out", "multi"
    ]  # fmt: skip
    schema = tmp_path / "schema.toml"
    schema.write_text(format_schema(found, ["log.parquet"]))
    expected = [{"column": "text", "width": 8}, {"column": "picture", "width": 2}]
    assert tomllib.loads(schema.read_text())["vector"] == expected
    succeed("prepare", "--schema", schema, tmp_path / "log.parquet", tmp_path / "data")


def row_of(found: InferredRoles, **roles: str) -> None:
    """Check what columns were taken for."""
    assert {name: found.roles[name] for name in roles} == roles


def test_of_two_columns_that_may_be_the_task_the_one_of_more_tasks_is() -> None:
    rows = log().add_column(0, "advertiser", pa.array([f"a{n % 5}" for n in range(ROWS)]))
    row_of(guessed(rows), advertiser="single", user_id="task")


def test_integers_are_rows_numbers_or_ids_by_their_names() -> None:
    rng = np.random.default_rng(1)
    rows = log().append_column("Unnamed: 0", pa.array(np.arange(ROWS)))
    rows = rows.append_column("view_count", pa.array(rng.integers(0, 5_000, ROWS)))
    rows = rows.append_column("price_id", pa.array(rng.integers(0, 500, ROWS)))
    found = guessed(rows)
    assert found.roles["Unnamed: 0"] == "row id"
    assert (found.roles["view_count"], found.roles["price_id"]) == ("dense", "single")
    schema = tomllib.loads(format_schema(found, ["log.csv"]))
    assert schema["row_id"] == {"column": "Unnamed: 0"}


def test_two_values_other_than_0_and_1_become_clicks() -> None:
    rows = log().set_column(9, "click", pa.array(np.arange(ROWS) % 2 * 2 - 1))
    found = guessed(rows)
    assert not found.is_rating
    assert tomllib.loads(format_schema(found, ["log.csv"]))["label"]["threshold"] == 1
    with pytest.raises(DataError) as caught:
        guessed(log().set_column(9, "click", pa.array(np.full(ROWS, 3))), label="click")
    assert str(caught.value) == (
        "label click is 3 in all of the 4,000 rows looked at: there is nothing to learn. Name "
        "another column with --label; a log of positives alone needs a column of ones, and one of "
        "items"
    )


def test_a_log_of_positives_alone_gets_negatives(tmp_path: Path) -> None:
    rows = log().set_column(9, "click", pa.array(np.ones(ROWS, np.int64))).drop_columns("tags")
    rows = rows.append_column("brand", pa.array([f"b{n % 7}" for n in rows["item"].to_pylist()]))
    pyarrow.csv.write_csv(rows, tmp_path / "log.csv")
    succeed("init", "log.csv", "--label", "click", cwd=tmp_path)
    schema = tomllib.loads((tmp_path / "schema.toml").read_text())
    assert schema["negatives"] == {
        "item": "item",
        "columns": ["brand"],  # not the user's, nor those that change from row to row
        "per_positive": 4,
        "by": "popularity",
    }
    config = tomllib.loads((tmp_path / "train.toml").read_text())
    assert config["model"]["linear_start"] is True  # whose bias is the share of clicks
    succeed("prepare", "--schema", "schema.toml", "log.csv", "data", cwd=tmp_path)
    assert "0.200" in gmeta("inspect", "data", cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # of 100 tasks of so many rows: query_rows, min_rows, shares of train and valid
        (40, (10, 13, 0.6, 0.2)),
        (9, (3, 4, 0.6, 0.2)),
        (2, (1, 2, 0.6, 0.2)),
    ],
)
def test_episodes_follow_from_the_tasks(rows: int, expected: tuple[int, int, float, float]) -> None:
    number = np.arange(100 * rows)
    table = pa.table({"uid": number % 100, "item": number % 7, "y": number % 2})
    schema = tomllib.loads(format_schema(guessed(table), ["log.csv"]))
    episodes, shares = schema["episodes"], schema["splits"]["shares"]
    found = (episodes["query_rows"], episodes["min_rows"], shares["train"], shares["valid"])
    assert found == expected
    assert propose_episodes(guessed(table)).num_tasks == 100


@pytest.mark.parametrize("name", ["is_query", "side"])
def test_columns_of_a_protocol_are_no_inputs(tmp_path: Path, name: str) -> None:
    """A split of their own, whose train split keeps a tenth to choose by, and given sides."""
    number = np.arange(ROWS)
    split = np.where(number % 80 < 60, "train", "cold")
    is_query = number // 80 % 5 == 0  # 10 of each user's 50 rows
    side = is_query + 0 if name == "is_query" else np.where(is_query, "query", "support")
    rows = log().drop_columns(["tags", "user_id"]).append_column("split", pa.array(split))
    rows = rows.append_column("user_id", pa.array(number % 80)).append_column(name, pa.array(side))
    pyarrow.csv.write_csv(rows, tmp_path / "log.csv")
    made = succeed("init", "log.csv", cwd=tmp_path).stdout
    assert f"{name} says which are predicted" in made
    schema = tomllib.loads((tmp_path / "schema.toml").read_text())
    assert schema["splits"] == {"column": "split", "validation_from": "train"}
    assert schema["membership"] == {"column": name}
    succeed("prepare", "--schema", "schema.toml", "log.csv", "data", cwd=tmp_path)
    dataset = open_dataset(str(tmp_path / "data"))
    assert sorted(dataset.splits) == ["cold", "train", "valid"]
    support_T = dataset.read_block("cold", 0).support_lengths_T
    assert support_T.tolist() == [40] * 20
    succeed("config", "train.toml", "--check", cwd=tmp_path)
    own = log().append_column("split", pa.array(np.where(split == "cold", "val", split)))
    found = guessed(own)
    assert found.valid_split == "val"
    assert "validation_from" not in format_schema(found, ["log.csv"])
    other = log().append_column("split", pa.array(number % 3))  # of something else
    row_of(guessed(other), split="single")


def test_a_code_is_no_time_and_the_only_column_of_0_and_1_the_label() -> None:
    number = np.arange(ROWS)
    rows = log().drop_columns(["ts", "click"]).append_column("time", pa.array(number % 7))
    rows = rows.append_column("watched_it_all", pa.array(number % 2))
    row_of(guessed(rows), time="single", watched_it_all="label")
    row_of(guessed(rows, time="time"), time="time")
    two = rows.append_column("weekend", pa.array(number % 7 // 6))
    told = catch_message(DataError, guessed, two)
    assert "looks like the label. Name it with --label" in told


def test_a_single_query_row_is_not_ranked(tmp_path: Path) -> None:
    for rows, metrics in ((3, ["auc", "logloss"]), (5, None)):
        number = np.arange(200 * rows)
        table = pa.table({"uid": number // rows, "item": number % 7, "y": number % 2})
        pyarrow.csv.write_csv(table, tmp_path / f"{rows}.csv")
        succeed("init", f"{rows}.csv", "--out", str(rows), cwd=tmp_path)
        config = tomllib.loads((tmp_path / str(rows) / "train.toml").read_text())
        assert config.get("evaluation", {}).get("metrics") == metrics
        assert propose_episodes(guessed(table)).query_rows == 1 + (rows > 3)


def test_of_rare_clicks_more_rows_are_to_be_predicted() -> None:
    number = np.arange(12_000)
    clicks = (number % 97 == 0).astype(np.int64)
    table = pa.table({"uid": number // 120, "item": number % 7, "y": clicks})
    assert propose_episodes(guessed(table)).query_rows == 40
    table = table.set_column(2, "y", pa.array(1 - clicks))
    assert propose_episodes(guessed(table)).query_rows == 40


def test_of_many_tasks_a_tenth_is_held_back() -> None:
    number = np.arange(30_000)
    table = pa.table({"uid": number // 10, "item": number % 7, "y": number % 2})
    shares = tomllib.loads(format_schema(guessed(table), ["log.csv"]))["splits"]["shares"]
    assert shares == {"train": 0.8, "valid": 0.1, "user-cold": 0.1}


@pytest.mark.parametrize("name", ["numbers", "times", "latin", "utf-16", "names"])
def test_unusual_logs_prepare_as_pasted(tmp_path: Path, name: str) -> None:
    rng = np.random.default_rng(2)
    users = rng.integers(1, 81, ROWS)
    x_N, rows = rng.random(ROWS), range(ROWS)
    header, lines = {
        "numbers": ("uid,x,y", [f"u{users[n]},{x_N[n]:.3f},{x_N[n] > 0.5:d}" for n in rows]),
        "times": (
            "uid;item:token;Datum_time;stars",
            [
                f"{users[n]};{n % 90};{1 + n % 28:02}.03.2024 {n % 24:02}:10;{1 + n % 5}"
                for n in rows
            ],
        ),
        "latin": ("uid,café,y", [f"{users[n]},thé{n % 50},{n % 2}" for n in rows]),
        "utf-16": ("uid,café,y", [f"{users[n]},thé{n % 50},{n % 2}" for n in rows]),
        "names": (
            'uid,"a\n""b""","\\x",y,"why\nnot"',
            [f"{users[n]},{n % 50},{x_N[n]:.3f},{n % 2},1" for n in rows],
        ),
    }[name]
    text = "\n".join((header, *lines)) + "\n"
    (tmp_path / "log.csv").write_bytes(text.encode("utf-16" if name == "utf-16" else "latin-1"))
    succeed("init", "log.csv", cwd=tmp_path)
    succeed("prepare", "--schema", "schema.toml", "log.csv", "data", cwd=tmp_path)
    schema = tomllib.loads((tmp_path / "schema.toml").read_text())
    if name == "numbers":  # a model needs a table: one row of all tasks
        assert schema["single"] == [{"column": "uid", "hash": 2}]
    if name == "times":
        assert schema["time"] == {"column": "Datum_time", "format": "%d.%m.%Y %H:%M"}
        assert schema["single"][0]["table"] == "item-token"
    if name in ("latin", "utf-16"):
        assert schema["text"] == {"encoding": {"latin": "latin-1"}.get(name, name)}
    if name == "names":
        assert [one["column"] for one in schema["single"]] == ['a\n"b"']
        assert [one["column"] for one in schema["dense"]] == ["\\x"]
    succeed("config", "train.toml", "--check", cwd=tmp_path)


def test_labels_that_are_no_stars_are_good_from_their_median_on(tmp_path: Path) -> None:
    minutes = pa.array(np.arange(ROWS) % 101)
    for name, rows in (
        ("minutes", log().append_column("score", minutes)),
        ("stars", log().append_column("score", pa.array(np.arange(ROWS) % 5 + 1))),
    ):
        pq.write_table(rows, tmp_path / f"{name}.parquet")
        words = ("init", f"{name}.parquet", "--label", "score", "--out", name)
        succeed(*words, cwd=tmp_path)
    found = tomllib.loads((tmp_path / "minutes" / "train.toml").read_text())
    assert found["evaluation"] == {"positive_rating": 50.0, "unit": "of score"}
    assert found["labels"]["standardise"]
    assert found["model"]["linear_start"] is True  # whose bias is the mean
    assert found["outer"]["loss"] == "mae"
    assert "evaluation" not in tomllib.loads((tmp_path / "stars" / "train.toml").read_text())


@pytest.mark.parametrize(("kind", "most"), [(pa.decimal128(21, 1), 5.0), (pa.int64(), 2.0**60)])
def test_labels_of_any_type_of_numbers_are_dealt_with(kind: pa.DataType, most: float) -> None:
    score = pa.array(np.arange(ROWS) % 3 + int(most) - 2).cast(kind)
    found = guessed(log().append_column("score", score), label="score")
    assert found.is_rating
    assert found.median_label == pytest.approx(most - 1)
    assert propose_episodes(found).query_rows == 10
    assert "# threshold" in format_schema(found, ["log.parquet"])


def test_ids_of_decimals_beyond_2_53_are_told_apart() -> None:
    ids = pa.chunked_array([pa.array([2**60, 2**60 + 1, None]).cast(pa.decimal128(20, 0))])
    found = profile_column("user", ids)
    assert (found.num_distinct, found.least, found.num_null) == (2, 2.0**60, 1)


def test_init_goes_from_a_log_to_a_report_and_stops_at_a_step_that_fails(tmp_path: Path) -> None:
    pyarrow.csv.write_csv(log().drop_columns("tags"), tmp_path / "log.csv")
    words = ("init", "log.csv", "--run")
    # Its report has empty pictures: to draw them takes longer than all steps.
    ran = run_forked("gmeta", *words, env=environment(), cwd=tmp_path, first=without_pictures)
    assert ran.returncode == 0, ran.stderr
    made = ran.stdout
    steps = [line for line in made.splitlines() if line.startswith("[")]
    assert steps == [
        "[1 of 4] gmeta prepare --schema schema.toml log.csv data",
        "[2 of 4] gmeta train train.toml algorithm.name=none run.dir=runs/maml-plain",
        "[3 of 4] gmeta train train.toml run.start_from=runs/maml-plain run.epochs=30",
        "[4 of 4] gmeta evaluate runs/maml --against runs/maml-plain",
    ]
    assert (tmp_path / "runs" / "maml" / "evaluation" / "report.html").is_file()
    values = {name: read_json(tmp_path / "runs" / name / "adapting.json")["value"] for name in RUNS}
    maml, plain = (values[name] for name in RUNS)
    better = "maml-plain" if plain < maml else "maml"
    assert made.endswith(
        f"\nOn validation (logloss): maml {maml:.4f}, maml-plain {plain:.4f}. {better} is the "
        "better one; it adapts to new tasks as it was evaluated:\n"
        f"  gmeta export runs/{better} model\n"
    )
    again = gmeta("init", "log.csv", "--run", "--overwrite", cwd=tmp_path)
    assert again.returncode == 2
    assert "[2 of 4]" not in again.stdout
