"""From prediction tables to an Evaluation: metrics with intervals, comparisons with verdicts."""

import math
from collections.abc import Sequence

import numpy as np

from gmeta.metrics import Array, Floats, Ints, Loss, MetricInfo, Terms, metric_infos, split_terms
from gmeta.report.cautions import cautions_of
from gmeta.report.evaluation import (
    SCHEMA,
    STAGES,
    Calibration,
    CalibrationBin,
    Comparison,
    Difference,
    Estimate,
    Evaluation,
    Group,
    IntervalMethod,
    Result,
    RunFacts,
    Stage,
    SupportBin,
    Verdict,
    YardstickFacts,
    hide_secrets,
)
from gmeta.report.intervals import LEVEL_PERCENT, Interval, bootstrap_values, percentile_interval
from gmeta.report.runs import (
    EvaluatedRun,
    EvaluatedYardstick,
    SplitRows,
    check_runs,
    rows_of_split,
    same_rows,
    split_names,
    yardstick_rows,
)

# N rows, T tasks, E episodes, B resamples

# The ends of an interval then vary by 2 % of its width: sqrt(p (1 - p) / B) / density at p = 2.5 %.
RESAMPLES = 1000
SEED = 0
SUPPORT_BINS = 6
CALIBRATION_BINS = 10  # deciles, as in Niculescu-Mizil & Caruana 2005


def summarise(
    runs: Sequence[EvaluatedRun],
    yardsticks: Sequence[EvaluatedYardstick] = (),
    notes: Sequence[str] = (),
) -> Evaluation:
    """Evaluate the first run against the others, its baselines, and against the yardsticks, on each
    split that it predicted.

    Raises:
        UserError: the runs cannot be reported or compared; see check_runs.
    """
    check_runs(runs, [one.name for one in yardsticks])
    loss = runs[0].loss
    infos = metric_infos(loss)
    names = split_names(runs[0].predictions)
    groups = tuple(_Group(name, runs, yardsticks, loss).summary() for name in names)
    method = IntervalMethod("percentile bootstrap over tasks", LEVEL_PERCENT, RESAMPLES, SEED)
    return Evaluation(
        SCHEMA,
        loss,
        next(iter(infos)),
        infos,
        method,
        tuple(map(_facts, runs)),
        groups,
        tuple(YardstickFacts(one.name, one.short_name, one.told, one.chosen) for one in yardsticks),
        tuple(one for group in groups for one in cautions_of(group, runs[0].name, infos)),
        tuple(notes),
    )


class _Group:
    """One split of all models: keeps the resampled values, which every comparison takes pairs
    of. A yardstick has the stage "after" alone."""

    def __init__(
        self,
        name: str,
        runs: Sequence[EvaluatedRun],
        yardsticks: Sequence[EvaluatedYardstick],
        loss: Loss,
    ) -> None:
        self._name = name
        self._loss = loss
        self._infos = metric_infos(loss)
        split = {run.name: rows_of_split(run.predictions, name) for run in runs}
        split |= {one.name: yardstick_rows(one.predictions, name) for one in yardsticks}
        self._rows = {run: rows for run, rows in split.items() if rows.task_N.size}
        self._first = runs[0].name
        simple = {one.name for one in yardsticks}
        self._stages = {run: STAGES[1:] if run in simple else STAGES for run in self._rows}
        self._comparable = {
            run for run, rows in self._rows.items() if same_rows(rows, self._rows[self._first])
        }
        self._terms: dict[tuple[str, Stage], dict[str, Terms]] = {}
        self._values: dict[tuple[str, Stage], dict[str, Floats]] = {}
        for run, rows in self._rows.items():
            for stage in self._stages[run]:
                terms = split_terms(rows.label_N, rows.prediction_N(stage), rows.task_N, loss)
                # Equal seeds and task counts give equal draws: values of two runs pair up across
                # these calls.
                values_MB = bootstrap_values(list(terms.values()), RESAMPLES, SEED)
                self._terms[run, stage] = terms
                self._values[run, stage] = dict(zip(terms, values_MB, strict=True))

    def summary(self) -> Group:
        """Return all that the report says about this split."""
        rows = self._rows[self._first]
        support_E = _episode_support_rows(rows)
        return Group(
            name=self._name,
            num_tasks=int(np.unique(rows.task_N).size),
            num_rows=int(rows.task_N.size),
            min_support_rows=int(support_E.min()),
            median_support_rows=float(np.median(support_E)),
            max_support_rows=int(support_E.max()),
            results=tuple(
                self._result(run, stage) for run in self._rows for stage in self._stages[run]
            ),
            comparisons=tuple(self._comparisons()),
            by_support_rows=tuple(self._support_bins(support_E)),
            calibration=tuple(self._calibrations()) if self._loss == "bce" else (),
        )

    def _result(self, run: str, stage: Stage) -> Result:
        values = self._values[run, stage]
        terms = self._terms[run, stage]
        return Result(
            run, stage, {name: _estimate(one, values[name]) for name, one in terms.items()}
        )

    def _comparisons(self) -> list[Comparison]:
        made = [
            self._compare(run, "after", run, "before")
            for run, stages in self._stages.items()
            if "before" in stages
        ]
        for run, stages in self._stages.items():
            if run != self._first:
                made += [self._compare(self._first, "after", run, stage) for stage in stages]
        return made

    def _compare(self, run: str, stage: Stage, minus_run: str, minus_stage: Stage) -> Comparison:
        comparable = run == minus_run or minus_run in self._comparable
        reason = (
            ""
            if comparable
            else f"'{minus_run}' was evaluated on other tasks or rows of this group"
        )
        differences = {}
        for name, info in self._infos.items():
            terms = self._terms[run, stage][name], self._terms[minus_run, minus_stage][name]
            why = reason or terms[0].reason or terms[1].reason
            values = self._values[run, stage][name], self._values[minus_run, minus_stage][name]
            differences[name] = (
                Difference(*_UNKNOWN, why) if why else _difference(terms, values, info)
            )
        return Comparison(run, stage, minus_run, minus_stage, differences)

    def _support_bins(self, support_E: Ints) -> list[SupportBin]:
        bins = []
        for low, high in support_bin_bounds(support_E):
            kept = {run: _within(rows, low, high) for run, rows in self._rows.items()}
            if first := kept[self._first]:
                results = [
                    self._headline(run, rows, stage)
                    for run, rows in kept.items()
                    if rows
                    for stage in self._stages[run]
                ]
                tasks = int(np.unique(first.task_N).size)
                bins.append(SupportBin(low, high, tasks, int(first.task_N.size), tuple(results)))
        return bins

    def _headline(self, run: str, rows: SplitRows, stage: Stage) -> Result:
        name = next(iter(self._infos))
        terms = split_terms(
            rows.label_N, rows.prediction_N(stage), rows.task_N, self._loss, [name]
        )[name]
        return Result(
            run, stage, {name: _estimate(terms, bootstrap_values([terms], RESAMPLES, SEED)[0])}
        )

    def _calibrations(self) -> list[Calibration]:
        made = [
            calibration(run, rows, stage)
            for run, rows in self._rows.items()
            for stage in self._stages[run]
        ]
        return [one for one in made if one.bins]


def support_bin_bounds(support_E: Ints) -> list[tuple[int, int]]:
    """Return inclusive bounds of at most six bins: one a size, or each with a sixth of the
    episodes."""
    sizes, counts = np.unique(support_E, return_counts=True)
    target = 1 if sizes.size <= SUPPORT_BINS else support_E.size / SUPPORT_BINS
    bounds, first, held = [], 0, 0
    for last, count in enumerate(counts):
        held += int(count)
        # A size never lies in two bins, so a bin may hold more than its sixth.
        if held >= target or last == sizes.size - 1:
            bounds.append((int(sizes[first]), int(sizes[last])))
            first, held = last + 1, 0
    return bounds


def calibration(run: str, rows: SplitRows, stage: Stage) -> Calibration:
    """Return predicted against observed probability by bins of equally many rows; none if
    diverged."""
    probability_N = rows.prediction_N(stage).astype(np.float64)
    if not np.isfinite(probability_N).all():
        return Calibration(run, stage, math.nan, ())
    inner_edges = np.unique(
        np.quantile(probability_N, np.linspace(0, 1, CALIBRATION_BINS + 1)[1:-1])
    )
    # A value on an edge goes below it, so that equal predictions share a bin.
    bin_N = np.searchsorted(inner_edges, probability_N, side="left")
    code_N = np.unique(rows.task_N, return_inverse=True)[1]
    filled = [index for index in range(inner_edges.size + 1) if (bin_N == index).any()]
    terms = [_share_terms(rows.label_N, code_N, bin_N == index) for index in filled]
    shares_MB = bootstrap_values(terms, RESAMPLES, SEED)
    bins = [
        CalibrationBin(
            float(probability_N[bin_N == index].mean()),
            _estimate(one, share_B),
            int(np.count_nonzero(bin_N == index)),
        )
        for index, one, share_B in zip(filled, terms, shares_MB, strict=True)
    ]
    positives = float(rows.label_N.sum())
    return Calibration(
        run, stage, float(probability_N.sum()) / positives if positives else math.nan, tuple(bins)
    )


def _share_terms(label_N: Array, code_N: Ints, in_bin_N: Array) -> Terms:
    """Return the share of positives among the rows of one bin, as sums over tasks."""
    num_tasks = int(code_N.max()) + 1
    rows_T = np.bincount(code_N[in_bin_N], minlength=num_tasks).astype(np.float64)
    positives_T = np.bincount(code_N[in_bin_N], label_N[in_bin_N], minlength=num_tasks).astype(
        np.float64
    )
    return Terms(float(positives_T.sum() / rows_T.sum()), positives_T, rows_T)


def _within(rows: SplitRows, low: int, high: int) -> SplitRows | None:
    kept = rows.where((rows.support_rows_N >= low) & (rows.support_rows_N <= high))
    return kept if kept.task_N.size else None


def _episode_support_rows(rows: SplitRows) -> Ints:
    """Return the support sizes of the distinct (task, size) pairs."""
    order_N = np.lexsort((rows.support_rows_N, rows.task_N))
    task_N, support_N = rows.task_N[order_N], rows.support_rows_N[order_N]
    changed_N = np.ones(task_N.size, np.bool_)
    changed_N[1:] = (task_N[1:] != task_N[:-1]) | (support_N[1:] != support_N[:-1])
    return support_N[changed_N].astype(np.int64)


def _estimate(terms: Terms, values_B: Floats) -> Estimate:
    if terms.reason:
        return Estimate(math.nan, math.nan, math.nan, 0, terms.reason)
    interval = percentile_interval(values_B, terms.num_tasks)
    return Estimate(terms.value, interval.low, interval.high, terms.num_tasks, interval.reason)


_UNKNOWN: tuple[float, float, float, Verdict] = (math.nan, math.nan, math.nan, "unknown")


def _difference(
    terms: tuple[Terms, Terms], values: tuple[Floats, Floats], info: MetricInfo
) -> Difference:
    # Equal models whose rows stand in another order differ in the last bits of their sums: no
    # difference.
    difference_B = np.round(values[0] - values[1], 12)
    interval = percentile_interval(difference_B, min(one.num_tasks for one in terms))
    value = terms[0].value - terms[1].value
    return Difference(value, interval.low, interval.high, _verdict(interval, info), interval.reason)


def _verdict(interval: Interval, info: MetricInfo) -> Verdict:
    if interval.reason:
        return "unknown"
    # No resample differs: the two are one model, or one copied onto the other.
    if interval.low == interval.high == 0:
        return "same"
    if interval.low <= 0 <= interval.high:
        return "noise"
    return "better" if (interval.low > 0) == info.higher_is_better else "worse"


def _facts(run: EvaluatedRun) -> RunFacts:
    return RunFacts(
        name=run.name,
        algorithm=run.algorithm,
        model=run.model,
        step=run.step,
        dataset=run.dataset,
        evaluated_at=run.evaluated_at,
        samples_per_s=_median(run, "samples_per_s"),
        data_wait_share=_median(run, "data_wait_share"),
        config=hide_secrets(run.config),
        environment=hide_secrets(run.environment),
        adapts_with=run.adapts_with,
        fine_tuning=run.fine_tuning,
    )


def _median(run: EvaluatedRun, key: str) -> float:
    values = [line[key] for line in run.history if isinstance(line.get(key), int | float)]
    return float(np.median(values)) if values else math.nan
