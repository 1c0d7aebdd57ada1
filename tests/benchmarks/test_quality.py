"""benchmarks/quality.py: seeds as one interval, what the page says, what is not repeated."""

import csv
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import _quality_jobs
import numpy as np
import pytest
from _common import REPOSITORY
from _quality_jobs import Job, run_jobs
from _quality_outside import measure_outside, read_rows
from _quality_page import Measured, page
from _quality_protocols import PROTOCOLS
from _quality_tables import BASELINES, counts, figures, lead, markdown, rows_of, text_lines
from quality import evaluate_job, train_job

from gmeta.config.train_config import load_config
from metaio import open_dataset
from tests.support.processes import with_imports_ready


def difference(value: float, half: float = 0.01) -> dict[str, Any]:
    return {"value": value, "low": value - half, "high": value + half, "reason": ""}


def evaluation(path: Path, adapted: float, against: dict[tuple[str, str], float]) -> Path:
    """An evaluation.json with one split and the metric `auc`; `against` holds differences."""
    results = [
        {"run": run, "stage": stage, "metrics": {"auc": {"value": adapted - by}}}
        for (run, stage), by in {**against, ("adapted", "after"): 0.0}.items()
    ]
    comparisons = [
        {
            "run": "adapted", "stage": "after", "minus_run": run, "minus_stage": stage,
            "metrics": {"auc": difference(by)},
        }
        for (run, stage), by in against.items()
    ]  # fmt: skip
    group = {"name": "cold", "num_tasks": 70, "results": results, "comparisons": comparisons}
    told = {
        "runs": [{"name": "adapted"}, {"name": "plain"}],
        "metrics": {"auc": {"label": "AUC", "higher_is_better": True}},
        "groups": [group],
    }
    path.write_text(json.dumps(told))
    return path


def two_seeds(folder: Path) -> list[Path]:
    """Adapted is ahead of plain, level with fine-tuned, behind the bias model; no trees."""
    leads = [(0.059, 0.004, -0.039), (0.061, -0.004, -0.041)]
    return [
        evaluation(
            folder / f"{seed}.json",
            0.7 + 0.02 * seed,
            {
                ("adapted", "before"): 0.1, ("plain", "before"): plain, ("plain", "after"): tuned,
                ("bias model", "after"): bias,
            },
        )
        for seed, (plain, tuned, bias) in enumerate(leads)
    ]  # fmt: skip


def test_the_error_of_seeds_shrinks_with_their_number_and_that_of_tasks_does_not() -> None:
    values = [0.010, 0.014, 0.018]
    one = lead("plain", 0.5, [difference(value, half=0.0196) for value in values], higher=True)
    # By Student's t of two degrees, where a normal error would have 1.96.
    half = math.hypot(0.0196, 4.303 * statistics.stdev(values) / math.sqrt(3))
    assert one.difference == pytest.approx(0.014)
    assert (one.low, one.high) == pytest.approx((0.014 - half, 0.014 + half))
    assert one.verdict == "noise"
    # A single seed has the interval of its evaluation.
    alone = lead("plain", 0.5, [difference(0.02)], higher=True)
    assert (alone.low, alone.high) == pytest.approx((0.01, 0.03))


@pytest.mark.parametrize("of_seed", [0.0, 0.5, 1.0, 2.0, 10.0], ids=lambda value: f"seed_{value}")
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_an_interval_of_95_percent_holds_the_truth_so_often(seeds: int, of_seed: float) -> None:
    # Worlds whose true difference is 0: 100 tasks differ by 10, so that their mean is off by 1, and
    # a seed is off by `of_seed`. 4,000 worlds tell a share of 95 % to within 1 % (3 sigma).
    rng = np.random.default_rng(0)
    worlds, tasks = 4000, 100
    task_WT = 10 * rng.standard_normal((worlds, tasks))
    seed_WS = of_seed * rng.standard_normal((worlds, seeds))
    half_W = 1.959964 * task_WT.std(axis=1, ddof=1) / math.sqrt(tasks)
    held = 0
    for mean, half, off_S in zip(task_WT.mean(axis=1), half_W, seed_WS, strict=True):
        one = lead("plain", 0, [difference(mean + off, half) for off in off_S], higher=True)
        held += one.low <= 0 <= one.high
    assert held / worlds > 0.94
    if of_seed > 1:
        assert held / worlds < 0.985  # nor wider than it needs to be


@pytest.mark.parametrize(
    ("value", "higher", "verdict"),
    [
        (0.02, True, "better"), (-0.02, True, "worse"), (-0.02, False, "better"),
        (0.02, False, "worse"), (0.005, True, "noise"),
    ],
)  # fmt: skip
def test_a_verdict_is_of_an_interval_without_0(value: float, higher: bool, verdict: str) -> None:
    assert lead("plain", 0.5, [difference(value)], higher=higher).verdict == verdict


def test_a_seed_without_an_interval_is_no_figure() -> None:
    missing = {"value": 0.1, "low": None, "high": None, "reason": "only 3 tasks"}
    with pytest.raises(ValueError, match="no interval against plain: only 3 tasks"):
        lead("plain", 0.5, [missing], higher=True)


def test_evaluations_of_seeds_become_rows(tmp_path: Path) -> None:
    (row,) = rows_of(two_seeds(tmp_path), ["cold"], ["auc"])
    assert row.value == pytest.approx(0.71)
    # The trees were not measured: they have no column.
    found = [each.baseline for each in row.leads]
    assert found == [head for (run, _), head in BASELINES.items() if run != "boosted trees"]
    assert [each.verdict for each in row.leads] == ["better", "better", "noise", "worse"]
    assert [each.value for each in row.leads] == pytest.approx([0.61, 0.65, 0.71, 0.75])
    assert counts([row], "plain") == {"better": 1, "noise": 0, "worse": 0}
    assert counts([row], "boosted trees") == {"better": 0, "noise": 0, "worse": 0}
    assert figures([row])["cold/auc"]["minus"]["plain"][0] == pytest.approx(0.06)
    first, *others = text_lines([row])
    assert first == "cold  AUC ↑  adapted 0.7100  (70 tasks)"
    assert all(len(line) <= 80 for line in others)
    head, rule, values, empty, told, _, heads, rules, ranges = markdown([row])
    assert (
        head
        == "| split | metric | adapted | not adapted | plain | plain, fine-tuned | bias model |"
    )
    assert head.count("|") == rule.count("|") == values.count("|")
    assert values == "| cold | AUC ↑ | .7100 | .6100 | .6500 | .7100 | .7500 |"
    assert not empty
    assert told == "Adapted minus each, from the lower to the upper end of its interval:"
    assert heads.count("|") == rules.count("|") == ranges.count("|")
    # Better is bold, worse in italics, noise plain: a figure or a range a cell.
    assert ranges == (
        "| cold | AUC ↑ | **+.0900 to +.1100** | **+.0438 to +.0762** | -.0518 to +.0518 "
        "| *-.0562 to -.0238* |"
    )


def test_other_algorithms_stand_behind_the_baselines_by_their_seeds(tmp_path: Path) -> None:
    first, second = two_seeds(tmp_path)
    told = json.loads(first.read_text())["groups"][0]["comparisons"]
    against = {(one["minus_run"], one["minus_stage"]): one for one in told}
    differences = {key: one["metrics"]["auc"]["value"] for key, one in against.items()}
    first = evaluation(tmp_path / "more.json", 0.7, {**differences, ("encoder", "after"): 0.04})
    (row,) = rows_of([first, second], ["cold"], ["auc"], ["encoder"])
    *baselines, encoder = row.leads
    assert tuple(baselines) == rows_of([first, second], ["cold"], ["auc"])[0].leads
    # Of one seed: as wide as its evaluation has it.
    assert (encoder.baseline, encoder.value) == ("encoder", pytest.approx(0.66))
    assert (encoder.low, encoder.high) == pytest.approx((0.03, 0.05))
    # A baseline that one seed lacks is no figure.
    lacking = evaluation(tmp_path / "less.json", 0.7, {("adapted", "before"): 0.1})
    with pytest.raises(ValueError, match="0 entries with run plain, stage before: 1 is needed"):
        rows_of([first, lacking], ["cold"], ["auc"], ["encoder"])


def test_an_outside_script_is_one_more_column_of_its_best_model_on_validation(
    tmp_path: Path,
) -> None:
    printed = (
        "features (9, 3)\nlinear bias   valid  AUC 0.60 logloss 0.30\n"
        "linear bias   cold   AUC 0.90 logloss 0.20\n"
        "a tree        valid  AUC 0.70 logloss 0.40\na tree        cold   AUC 0.75 logloss 0.25\n"
    )
    values = read_rows(printed, ("cold",))
    assert values == {("cold", "auc"): 0.75, ("cold", "logloss"): 0.2}
    paths = two_seeds(tmp_path)
    for path in paths:
        told = json.loads(path.read_text())
        for one in told["groups"][0]["results"]:
            metric = one["metrics"]["auc"]
            metric |= {"low": metric["value"] - 0.01, "high": metric["value"] + 0.01, "reason": ""}
        path.write_text(json.dumps(told))
    (row,) = rows_of(paths, ["cold"], ["auc"], outside=values)
    last = row.leads[-1]
    assert (last.baseline, last.value) == ("outside", 0.75)
    assert last.difference == pytest.approx(-0.04)
    # Two seeds .02 apart, beside the interval over tasks.
    assert last.high - last.difference == pytest.approx(math.hypot(0.01, 12.706 * 0.01))
    for path in paths:
        told = json.loads(path.read_text())
        after = {"run": "adapted", "stage": "after", "metrics": {"auc": [0.74, 0.68]}}
        path.write_text(json.dumps({**told, "groups": [{**told["groups"][0], "by_draw": [after]}]}))
    (row,) = rows_of(paths, ["cold"], ["auc"], outside=values)
    # The script has the stored draw, and is compared on it.
    assert row.leads[-1].difference == pytest.approx(-0.01)


def test_a_script_is_given_the_prepared_episodes_or_its_last_line_told(
    click_logs: Path, tmp_path: Path
) -> None:
    config = tmp_path / "train.toml"
    config.write_text('[run]\ndir = "run"\n')
    (tmp_path / "data").symlink_to(click_logs)
    script = tmp_path / "script.py"
    script.write_text("import sys; sys.exit('no pandas')")
    with pytest.raises(RuntimeError, match=r"^no pandas$"):
        measure_outside(script, tmp_path, config, ("user-cold",))
    script.write_text("print('m  valid  AUC 0.5\\nm  user-cold  AUC 0.6')")
    found = measure_outside(script, tmp_path, config, ("user-cold",))
    assert found == {("user-cold", "auc"): 0.6}
    spec = json.loads((tmp_path / "outside" / "spec.json").read_text())
    with Path(spec["file"]).open() as file:
        rows = list(csv.DictReader(file))
    splits = open_dataset(str(click_logs)).splits
    wanted = sum(splits[name].num_rows for name in ("train", "valid", "user-cold"))
    assert len(rows) == wanted
    assert sum(row["is_query"] == "1" for row in rows if row["task"] == rows[0]["task"]) == 5
    assert (spec["kind"], spec["item"]) == ("c", "item")


def test_the_page_tells_where_adapting_is_not_ahead(tmp_path: Path) -> None:
    rows = tuple(rows_of(two_seeds(tmp_path), ["cold"], ["auc"]))
    protocol = PROTOCOLS[0]
    text = page([Measured(protocol, rows, 90.0, 2, "today, 1a2b3c4d")], 5, "the command")
    # Better, worse, noise; the trees were not measured.
    title = "| [MovieLens-1M, MeLU's split](#movielens-1m-melus-split) | today, 1a2b3c4d "
    assert f"{title}| 1 | 1 | 0 | 0 | 0 | 0 | 1 | - | - |" in text
    assert "*-.0562 to -.0238*" in text
    assert f"Why adapting is not ahead everywhere: {protocol.why}" in text
    assert "Means over 2 seeds and 5 draws of support and query rows." in text
    for each in PROTOCOLS:
        told = *each.tuned, *each.by_hand, each.judged_by
        assert f"| {each.title} | {' | '.join(map(str, told))} |" in text
    assert "## When not to use meta-learning" in text
    assert "{" not in text


def test_a_data_set_that_was_not_measured_stays_on_the_page_as_it_was(tmp_path: Path) -> None:
    rows = tuple(rows_of(two_seeds(tmp_path), ["cold"], ["auc"]))
    last, first = (Measured(PROTOCOLS[at], rows, 90.0, 2, "yesterday, 1a2b3c4d") for at in (-1, 0))
    both = page([last, first], 5, "the command")
    assert both.index(f"## {first.protocol.title}") < both.index(f"## {last.protocol.title}")
    assert page([], 5, "the command", both) == both
    # One anew: its row and section alone are others.
    anew = page([replace(last, seeds=1, where="today, 5e6f7a8b")], 5, "the command", both)
    assert [line for line in anew.splitlines() if line not in both.splitlines()] == [
        line.replace("yesterday, 1a2b3c4d", "today, 5e6f7a8b").replace("Means over 2", "One")
        for line in both.replace("2 seeds of", "2 seed of").splitlines()
        if line.startswith((f"| [{last.protocol.title}]", last.protocol.about))
    ]


def test_the_page_in_docs_is_what_the_generator_makes_of_its_figures() -> None:
    docs = (REPOSITORY / "docs" / "results.md").read_text()
    command = "python benchmarks/quality.py --data DIR --seeds 3 --draws 5 --write docs/results.md"
    assert page([], 5, command, docs) == docs
    assert all(f"\n## {protocol.title}\n" in docs for protocol in PROTOCOLS)


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
def test_configs_of_a_data_set_differ_in_algorithm_and_what_was_tuned(protocol: Any) -> None:
    adapted, plain = (
        load_config(protocol.configs(Path())[name], ["data.path=data", "run.dir=run"])
        for name in ("adapted", "plain")
    )
    assert plain.algorithm.name == "none" != adapted.algorithm.name
    assert plain.model.name == adapted.model.name
    assert plain.run.epochs == adapted.run.epochs


def test_a_command_is_repeated_only_when_what_it_reads_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = with_imports_ready()
    out = tmp_path / "data"
    sizes = ("--recipe", "synthetic", "--tasks", "20", "--items", "20")
    job = Job(("prepare", *sizes, str(out)), out)
    ran = run_jobs([job], 1, context)
    made = (out / "manifest.json").stat().st_mtime_ns
    # When, and by which code, a kept folder was made.
    monkeypatch.setattr(_quality_jobs, "environment", lambda: pytest.fail("it is not run again"))
    assert run_jobs([job], 1, context) == ran
    monkeypatch.undo()
    assert (out / "manifest.json").stat().st_mtime_ns == made
    other = Job(("prepare", *sizes, "--seed", "1", str(out)), out)
    run_jobs([other], 1, context)
    remade = (out / "manifest.json").stat().st_mtime_ns
    assert remade != made
    # Figures of older code would stand under the name of the newer.
    monkeypatch.setattr(_quality_jobs, "_code", lambda: "a later version")
    run_jobs([other], 1, context)
    assert (out / "manifest.json").stat().st_mtime_ns != remade


def test_a_run_is_made_anew_from_other_data_as_is_an_evaluation(tmp_path: Path) -> None:
    trainings = [
        train_job(PROTOCOLS[0], name, 0, tmp_path, quick=True) for name in ("adapted", "plain")
    ]
    evaluation = evaluate_job(PROTOCOLS[0], 0, 1, tmp_path, trainings, quick=True)
    (tmp_path / "seed-0").mkdir()
    places = [
        tmp_path / "data.done",
        *(job.out.with_name(f"{job.out.name}.done") for job in trainings),
    ]
    for place in places:
        place.write_text("first")
    before = [job.stamp for job in (*trainings, evaluation)]
    for place, stamps_that_change in zip(places, ([0, 1], [2], [2]), strict=True):
        place.write_text("second")
        now = [job.stamp for job in (*trainings, evaluation)]
        place.write_text("first")
        assert [at for at in range(3) if now[at] != before[at]] == stamps_that_change
