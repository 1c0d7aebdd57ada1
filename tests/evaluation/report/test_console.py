"""The console table fits a terminal and has verdicts in words; numbers read the same everywhere."""

import io
import math
import re
from collections.abc import Sequence

import pytest
from rich.console import Console

from gmeta.config.losses import Loss
from gmeta.evaluation.report.console_table import make_console_table
from gmeta.evaluation.report.evaluated_runs import EvaluatedBaseline, EvaluatedRun
from gmeta.evaluation.report.headline import (
    find_differing_settings,
    find_estimate,
    flatten_settings,
    format_interval,
    format_number,
    format_signed,
    make_headline,
)
from gmeta.evaluation.report.summarise import summarise_evaluation
from tests.evaluation.report.sample import baseline_of, run_of, yardstick_of

MAE = ("MAE", "\N{DOWNWARDS ARROW}")


def printed(
    width: int, *runs: EvaluatedRun, yardsticks: Sequence[EvaluatedBaseline] = ()
) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(make_console_table(summarise_evaluation(runs, yardsticks)))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("loss", ["bce", "mse"])
def test_one_baseline_fits_eighty_columns_uncut(loss: Loss) -> None:
    lines = printed(80, run_of(loss), baseline_of(loss))
    assert max(len(line) for line in lines) <= 80
    assert not any("\N{HORIZONTAL ELLIPSIS}" in line for line in lines)
    evaluation = summarise_evaluation([run_of(loss), baseline_of(loss)])
    rows = [
        line
        for line in lines
        if re.search(r"[\N{UPWARDS ARROW}\N{DOWNWARDS ARROW}] +[\d+\N{MINUS SIGN}]", line)
    ]
    # Once with the values of each model, once with the differences.
    assert len(rows) == 2 * len(evaluation.groups) * len(evaluation.metrics)


def test_a_row_holds_both_stages_the_change_and_the_baseline() -> None:
    evaluation = summarise_evaluation([run_of("mse"), baseline_of("mse")])
    line = make_headline(evaluation, evaluation.groups[0], "mae")
    rival = line.rivals[0]
    rows = [one for one in printed(80, run_of("mse"), baseline_of("mse")) if one.startswith("MAE")]
    tuned = find_estimate(evaluation.groups[0], "plain-dlrm", "after", "mae")
    trained = find_estimate(evaluation.groups[0], "plain-dlrm", "before", "mae")
    shown = (line.before, line.after, trained, tuned)
    assert rows[0].split() == [*MAE, *(format_number(one.value) for one in shown)]
    assert rows[1].split() == [
        *MAE, format_signed(line.change.value), line.change.verdict,
        format_signed(rival.difference.value), rival.difference.verdict,
    ]  # fmt: skip


def test_groups_are_headed_by_their_size() -> None:
    found = "user-cold: 40 tasks, 320 query rows, 5 support rows"
    assert found in printed(80, run_of("mse", support_rows=5))


def test_the_legend_tells_what_a_verdict_means() -> None:
    text = " ".join(printed(200, run_of("mse"), baseline_of("mse")))
    assert "better, worse: the 95 % interval over tasks excludes 0; noise: it does not." in text
    assert "A baseline is compared at its better stage, metric by metric." in text
    assert "?," not in text


def test_a_baseline_without_the_group_is_a_dash_not_a_number() -> None:
    lines = printed(80, run_of("mse"), baseline_of("mse", groups=("user-cold",)))
    last = [line for line in lines if line.startswith("MAE")][-1]
    assert last.split()[-2:] == ["\N{EM DASH}", "?"]
    found = lines[-2].rstrip()
    assert found == "?, \N{EM DASH}: there is no such interval, or value; the report says why."


@pytest.mark.parametrize("loss", ["bce", "mse"])
def test_a_baseline_and_two_yardsticks_fit_eighty_columns_uncut(loss: Loss) -> None:
    models = [yardstick_of(loss), yardstick_of(loss, "boosted trees", "trees")]
    lines = printed(80, run_of(loss), baseline_of(loss), yardsticks=models)
    told = [line for line in lines if line.startswith(("bias model: ", "boosted trees: "))]
    assert len(told) == 2
    assert max(len(line) for line in lines) <= 80
    assert not any("\N{HORIZONTAL ELLIPSIS}" in line for line in lines)
    heads = [line.split() for line in lines if line.startswith("adapted minus")]
    assert heads == 2 * [["adapted", "minus", "before", "plain-dlrm", "bias", "trees"]]


def test_what_must_not_be_missed_is_red_and_the_last_line() -> None:
    run = run_of("mse", groups=("user-cold",), gain=0.3)
    console = Console(file=io.StringIO(), width=200, color_system="standard", force_terminal=True)
    console.print(make_console_table(summarise_evaluation([run], [yardstick_of("mse", gain=0.8)])))
    first, last = console.file.getvalue().splitlines()[-2:]  # type: ignore[attr-defined]
    told = "\x1b[1;31muser-cold: it is below the bias model, the best baseline, by MAE +"
    assert first.startswith(told)
    assert last.startswith("\x1b[1;31mTo try next: gmeta train RUN/config.json ")


def test_a_run_that_is_better_than_all_is_told_of_without_red() -> None:
    evaluation = summarise_evaluation([run_of("mse")], [yardstick_of("mse", gain=0.0)])
    assert evaluation.cautions == ()


MINUS = "\N{MINUS SIGN}"


@pytest.mark.parametrize(
    ("value", "plain", "with_sign"),
    [
        (0.78512, "0.7851", "+0.7851"), (-0.00126, f"{MINUS}0.0013", f"{MINUS}0.0013"),
        (-0.00001, f"{MINUS}0.0000", "0.0000"), (math.nan, "\N{EM DASH}", "\N{EM DASH}"),
    ],
)  # fmt: skip
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
