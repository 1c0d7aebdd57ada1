"""Run folders side by side, and what `gmeta runs` and `gmeta config` print."""

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from gmeta.config.train_config import config_from_dict, load_config
from gmeta.runs.listing import RunSummary, find_differing_keys, find_runs, summarise_run
from gmeta.runs.run_folder import create_run_folder
from tests.support.commands import gmeta, succeed
from tests.support.page_outline import PageOutline, Picture, outline_page

LOGGED = [
    {"step": 5, "epoch": 0, "loss": 0.7},
    {"step": 5, "epoch": 0, "valid": {"auc": 0.6, "logloss": 0.65}},
    {"step": 10, "epoch": 1, "loss": 0.5, "grad_norm": None},
    {"step": 10, "epoch": 1, "valid": {"auc": 0.58, "logloss": 0.64}},
    {"step": 12, "epoch": 1, "valid": {"auc": None, "logloss": None}},
]


def make_run(root: Path, logged: list[dict[str, object]], **changed: dict[str, object]) -> Path:
    config = config_from_dict({"data": {"path": "d"}, **changed})
    folder = create_run_folder(replace(config, run=replace(config.run, dir=str(root))), {})
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in logged))
    return root


def test_a_run_is_summarised_by_what_it_logged(tmp_path: Path) -> None:
    root = make_run(tmp_path / "a" / "b", LOGGED)
    (found,) = find_runs(tmp_path)
    summary = summarise_run(found)
    assert replace(summary, logged_s=None) == RunSummary(
        str(root), "maml", "dlrm", "d", 12, 0.5, "auc", 0.6, 5, {"auc": 0.6, "logloss": 0.65}, None
    )
    # Less of this one is better.
    make_run(tmp_path / "c", LOGGED, run={"early_stop_metric": "logloss"})
    by_loss = summarise_run(list(find_runs(tmp_path))[1])
    assert (by_loss.metric, by_loss.best, by_loss.best_step) == ("logloss", 0.64, 10)
    begun = make_run(tmp_path / "d", [])
    (found,) = find_runs(begun)
    told = summarise_run(found)
    assert (told.step, told.loss, told.best, told.logged_s) == (None, None, None, None)


def test_what_is_no_run_is_passed_by(tmp_path: Path) -> None:
    make_run(tmp_path / "run", LOGGED)
    make_run(tmp_path / "run" / "inside", LOGGED)  # of a run, not a run to list
    make_run(tmp_path / "1" / "2" / "3" / "4", LOGGED)  # too deep
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text("{}")
    assert [run.root for run in find_runs(tmp_path)] == [tmp_path / "run"]


def test_only_keys_that_differ_are_compared() -> None:
    first = config_from_dict({})
    second = config_from_dict({"run": {"dir": "x"}, "outer": {"dense_lr": 0.5}})
    third = config_from_dict({"model": {"hidden": [8]}})
    assert find_differing_keys([first, second, third]) == [
        ("model.hidden", [[256, 128], [256, 128], [8]]),
        ("outer.dense_lr", [0.001, 0.5, 0.001]),
    ]


def test_the_command_lists_and_compares(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "maml", LOGGED)
    make_run(tmp_path / "runs" / "plain", LOGGED, algorithm={"name": "none"})
    (tmp_path / "runs" / "broken").mkdir()
    for name in ("config.json", "environment.json"):
        (tmp_path / "runs" / "broken" / name).write_text("{")
    listed = succeed("runs", cwd=tmp_path)
    assert re.search(r"runs/maml +maml +dlrm +12 +0.5000 +auc +0.6000 +5 ", listed.stdout)
    assert "differ" not in listed.stdout
    assert listed.stderr.startswith("not listed: runs/broken is no run folder")
    compared = gmeta("runs", "runs/maml", "runs/plain", cwd=tmp_path)
    assert re.search(r'algorithm.name +"maml" +"none"', compared.stdout)
    assert re.search(r"metric +runs/maml +runs/plain", compared.stdout)
    assert re.search(r"logloss +0.6500 +0.6500", compared.stdout)
    told = json.loads(gmeta("runs", "runs/maml", "runs/plain", "--json", cwd=tmp_path).stdout)
    assert [run["best"] for run in told["runs"]] == [0.6, 0.6]
    expected = [{"key": "algorithm.name", "runs/maml": "maml", "runs/plain": "none"}]
    assert told["differing"] == expected
    nothing = gmeta("runs", "elsewhere", cwd=tmp_path)
    expected = (2, "error: elsewhere is no folder. Give a run folder, or one with runs below it\n")
    assert (nothing.returncode, nothing.stderr) == expected


@pytest.mark.parametrize("metric", ["auc", "logloss"])
def test_a_page_shows_which_run_is_ahead_by_the_metric_that_kept_its_best(
    tmp_path: Path, metric: str
) -> None:
    worse = [
        {**line, "valid": {"auc": 0.55, "logloss": 0.68}} if "valid" in line else line
        for line in LOGGED
    ]
    for name, logged in (("a", LOGGED), ("b", worse)):
        make_run(tmp_path / name, logged, run={"early_stop_metric": metric})
    succeed("runs", "a", "b", "--page", "runs.html", cwd=tmp_path)
    page = (tmp_path / "runs.html").read_text()
    assert re.search(rf">a is ahead on validation, by 0\.0[45]00 {metric}\.", page)
    assert page.count("<svg role") == 2
    assert outline_page(page) == PageOutline(
        verdicts=[""],
        tiles=["a", "b"],
        headings=["Learning curves", "Keys that differ"],
        legends=[["a", "b"]],
        pictures=[
            Picture("Training loss", ("outer step", "loss (cross-entropy, nats)"), 2),
            Picture("Validation AUC", ("outer step", "AUC"), 2),
        ],
        folds=[],
    )
    refused = gmeta("runs", ".", "--page", "x.html", cwd=tmp_path)
    assert refused.returncode == 2
    assert "--page draws 2 to 4 runs that can be read and are named one by one" in refused.stderr


@pytest.mark.parametrize(
    ("auc", "told"),
    [(0.6, "These runs are level on validation, at 0.6000 auc."), (None, "none is")],
)
def test_a_page_calls_no_run_ahead_that_is_not(
    tmp_path: Path, auc: float | None, told: str
) -> None:
    make_run(tmp_path / "a", LOGGED)
    make_run(tmp_path / "b", [{"step": 5, "epoch": 0, "valid": {"auc": auc, "logloss": 0.6}}])
    succeed("runs", "a", "b", "--page", "runs.html", cwd=tmp_path)
    assert told in (tmp_path / "runs.html").read_text()


def test_a_resolved_config_can_be_copied(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[data]\npath = "d"\n[run]\ndir = "r"\n[model]\nhidden = [8, 4]\n')
    printed = succeed("config", path, "outer.dense_lr=0.25")
    assert tomllib.loads(printed.stdout)["outer"]["dense_lr"] == 0.25
    copy = tmp_path / "copy.toml"
    copy.write_text(printed.stdout)
    assert load_config(copy) == load_config(path, ["outer.dense_lr=0.25"])
    short = gmeta("config", path, "--short").stdout
    assert tomllib.loads(short) == tomllib.loads(path.read_text())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["config", "mine.toml", "--check"], "error: d holds no dataset"),
        (["config", "mine.toml", "outer.dense_lrr=1"], "did you mean outer.dense_lr?"),
        (["xyzzy"], "no such command 'xyzzy': `gmeta --help` lists all commands"),
    ],
)
def test_what_is_mistyped_gets_a_hint(tmp_path: Path, arguments: list[str], told: str) -> None:
    (tmp_path / "mine.toml").write_text('[data]\npath = "d"\n[run]\ndir = "r"\n')
    done = gmeta(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert told in done.stderr
