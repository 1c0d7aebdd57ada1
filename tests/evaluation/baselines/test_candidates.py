"""Rank metrics over sampled candidates, against loops over rows and lists."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gmeta.config.evaluation import EvaluationConfig
from gmeta.config.train_config import config_from_dict
from gmeta.data.support_views import STORED, SupportView
from gmeta.errors import ConfigError, UserError
from gmeta.evaluation.baselines import candidates
from gmeta.evaluation.baselines.block_rows import read_rows
from gmeta.evaluation.baselines.candidates import (
    Candidates,
    make_candidates,
    rank_among_candidates_N2,
)
from gmeta.evaluation.baselines.episode_rows import EpisodeRows
from gmeta.metrics.catalogue import Scoring
from gmeta.metrics.scores import split_terms
from gmeta.runs.early_stop import make_early_stop
from metaio import Dataset, open_dataset
from metaio.prepare.engines.local import prepare
from metaio.prepare.schema.schema_file import parse_schema
from tests.support.commands import SMALL_MODEL, evaluate, succeed, write_config
from tests.support.refusals import catch_message

FILMS = 25
SCHEMA: dict[str, Any] = {
    "task": {"column": "user"},
    "label": {"column": "clicked"},
    "item": {"column": "film", "columns": ["maker", "tags", "length"]},
    "single": [{"column": column, "hash": 10**6} for column in ("city", "film", "maker")],
    "multi": [{"column": name, "hash": 10**6, "null": "unknown"} for name in ("seen", "tags")],
    "dense": [{"column": "hour"}, {"column": "length"}],
    "episodes": {"by": "random", "query_rows": 3, "min_rows": 5},
    "splits": {"shares": {"train": 0.6, "cold": 0.4}},
}


def raw_table() -> pa.Table:
    """40 users of 6 to 9 films; a film has its maker, tags and length, a row its hour and list."""
    rng = np.random.default_rng(1)
    rows = [
        {
            "user": user, "city": user % 4, "film": film + 100, "maker": film % 7,
            "tags": [film % 5, film % 3][: film % 3], "length": float(film),
            "seen": rng.integers(0, 9, int(rng.integers(0, 3))).tolist(),
            "hour": float(rng.integers(0, 24)), "clicked": int(rng.random() < 0.6),
        }
        for user in range(40)
        for film in rng.choice(FILMS, int(rng.integers(6, 10)), replace=False).tolist()
    ]  # fmt: skip
    return pa.Table.from_pylist(rows)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("films")
    pq.write_table(raw_table(), folder / "raw.parquet")
    prepare([str(folder / "raw.parquet")], str(folder / "data"), parse_schema(SCHEMA))
    return folder / "data"


Row = tuple[Any, ...]


def plain(rows: EpisodeRows) -> list[Row]:
    """(task, ids, lists, dense, label) of each row."""
    return [
        (
            int(rows.task_T[episode]), tuple(rows.ids_NF[row].tolist()),
            tuple(tuple(lists.select(np.array([row])).ids_V.tolist()) for lists in rows.multi),
            tuple(rows.dense_NK[row].tolist()), float(rows.label_N[row]),
        )
        for row, episode in enumerate(rows.episode_N.tolist())
    ]  # fmt: skip


def with_film_of(row: Row, other: Row) -> Row:
    """A row with another's film, maker, tags and length, and its own city, list and hour."""
    task, ids, lists, dense, label = row
    return task, (ids[0], *other[1][1:]), (lists[0], other[2][1]), (dense[0], other[3][1]), label


def every_row(dataset: Dataset) -> list[Row]:
    return [row for split in dataset.splits for part in read_rows(dataset, split)
            for row in plain(part)]  # fmt: skip


def made(data: Path, per_positive: int = 4) -> tuple[Dataset, Candidates]:
    dataset = open_dataset(str(data))
    return dataset, make_candidates(dataset, ["cold"], per_positive, 0.5)


def test_a_sampled_row_is_its_positive_with_a_film_that_the_task_never_had(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "MOST_ROWS", 40)
    dataset, sampler = made(data)
    stored = every_row(dataset)
    of_film = {row[1][1]: row for row in stored}
    films_of = {task: {row[1][1] for row in stored if row[0] == task} for task, *_ in stored}
    (rows,) = read_rows(dataset, "cold")
    own, query = plain(rows), ~rows.is_support_N
    parts = list(sampler.add_candidates(rows, STORED))
    assert len(parts) > 2
    seen, drawn_films = 0, []
    for listed in parts:
        shown = plain(listed.rows)
        for place, is_sampled in enumerate(listed.is_sampled_N.tolist()):
            source = int(listed.source_N[place])
            if not is_sampled:
                assert (shown[place], source) == (own[seen], seen)
                is_positive = bool(query[seen]) and own[seen][-1] == 1.0
                count = listed.source_N.tolist().count(seen)
                assert count == (5 if is_positive else 1)
                seen += 1
                continue
            film = shown[place][1][1]
            assert film not in films_of[own[source][0]]
            assert shown[place] == with_film_of(own[source], of_film[film])
            drawn_films.append((source, film))
    assert seen == rows.num_rows
    assert len(set(drawn_films)) == len(drawn_films)  # none twice beside one row
    assert len({film for _, film in drawn_films}) == len(of_film) == FILMS


def test_task_and_draw_decide_which_films_and_nothing_else(data: Path) -> None:
    dataset, sampler = made(data)
    (rows,) = read_rows(dataset, "cold")

    def films(rows: EpisodeRows, view: SupportView) -> dict[int, list[int]]:
        (listed,) = sampler.add_candidates(rows, view)
        found: dict[int, list[int]] = {}
        for row, sampled in zip(plain(listed.rows), listed.is_sampled_N, strict=True):
            if sampled:
                found.setdefault(row[0], []).append(row[1][1])
        return found

    alone = films(rows.select_episodes(np.array([3, 1])), STORED)
    together = films(rows, STORED)
    assert alone == {task: together[task] for task in alone}
    assert films(rows, SupportView(1)) != together


def test_the_films_columns_are_found_where_none_are_listed(data: Path, tmp_path: Path) -> None:
    dataset, listed = made(data)
    body = {**SCHEMA, "item": {"column": "film"}}
    prepare([str(data.parent / "raw.parquet")], str(tmp_path / "data"), parse_schema(body))
    _, found = made(tmp_path / "data")
    assert found.sparse == listed.sparse == (False, True, True, False, True)
    assert (found.dense, listed.dense) == ((), (1,))
    assert dataset.features.dense == ("hour", "length")


def test_tasks_of_new_items_alone_meet_all_known_ones(tmp_path: Path) -> None:
    user = np.repeat(np.arange(8), 6)
    is_cold = user >= 6
    columns = {"user": user, "film": np.arange(48) % 12 + 99 * is_cold, "clicked": user % 2}
    columns["split"] = np.where(is_cold, "cold", "train")
    pq.write_table(pa.table(columns), tmp_path / "raw.parquet")
    body = {key: SCHEMA[key] for key in ("task", "label", "episodes")}
    body |= {"item": {"column": "film"}, "single": [{"column": "film", "vocabulary": 1}]}
    prepare([str(tmp_path / "raw.parquet")], str(tmp_path / "data"),
            parse_schema({**body, "splits": {"column": "split"}}))  # fmt: skip
    dataset = open_dataset(str(tmp_path / "data"))
    found = make_candidates(dataset, ["cold"], 4, 0.5)
    assert found.items.ids_of(0).tolist() == list(range(1, 13))
    (rows,) = read_rows(dataset, "cold")
    assert not rows.ids_NF.any()
    (listed,) = found.add_candidates(rows, STORED)
    assert set(listed.rows.ids_NF[listed.is_sampled_N, 0]) <= set(range(1, 13))


@pytest.mark.parametrize("name", ["mrr", "hr@1", "hr@3", "ndcg@3", "p@3", "recall@2", "hr@99"])
def test_metrics_are_those_of_a_loop_over_lists(name: str) -> None:
    """Ties stand in every order with equal chance: all orders are tried."""
    rng = np.random.default_rng(4)
    family, _, cut = name.partition("@")
    k = int(cut or 10**6)
    score_N, is_sampled_N, task_N, values, owners = [], [], [], [], []
    for row in range(30):
        task_N.append(row // 3)
        own = float(rng.integers(0, 4))
        score_N.append(own)
        is_sampled_N.append(False)
        if row % 4 == 0:
            continue  # not positive
        others = rng.integers(0, 4, 5).astype(float).tolist()
        score_N += others
        is_sampled_N += [True] * 5
        above, tied = (sum(one) for one in ([o > own for o in others], [o == own for o in others]))
        ranks = range(above + 1, above + tied + 2)
        worth = {
            "mrr": lambda rank: 1 / rank, "ndcg": lambda rank: (rank <= k) / math.log2(1 + rank),
            "hr": lambda rank: float(rank <= k), "recall": lambda rank: float(rank <= k),
            "p": lambda rank: (rank <= k) / k,
        }[family]  # fmt: skip
        values.append(sum(map(worth, ranks)) / len(ranks))
        owners.append(row // 3)
    places = rank_among_candidates_N2(np.array(score_N), np.array(is_sampled_N))
    scoring = Scoring("bce", EvaluationConfig(metrics=(name,), candidates=5))
    label_N = (np.arange(30) % 4 > 0).astype(np.float64)
    terms = split_terms(label_N, np.zeros(30), np.array(task_N), scoring, (), places)[name]
    assert terms.value == pytest.approx(sum(values) / len(values))
    for task in range(10):
        mine = [value for value, owner in zip(values, owners, strict=True) if owner == task]
        assert (terms.num_T[task], terms.den_T[task]) == pytest.approx((sum(mine), len(mine)))


def test_a_candidate_that_is_no_number_stands_above() -> None:
    found = rank_among_candidates_N2(
        np.array([0.5, 0.1, math.nan, 0.5, 0.9]), np.array([0, 1, 1, 1, 0], bool)
    )
    assert found.tolist() == [[1, 1], [-1, -1]]


@pytest.mark.distributed
def test_evaluate_ranks_candidates_alike_on_one_rank_and_two(data: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "train.toml", data, tmp_path / "run")
    succeed("train", config, *SMALL_MODEL, "run.max_steps=2")
    asked = ("evaluation.candidates=7", 'evaluation.metrics=["auc","hr@3","mrr"]', "--no-trees")
    found, tables = [], []
    for name, ranks in (("one", "1"), ("two", "2")):
        options = ("--draws", "2", "--support-sizes", "0", "--nproc-per-node", ranks)
        result = evaluate(tmp_path / "run", *asked, *options, "--out", tmp_path / name)
        assert result.returncode == 0, result.stderr
        found.append(json.loads((tmp_path / name / "evaluation.json").read_text()))
        tables.append(pq.read_table(tmp_path / name / "predictions.parquet"))
    assert found[0]["metrics"]["hr@3"]["label"] == "HR@3 of 8"
    keys = ("run", "draw", "task", "item_id", "label", "after_above", "after_tied")
    one, two = (
        sorted(zip(*(table[key].to_pylist() for key in keys), strict=True)) for table in tables
    )
    assert one == two
    # What the report says is what the table holds.
    (group,) = found[0]["groups"]
    for run, stage in (("run", "before"), ("run", "after"), ("bias model", "after")):
        mine = [row for row in tables[0].to_pylist() if row["run"] == run]
        told = next(r for r in group["results"] if (r["run"], r["stage"]) == (run, stage))
        for name, worth in (
            ("hr@3", lambda rank: float(rank <= 3)),
            ("mrr", lambda rank: 1 / rank),
        ):
            of_draw = []
            for draw in range(2):
                values = []
                for row in mine:
                    above, tied = row[f"{stage}_above"], row[f"{stage}_tied"]
                    assert (above >= 0) == (row["label"] == 1)
                    if row["draw"] == draw and above >= 0:
                        ranks = range(above + 1, above + tied + 2)
                        values.append(sum(map(worth, ranks)) / len(ranks))
                of_draw.append(sum(values) / len(values))
            assert told["metrics"][name]["value"] == pytest.approx(sum(of_draw) / 2)
    # Rows of which nothing is sampled are as they are without candidates.
    plain_out = evaluate(tmp_path / "run", "--no-trees", "--out", tmp_path / "plain")
    assert plain_out.returncode == 0, plain_out.stderr
    table = pq.read_table(tmp_path / "plain" / "predictions.parquet")
    values = [
        sorted(
            (row["run"], row["task"], row["item_id"], row["label"], round(row["after"], 4))
            for row in each.to_pylist()
            if row["draw"] == 0
        )
        for each in (table, tables[0])
    ]
    assert [row[:4] for row in values[0]] == [row[:4] for row in values[1]]
    afters = [np.array([row[4] for row in each]) for each in values]
    np.testing.assert_allclose(*afters, atol=2e-4)


def test_what_cannot_be_is_refused_in_a_line(data: Path, click_logs: Path) -> None:
    assert catch_message(UserError, make_candidates, open_dataset(str(click_logs)), [], 9, 0.5) == (
        f"evaluation.candidates = 9, but nothing says which column of {click_logs} is the item. "
        "Name it under [item] in its schema and prepare it again, or with --item-column"
    )
    with pytest.raises(UserError, match=r"task \d+ has no row of 1\d of the 25 items alone. Lower"):
        made(data, 20)
    assert catch_message(ConfigError, Scoring, "bce", EvaluationConfig(candidates=9)) == (
        "evaluation.candidates = 9, but evaluation.metrics ranks nothing: auc, gauc, logloss. Name "
        "metrics such as hr@10, ndcg@10 and mrr, or leave it 0"
    )
    raw: dict[str, Any] = {"evaluation": {"candidates": 9, "metrics": ["hr@3", "auc"]}}
    assert catch_message(ConfigError, make_early_stop, config_from_dict(raw)) == (
        "the metric of early stopping is hr@3, over evaluation.candidates = 9: that takes as many "
        "predictions a row, which gmeta evaluate alone makes. Name another in "
        "run.early_stop_metric, e.g. auc"
    )
    make_early_stop(config_from_dict({**raw, "run": {"early_stop_metric": "auc"}}))
