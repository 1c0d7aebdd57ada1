"""A study: the settings that were tried, their scores, and what is tried next.

Optuna proposes values (a tree-structured Parzen estimator, Bergstra et al., NeurIPS 2011) and
prunes trials by the median (Golovin et al., KDD 2017) or Hyperband (Li et al., JMLR 2018)."""

import json
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, final

from gmeta.config.train_config import TrainConfig, config_from_dict
from gmeta.errors import ConfigError, UserError
from gmeta.platform.files.atomic_write import write_atomically
from gmeta.platform.files.checked_json import read_json
from gmeta.runs.early_stop import EarlyStop
from gmeta.tuning.search_space import Space, replace_values

PrunerName = Literal["median", "hyperband", "none"]
State = Literal["complete", "pruned", "failed", "interrupted"]
# Optuna's journal, one line an event: a study that was killed goes on from it.
JOURNAL_FILE = "journal.log"
STUDY_FILE = "study.json"
# Validations of a trial before it may be pruned, and complete trials before any is pruned.
WARM_UP = 1
STARTUP_TRIALS = 4
# Validations of a run whose config does not say how many: so often it can be pruned, and how many
# in a row without a better score end it.
VALIDATIONS, PATIENCE = 8, 5
# The first trials have the best values so far but for one of these keys, each in its turn: what has
# most often helped. Of a dozen keys drawn at once twenty trials say little.
FIRST_CHANGES = (
    *("model.without", "run.epochs", "algorithm.inner_lr", "outer.dense_lr", "neighbours.column"),
    *("outer.loss", "model.dropout", "model.hidden", "algorithm.plain_epochs"),
    "algorithm.support_prior",
)


@dataclass(frozen=True)
class StudyPlan:
    """What a study tries: `seed` is of its proposals, `dataset` a fingerprint."""

    base: TrainConfig
    space: Space
    pruner: PrunerName
    seed: int
    dataset: str

    def to_json(self) -> dict[str, Any]:
        """Return what must be the same for a study to go on."""
        base = self.base.to_json()
        # Each trial has a folder of its own, so the config's may change.
        base["run"].pop("dir")
        return {
            "dataset": self.dataset,
            "space": {dimension.key: dimension.to_json() for dimension in self.space},
            "pruner": self.pruner,
            "seed": self.seed,
            "config": base,
            # Studies of older releases scored by the last validation: their trials do not compare.
            "score": "gmeta evaluate",
        }


@dataclass(frozen=True)
class Trial:
    """One short run: its values and its outcome."""

    number: int
    values: dict[str, Any]
    state: State
    # Of its validations, None where undefined.
    scores: tuple[float | None, ...]
    # That of `gmeta evaluate` on the same tasks, or the last of `scores` for a run that did not
    # end.
    score: float | None = None
    # How the run adapts for its score, or why it failed.
    note: str = ""


@final
class Study:
    """Proposes trials and stores them; one process at a time may have a study open."""

    def __init__(self, folder: Path, plan: StudyPlan, early_stop: EarlyStop) -> None:
        """Open or begin the study in `folder`, which exists; `early_stop` names the metric."""
        optuna = import_optuna()
        self._plan, self._metric = plan, early_stop
        self._states = optuna.trial.TrialState
        _check_same(folder, plan)
        with warnings.catch_warnings():
            # Optuna warns that Hyperband and constant_liar are experimental.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            journal = folder / JOURNAL_FILE
            _repair_journal(journal)
            backend = optuna.storages.journal.JournalFileBackend(str(journal))
            try:
                storage = optuna.storages.JournalStorage(backend)
                self._study = optuna.create_study(
                    storage=storage,
                    study_name="tune",
                    load_if_exists=True,
                    direction="maximize" if early_stop.higher_is_better else "minimize",
                    pruner=_make_pruner(optuna, plan.pruner),
                )
            except (LookupError, TypeError, ValueError) as error:
                raise _make_damage_error(journal, error) from error
            # With another seed when it goes on: else it would draw its first proposals once more.
            begun = len(self._study.get_trials(deepcopy=False))
            # constant_liar: trials that run side by side must not get nearly the same values.
            self._study.sampler = optuna.samplers.TPESampler(
                n_startup_trials=2 * STARTUP_TRIALS, seed=plan.seed + begun, constant_liar=True
            )
        self._running: dict[int, Any] = {}
        self.interrupted = self._requeue_interrupted()
        if not begun:
            # The config's own values first: the best that is found is then no worse.
            self._enqueue(plan.base.by_key())

    def _requeue_interrupted(self) -> list[int]:
        """Queue the values of trials that a killed study left unfinished; return their numbers."""
        interrupted = []
        queued = [
            trial.system_attrs["fixed_params"] for trial in self._list_trials(self._states.WAITING)
        ]
        for trial in self._list_trials(self._states.RUNNING):
            # The study was killed between the trial's end and its report to Optuna.
            if (state := trial.user_attrs.get("state")) is not None:
                self._tell_optuna(trial.number, state, trial.user_attrs["score"])
                continue
            # As a new trial: a killed one cannot be reopened. One killed as it began may lack some
            # values.
            values = trial.system_attrs.get("fixed_params", {}) | trial.params
            # They are queued already after a kill at this very place.
            if values not in queued:
                self._study.enqueue_trial(values)
            self._study.tell(trial.number, state=self._states.FAIL)
            interrupted.append(trial.number)
        return interrupted

    def _list_trials(self, state: Any) -> list[Any]:
        return list(self._study.get_trials(deepcopy=False, states=(state,)))

    def _enqueue(self, values: Mapping[str, Any]) -> None:
        """Queue a trial with these values, of keys that the space may not have."""
        normalised = {}
        for dimension in self._plan.space:
            value = dimension.normalise(values[dimension.key])
            # A value outside its range cannot be tried: Optuna draws one.
            if value is not None:
                normalised[dimension.key] = value
        if normalised:
            self._study.enqueue_trial(normalised)

    def _enqueue_change(self) -> None:
        """Queue the best values so far with the next of FIRST_CHANGES, if nothing is queued."""
        best, done = self.best_trial(), self._study.user_attrs.get("changed", [])
        values = self._plan.base.by_key() if best is None else best.values
        space = {dimension.key: dimension for dimension in self._plan.space}
        left = (key for key in FIRST_CHANGES if key in space and key not in done)
        key = next((key for key in left if space[key].change(values[key]) is not None), None)
        if key is not None and not self._list_trials(self._states.WAITING):
            self._study.set_user_attr("changed", [*done, key])
            self._enqueue({**values, key: space[key].change(values[key])})

    def propose_trial(self) -> tuple[int, dict[str, Any]]:
        """Return the number of the next trial and the values to train it with."""
        self._enqueue_change()
        trial = self._study.ask()
        values = {dimension.key: dimension.suggest(trial) for dimension in self._plan.space}
        trial.set_user_attr("values", values)
        self._running[trial.number] = trial
        return trial.number, values

    def report_score(self, number: int, step: int, score: float | None) -> bool:
        """Store the score of a trial's validation `step` (from 0); return whether to prune it."""
        trial = self._running[number]
        # In an attribute of ours: Optuna takes no undefined score, and the journal must have it.
        reported_scores = [*trial.user_attrs.get("scores", []), score]
        trial.set_user_attr("scores", reported_scores)
        if score is None:
            return False
        trial.report(score, step)
        return bool(trial.should_prune())

    def finish_trial(
        self, number: int, state: State, note: str = "", score: float | None = None
    ) -> Trial:
        """Store the end of a trial and return it; a complete trial without a score has failed."""
        trial = self._running.pop(number)
        if state == "complete" and score is None:
            state = "failed"
            note = f"{self._metric.metric} is undefined on the validation split"
        if state != "complete":
            score = [None, *trial.user_attrs.get("scores", [])][-1]
        trial.set_user_attr("score", score)
        trial.set_user_attr("note", note)
        # Written last: with a state the trial has ended, whatever is killed next.
        trial.set_user_attr("state", state)
        self._tell_optuna(number, state, score)
        return next(each for each in self.trials() if each.number == number)

    def _tell_optuna(self, number: int, state: State, score: float | None) -> None:
        if state == "complete":
            self._study.tell(number, score)
        else:
            # Not as failed: from failures the sampler learns nothing, and would return to rates
            # that diverge.
            self._study.tell(number, state=self._states.PRUNED)

    def trials(self) -> list[Trial]:
        """Return all trials that ended, in order; those of a killed process as interrupted."""
        return [
            Trial(
                trial.number,
                trial.user_attrs.get("values", {}),
                trial.user_attrs.get("state", "interrupted"),
                tuple(trial.user_attrs.get("scores", ())),
                trial.user_attrs.get("score"),
                trial.user_attrs.get("note", ""),
            )
            for trial in self._study.get_trials(deepcopy=False)
            if trial.state.is_finished()
        ]

    def count_tried(self) -> int:
        """Return how many trials ended or run, without interrupted ones, which are tried anew."""
        num_ended = sum(trial.state != "interrupted" for trial in self.trials())
        return num_ended + len(self._running)

    def rank_trials(self) -> list[Trial]:
        """Return the trials, the best first: complete ones, then pruned, then failed."""
        order = ("complete", "pruned", "failed", "interrupted")
        sign = -1.0 if self._metric.higher_is_better else 1.0

        def place(trial: Trial) -> tuple[int, float, int]:
            worth = math.inf if trial.score is None else sign * trial.score
            return order.index(trial.state), worth, trial.number

        return sorted(self.trials(), key=place)

    def best_trial(self) -> Trial | None:
        """Return the best complete trial; None if no trial is complete."""
        first = next(iter(self.rank_trials()), None)
        return first if first is not None and first.state == "complete" else None

    def score_of_base(self) -> float | None:
        """Return the score of the config's own values; None where no whole trial has them."""
        own, tried = self._plan.base.by_key(), self.rank_trials()
        found = (one for one in tried if all(own[key] == at for key, at in one.values.items()))
        return next((one.score for one in found if one.state == "complete"), None)

    def config(self, values: dict[str, Any]) -> TrainConfig:
        """Return the study's config with these values, as a trial trains it in its own folder."""
        return replace_values(self._plan.base, values)


def import_optuna() -> Any:
    """Return the package optuna, which logs only warnings from here on."""
    try:
        import optuna
    except ImportError as error:
        raise UserError(
            "`gmeta tune` needs the extra: pip install 'gmeta[tune]' (Optuna is not installed)"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _make_pruner(optuna: Any, name: PrunerName) -> Any:
    if name == "median":
        return optuna.pruners.MedianPruner(STARTUP_TRIALS, WARM_UP)
    if name == "hyperband":
        # Its resource is the number of validations.
        return optuna.pruners.HyperbandPruner(min_resource=1, max_resource=VALIDATIONS)
    return optuna.pruners.NopPruner()


def _repair_journal(journal: Path) -> None:
    """Remove what a kill or a full disk leaves in the folder of a journal."""
    # Optuna would wait for the lock, for ever where the path is relative.
    for lock in journal.parent.glob(f"{journal.name}.lock*"):
        lock.unlink()
    if journal.exists():
        # Optuna reads nothing after an incomplete line.
        content = journal.read_bytes()
        os.truncate(journal, content.rfind(b"\n") + 1)


def _check_same(folder: Path, plan: StudyPlan) -> None:
    """Write what the study is about, or raise UserError where it was begun with something else."""
    path = folder / STUDY_FILE
    wanted = plan.to_json()
    if not path.exists():
        write_atomically(path, json.dumps(wanted, indent=2).encode())
        return
    try:
        found = read_json(path)
        begun = config_from_dict(found.get("config", {}), is_saved=True)  # maybe of former keys
    except (ValueError, ConfigError) as error:
        raise _make_damage_error(path, error) from error
    found["config"] = replace(plan, base=begun).to_json()["config"]
    for name, value in wanted.items():
        # Through JSON, so that tuples are lists on both sides.
        if found.get(name) != json.loads(json.dumps(value)):
            which = ", ".join(_find_differing_keys(found.get(name), value)) or name
            raise UserError(
                f"--study {folder} was begun with another {name} ({which}): its trials do not "
                "compare. Give the same command to go on, or another --study"
            )


def _make_damage_error(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is damaged: {error}. Begin another --study")


def _find_differing_keys(found: Any, wanted: Any, prefix: str = "") -> list[str]:
    if not (isinstance(found, dict) and isinstance(wanted, dict)):
        return []
    names = []
    for name in [*wanted, *(name for name in found if name not in wanted)]:
        one, other = found.get(name), json.loads(json.dumps(wanted.get(name)))
        if one != other:
            names += _find_differing_keys(one, other, f"{prefix}{name}.") or [f"{prefix}{name}"]
    return names
