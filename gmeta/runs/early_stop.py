"""Which validation score is the best so far, and when the scores have stopped getting better.

The judgement is part of a run's progress and lies in every checkpoint, so a resumed run stops where
it would have stopped.
"""

import math
from dataclasses import dataclass, replace
from typing import final

from gmeta.config.train_config import TrainConfig
from gmeta.errors import ConfigError
from gmeta.metrics.catalogue import Scoring, label_of, predicted_by
from gmeta.runs.run_progress import RunProgress


@final
@dataclass(frozen=True)
class EarlyStop:
    """`metric` decides; `patience` validations in a row without a better score end the run
    (0: never)."""

    metric: str
    higher_is_better: bool
    patience: int

    def update(self, progress: RunProgress, score: float | None) -> RunProgress:
        """Return the progress after a validation at its step; no undefined score is better."""
        progress = replace(progress, scored_step=progress.step)
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
        """Return a line that says why the run ends."""
        if progress.best_score is None:
            return (
                f"stopped early: {self.metric} was undefined in every validation "
                f"({progress.stale} so far): data.valid_split is too small, or of one class"
            )
        return (
            f"stopped early: after step {progress.best_step} with {self.metric} "
            f"{progress.best_score:.4f} no validation was better, {progress.stale} in a row"
        )


def make_scoring(config: TrainConfig, label: str = "") -> Scoring:
    """Return what is measured of predictions of a label; "" stands for the judged one."""
    judged = Scoring(config.loss_of(), config.evaluation)
    return (
        judged
        if label in ("", config.labels.judged)
        else judged.for_other_label(config.loss_of(label))
    )


def make_early_stop(config: TrainConfig) -> EarlyStop:
    """Return the early stopping that the config asks for."""
    run = config.run
    for key, value in (
        ("early_stop_patience", run.early_stop_patience),
        ("valid_every_steps", run.valid_every_steps),
    ):
        if value and not config.data.valid_splits:
            raise ConfigError(
                f"run.{key} = {value}, but there is no split to score. Set data.valid_split, "
                f"or leave run.{key} out"
            )
    named, label = label_of(run.early_stop_metric)
    scoring = make_scoring(config, label)
    metric = named or scoring.names[0]
    scoring.check("run.early_stop_metric", metric)
    if scoring.is_over_candidates(metric):
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
