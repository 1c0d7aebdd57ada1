"""Small evaluated runs with known properties: adaptation helps, the baseline is weaker."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from gmeta.config.losses import Loss
from gmeta.evaluation.report.evaluated_runs import EvaluatedBaseline, EvaluatedRun
from gmeta.metrics.terms import Array

# N rows

GROUPS = ("user-cold", "item-cold")
ROWS_PER_TASK = 8


def predictions(
    loss: Loss, gain: float = 0.8, groups: Sequence[str] = GROUPS, num_tasks: int = 40,
    support_rows: int = 0,
) -> pa.Table:  # fmt: skip
    """Query rows of tasks with their own taste, of which the adapted model knows the share `gain`.

    `support_rows` 0 gives tasks of 3 to 30 support rows."""
    return pa.concat_tables(
        _group(name, loss, gain, num_tasks, support_rows, seed) for seed, name in enumerate(groups)
    )


def _group(
    name: str, loss: Loss, gain: float, num_tasks: int, support_rows: int, seed: int
) -> pa.Table:
    rng = np.random.default_rng(seed)
    task_N = np.repeat(np.arange(num_tasks) + 1000 * seed, ROWS_PER_TASK)
    size_N = np.repeat(rng.integers(3, 31, num_tasks), ROWS_PER_TASK)
    taste_N = np.repeat(rng.normal(0, 1, num_tasks), ROWS_PER_TASK)
    item_N = rng.normal(0, 1, task_N.size)
    if support_rows:
        size_N = np.full_like(size_N, support_rows)
    label_N, before_N, after_N = _outputs(loss, rng, taste_N, item_N, gain)
    return pa.table(
        {
            "split": pa.array([name] * task_N.size),
            "task": task_N,
            "support_rows": (
                size_N if support_rows == 0 else np.full_like(size_N, support_rows)
            ).astype(np.int32),
            "label": label_N.astype(np.float32),
            "before": before_N.astype(np.float32),
            "after": after_N.astype(np.float32),
        }
    )


def _outputs(
    loss: Loss, rng: np.random.Generator, taste_N: Array, item_N: Array, gain: float
) -> tuple[Array, Array, Array]:
    if loss == "mse":
        label_N = np.clip(np.round(3.5 + taste_N + item_N + rng.normal(0, 0.7, item_N.size)), 1, 5)
        return label_N, 3.5 + 0.6 * item_N, 3.5 + 0.6 * item_N + gain * taste_N
    label_N = (rng.random(item_N.size) < _sigmoid(taste_N + item_N)).astype(np.float64)
    return label_N, _sigmoid(0.6 * item_N), _sigmoid(0.6 * item_N + gain * taste_N)


def _sigmoid(logit_N: Array) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-logit_N)))


def history(loss: Loss, num_lines: int = 100) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl: every tenth holds a validation."""
    name = "mae" if loss == "mse" else "auc"
    lines: list[dict[str, Any]] = []
    for index in range(num_lines):
        line = {"step": 10 * (index + 1), "epoch": index // 10, "loss": 2.0 / (index + 1)}
        line |= {"samples_per_s": 1000.0 + index, "data_wait_share": 0.02}
        lines.append(line | ({"valid": {"other": 1.0, name: 0.5}} if index % 10 == 9 else {}))
    return lines


def run_of(loss: Loss, name: str = "melu-maml", **table: Any) -> EvaluatedRun:
    """A meta-learned run."""
    return EvaluatedRun(
        name=name, algorithm="maml", model="melu", loss=loss, step=1000,
        predictions=predictions(loss, **table), history=history(loss),
        config={"outer": {"loss": loss, "dense_lr": 0.001}, "algorithm": {"name": "maml"}},
        environment={"world_size": 2, "packages": {"torch": "2.13.0"}}, dataset="movielens-1m",
        evaluated_at="2026-11-21 04:05 UTC",
    )  # fmt: skip


def baseline_of(
    loss: Loss, name: str = "plain-dlrm", gain: float = 0.3, **table: Any
) -> EvaluatedRun:
    """Plain training on the same rows, fine-tuned less well."""
    run = run_of(loss, name, gain=gain, **table)
    config = {**run.config, "algorithm": {"name": "none"}}
    return replace(run, algorithm="none", model="dlrm", history=[], config=config)


def with_column(run: EvaluatedRun, name: str, values: Any) -> EvaluatedRun:
    """The run with one column of its predictions replaced."""
    table = run.predictions
    column = table.column_names.index(name)
    return replace(run, predictions=table.set_column(column, name, pa.array(values)))


def yardstick_of(
    loss: Loss, name: str = "bias model", short: str = "bias", gain: float = 0.3
) -> EvaluatedBaseline:
    """A model that knows the share `gain` of the tasks' taste."""
    table = predictions(loss, gain=gain)
    table = table.drop_columns(["before"]).rename_columns(
        ["split", "task", "support_rows", "label", "prediction"]
    )
    return EvaluatedBaseline(name, short, f"{short}, as it was chosen", {"prior": 8.0}, table)
