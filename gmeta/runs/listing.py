"""Run folders side by side: what each trains, how far it came, and in which keys they differ."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gmeta.config.train_config import TrainConfig
from gmeta.errors import UserError
from gmeta.metrics.catalogue import Scoring, custom_names, label_of
from gmeta.metrics.own import check_trusted
from gmeta.runs.run_folder import CONFIG_FILE, ENVIRONMENT_FILE, RunFolder

MAX_DEPTH = 3  # folders below the one that is asked for: runs/DATA/NAME, and one more
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
    if _is_run(root):
        yield RunFolder(root)
    elif depth:
        with os.scandir(root) as entries:
            folders = sorted(entry.path for entry in entries if entry.is_dir())
        for folder in folders:
            yield from _iterate_below(Path(folder), depth - 1)


def _is_run(folder: Path) -> bool:
    # An exported model has a config.json, too.
    return (folder / CONFIG_FILE).is_file() and (folder / ENVIRONMENT_FILE).is_file()


def summarise_run(folder: RunFolder) -> RunSummary:
    """Return a run's line."""
    config, history = folder.read_config(), folder.read_metrics()
    # The first, or that of early stopping, decides; to know what is better its code is loaded.
    metric_name = [*config.evaluation.metrics, label_of(config.run.early_stop_metric)[0]]
    check_trusted(folder.root, custom_names(metric_name), folder.read_environment())
    scoring = Scoring(config.loss_of(label_of(config.run.early_stop_metric)[1]), config.evaluation)
    metric, is_better = _choose_early_stop_metric(
        config.run.early_stop_metric, config.labels.judged, scoring
    )
    scored = [
        (line["valid"][metric], line["step"])
        for line in history
        if line.get("valid", {}).get(metric) is not None
    ]
    best = (max if is_better else min)(scored, key=lambda pair: pair[0], default=(None, None))
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


def _choose_early_stop_metric(
    early_stop_metric: str, judged: str, scoring: Scoring
) -> tuple[str, bool]:
    """Return the metric that validation goes by, and whether more of it is better."""
    named, label = label_of(early_stop_metric)
    name = named or scoring.names[0]
    is_other = label not in ("", judged)
    return f"{name}:{label}" if is_other else name, scoring.info(name).higher_is_better


def find_differing_keys(configs: Sequence[TrainConfig]) -> list[tuple[str, list[Any]]]:
    """Return the keys whose values are not the same in all configs, each with its values."""
    resolved = [config.by_key() for config in configs]
    keys = dict.fromkeys(key for config in resolved for key in config)
    by_key = {key: [config.get(key) for config in resolved] for key in keys}
    return [
        (key, values)
        for key, values in by_key.items()
        if key not in NOT_COMPARED and any(value != values[0] for value in values)
    ]
