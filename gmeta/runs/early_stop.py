"""The best validation score so far, and when scores have stopped getting better."""

import math
from dataclasses import dataclass, replace
from typing import final

from gmeta.config.algorithm import PLAIN, AlgorithmConfig
from gmeta.config.train_config import RunConfig, TrainConfig
from gmeta.errors import ConfigError
from gmeta.metrics.catalogue import Scoring, label_of, predicted_by
from gmeta.runs.run_progress import RunProgress


# Part of a run's progress, which checkpoints hold: a resumed run stops where it would have.
@final
@dataclass(frozen=True)
class EarlyStop:
    """Ends a run after `patience` validations in a row without a `metric` better by `min_delta`."""

    metric: str
    higher_is_better: bool
    patience: int

    def update(self, progress: RunProgress, score: float | None) -> RunProgress:
        """Return the progress after a validation; an undefined score is never better."""
        progress = replace(progress, scored_step=progress.step)
        # Undefined: as a validation that was no better.
        if score is None or math.isnan(score):
            return replace(progress, stale=progress.stale + 1)
        sign = 1.0 if self.higher_is_better else -1.0
        best = progress.best_score
        # The very first score is the best so far, however bad.
        if best is not None and sign * (score - best) <= 0:
            return replace(progress, stale=progress.stale + 1)
        return replace(progress, stale=0, best_score=score, best_step=progress.step)

    def is_over(self, progress: RunProgress) -> bool:
        """Return whether the run has waited long enough for a better score."""
        return 0 < self.patience <= progress.stale

    def stop_message(self, progress: RunProgress) -> str:
        """Return the line that says why the run ends."""
        if progress.best_score is None:
            return (
                f"stopped early: {self.metric} was undefined in every validation "
                f"({progress.stale} so far): data.valid_split is too small, or of one class"
            )
        return (
            f"stopped early: after step {progress.best_step} with {self.metric} "
            f"{progress.best_score:.4f} no validation was better, {progress.stale} in a row"
        )


def describe_end(
    early_stop: EarlyStop,
    progress: RunProgress,
    epoch_steps: int,
    run: RunConfig,
    algorithm: AlgorithmConfig,
) -> list[str]:
    """Return the lines on why a run of `epoch_steps` an epoch ended, and where its best lies."""
    lines = []
    is_last_best = progress.best_step == progress.scored_step == progress.step
    if early_stop.is_over(progress):
        lines.append(early_stop.stop_message(progress))
    elif progress.best_step and is_last_best and progress.epoch >= run.epochs > 1:
        lines.append(
            f"ended by run.epochs = {run.epochs} while {early_stop.metric} still got better: more "
            "epochs may be better yet"
        )
    if progress.best_score is not None and progress.best_step == 0 < progress.step:
        lines.append(
            f"the best {early_stop.metric} is that of {run.start_from}, with whose weights this "
            f"run began: {algorithm.name} made nothing better"
        )
    plain_steps = algorithm.plain_epochs * epoch_steps * (algorithm.name != PLAIN)
    if run.keep_best and 0 < progress.best_step <= plain_steps < progress.step:
        lines.append(
            f"the best {early_stop.metric}, of step {progress.best_step}, lies in the "
            f"{algorithm.plain_epochs} plain epochs: {algorithm.name} made nothing better. Lower "
            "algorithm.inner_lr, or train plainly and fine-tune (algorithm.name = none)"
        )
    return lines


def make_scoring(config: TrainConfig, label: str = "") -> Scoring:
    """Return the metrics of predictions of a label; "" stands for the judged one."""
    judged = Scoring(config.loss_of(), config.evaluation)
    return (
        judged
        if label in ("", config.labels.judged)
        else judged.for_other_label(config.loss_of(label))
    )


def describe_choices(
    scoring: Scoring, early_stop: EarlyStop, valid_splits: tuple[str, ...], standardises: bool,
    loss_name: str = "",
) -> str:  # fmt: skip
    """Return the line that says by what a run was trained and chosen, and is compared now."""
    kept = f"checkpoints by {early_stop.metric} of {', '.join(valid_splits)}, " * bool(valid_splits)
    units = " of standardised labels" * standardises
    return (
        f"judged by: {scoring.names[0]}; trained with {loss_name or scoring.loss}{units}, "
        f"{kept}inner rates by {scoring.measure}, trees fitted to {scoring.fitted_loss}"
    )


def make_early_stop(config: TrainConfig) -> EarlyStop:
    """Return the early stopping of the config."""
    run = config.run
    for key, value in (
        ("early_stop_patience", run.early_stop_patience),
        ("valid_every_steps", run.valid_every_steps),
    ):
        # Without an effect they would hide a forgotten valid_split.
        if value and not config.data.valid_splits:
            raise ConfigError(
                f"run.{key} = {value}, but there is no split to score. Set data.valid_split, "
                f"or leave run.{key} out"
            )
    named, label = label_of(run.early_stop_metric)
    scoring = make_scoring(config, label)
    metric = named or scoring.names[0]
    scoring.check("run.early_stop_metric", metric)
    if scoring.is_over_candidates(metric) and not config.evaluation.ranks_all:
        raise ConfigError(
            f"the metric of early stopping is {metric}, over evaluation.candidates = "
            f"{config.evaluation.candidates}: that takes as many predictions a row, which gmeta "
            "evaluate alone makes. Name another in run.early_stop_metric, e.g. "
            f"{'mae' if predicted_by(scoring.loss) == 'rating' else 'auc'}"
        )
    is_other = label not in ("", config.labels.judged)
    return EarlyStop(
        f"{metric}:{label}" if is_other else metric,
        scoring.info(metric).higher_is_better,
        run.early_stop_patience,
    )
