"""Numbers read the same everywhere, and a baseline is met at its best."""

import math

import pytest

from gmeta.evaluation.report.headline import (
    find_differing_settings,
    flatten_settings,
    format_interval,
    format_number,
    format_signed,
    make_headline,
)
from gmeta.evaluation.report.summarise import summarise_evaluation
from tests.evaluation.report.sample import baseline_of, run_of

MINUS = "\N{MINUS SIGN}"


@pytest.mark.parametrize(
    ("value", "plain", "with_sign"),
    [
        (0.78512, "0.7851", "+0.7851"),
        (-0.00126, f"{MINUS}0.0013", f"{MINUS}0.0013"),
        (-0.00001, f"{MINUS}0.0000", "0.0000"),
        (math.nan, "\N{EM DASH}", "\N{EM DASH}"),
    ],
)
def test_numbers_have_4_decimals_and_a_true_minus(value: float, plain: str, with_sign: str) -> None:
    assert format_number(value) == plain
    assert format_signed(value) == with_sign


def test_intervals_stand_in_brackets_or_not_at_all() -> None:
    assert format_interval(0.1, 0.25) == "[0.1000, 0.2500]"
    assert format_interval(-0.1, 0.25, is_difference=True) == f"[{MINUS}0.1000, +0.2500]"
    assert format_interval(math.nan, math.nan) == ""


def test_the_better_stage_of_a_baseline_is_chosen_in_the_metrics_direction() -> None:
    evaluation = summarise_evaluation([run_of("mse"), baseline_of("mse")])
    group = evaluation.groups[0]
    for name, info in evaluation.metrics.items():
        values = [
            result.metrics[name].value
            for stage in ("before", "after")
            if (result := group.result("plain-dlrm", stage))  # type: ignore[arg-type]
        ]
        best = max(values) if info.higher_is_better else min(values)
        assert make_headline(evaluation, group, name).rivals[0].estimate.value == best


def test_the_difference_to_a_rival_is_to_the_stage_that_is_shown() -> None:
    evaluation = summarise_evaluation([run_of("bce"), baseline_of("bce")])
    line = make_headline(evaluation, evaluation.groups[0], "auc")
    rival = line.rivals[0]
    assert rival.difference.value == pytest.approx(line.after.value - rival.estimate.value)


def test_nested_settings_read_like_overrides() -> None:
    settings = {"outer": {"lr": 0.1, "deep": {"on": True}}, "name": "x", "empty": {}}
    expected = {"outer.lr": "0.1", "outer.deep.on": "True", "name": "x", "empty": "{}"}
    assert dict(flatten_settings(settings)) == expected


def test_a_setting_that_one_run_lacks_is_a_dash() -> None:
    run, baseline = run_of("mse"), baseline_of("mse")
    baseline.config["extra"] = 1
    expected = [("algorithm.name", ["maml", "none"]), ("extra", ["\N{EM DASH}", "1"])]
    assert find_differing_settings(summarise_evaluation([run, baseline])) == expected
