"""What a report says is what the metrics say, and verdicts follow from intervals."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from gmeta.config.evaluation import EvaluationConfig
from gmeta.config.losses import Loss
from gmeta.evaluation.report.evaluated_runs import EvaluatedRun, select_split
from gmeta.evaluation.report.evaluation_schema import (
    STAGES,
    Comparison,
    Evaluation,
    GroupEvaluation,
    hide_secrets,
)
from gmeta.evaluation.report.headline import format_interval, format_signed
from gmeta.evaluation.report.summarise import calibrate, choose_support_bins, summarise_evaluation
from gmeta.metrics.catalogue import Scoring
from gmeta.metrics.scores import evaluate_split
from tests.evaluation.report.sample import (
    GROUPS,
    baseline_of,
    predictions,
    run_of,
    with_column,
    yardstick_of,
)

# N rows, E episodes


def first_group(*runs: EvaluatedRun) -> GroupEvaluation:
    return summarise_evaluation(runs).groups[0]


def adaptation_of(group: GroupEvaluation, run: str = "melu-maml") -> Comparison:
    found = group.comparison(run, "after", run, "before")
    assert found
    return found


def values_of(evaluation: Evaluation) -> list[float]:
    return [
        number
        for group in evaluation.groups
        for result in group.results
        for one in result.metrics.values()
        for number in (one.value, one.low, one.high)
    ]


@pytest.mark.parametrize("loss", ["bce", "mse"])
def test_every_estimate_is_the_metric_inside_its_interval(loss: Loss) -> None:
    run = run_of(loss)
    for group in summarise_evaluation([run, baseline_of(loss)]).groups:
        rows = select_split(run.predictions, group.name)
        for stage in STAGES:
            expected = evaluate_split(
                rows.label_N, rows.prediction_N(stage), rows.task_N, Scoring(loss)
            )
            found = group.result("melu-maml", stage)
            assert found
            for name, estimate in found.metrics.items():
                assert estimate.value == expected[name].value, name
                assert estimate.low < estimate.value < estimate.high, name


def test_groups_stand_in_the_order_of_the_table_with_their_size() -> None:
    groups = summarise_evaluation([run_of("mse")]).groups
    assert tuple(group.name for group in groups) == GROUPS
    assert (groups[0].num_tasks, groups[0].num_rows) == (40, 320)
    assert groups[0].min_support_rows >= 3
    assert (
        groups[0].min_support_rows
        < groups[0].median_support_rows
        < groups[0].max_support_rows
        <= 30
    )


def test_a_clear_gain_is_better_for_either_direction_of_a_metric() -> None:
    verdicts = {
        name: one.verdict for name, one in adaptation_of(first_group(run_of("mse"))).metrics.items()
    }
    assert verdicts["mae"] == verdicts["rmse"] == verdicts["auc"] == "better"
    difference = adaptation_of(first_group(run_of("mse"))).metrics["mae"]
    assert difference.high < 0


def test_a_clear_loss_is_worse() -> None:
    run = run_of("mse")
    table = run.predictions
    swapped = table.rename_columns(["split", "task", "support_rows", "label", "after", "before"])
    found = adaptation_of(first_group(replace(run, predictions=swapped))).metrics["mae"].verdict
    assert found == "worse"


def test_equal_models_are_the_same_also_in_another_row_order() -> None:
    run = run_of("mse")
    order = np.random.default_rng(0).permutation(run.predictions.num_rows)
    twin = replace(run, name="twin", predictions=run.predictions.take(order))
    group = next(one for one in summarise_evaluation([run, twin]).groups if one.name == "user-cold")
    comparison = group.comparison("melu-maml", "after", "twin", "after")
    assert comparison
    assert {one.verdict for one in comparison.metrics.values()} == {"same"}


def test_a_random_change_is_noise() -> None:
    run = run_of("mse")
    before_N = np.array(run.predictions["before"])
    jitter_2N = np.random.default_rng(5).normal(0, 0.1, (2, before_N.size)).astype(np.float32)
    shaken = with_column(
        with_column(run, "before", before_N + jitter_2N[0]), "after", before_N + jitter_2N[1]
    )
    assert {one.verdict for one in adaptation_of(first_group(shaken)).metrics.values()} == {"noise"}


def test_a_baseline_on_other_tasks_is_shown_but_not_compared() -> None:
    group = first_group(run_of("mse"), baseline_of("mse", num_tasks=30))
    comparison = group.comparison("melu-maml", "after", "plain-dlrm", "after")
    shown = group.result("plain-dlrm", "after")
    assert comparison
    assert shown
    assert math.isfinite(shown.metrics["mae"].value)
    difference = comparison.metrics["mae"]
    assert math.isnan(difference.value)
    assert difference.verdict == "unknown"
    assert difference.reason == "'plain-dlrm' was evaluated on other tasks or rows of this group"
    assert adaptation_of(group, "plain-dlrm").metrics["mae"].verdict == "better"


def test_a_baseline_without_a_group_is_left_out_of_it() -> None:
    evaluation = summarise_evaluation([run_of("mse"), baseline_of("mse", groups=GROUPS[:1])])
    assert evaluation.groups[0].result("plain-dlrm", "after")
    assert evaluation.groups[1].result("plain-dlrm", "after") is None


def test_few_tasks_have_values_but_neither_interval_nor_verdict() -> None:
    group = first_group(run_of("mse", num_tasks=5))
    result = group.result("melu-maml", "after")
    assert result
    estimate = result.metrics["mae"]
    assert math.isfinite(estimate.value)
    assert math.isnan(estimate.low)
    assert estimate.reason == "rests on only 5 tasks: too few to resample"
    assert adaptation_of(group).metrics["mae"].verdict == "unknown"


def test_an_ece_has_no_interval_but_the_difference_of_two_has_one_and_a_verdict() -> None:
    run = replace(run_of("bce"), evaluation=EvaluationConfig(metrics=("ece",)))
    group = first_group(run)
    result = group.result("melu-maml", "after")
    assert result
    estimate = result.metrics["ece"]
    assert math.isfinite(estimate.value)
    assert math.isnan(estimate.low)
    assert math.isnan(estimate.high)
    assert estimate.reason == "noise in its bins only adds to it"
    difference = adaptation_of(group).metrics["ece"]
    assert difference.low < difference.value < difference.high
    assert difference.verdict != "unknown"


def test_one_class_leaves_auc_undefined_with_its_reason() -> None:
    run = with_column(run_of("bce"), "label", np.zeros(640, np.float32))
    group = first_group(run)
    result = group.result("melu-maml", "after")
    assert result
    assert math.isnan(result.metrics["auc"].value)
    found = result.metrics["auc"].reason
    assert found == "0 positive and 320 negative rows: both classes are needed"
    assert adaptation_of(group).metrics["auc"].reason == result.metrics["auc"].reason
    assert math.isfinite(result.metrics["logloss"].value)


def test_a_diverged_stage_is_reported_as_such() -> None:
    after_N = np.array(run_of("bce").predictions["after"])
    after_N[7] = np.nan
    group = first_group(with_column(run_of("bce"), "after", after_N))
    result = group.result("melu-maml", "after")
    assert result
    reasons = {one.reason for one in result.metrics.values()}
    assert reasons == {"1 of 320 predictions are not finite: the model diverged"}
    assert [(one.run, one.stage) for one in group.calibration] == [("melu-maml", "before")]


def test_support_bins_cover_every_task_once() -> None:
    group = first_group(run_of("mse", num_tasks=200))
    bins = group.by_support_rows
    assert len(bins) == 6
    assert sum(bin_.num_tasks for bin_ in bins) == 200
    assert sum(bin_.num_rows for bin_ in bins) == group.num_rows
    assert all(one.max_rows < other.min_rows for one, other in pairwise(bins))
    assert (bins[0].min_rows, bins[-1].max_rows) == (group.min_support_rows, group.max_support_rows)


def test_a_support_bin_holds_the_metric_of_its_rows() -> None:
    run = run_of("mse", num_tasks=200)
    bin_ = first_group(run).by_support_rows[2]
    rows = select_split(run.predictions, "user-cold")
    inside = rows.keep_where(
        (rows.support_rows_N >= bin_.min_rows) & (rows.support_rows_N <= bin_.max_rows)
    )
    after = next(one for one in bin_.results if one.stage == "after")
    found = after.metrics["mae"].value
    assert found == np.abs(inside.after_N.astype(float) - inside.label_N).mean()


@pytest.mark.parametrize(
    ("sizes", "bounds"),
    [
        ([5, 5, 5], [(5, 5)]),
        ([1, 2, 2, 7], [(1, 1), (2, 2), (7, 7)]),
        (list(range(1, 13)), [(1, 2), (3, 4), (5, 6), (7, 8), (9, 10), (11, 12)]),
        ([1] * 90 + [2, 3, 4, 5, 6, 7], [(1, 1), (2, 7)]),
    ],
)
def test_support_bins_are_sizes_or_even(sizes: list[int], bounds: list[tuple[int, int]]) -> None:
    assert choose_support_bins(np.array(sizes)) == bounds


def test_calibration_bins_hold_equally_many_rows_and_their_shares() -> None:
    rows = select_split(predictions("bce", num_tasks=100), "user-cold")
    found = calibrate("run", rows, "after")
    order_N = np.argsort(rows.after_N, kind="stable")
    for bin_, rows_N in zip(found.bins, np.array_split(order_N, 10), strict=True):
        assert bin_.num_rows == 80
        assert bin_.mean_probability == pytest.approx(rows.after_N[rows_N].mean(), abs=1e-6)
        assert bin_.positive_share.value == pytest.approx(rows.label_N[rows_N].mean(), abs=1e-6)
    told = found.predicted_over_observed
    assert told == pytest.approx(rows.after_N.sum() / rows.label_N.sum(), rel=1e-5)


def test_a_constant_model_has_one_calibration_bin() -> None:
    run = with_column(run_of("bce"), "after", np.full(640, 0.3, np.float32))
    found = calibrate("run", select_split(run.predictions, "user-cold"), "after")
    assert [bin_.num_rows for bin_ in found.bins] == [320]


def test_a_bin_without_a_positive_row_is_not_known_to_have_none() -> None:
    rows = select_split(predictions("bce", num_tasks=100), "user-cold")
    rows = replace(rows, label_N=(rows.after_N > np.median(rows.after_N)).astype(np.float32))
    bins = calibrate("run", rows, "after").bins
    for bin_ in (bins[0], bins[-1]):
        share = bin_.positive_share
        assert share.value in (0, 1)
        assert math.isnan(share.low)
        assert share.reason == "rests on only 0 tasks: too few to resample"


def test_ratings_have_no_calibration() -> None:
    assert first_group(run_of("mse")).calibration == ()


def test_the_same_runs_give_the_same_numbers() -> None:
    runs = [run_of("bce"), baseline_of("bce")]
    assert values_of(summarise_evaluation(runs)) == values_of(summarise_evaluation(runs))


def test_speed_is_the_median_of_the_log_and_unknown_without_one() -> None:
    run, baseline = summarise_evaluation([run_of("mse"), baseline_of("mse")]).runs
    assert (run.samples_per_s, run.data_wait_share) == (1049.5, 0.02)
    assert math.isnan(baseline.samples_per_s)


def test_secrets_of_a_config_do_not_reach_the_report() -> None:
    config = {
        "storage": {"key": "a", "secret": "b", "AWS_SECRET_KEY": "c"},
        "list": [{"password": "d"}],
    }
    assert hide_secrets(config) == {
        "storage": {"key": "a", "secret": "(hidden)", "AWS_SECRET_KEY": "(hidden)"},
        "list": [{"password": "(hidden)"}],
    }
    found = summarise_evaluation([replace(run_of("mse"), config=config)]).runs[0].config
    assert found == hide_secrets(config)


def test_a_yardstick_has_one_stage_and_the_run_is_compared_with_it() -> None:
    run, model = run_of("mse"), yardstick_of("mse")
    evaluation = summarise_evaluation([run], [model], ["boosted trees: none"])
    group = evaluation.groups[0]
    wanted = [("melu-maml", "before"), ("melu-maml", "after"), ("bias model", "after")]
    assert [(one.run, one.stage) for one in group.results] == wanted
    rows = select_split(model.predictions, group.name)
    expected = evaluate_split(rows.label_N, rows.after_N, rows.task_N, Scoring("mse"))["mae"].value
    found = group.result("bias model", "after")
    assert found
    assert found.metrics["mae"].value == expected
    compared = group.comparison("melu-maml", "after", "bias model", "after")
    after = group.result("melu-maml", "after")
    assert compared
    assert after
    difference = compared.metrics["mae"]
    assert difference.value == pytest.approx(after.metrics["mae"].value - expected)
    assert difference.verdict == "better"
    assert evaluation.notes == ("boosted trees: none",)


def test_cautions_are_the_verdicts_that_say_worse() -> None:
    evaluation = summarise_evaluation([run_of("mse", gain=-0.5)], [yardstick_of("mse", gain=0.9)])
    for group in evaluation.groups:
        for minus_run, stage in (("melu-maml", "before"), ("bias model", "after")):
            compared = group.comparison("melu-maml", "after", minus_run, stage)
            assert compared
            worse = [name for name, one in compared.metrics.items() if one.verdict == "worse"]
            found = [
                one.metrics
                for one in evaluation.cautions
                if (one.group, one.minus_run) == (group.name, minus_run)
            ]
            assert found == ([tuple(worse)] if worse else [])
            assert "mae" in worse


def test_a_run_below_a_plain_one_that_is_fine_tuned_is_told() -> None:
    run, plain = run_of("mse", gain=0.3), baseline_of("mse", gain=0.9)
    evaluation = summarise_evaluation([run, plain])
    found = [(one.group, one.minus_run, one.text) for one in evaluation.cautions]
    expected = []
    for group in evaluation.groups:
        compared = group.comparison("melu-maml", "after", "plain-dlrm", "after")
        assert compared
        worse = [name for name, one in compared.metrics.items() if one.verdict == "worse"]
        assert "mae" in worse
        differences = [(evaluation.metrics[name].label, compared.metrics[name]) for name in worse]
        told = ", ".join(
            f"{label} {format_signed(one.value)} {format_interval(one.low, one.high, True)}"
            for label, one in differences
        )
        text = f"{group.name}: it is below plain-dlrm, fine-tuned, the best baseline, by {told}"
        expected.append((group.name, "plain-dlrm", text))
    group_name, minus_run, text = expected[-1]
    command = """train RUN/config.json 'item_features.columns=["*"]' support_features.task=true"""
    expected[-1] = (group_name, minus_run, f"{text}.\nTo try next: gmeta {command} run.dir=RUN-2")
    assert found == expected
    assert not summarise_evaluation([plain, run]).cautions


def test_of_several_baselines_the_best_of_a_metric_is_told() -> None:
    """Trees among them: a run between both is level with the bias model and below the trees."""
    simple = [yardstick_of("mse", gain=0.1), yardstick_of("mse", "boosted trees", "trees", 0.9)]
    run = run_of("mse", gain=0.5)
    items = {"columns": ["item"]}
    config = {"item_features": items, "run": {"dir": "my runs/a"}, "model": {"name": "melu"}}
    for model, command in (
        ({}, "train 'my runs/a/config.json' model.linear_start=true 'run.dir=my runs/a-2'"),
        ({"linear_start": True}, "tune 'my runs/a/config.json' --with-plain"),
    ):
        keys = config | {"model": {"name": "melu", **model}}
        cautions = summarise_evaluation([replace(run, config=keys)], simple).cautions
        assert {one.minus_run for one in cautions} == {"boosted trees"}
        assert all("the boosted trees, the best baseline, by MAE +" in one.text for one in cautions)
        assert cautions[-1].text.endswith(f".\nTo try next: gmeta {command}")


def test_a_baseline_that_is_not_plain_is_no_caution() -> None:
    runs = [run_of("mse", gain=0.3), run_of("mse", "melu-anil", gain=0.9)]
    assert not summarise_evaluation(runs).cautions
