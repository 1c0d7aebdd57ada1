"""The runs and baselines that a report is made from, and the checks of their predictions."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gmeta.config.evaluation import EvaluationConfig
from gmeta.config.losses import Loss
from gmeta.errors import UserError
from gmeta.evaluation.report.evaluation_schema import STAGES, FineTuning, Stage
from gmeta.metrics.catalogue import Scoring, predicts_alike
from gmeta.metrics.terms import Array
from metaio.quantities import format_count

# N rows

# column -> (what its type must be, the check of an Arrow type)
COLUMNS = {
    "split": ("a string", lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind)),
    "task": ("an integer", pa.types.is_integer),
    "support_rows": ("an integer", pa.types.is_integer),
    "label": ("a float", pa.types.is_floating),
    "before": ("a float", pa.types.is_floating),
    "after": ("a float", pa.types.is_floating),
}


# Columns of rank metrics over sampled candidates; a baseline has the last two only.
PLACES = ("before_above", "before_tied", "after_above", "after_tied")
AFTER_PLACES = PLACES[2:]


@dataclass(frozen=True)
class EvaluatedRun:
    """A checkpoint and its predictions on the query rows of unseen tasks.

    Columns of `predictions`: split, task, support_rows (of the episode), label, before and after
    (the output before and after adaptation: a probability for bce, a rating for mse). Optional:
    draw (which draw of support and query rows, from 0), task_rows (stored rows of the task), those
    of PLACES (how many sampled candidates score above a positive row, and how many the same; else
    -1), and names of a row. `limited` holds the predictions by a limit of support rows; `history`
    the lines of metrics.jsonl. With several labels `label` is the judged one, NaN where not known,
    and each of `other_losses` has columns `label:NAME`, `before:NAME` and `after:NAME`."""

    name: str
    algorithm: str
    model: str
    loss: Loss
    step: int
    predictions: pa.Table
    history: Sequence[dict[str, Any]]
    config: dict[str, Any]
    environment: dict[str, Any]
    dataset: str = field(default="")
    evaluated_at: str = field(default="")
    adapts_with: str = field(default="")
    fine_tuning: tuple[FineTuning, ...] = field(default=())
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    limited: dict[int, pa.Table] = field(default_factory=dict)
    label: str = field(default="")
    other_losses: dict[str, Loss] = field(default_factory=dict)
    loss_name: str = field(default="")  # as the config has it: it may be a package's own

    @property
    def scoring(self) -> Scoring:
        """Return how the predictions are measured."""
        return Scoring(self.loss, self.evaluation)

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the labels that it predicts, the judged one first; "" if that has no name."""
        return (self.label, *self.other_losses)

    @property
    def label_logged(self) -> str:
        """Return the suffix of the label's metrics in the log: "" if the config judges by it."""
        is_own = self.label == self.config.get("labels", {}).get("judged", self.label)
        return "" if is_own else self.label

    def select_label(self, label: str) -> "EvaluatedRun":
        """Return the run as if it had this label alone, with the rows where the label is known."""
        scoring, suffix = self.scoring, ""
        if label != self.label:
            scoring, suffix = scoring.for_other_label(self.other_losses[label]), f":{label}"
        return replace(
            self,
            label=label,
            loss=scoring.loss,
            evaluation=scoring.config,
            predictions=drop_unknown_rows(self.predictions, suffix),
            limited={
                most: drop_unknown_rows(table, suffix) for most, table in self.limited.items()
            },
            other_losses={},
        )


@dataclass(frozen=True)
class EvaluatedBaseline:
    """A baseline's predictions of the same query rows, for one label."""

    name: str
    short_name: str
    # A line on what the model is, and the same for machines.
    description: str
    chosen: dict[str, Any]
    # Columns: split, task, support_rows, label, prediction and, as in EvaluatedRun, draw. Rows
    # where the label is not known are there too.
    predictions: pa.Table
    limited: dict[int, pa.Table] = field(default_factory=dict)
    label: str = field(default="")

    def drop_unknown(self) -> "EvaluatedBaseline":
        """Return the baseline with only the rows where its label is known."""
        return replace(
            self,
            predictions=drop_unknown_rows(self.predictions),
            limited={most: drop_unknown_rows(table) for most, table in self.limited.items()},
        )


@dataclass(frozen=True)
class SplitRows:
    """The rows of one model on one split, aligned, in the order of the table."""

    task_N: Array
    support_rows_N: Array
    label_N: Array
    before_N: Array
    after_N: Array
    # Of positive rows, at each stage: sampled candidates above, and with the same score; else -1.
    places_N4: Array

    def prediction_N(self, stage: Stage) -> Array:
        """Return the model's output at a stage."""
        return self.before_N if stage == "before" else self.after_N

    def places_N2(self, stage: Stage) -> Array:
        """Return how many candidates score above each row, and how many the same, at a stage."""
        return self.places_N4[:, :2] if stage == "before" else self.places_N4[:, 2:]

    def keep_where(self, keep_N: Array) -> "SplitRows":
        """Return only the rows that the mask keeps."""
        return SplitRows(*(column[keep_N] for column in vars(self).values()))


def check_runs(runs: Sequence[EvaluatedRun], baseline_names: Sequence[str] = ()) -> None:
    """Raise UserError for runs that cannot be reported: none, equal names, a wrong table."""
    if not runs:
        raise UserError(
            "a report of 0 runs was asked for: at least 1 is needed. Evaluate a run first"
        )
    names = [run.name for run in runs]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise UserError(
            f"{names.count(doubled[0])} runs are called '{doubled[0]}': names must differ to tell "
            "them apart. Give the run or the baseline another name"
        )
    for name in names:
        if name in baseline_names:
            raise UserError(
                f"a run is called '{name}', as a model of the yardstick is: names must differ to "
                "tell them apart. Give the run another name"
            )
    for run in runs:
        _check_table(run)


def select_runs(runs: Sequence[EvaluatedRun], label: str) -> list[EvaluatedRun]:
    """Return the runs that predict `label`, as if they had it alone. Raises UserError."""
    views = []
    for run in runs:
        # A label without a name is compared with the one that other runs are judged by.
        own = run.label if label == runs[0].label and "" in (label, run.label) else label
        if own in run.labels:
            views.append(run.select_label(own))
        elif label == runs[0].label:
            raise UserError(
                f"run '{run.name}' has no label {label}, which '{runs[0].name}' is judged by: it "
                f"has {', '.join(run.labels)}. Compare runs of one label, or name one that both "
                "have with --label"
            )
    of_label = f" of label {label}" if label else ""
    for run in views:
        if not predicts_alike(run.loss, views[0].loss):
            raise UserError(
                f"run '{run.name}' was trained with loss {run.loss}{of_label}, '{views[0].name}' "
                f"with {views[0].loss}: their predictions mean different things. Compare runs of "
                "one loss"
            )
        if run.loss == "bce":
            _check_probabilities(run)
    return views


def split_names(predictions: pa.Table) -> list[str]:
    """Return the splits in the order of their first row."""
    return [str(name) for name in predictions["split"].unique().to_pylist()]


def select_split(predictions: pa.Table, split: str) -> SplitRows:
    """Return the rows of one split; none if the table has none."""
    rows = predictions.filter(pc.equal(predictions["split"], split))
    names = ["task", "support_rows", "label", "before", "after"]
    # A baseline has one prediction, whatever the stage.
    if "prediction" in rows.column_names:
        names[-2:] = ["prediction", "prediction"]
    places = [
        rows[name].to_numpy() if name in rows.column_names else np.full(rows.num_rows, -1)
        for name in PLACES
    ]
    return SplitRows(*[rows[name].to_numpy() for name in names] + [np.stack(places, axis=1)])


def drop_unknown_rows(table: pa.Table, suffix: str = "") -> pa.Table:
    """Return the rows whose label is known, with the columns of the label of this suffix alone."""
    own = {f"{name}{suffix}": name for name in ("label", "before", "after")}
    others = [name for name in table.column_names if name in own.values() or ":" in name]
    kept = [name for name in table.column_names if name in own or name not in others]
    table = table.select(kept).rename_columns([own.get(name, name) for name in kept])
    return table.filter(pc.invert(pc.is_nan(table["label"])))


def count_draws(predictions: pa.Table) -> int:
    """Return how many draws of support and query rows were predicted."""
    if "draw" not in predictions.column_names:
        return 1
    return int(pc.max(predictions["draw"]).as_py()) + 1


def select_draws(predictions: pa.Table, split: str) -> list[SplitRows]:
    """Return the rows of one split, draw by draw."""
    if "draw" not in predictions.column_names:
        return [select_split(predictions, split)]
    of_draw = [
        predictions.filter(pc.equal(predictions["draw"], draw))
        for draw in range(count_draws(predictions))
    ]
    return [select_split(rows, split) for rows in of_draw]


def count_task_rows(predictions: pa.Table, split: str) -> dict[int, int]:
    """Return the stored rows of each task of a split; {} where the table does not have them."""
    if "task_rows" not in predictions.column_names:
        return {}
    rows = predictions.filter(pc.equal(predictions["split"], split))
    tasks, first = np.unique(rows["task"].to_numpy(), return_index=True)
    sizes = rows["task_rows"].to_numpy()[first]
    return dict(zip(tasks.tolist(), sizes.tolist(), strict=True))


def have_same_rows(one: SplitRows, other: SplitRows) -> bool:
    """Return whether both hold the same tasks and labels, in any order, so that they compare."""
    if one.task_N.size != other.task_N.size:
        return False
    # Two runs may have read the split in different orders, with different numbers of ranks.
    order_N = np.lexsort((one.label_N, one.task_N))
    other_order_N = np.lexsort((other.label_N, other.task_N))
    return bool(
        np.array_equal(one.task_N[order_N], other.task_N[other_order_N])
        and np.array_equal(one.label_N[order_N], other.label_N[other_order_N])
    )


def _check_table(run: EvaluatedRun) -> None:
    table = run.predictions
    for name, (wanted, fits) in COLUMNS.items():
        if name not in table.column_names:
            raise UserError(
                f"the predictions of run '{run.name}' have no column '{name}', only "
                f"{', '.join(table.column_names)}: all of {', '.join(COLUMNS)} are needed. "
                "Evaluate the run again"
            )
        if not fits(table.schema.field(name).type):
            raise UserError(
                f"column '{name}' in the predictions of run '{run.name}' is "
                f"{table.schema.field(name).type}: it must be {wanted}. Evaluate the run again"
            )
        if table[name].null_count:
            raise UserError(
                f"column '{name}' in the predictions of run '{run.name}' holds "
                f"{format_count(table[name].null_count, 'null')}: every row needs a value. "
                "Evaluate the run again"
            )
    if table.num_rows == 0:
        raise UserError(
            f"the predictions of run '{run.name}' hold 0 rows: at least one is needed. "
            "Choose a split that has query rows"
        )


def _check_probabilities(run: EvaluatedRun) -> None:
    labels = run.predictions["label"].to_numpy()
    # Fractions are allowed, and trained as such.
    wrong_N = ~((labels >= 0) & (labels <= 1))
    if wrong_N.any():
        raise UserError(
            f"run '{run.name}' was trained with bce but has a label of "
            f"{float(labels[wrong_N][0]):g}: 0 to 1 is allowed. Train on ratings with "
            "outer.loss=mse"
        )
    for stage in STAGES:
        values = run.predictions[stage].to_numpy()
        # NaN passes: a diverged model is reported as such.
        outside = values[(values < 0) | (values > 1)]
        if outside.size:
            raise UserError(
                f"column '{stage}' in the predictions of run '{run.name}' holds "
                f"{float(outside[0]):g}: bce needs probabilities in [0, 1]. "
                "Write the sigmoid of the logit"
            )
