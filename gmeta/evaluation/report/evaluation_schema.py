"""The schema of evaluation.json, from which the page, the charts and the console table are made.

Version gmeta.evaluation/1 is these dataclasses as JSON objects, field by field. An undefined number
is null, beside its `reason`. A version may gain fields; renaming or dropping one makes a new
version."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from gmeta.config.algorithm import PLAIN
from gmeta.config.losses import Loss
from gmeta.metrics.metric_info import MetricInfo

SCHEMA = "gmeta.evaluation/1"
Stage: TypeAlias = Literal["before", "after"]
STAGES: tuple[Stage, Stage] = ("before", "after")
Verdict: TypeAlias = Literal["better", "worse", "noise", "same", "unknown"]
# Later digits depend on the order in which the linear algebra library adds.
SIGNIFICANT_DIGITS = 9
SECRET_WORDS = ("secret", "password", "token", "credential", "api_key", "access_key", "private_key")


@dataclass(frozen=True)
class MetricEstimate:
    """A metric with its 95 % interval over tasks."""

    value: float
    low: float
    high: float
    # Of tasks that count: for GAUC those with both classes, for AUC and PR-AUC with the rarer
    # class.
    num_tasks: int
    reason: str


@dataclass(frozen=True)
class Difference:
    """A paired difference of two metrics."""

    value: float
    low: float
    high: float
    # `better` or `worse` where the interval excludes 0, `noise` where it does not, `same` for equal
    # models, `unknown` without an interval.
    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class StageResult:
    """The metrics of a run at a stage: before or after adapting on the support set."""

    run: str
    stage: Stage
    metrics: dict[str, MetricEstimate]


@dataclass(frozen=True)
class Comparison:
    """The metrics of (run, stage) minus those of (minus_run, minus_stage), on the same rows."""

    run: str
    stage: Stage
    minus_run: str
    minus_stage: Stage
    metrics: dict[str, Difference]


@dataclass(frozen=True)
class RowsBin:
    """Tasks with min_rows to max_rows rows (support, or stored), and their headline metric."""

    min_rows: int
    max_rows: int
    num_tasks: int
    num_rows: int
    results: tuple[StageResult, ...]
    # The first run, adapted, minus the same before adapting.
    gain: Difference | None = None

    @property
    def label(self) -> str:
        """Return `13`, or `13 to 20` with a dash."""
        low, high = self.min_rows, self.max_rows
        return str(low) if low == high else f"{low}\N{EN DASH}{high}"


@dataclass(frozen=True)
class SupportLimit:
    """All tasks of a group on the same query rows, adapted on at most `max_support_rows` rows."""

    max_support_rows: int
    # Tasks with that many support rows.
    num_tasks_full: int
    results: tuple[StageResult, ...]


@dataclass(frozen=True)
class TaskGains:
    """By how much adapting lowers each task's mean loss, as a histogram; above 0 is better."""

    loss: str  # logloss or mae
    # Gains beyond the first or last of the edges are counted in the bin at that end.
    edges: tuple[float, ...]
    num_tasks_in_bin: tuple[int, ...]
    share_better: float
    share_worse: float
    median: float


@dataclass(frozen=True)
class TaskStory:
    """A task's query rows, predicted after 0, 1, 3, ... of its support rows were shown."""

    task: int
    labels: tuple[float, ...]
    support_rows: tuple[int, ...]
    predictions: tuple[tuple[float, ...], ...]  # for each number of support rows


@dataclass(frozen=True)
class DrawValues:
    """The metrics of a run at a stage, draw by draw; the first one is the data as stored."""

    run: str
    stage: Stage
    metrics: dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class CalibrationBin:
    """Rows of similar predicted probability: their mean against their share of positives."""

    mean_probability: float
    positive_share: MetricEstimate
    num_rows: int


@dataclass(frozen=True)
class Calibration:
    """Bins of about equally many rows; `predicted_over_observed` of the means is 1 if unbiased."""

    run: str
    stage: Stage
    predicted_over_observed: float
    bins: tuple[CalibrationBin, ...]


@dataclass(frozen=True)
class GroupEvaluation:
    """One split (a cold-start group); support sizes are over distinct pairs of task and size."""

    name: str
    num_tasks: int
    num_rows: int
    min_support_rows: int
    median_support_rows: float
    max_support_rows: int
    results: tuple[StageResult, ...]
    comparisons: tuple[Comparison, ...]
    by_support_rows: tuple[RowsBin, ...]
    calibration: tuple[Calibration, ...]
    by_activity: tuple[RowsBin, ...] = ()
    by_support_limit: tuple[SupportLimit, ...] = ()
    by_draw: tuple[DrawValues, ...] = ()
    task_gains: TaskGains | None = None
    story: TaskStory | None = None

    def result(self, run: str, stage: Stage) -> StageResult | None:
        """Return a run's result at a stage; None if the run predicted nothing for this group."""
        return next((one for one in self.results if (one.run, one.stage) == (run, stage)), None)

    def comparison(
        self, run: str, stage: Stage, minus_run: str, minus_stage: Stage
    ) -> Comparison | None:
        """Return (run, stage) minus (minus_run, minus_stage); None if that was not compared."""
        wanted = (run, stage, minus_run, minus_stage)
        for one in self.comparisons:
            if (one.run, one.stage, one.minus_run, one.minus_stage) == wanted:
                return one
        return None


@dataclass(frozen=True)
class TriedSetting:
    """A setting of the inner loop, and the metric that it reached."""

    inner_lr: float
    inner_steps: int
    value: float


@dataclass(frozen=True)
class FineTuning:
    """How an inner loop was chosen: the best of `tried` by a metric on tasks of a split."""

    split: str
    num_tasks: int
    metric: str
    # One setting, or two: the first half of the tasks adapts as the second half chose, and the
    # other way round.
    chosen: tuple[TriedSetting, ...]
    tried: tuple[TriedSetting, ...]


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run."""

    name: str
    algorithm: str
    model: str
    step: int
    dataset: str
    evaluated_at: str
    # Medians of the run's log, NaN if it is empty.
    samples_per_s: float
    data_wait_share: float
    config: dict[str, Any]
    environment: dict[str, Any]
    # A line on an inner loop that is not the config's.
    adapts_with: str = ""
    fine_tuning: tuple[FineTuning, ...] = ()

    def stage_label(self, stage: Stage) -> str:
        """Return the stage in words."""
        if self.algorithm == PLAIN:
            return "as trained" if stage == "before" else "fine-tuned"
        return "before adaptation" if stage == "before" else "adapted"


@dataclass(frozen=True)
class BaselineFacts:
    """A baseline; its results are those of the stage "after"."""

    name: str
    short_name: str
    # A line on what it is and how it was chosen, and the same for machines.
    told: str
    chosen: dict[str, Any]


@dataclass(frozen=True)
class Caution:
    """What a reader must not miss: the first run, adapted, is worse than `minus_run` in a group."""

    group: str
    # Itself before adapting, a baseline, or a plain run, fine-tuned.
    minus_run: str
    metrics: tuple[str, ...]
    text: str
    # `buy|click` is conditional: its rows are those where click is 1.
    label: str = ""


@dataclass(frozen=True)
class IntervalMethod:
    """How the intervals were made."""

    method: str
    level_percent: float
    resamples: int
    seed: int
    draws: int = 1  # of support and query rows; every metric is its mean over them


@dataclass(frozen=True)
class LabelEvaluation:
    """The evaluation of another label, on the rows where it is known."""

    label: str
    loss: Loss
    headline: str
    metrics: dict[str, MetricInfo]
    groups: tuple[GroupEvaluation, ...]
    yardsticks: tuple[BaselineFacts, ...]


@dataclass(frozen=True)
class Evaluation:
    """A run, the first of `runs`, and its baselines, the others."""

    schema: str
    loss: Loss
    headline: str
    metrics: dict[str, MetricInfo]
    interval: IntervalMethod
    runs: tuple[RunFacts, ...]
    groups: tuple[GroupEvaluation, ...]
    yardsticks: tuple[BaselineFacts, ...] = ()
    cautions: tuple[Caution, ...] = ()
    # Lines on missing baselines.
    notes: tuple[str, ...] = ()
    label: str = ""
    # All is about `label`, "" if it has no name; these are the others.
    labels: tuple[LabelEvaluation, ...] = ()

    def select_label(self, other: LabelEvaluation) -> "Evaluation":
        """Return the evaluation of another label, as if it were the only one."""
        return dataclasses.replace(self, **vars(other), cautions=(), notes=(), labels=())


def evaluation_to_json(evaluation: Evaluation) -> dict[str, Any]:
    """Return the evaluation as JSON values, without NaN and digits in which machines differ."""
    plain: dict[str, Any] = _to_plain_json(dataclasses.asdict(evaluation))
    return plain


def hide_secrets(value: Any) -> Any:
    """Return the nested config without the values of secrets."""
    if isinstance(value, dict):
        return {
            key: "(hidden)"
            # By the key alone, as a value does not show that it is a secret: reports are passed
            # around.
            if any(word in str(key).lower() for word in SECRET_WORDS)
            else hide_secrets(item)
            for key, item in value.items()
        }
    return [hide_secrets(item) for item in value] if isinstance(value, list | tuple) else value


def _to_plain_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _to_plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain_json(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else None
    return value
