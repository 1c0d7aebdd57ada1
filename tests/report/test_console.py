"""The console table fits a terminal and carries verdicts in words."""

import io
import re

import pytest
from rich.console import Console

from gmeta.metrics.catalogue import Loss
from gmeta.report.console import console_table
from gmeta.report.runs import EvaluatedRun
from gmeta.report.summarise import summarise
from gmeta.report.wording import line_of, number, signed
from tests.report.sample import baseline_of, run_of


def printed(width: int, *runs: EvaluatedRun) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(console_table(summarise(runs)))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("loss", ["bce", "mse"])
def test_one_baseline_fits_eighty_columns_uncut(loss: Loss) -> None:
    lines = printed(80, run_of(loss), baseline_of(loss))
    assert max(len(line) for line in lines) <= 80
    assert not any("\N{HORIZONTAL ELLIPSIS}" in line for line in lines)
    evaluation = summarise([run_of(loss), baseline_of(loss)])
    rows = [
        line
        for line in lines
        if re.search(r"[\N{UPWARDS ARROW}\N{DOWNWARDS ARROW}] +[\d\N{MINUS SIGN}]", line)
    ]
    assert len(rows) == len(evaluation.groups) * len(evaluation.metrics)


def test_a_row_holds_both_stages_the_change_and_the_baseline() -> None:
    evaluation = summarise([run_of("mse"), baseline_of("mse")])
    line = line_of(evaluation, evaluation.groups[0], "mae")
    rival = line.rivals[0]
    row = next(
        one for one in printed(80, run_of("mse"), baseline_of("mse")) if one.startswith("MAE")
    )
    assert row.split() == [
        "MAE",
        "\N{DOWNWARDS ARROW}",
        number(line.before.value),
        number(line.after.value),
        signed(line.change.value),
        line.change.verdict,
        number(rival.estimate.value),
        signed(rival.difference.value),
        rival.difference.verdict,
    ]


def test_groups_are_headed_by_their_size() -> None:
    assert "user-cold: 40 tasks, 320 query rows, 5 support rows" in printed(
        80, run_of("mse", support_rows=5)
    )


def test_the_legend_tells_what_a_verdict_means() -> None:
    text = " ".join(printed(200, run_of("mse"), baseline_of("mse")))
    assert "better, worse: the 95 % interval over tasks excludes 0; noise: it does not." in text
    assert "A baseline stands at the better of as trained and fine-tuned, metric by metric." in text
    assert "unknown:" not in text


def test_a_baseline_without_the_group_is_a_dash_not_a_number() -> None:
    lines = printed(80, run_of("mse"), baseline_of("mse", groups=("user-cold",)))
    last = [line for line in lines if line.startswith("MAE")][-1]
    assert last.split()[-3:] == ["\N{EM DASH}", "\N{EM DASH}", "unknown"]
    assert lines[-2].rstrip() == "unknown: there is no such interval; the report says why."
