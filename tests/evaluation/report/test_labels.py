"""What a report says of a label is what it would say of that label alone."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from gmeta.errors import UserError
from gmeta.evaluation.report.console_table import make_console_table
from gmeta.evaluation.report.evaluated_runs import EvaluatedRun
from gmeta.evaluation.report.summarise import summarise_evaluation
from tests.evaluation.report.sample import GROUPS, baseline_of, predictions, run_of
from tests.support.refusals import catch_message

KNOWN_SHARE = 0.4


def labelled(name: str = "melu-maml", gain: float = 0.8) -> EvaluatedRun:
    """A run with clicks, by which it is judged, and stars that four of ten rows have."""
    run = run_of("bce", name, gain=gain)
    stars = predictions("mse", gain=gain)
    lacks_N = np.random.default_rng(7).random(stars.num_rows) > KNOWN_SHARE
    table = run.predictions
    for column in ("label", "before", "after"):
        values_N = stars[column].to_numpy()
        if column == "label":
            values_N = np.where(lacks_N, np.float32(np.nan), values_N)
        table = table.append_column(f"{column}:stars", pa.array(values_N))
    return replace(run, predictions=table, label="click", other_losses={"stars": "mse"})


def alone(run: EvaluatedRun) -> EvaluatedRun:
    """The run as if stars were its one label, which every row has."""
    table = run.predictions.drop_columns(["label", "before", "after"])
    table = table.rename_columns([name.removesuffix(":stars") for name in table.column_names])
    table = table.filter(pc.invert(pc.is_nan(table["label"])))
    return replace(run, loss="mse", label="", other_losses={}, predictions=table)


def test_each_label_is_told_of_as_if_it_were_the_only_one() -> None:
    runs = labelled(), labelled("other", gain=0.3)
    found = summarise_evaluation(runs)
    (stars,) = found.labels
    expected = summarise_evaluation([alone(run) for run in runs])
    assert (found.label, stars.label, stars.loss) == ("click", "stars", "mse")
    assert repr(found.select_label(stars).groups) == repr(expected.groups)  # some are NaN
    assert found.select_label(stars).metrics == expected.metrics
    clicks = summarise_evaluation([replace(run, label="", other_losses={}) for run in runs])
    assert repr(found.groups) == repr(clicks.groups)
    of_stars = [replace(one, label="") for one in found.cautions if one.label == "stars"]
    assert [one.metrics for one in of_stars] == [one.metrics for one in expected.cautions]


def test_draws_that_know_other_tasks_are_paired_by_task() -> None:
    run = labelled()
    tables = []
    for draw in range(2):
        table = run.predictions
        # The first ten tasks of each split are known in the first draw alone.
        hidden_N = (table["task"].to_numpy() % 1000 < 10) & (draw == 1)
        label_N = np.where(hidden_N, np.float32(np.nan), table["label"].to_numpy())
        table = table.set_column(3, "label", pa.array(label_N))
        tables.append(table.append_column("draw", pa.array([draw] * table.num_rows, pa.int32())))
    found = summarise_evaluation([replace(run, predictions=pa.concat_tables(tables))])
    result = found.groups[0].result("melu-maml", "after")
    assert result is not None
    estimate = result.metrics["auc"]
    assert estimate.low < estimate.value < estimate.high


def test_a_label_without_a_name_stands_beside_the_judged_one() -> None:
    found = summarise_evaluation([labelled(), baseline_of("bce")])
    comparison = found.groups[0].comparison("melu-maml", "after", "plain-dlrm", "after")
    assert comparison is not None
    assert comparison.metrics["auc"].verdict == "better"
    assert {one.run for one in found.labels[0].groups[0].results} == {"melu-maml"}
    assert make_console_table(found)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            replace(labelled("other"), label="like"),
            "run 'other' has no label click, which 'melu-maml' is judged by: it has like, stars. "
            "Compare runs of one label, or name one that both have with --label",
        ),
        (
            replace(labelled("other"), other_losses={"stars": "bce"}),
            "run 'other' was trained with loss bce of label stars, 'melu-maml' with mse: their "
            "predictions mean different things. Compare runs of one loss",
        ),
    ],
)
def test_runs_whose_labels_differ_are_refused(other: EvaluatedRun, message: str) -> None:
    assert catch_message(UserError, summarise_evaluation, [labelled(), other]) == message


def test_a_split_or_a_label_that_nothing_is_known_of_is_told() -> None:
    run = labelled()
    table = run.predictions
    hidden_N = np.array(table["split"]) == GROUPS[1]
    place = table.column_names.index("label:stars")
    stars_N = np.where(hidden_N, np.float32(np.nan), table["label:stars"].to_numpy())
    found = summarise_evaluation(
        [replace(run, predictions=table.set_column(place, "label:stars", pa.array(stars_N)))]
    )
    assert found.notes == (f"stars: not known in any query row of {GROUPS[1]}",)
    assert [group.name for group in found.groups] == list(GROUPS)
    assert GROUPS[1] not in [group.name for group in found.labels[0].groups]
    none_N = np.full(table.num_rows, np.nan, np.float32)
    table = table.set_column(table.column_names.index("label"), "label", pa.array(none_N))
    with pytest.raises(UserError, match=r"^label click is not known in any query row of "):
        summarise_evaluation([replace(run, predictions=table)])
