"""Makes an Evaluation of prediction tables: metrics with intervals, comparisons with verdicts."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from gmeta.config.algorithm import PLAIN
from gmeta.errors import UserError
from gmeta.evaluation.report import evaluation_schema as schema
from gmeta.evaluation.report.cautions import add_next_command, find_cautions
from gmeta.evaluation.report.evaluated_runs import (
    EvaluatedBaseline,
    EvaluatedRun,
    SplitRows,
    check_runs,
    count_draws,
    count_task_rows,
    have_same_rows,
    select_draws,
    select_runs,
    select_split,
    split_names,
)
from gmeta.evaluation.report.intervals import LEVEL_PERCENT, bootstrap
from gmeta.evaluation.report.metric_estimates import (
    RESAMPLES,
    SEED,
    UNKNOWN,
    MeasuredMetric,
    combine_draws,
    compare,
    measure_metrics,
)
from gmeta.evaluation.report.task_gains import measure_task_gains, tell_story
from gmeta.metrics.catalogue import Scoring, metric_infos, predicted_by
from gmeta.metrics.terms import Array, Ints, Terms, sum_T
from metaio.ragged import find_run_starts

# N rows, T tasks, E episodes, B resamples

SUPPORT_BINS = 6
# Deciles, as in Niculescu-Mizil & Caruana 2005.
CALIBRATION_BINS = 10


def summarise_evaluation(
    runs: Sequence[EvaluatedRun],
    baselines: Sequence[EvaluatedBaseline] = (),
    notes: Sequence[str] = (),
) -> schema.Evaluation:
    """Evaluate the first run against other runs and baselines, on each split that it predicted."""
    check_runs(runs, [one.name for one in baselines])
    splits = split_names(runs[0].predictions)
    scored = [_summarise_label(runs, baselines, label) for label in runs[0].labels]
    unknown = [
        f"{one.label}: not known in any query row of {split}"
        for one in scored
        for split in splits
        if split not in [group.name for group in one.groups]
    ]
    uncalibrated = [
        f"calibration{one.label and f' of {one.label}'}: -, scores of a ranking loss tell an order "
        "and no level"
        for one in scored
        if predicted_by(one.loss) == "score"
    ]
    judged, *others = scored
    if not judged.groups:
        raise UserError(
            f"label {judged.label} is not known in any query row of {', '.join(splits)}: there is "
            "nothing to score. Name other splits with --split, or another label with --label"
        )
    plain = {one.name: f"{one.name}, fine-tuned" for one in runs[1:] if one.algorithm == PLAIN}
    cautions = [
        caution
        for one in scored
        for group in one.groups
        for caution in find_cautions(
            group,
            runs[0].name,
            {made.name: f"the {made.name}" for made in one.yardsticks} | plain,
            one.metrics,
            one.label,
        )
    ]
    draws = count_draws(runs[0].predictions)
    over = "tasks, each with all its draws" if draws > 1 else "tasks"
    method = schema.IntervalMethod(
        f"percentile bootstrap over {over}", LEVEL_PERCENT, RESAMPLES, SEED, draws
    )
    return schema.Evaluation(
        schema.SCHEMA,
        judged.loss,
        judged.headline,
        judged.metrics,
        method,
        tuple(map(_make_facts, runs)),
        judged.groups,
        judged.yardsticks,
        tuple(add_next_command(cautions, runs[0].config, has_statistics=not judged.label)),
        (*notes, *uncalibrated, *unknown),
        judged.label,
        tuple(one for one in others if one.groups),
    )


def _summarise_label(
    runs: Sequence[EvaluatedRun], baselines: Sequence[EvaluatedBaseline], label: str
) -> schema.LabelEvaluation:
    views = select_runs(runs, label)
    label_baselines = [one.drop_unknown() for one in baselines if one.label == label]
    scoring = views[0].scoring
    names = split_names(views[0].predictions)
    return schema.LabelEvaluation(
        label,
        scoring.loss,
        scoring.names[0],
        metric_infos(scoring),
        tuple(_GroupSummariser(name, views, label_baselines, scoring).summary() for name in names),
        tuple(
            schema.BaselineFacts(one.name, one.short_name, one.description, one.chosen)
            for one in label_baselines
        ),
    )


class _GroupSummariser:
    """Summarises one split of all models; a baseline has the stage "after" alone."""

    def __init__(
        self,
        name: str,
        runs: Sequence[EvaluatedRun],
        baselines: Sequence[EvaluatedBaseline],
        scoring: Scoring,
    ) -> None:
        self._name = name
        self._scoring = scoring
        self._infos = metric_infos(scoring)
        self._task_rows = count_task_rows(runs[0].predictions, name)
        models: list[EvaluatedRun | EvaluatedBaseline] = [*runs, *baselines]
        split = {model.name: select_draws(model.predictions, name) for model in models}
        self._draws = {model: draws for model, draws in split.items() if draws[0].task_N.size}
        self._limited = {
            model.name: {most: select_split(table, name) for most, table in model.limited.items()}
            for model in models
        }
        simple = {one.name for one in baselines}
        self._stages = {
            model: schema.STAGES[1:] if model in simple else schema.STAGES for model in self._draws
        }
        self._first = runs[0].name
        first = self._draws[self._first]
        # Only models with the same rows in every draw compare.
        self._comparable = {
            model
            for model, draws in self._draws.items()
            if len(draws) == len(first) and all(map(have_same_rows, draws, first))
        }
        # Kept with their resampled values: each comparison pairs two of them.
        self._measured = {
            (model, stage): measure_metrics(draws, stage, scoring)
            for model, draws in self._draws.items()
            for stage in self._stages[model]
        }

    def summary(self) -> schema.GroupEvaluation:
        """Return all that the report says about this split."""
        # Every draw has as many rows of each task, if the label is always known.
        rows = self._draws[self._first][0]
        support_T = _list_support_sizes(rows)
        return schema.GroupEvaluation(
            name=self._name,
            num_tasks=int(np.unique(rows.task_N).size),
            num_rows=int(rows.task_N.size),
            min_support_rows=int(support_T.min()),
            median_support_rows=float(np.median(support_T)),
            max_support_rows=int(support_T.max()),
            results=tuple(_make_result(*key, measured) for key, measured in self._measured.items()),
            comparisons=tuple(self._compare_all()),
            by_support_rows=tuple(self._make_support_bins(support_T)),
            calibration=tuple(self._calibrate_all()) if self._scoring.loss == "bce" else (),
            by_activity=tuple(self._make_activity_bins()),
            by_support_limit=tuple(self._measure_support_limits()),
            by_draw=tuple(self._measure_draws()) if len(self._draws[self._first]) > 1 else (),
            task_gains=measure_task_gains(self._draws[self._first], self._scoring),
            story=tell_story(rows, self._limited[self._first], self._scoring),
        )

    def _compare_all(self) -> list[schema.Comparison]:
        made = [
            self._compare(run, "after", run, "before")
            for run, stages in self._stages.items()
            if "before" in stages
        ]
        for run, stages in self._stages.items():
            if run != self._first:
                made += [self._compare(self._first, "after", run, stage) for stage in stages]
        return made

    def _compare(
        self, run: str, stage: schema.Stage, minus_run: str, minus_stage: schema.Stage
    ) -> schema.Comparison:
        reason = f"'{minus_run}' was evaluated on other tasks or rows of this group"
        if run == minus_run or minus_run in self._comparable:
            reason = ""
        differences = {}
        own_of, other_of = self._measured[run, stage], self._measured[minus_run, minus_stage]
        for name, info in self._infos.items():
            own, other = own_of[name], other_of[name]
            why = reason or own.reason or other.reason
            differences[name] = (
                schema.Difference(*UNKNOWN, why) if why else compare(own, other, info)
            )
        return schema.Comparison(run, stage, minus_run, minus_stage, differences)

    def _make_support_bins(self, support_T: Ints) -> list[schema.RowsBin]:
        bins = [
            self._make_bin(low, high, partial(_select_support, low, high))
            for low, high in choose_support_bins(support_T)
        ]
        return [one for one in bins if one.num_tasks]

    def _make_activity_bins(self) -> list[schema.RowsBin]:
        """Return the tasks by their number of stored rows; no bins where the runs lack that."""
        if not self._task_rows:
            return []
        tasks_T, rows_T = (np.array(part) for part in zip(*self._task_rows.items(), strict=True))
        return [
            self._make_bin(
                low, high, partial(_select_tasks, tasks_T[_is_between(rows_T, low, high)])
            )
            for low, high in choose_support_bins(rows_T)
        ]

    def _make_bin(
        self, low: int, high: int, chosen: Callable[[SplitRows], Array]
    ) -> schema.RowsBin:
        kept = {
            run: [rows.keep_where(chosen(rows)) for rows in draws]
            for run, draws in self._draws.items()
        }
        first, headline = kept[self._first][0], self._scoring.names[:1]
        measured = {
            (run, stage): measure_metrics(draws, stage, self._scoring, headline)
            for run, draws in kept.items()
            if all(rows.task_N.size for rows in draws)
            for stage in self._stages[run]
        }
        results = tuple(_make_result(*key, metrics) for key, metrics in measured.items())
        num_tasks, num_rows = int(np.unique(first.task_N).size), int(first.task_N.size)
        return schema.RowsBin(low, high, num_tasks, num_rows, results, self._measure_gain(measured))

    def _measure_gain(
        self, measured: Mapping[tuple[str, schema.Stage], Mapping[str, MeasuredMetric]]
    ) -> schema.Difference | None:
        """Return the first run's headline metric, adapted minus before; None if not measured."""
        name = self._scoring.names[0]
        if (self._first, "after") not in measured:
            return None
        own, other = (measured[self._first, stage][name] for stage in ("after", "before"))
        if why := own.reason or other.reason:
            return schema.Difference(*UNKNOWN, why)
        return compare(own, other, self._infos[name])

    def _measure_support_limits(self) -> list[schema.SupportLimit]:
        rows = self._draws[self._first][0]
        limits = []
        for most in sorted(self._limited[self._first]):
            results = [
                _make_result(run, "after", measure_metrics([limited[most]], "after", self._scoring))
                for run, limited in self._limited.items()
                if most in limited and limited[most].task_N.size
            ]
            full = np.unique(rows.task_N[rows.support_rows_N >= most]).size
            limits.append(schema.SupportLimit(most, int(full), tuple(results)))
        return limits

    def _measure_draws(self) -> list[schema.DrawValues]:
        return [
            schema.DrawValues(
                run, stage, {name: tuple(one.by_draw.tolist()) for name, one in measured.items()}
            )
            for (run, stage), measured in self._measured.items()
        ]

    def _calibrate_all(self) -> list[schema.Calibration]:
        made = [
            calibrate(run, _concatenate_draws(draws), stage)
            for run, draws in self._draws.items()
            for stage in self._stages[run]
        ]
        return [one for one in made if one.bins]


def _make_result(
    run: str, stage: schema.Stage, measured: Mapping[str, MeasuredMetric]
) -> schema.StageResult:
    return schema.StageResult(run, stage, {name: one.estimate() for name, one in measured.items()})


def choose_support_bins(support_T: Ints) -> list[tuple[int, int]]:
    """Return inclusive bounds of at most six bins: one a size, or a sixth of the episodes each."""
    sizes, counts = np.unique(support_T, return_counts=True)
    # Few different sizes get a bin each.
    target = 1 if sizes.size <= SUPPORT_BINS else support_T.size / SUPPORT_BINS
    bounds, first, num_in_bin = [], 0, 0
    for last, count in enumerate(counts):
        num_in_bin += int(count)
        # A size never lies in two bins, so a bin may hold more than its sixth.
        if num_in_bin >= target or last == sizes.size - 1:
            bounds.append((int(sizes[first]), int(sizes[last])))
            first, num_in_bin = last + 1, 0
    return bounds


def calibrate(run: str, rows: SplitRows, stage: schema.Stage) -> schema.Calibration:
    """Return predicted against observed probability by bins of equal size; none if diverged."""
    probability_N = rows.prediction_N(stage).astype(np.float64)
    if not np.isfinite(probability_N).all():
        return schema.Calibration(run, stage, math.nan, ())
    inner_shares = np.linspace(0, 1, CALIBRATION_BINS + 1)[1:-1]
    inner_edges = np.unique(np.quantile(probability_N, inner_shares))
    # A value on an edge goes below it, so that equal predictions share a bin.
    bin_N = np.searchsorted(inner_edges, probability_N, side="left")
    code_N = np.unique(rows.task_N, return_inverse=True)[1]
    filled = [index for index in range(inner_edges.size + 1) if (bin_N == index).any()]
    terms = [_make_share_terms(rows.label_N, code_N, bin_N == index) for index in filled]
    # By tasks, as everywhere: the rows of a bin are not independent.
    resampled = bootstrap(terms, RESAMPLES, SEED)
    bins = [
        schema.CalibrationBin(
            float(probability_N[bin_N == index].mean()),
            combine_draws([one], values).estimate(),
            int(np.count_nonzero(bin_N == index)),
        )
        for index, one, values in zip(filled, terms, resampled, strict=True)
    ]
    positives = float(rows.label_N.sum())
    ratio = float(probability_N.sum()) / positives if positives else math.nan
    return schema.Calibration(run, stage, ratio, tuple(bins))


def _make_share_terms(label_N: Array, code_N: Ints, in_bin_N: Array) -> Terms:
    """Return the share of positives among the rows of one bin, as sums over tasks."""
    num_tasks = int(code_N.max()) + 1
    rows_T, positives_T = (sum_T(n, code_N, num_tasks) for n in (in_bin_N, label_N * in_bin_N))
    # In a bin without a positive row every resample is 0, but the true share is not.
    rarer_tasks = min(int(np.count_nonzero(of_T)) for of_T in (positives_T, rows_T - positives_T))
    value = float(positives_T.sum() / rows_T.sum())
    return Terms(value, positives_T, rows_T, rarer_tasks=rarer_tasks)


def _is_between(sizes: Array, low: int, high: int) -> Array:
    return (sizes >= low) & (sizes <= high)


def _select_support(low: int, high: int, rows: SplitRows) -> Array:
    return _is_between(rows.support_rows_N, low, high)


def _select_tasks(tasks_T: Ints, rows: SplitRows) -> Array:
    return np.isin(rows.task_N, tasks_T)


def _concatenate_draws(draws: Sequence[SplitRows]) -> SplitRows:
    columns = zip(*(vars(rows).values() for rows in draws), strict=True)
    return draws[0] if len(draws) == 1 else SplitRows(*map(np.concatenate, columns))


def _list_support_sizes(rows: SplitRows) -> Ints:
    """Return the support sizes of the distinct (task, size) pairs."""
    order_N = np.lexsort((rows.support_rows_N, rows.task_N))
    task_N, support_N = rows.task_N[order_N], rows.support_rows_N[order_N]
    return support_N[find_run_starts(task_N) | find_run_starts(support_N)].astype(np.int64)


def _make_facts(run: EvaluatedRun) -> schema.RunFacts:
    return schema.RunFacts(
        name=run.name,
        algorithm=run.algorithm,
        model=run.model,
        step=run.step,
        dataset=run.dataset,
        evaluated_at=run.evaluated_at,
        samples_per_s=_median_of_log(run, "samples_per_s"),
        data_wait_share=_median_of_log(run, "data_wait_share"),
        config=schema.hide_secrets(run.config),
        environment=schema.hide_secrets(run.environment),
        adapts_with=run.adapts_with,
        fine_tuning=run.fine_tuning,
    )


def _median_of_log(run: EvaluatedRun, key: str) -> float:
    values = [line[key] for line in run.history if isinstance(line.get(key), int | float)]
    return float(np.median(values)) if values else math.nan
