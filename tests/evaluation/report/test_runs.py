"""Runs that cannot be reported are refused with one clear message."""

from dataclasses import replace

import numpy as np

from gmeta.errors import UserError
from gmeta.evaluation.report.evaluated_runs import (
    EvaluatedRun,
    check_runs,
    have_same_rows,
    select_runs,
    select_split,
    split_names,
)
from tests.evaluation.report.sample import baseline_of, run_of, with_column
from tests.support.refusals import catch_message


def refusal(*runs: EvaluatedRun) -> str:
    def check() -> None:
        check_runs(runs)
        select_runs(runs, runs[0].label)

    return catch_message(UserError, check)


def test_good_runs_pass() -> None:
    check_runs([run_of("mse"), baseline_of("mse")])
    check_runs([run_of("bce"), baseline_of("bce")])
    select_runs([run_of("bce"), baseline_of("bce")], "")


def test_equal_names_are_refused() -> None:
    assert refusal(run_of("mse"), run_of("mse")) == (
        "2 runs are called 'melu-maml': names must differ to tell them apart. "
        "Give the run or the baseline another name"
    )


def test_another_loss_is_refused() -> None:
    assert refusal(run_of("mse"), baseline_of("bce")) == (
        "run 'plain-dlrm' was trained with loss bce, 'melu-maml' with mse: their predictions mean "
        "different things. Compare runs of one loss"
    )


def test_runs_of_two_losses_of_ratings_compare() -> None:
    select_runs([run_of("mse"), baseline_of("huber"), run_of("mae", "third")], "")


def test_a_missing_column_is_named() -> None:
    run = run_of("mse")
    broken = replace(run, predictions=run.predictions.drop_columns(["after"]))
    assert refusal(broken) == (
        "the predictions of run 'melu-maml' have no column 'after', only split, task, "
        "support_rows, label, before: all of split, task, support_rows, label, before, after are "
        "needed. Evaluate the run again"
    )


def test_ratings_under_bce_are_refused() -> None:
    broken = with_column(run_of("bce"), "label", np.full(640, 4.0, np.float32))
    assert refusal(broken) == (
        "run 'melu-maml' was trained with bce but has a label of 4: 0 to 1 is allowed. "
        "Train on ratings with outer.loss=mse"
    )


def test_splits_keep_the_order_of_the_table() -> None:
    expected = ["warm", "cold", "both"]
    assert split_names(run_of("mse", groups=("warm", "cold", "both")).predictions) == expected


def test_the_same_rows_in_another_order_are_the_same() -> None:
    table = run_of("mse").predictions
    shuffled = table.take(np.random.default_rng(0).permutation(table.num_rows))
    assert have_same_rows(select_split(table, "user-cold"), select_split(shuffled, "user-cold"))
    assert not have_same_rows(select_split(table, "user-cold"), select_split(table, "item-cold"))


def test_other_labels_are_other_rows() -> None:
    run = run_of("mse")
    changed = np.array(run.predictions["label"])
    changed[0] = 6.0 - changed[0] + 0.5
    other = with_column(run, "label", changed)
    assert not have_same_rows(
        select_split(run.predictions, "user-cold"), select_split(other.predictions, "user-cold")
    )
