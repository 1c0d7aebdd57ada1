"""The sentence that a report begins with says what the tables say."""

from dataclasses import replace

import numpy as np
import pytest

from gmeta.evaluation.report.evaluation_schema import Evaluation
from gmeta.evaluation.report.headline import format_number, make_headline
from gmeta.evaluation.report.summarise import summarise_evaluation
from gmeta.evaluation.report.verdict import judge_groups, make_tiles
from tests.evaluation.report.sample import baseline_of, run_of, yardstick_of


def evaluate(gain: float) -> Evaluation:
    rivals = [yardstick_of("bce"), yardstick_of("bce", "boosted trees", "trees")]
    return summarise_evaluation([run_of("bce", gain=gain), baseline_of("bce")], rivals)


def test_a_run_that_is_ahead_of_all_is_good_and_says_by_how_much() -> None:
    evaluation = evaluate(0.8)
    verdict = judge_groups(evaluation)[0]
    line = make_headline(evaluation, evaluation.groups[0], "auc")
    assert verdict.kind == "good"
    assert f"AUC {format_number(line.before.value)} → {format_number(line.after.value)}" in (
        verdict.sentence
    )
    assert f"ahead of plain-dlrm by {format_number(line.rivals[0].difference.value)}" in (
        verdict.sentence
    )


def test_a_run_that_adapting_makes_worse_is_bad() -> None:
    verdict = judge_groups(evaluate(-0.8))[0]
    assert verdict.kind == "bad"
    assert "adapting makes it worse" in verdict.sentence
    assert "behind plain-dlrm by" in verdict.sentence


def test_a_run_that_adapting_does_not_change_is_neither() -> None:
    evaluation = summarise_evaluation([run_of("bce", gain=0.0)])
    verdict = judge_groups(evaluation)[0]
    assert (verdict.kind, "adapting changes nothing" in verdict.sentence) == ("", True)


@pytest.mark.parametrize("gain", [0.8, -0.8])
def test_gains_of_tasks_are_those_of_their_rows(gain: float) -> None:
    """Against a loop over tasks."""
    run = run_of("bce", gain=gain)
    evaluation = summarise_evaluation([run])
    rows = [row for row in run.predictions.to_pylist() if row["split"] == "user-cold"]
    gains = []
    for task in {row["task"] for row in rows}:
        of_task = [row for row in rows if row["task"] == task]
        losses = [
            [-np.log(row[at] if row["label"] else 1 - row[at]) for row in of_task]
            for at in ("before", "after")
        ]
        gains.append(np.mean(losses[0]) - np.mean(losses[1]))
    found = evaluation.groups[0].task_gains
    assert found is not None
    assert found.share_worse == np.mean(np.array(gains) < 0)
    assert found.median == pytest.approx(np.median(gains), rel=1e-6)
    assert sum(found.num_tasks_in_bin) == len(gains)
    first = replace(evaluation, groups=evaluation.groups[:1])
    assert make_tiles(first)[-1].value == f"{found.share_worse:.0%}"
    # Of all groups, by their tasks.
    shares = [one.task_gains.share_worse for one in evaluation.groups if one.task_gains]
    *_, tile = make_tiles(evaluation)
    assert (tile.value, tile.name) == (
        f"{np.mean(shares):.0%}",
        "of tasks worse off, 2 groups together",
    )
    assert f"{min(shares):.0%} to {max(shares):.0%} worse off by group" in tile.detail
