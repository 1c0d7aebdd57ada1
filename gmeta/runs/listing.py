"""Run folders side by side: algorithm, model, progress, and the keys in which they differ."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gmeta.config.train_config import TrainConfig
from gmeta.errors import UserError
from gmeta.runs.early_stop import make_early_stop
from gmeta.runs.run_folder import CONFIG_FILE, ENVIRONMENT_FILE, RunFolder
from gmeta.runs.trusted_names import read_trusted_config

MAX_DEPTH = 3  # folders below the given one: runs/DATA/NAME, and one more
NOT_COMPARED = ("run.dir",)  # never the same


@dataclass(frozen=True)
class RunSummary:
    """A run's line; None where nothing was logged yet."""

    run: str
    algorithm: str
    model: str
    data: str
    step: int | None
    loss: float | None  # of the last reading
    metric: str  # that validation goes by
    best: float | None  # of all validations
    best_step: int | None
    scores: dict[str, float | None]  # all metrics of that validation
    logged_s: float | None  # when the last line was written, seconds since 1970


def find_runs(root: Path) -> Iterator[RunFolder]:
    """Yield the run folders at or below `root`, in the order of their paths."""
    if not root.is_dir():
        raise UserError(f"{root} is no folder. Give a run folder, or one with runs below it")
    yield from _iterate_below(root, MAX_DEPTH)


def _iterate_below(root: Path, depth: int) -> Iterator[RunFolder]:
    # An exported model has a config.json, too.
    if (root / CONFIG_FILE).is_file() and (root / ENVIRONMENT_FILE).is_file():
        yield RunFolder(root)
    elif depth:
        with os.scandir(root) as entries:
            # Sorted: scandir's order is the file system's.
            folders = sorted(entry.path for entry in entries if entry.is_dir())
        for folder in folders:
            yield from _iterate_below(Path(folder), depth - 1)


def summarise_run(folder: RunFolder) -> RunSummary:
    """Return a run's line."""
    # The first metric, or that of early stopping, decides; its code says what is better.
    config, history = read_trusted_config(folder), folder.read_metrics()
    early_stop = make_early_stop(config)
    metric = early_stop.metric
    scored = [
        (line["valid"][metric], line["step"])
        for line in history
        if line.get("valid", {}).get(metric) is not None
    ]
    best = (max if early_stop.higher_is_better else min)(
        scored, key=lambda pair: pair[0], default=(None, None)
    )
    valid = {line["step"]: line["valid"] for line in history if line.get("valid")}
    losses = [line["loss"] for line in history if line.get("loss") is not None]
    return RunSummary(
        run=str(folder.root),
        algorithm=config.algorithm.name,
        model=config.model.name,
        data=config.data.path,
        step=max((line["step"] for line in history), default=None),
        loss=losses[-1] if losses else None,
        metric=metric,
        best=best[0],
        best_step=best[1],
        scores=valid.get(best[1], {}),
        logged_s=folder.metrics.stat().st_mtime if history else None,
    )


def find_differing_keys(configs: Sequence[TrainConfig]) -> list[tuple[str, list[Any]]]:
    """Return the keys whose values differ between configs, each with its values."""
    resolved = [config.by_key() for config in configs]
    keys = dict.fromkeys(key for config in resolved for key in config)
    by_key = {key: [config.get(key) for config in resolved] for key in keys}
    return [
        (key, values)
        for key, values in by_key.items()
        if key not in NOT_COMPARED and any(value != values[0] for value in values)
    ]
