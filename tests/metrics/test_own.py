"""Metrics of somebody's own: measured as ours are, with intervals of nearly the same width."""

from pathlib import Path

import numpy as np
import pytest

from gmeta.config.evaluation import EvaluationConfig
from gmeta.config.train_config import config_from_dict
from gmeta.errors import ConfigError, GMetaError
from gmeta.evaluation.report.intervals import bootstrap, percentile_interval
from gmeta.metrics import custom_metrics as own
from gmeta.metrics.catalogue import Scoring, custom_names, is_metric, label_of
from gmeta.metrics.custom_metrics import NUM_GROUPS, Metric
from gmeta.metrics.scores import evaluate_split, split_terms
from gmeta.metrics.terms import Floats, Ints
from gmeta.runs.build import check_hooks
from gmeta.runs.trusted_names import check_trusted
from gmeta_keys.plugins import NOT_INSTALLED
from tests.support.refusals import catch_message

# N rows

HERE = __name__
CALLS: list[int] = []


def mean_error(label_N: Floats, prediction_N: Floats, task_N: Ints) -> float:
    """The mean absolute error."""
    CALLS.append(len(label_N))
    return float(np.abs(label_N - prediction_N).mean())


def failing(label_N: Floats, prediction_N: Floats, task_N: Ints) -> float:
    """Not a metric."""
    raise IndexError("no rows")


MEAN_ERROR = Metric(mean_error, "mean error", higher_is_better=False, unit="stars")
FAILING = Metric(failing, "failing", higher_is_better=True)
LOWEST = Metric(lambda label_N, prediction_N, task_N: np.sort(prediction_N)[0], "lowest", True)
UNDEFINED = Metric(lambda label_N, prediction_N, task_N: np.nan, "nothing", higher_is_better=True)


def scoring_of(*names: str) -> Scoring:
    return Scoring("mse", EvaluationConfig(metrics=(*names,)))


def rows(num_tasks: int, seed: int) -> tuple[Floats, Floats, Ints]:
    random = np.random.default_rng(seed)
    task_N = np.repeat(np.arange(num_tasks), random.integers(1, 9, num_tasks)) * 7
    label_N = random.normal(size=task_N.size)
    # Rows of a task are alike, as its users' are.
    return label_N, label_N + random.normal(size=num_tasks)[task_N // 7], task_N


def test_it_is_reported_beside_ours() -> None:
    scoring = scoring_of("mae", f"{HERE}:MEAN_ERROR")
    CALLS.clear()
    values = evaluate_split(*rows(200, 0), scoring)
    assert values[f"{HERE}:MEAN_ERROR"].value == pytest.approx(values["mae"].value, rel=1e-12)
    assert values[f"{HERE}:MEAN_ERROR"].num_tasks == 200
    assert len(CALLS) == 1  # validation asks for the value alone
    info = scoring.info(f"{HERE}:MEAN_ERROR")
    assert (info.label, info.higher_is_better, info.unit) == ("mean error", False, "stars")
    assert is_metric(f"{HERE}:MEAN_ERROR")
    assert not is_metric("map@5")


def test_its_interval_is_nearly_that_of_exact_sums() -> None:
    """10 % is the standard error of a width that 50 groups give: three of them."""
    widths = []
    for seed in range(8):
        scoring = scoring_of("mae", f"{HERE}:MEAN_ERROR")
        terms = split_terms(*rows(400, seed), scoring)
        exact, guessed = (
            percentile_interval(values_B, 400) for values_B in bootstrap([*terms.values()])
        )
        assert guessed.low < terms["mae"].value < guessed.high
        widths.append((guessed.high - guessed.low) / (exact.high - exact.low))
    assert max(widths) < 1.35
    assert min(widths) > 0.65
    assert np.mean(widths) == pytest.approx(1.0, abs=0.12)


def test_a_model_compared_with_itself_differs_by_nothing() -> None:
    name = f"{HERE}:MEAN_ERROR"
    CALLS.clear()
    terms = [split_terms(*rows(400, 3), scoring_of(name))[name] for _ in range(2)]
    assert len(CALLS) == 2 * (1 + NUM_GROUPS)
    first_B, second_B = bootstrap(terms)
    np.testing.assert_array_equal(first_B, second_B)


def test_fewer_tasks_than_groups_are_left_out_one_by_one() -> None:
    name = f"{HERE}:MEAN_ERROR"
    terms = split_terms(*rows(12, 3), scoring_of("mae", name))
    exact, rough = (percentile_interval(values_B, 12) for values_B in bootstrap([*terms.values()]))
    assert rough.high - rough.low == pytest.approx(exact.high - exact.low, rel=0.3)


@pytest.mark.parametrize("num_tasks", [0, 1, 2])
def test_it_is_never_asked_about_no_rows(num_tasks: int) -> None:
    name, tasks = f"{HERE}:LOWEST", np.arange(3) * 7  # of which the last have no row
    terms = split_terms(*rows(num_tasks, 4), scoring_of(name), tasks=tasks)[name]
    assert np.isnan(terms.value) == (num_tasks == 0)
    assert terms.reason == ("no rows" if num_tasks == 0 else "")


def test_what_is_no_number_has_a_reason_and_what_fails_a_line() -> None:
    name = f"{HERE}:UNDEFINED"
    value = evaluate_split(*rows(12, 0), scoring_of(name))[name]
    assert np.isnan(value.value)
    assert value.reason == f"{name} is nan of these rows"
    label_N, score_N, task_N = rows(12, 0)
    with pytest.raises(GMetaError) as caught:
        evaluate_split(label_N, score_N, task_N, scoring_of(f"{HERE}:FAILING"))
    assert str(caught.value) == (
        f"evaluation.metrics = '{HERE}:FAILING' failed on {label_N.size} rows: IndexError: no "
        "rows. Mend it, or leave it out"
    )


def test_a_metric_that_fails_is_found_before_the_first_step() -> None:
    """At the first validation the steps before it, without a checkpoint yet, would be lost."""

    def checked(metrics: list[str], **run: str) -> None:
        table = {"data": {"path": "d"}, "run": {"dir": "r"} | run}
        check_hooks(config_from_dict(table | {"evaluation": {"metrics": metrics}}))

    checked(["auc", f"{HERE}:MEAN_ERROR", f"{HERE}:UNDEFINED"])
    for metrics, run in (
        (["auc", f"{HERE}:FAILING"], {}),
        (["auc"], {"early_stop_metric": f"{HERE}:FAILING"}),
    ):
        assert catch_message(GMetaError, checked, metrics, **run) == (
            f"evaluation.metrics = '{HERE}:FAILING' failed on 200 rows: IndexError: no rows. Mend "
            "it, or leave it out. These rows were made up to try it"
        )


@pytest.mark.parametrize(
    ("metric", "name", "label"),
    [
        ("auc", "auc", ""),
        ("ndcg@3:rating", "ndcg@3", "rating"),
        ("ac:rating", "ac", "rating"),  # a mistyped metric, as there is no such module
        (":rating", "", "rating"),
        (f"{HERE}:MEAN_ERROR", f"{HERE}:MEAN_ERROR", ""),
        (f"{HERE}:MEAN_ERROR:rating", f"{HERE}:MEAN_ERROR", "rating"),
        ("", "", ""),
    ],
)
def test_a_label_may_stand_behind_any_metric(metric: str, name: str, label: str) -> None:
    assert label_of(metric) == (name, label)
    assert is_metric(metric) == bool(name and not label)


def test_a_module_that_is_named_nearly_as_a_metric_is_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "aucs.py").touch()
    assert label_of("aucs:rating") == ("aucs:rating", "")
    assert label_of("aucz:rating") == ("aucz", "rating")


def test_a_name_of_something_else_is_refused() -> None:
    assert catch_message(ConfigError, scoring_of, f"{HERE}:mean_error") == (
        f"evaluation.metrics = '{HERE}:mean_error' is a value of function: a value of "
        "gmeta.metrics.custom_metrics.Metric is needed. Name that (docs/extending.md)"
    )


def test_a_strangers_run_imports_no_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_on = {"plugins": {"evaluation.metrics: mine:M": {"package": "mine", "version": "2"}}}
    metrics = own.NAMED_METRICS
    named = {f"{own.KEY}: {name}": (metrics, name) for name in custom_names(["auc", "mine:M", ""])}
    monkeypatch.setattr(metrics.__class__, "find", pytest.fail)
    with pytest.raises(GMetaError) as caught:
        check_trusted(tmp_path, named, made_on)
    assert str(caught.value).startswith(
        f"{tmp_path} was made with evaluation.metrics = 'mine:M', code of the package 'mine', "
        "which is not installed as a plug-in here"
    )
    assert str(caught.value).endswith("It was made with mine 2.")
    made_on = {"plugins": {f"{own.KEY}: mine:M": {"package": "mine", "version": NOT_INSTALLED}}}
    with pytest.raises(GMetaError) as caught:
        check_trusted(tmp_path, named, made_on)
    assert str(caught.value).endswith(" It was made with mine, which was only on the path.")
    monkeypatch.setenv("GMETA_PLUGINS", "mine")
    check_trusted(tmp_path, named, made_on)
