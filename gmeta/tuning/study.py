"""A study: which settings were tried, how they scored, which are tried next. Held in a folder by
Optuna's journal, one line an event, so that a killed study goes on.

Optuna proposes (a tree-structured Parzen estimator, Bergstra et al., NeurIPS 2011) and says which
trials are not worth their end: median pruning (Golovin et al., KDD 2017) or Hyperband (Li et al.,
JMLR 2018).
"""

import json
import math
import os
import warnings
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
JOURNAL_FILE = "journal.log"
STUDY_FILE = "study.json"
# Validations of a trial before it may be pruned, and whole trials before any is.
WARM_UP = 1
STARTUP_TRIALS = 4
# A run's validations, where its config does not say how many.
VALIDATIONS = 8


@dataclass(frozen=True)
class StudyPlan:
    """What a study tries; `seed` is that of its proposals, `dataset` a fingerprint."""

    base: TrainConfig
    space: Space
    pruner: PrunerName
    seed: int
    dataset: str

    def to_json(self) -> dict[str, Any]:
        """Return what must be the same for a study to go on; the config's run.dir need not."""
        base = self.base.to_json()
        base["run"].pop("dir")
        return {
            "dataset": self.dataset,
            "space": {dimension.key: dimension.to_json() for dimension in self.space},
            "pruner": self.pruner,
            "seed": self.seed,
            "config": base,
            "score": "gmeta evaluate",  # it was once the last validation's
        }


@dataclass(frozen=True)
class Trial:
    """One short run: its settings and its outcome. `scores` are those of its validations, None
    where undefined, `score` is that of `gmeta evaluate` on the same tasks, or the last of `scores`
    for a run that did not end; `note` says how it adapts for that score, or why it failed."""

    number: int
    values: dict[str, Any]
    state: State
    scores: tuple[float | None, ...]
    score: float | None = None
    note: str = ""


@final
class Study:
    """Proposes trials and remembers them; one process at a time has a study open."""

    def __init__(self, folder: Path, plan: StudyPlan, best_trial: EarlyStop) -> None:
        """Open the study in `folder`, which exists, or begin it there; `best` says which metric
        decides."""
        optuna = import_optuna()
        self._plan, self._metric = plan, best_trial
        self._states = optuna.trial.TrialState
        _check_same(folder, plan)
        with warnings.catch_warnings():
            # Hyperband and the like are called experimental.
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
                    direction="maximize" if best_trial.higher_is_better else "minimize",
                    pruner=_make_pruner(optuna, plan.pruner),
                )
            except (LookupError, TypeError, ValueError) as error:
                raise _make_damage_error(journal, error) from error
            # A study that goes on must not draw its first proposals once more.
            begun = len(self._study.get_trials(deepcopy=False))
            self._study.sampler = optuna.samplers.TPESampler(
                n_startup_trials=2 * STARTUP_TRIALS, seed=plan.seed + begun, constant_liar=True
            )
        self._running: dict[int, Any] = {}
        self.interrupted = self._requeue_interrupted()
        if not begun:
            self._enqueue_base_values()

    def _requeue_interrupted(self) -> list[int]:
        """Have the trials that a killed study left unfinished tried anew; return their numbers."""
        interrupted = []
        queued = [
            trial.system_attrs["fixed_params"] for trial in self._list_trials(self._states.WAITING)
        ]
        for trial in self._list_trials(self._states.RUNNING):
            if (state := trial.user_attrs.get("state")) is not None:  # killed after its end
                self._tell_optuna(trial.number, state, trial.user_attrs["score"])
                continue
            # The same values as a new trial: a killed one cannot be reopened. One that was killed
            # as it began may not have drawn all of them yet.
            values = trial.system_attrs.get("fixed_params", {}) | trial.params
            if values not in queued:  # as after a kill at this very place
                self._study.enqueue_trial(values)
            self._study.tell(trial.number, state=self._states.FAIL)
            interrupted.append(trial.number)
        return interrupted

    def _list_trials(self, state: Any) -> list[Any]:
        return list(self._study.get_trials(deepcopy=False, states=(state,)))

    def _enqueue_base_values(self) -> None:
        """Have the config's own values tried first: the best found is then no worse."""
        normalised = {}
        for dimension in self._plan.space:
            value = dimension.normalise(self._plan.base.by_key()[dimension.key])
            if value is not None:
                normalised[dimension.key] = value
        if normalised:
            self._study.enqueue_trial(normalised)

    def propose_trial(self) -> tuple[int, dict[str, Any]]:
        """Return the number of the next trial and the values that it is to be trained with."""
        trial = self._study.ask()
        values = {dimension.key: dimension.suggest(trial) for dimension in self._plan.space}
        trial.set_user_attr("values", values)
        self._running[trial.number] = trial
        return trial.number, values

    def report_score(self, number: int, step: int, score: float | None) -> bool:
        """Take the score of a trial's validation number `step` (from 0); return whether the trial
        is to be pruned."""
        trial = self._running[number]
        # Kept by our own attribute: Optuna takes no undefined score, and the journal must have it.
        reported_scores = [*trial.user_attrs.get("scores", []), score]
        trial.set_user_attr("scores", reported_scores)
        if score is None:
            return False
        trial.report(score, step)
        return bool(trial.should_prune())

    def finish_trial(
        self, number: int, state: State, note: str = "", score: float | None = None
    ) -> Trial:
        """Take the end of a trial and return it; a complete one without a score has failed."""
        trial = self._running.pop(number)
        if state == "complete" and score is None:
            state = "failed"
            note = f"{self._metric.metric} is undefined on the validation split"
        if state != "complete":
            score = [None, *trial.user_attrs.get("scores", [])][-1]
        trial.set_user_attr("score", score)
        trial.set_user_attr("note", note)
        trial.set_user_attr("state", state)  # last: with it a trial has ended
        self._tell_optuna(number, state, score)
        return next(each for each in self.trials() if each.number == number)

    def _tell_optuna(self, number: int, state: State, score: float | None) -> None:
        if state == "complete":
            self._study.tell(number, score)
        else:
            # Not as failed: the proposals learn nothing from a failure, and would come back to
            # rates that diverge.
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
        """Return how many trials ended or run; an interrupted one is tried anew and not counted."""
        finish_trial = sum(trial.state != "interrupted" for trial in self.trials())
        return finish_trial + len(self._running)

    def rank_trials(self) -> list[Trial]:
        """Return the trials, the best first: complete ones, then pruned, then failed."""
        order = ("complete", "pruned", "failed", "interrupted")
        sign = -1.0 if self._metric.higher_is_better else 1.0

        def place(trial: Trial) -> tuple[int, float, int]:
            worth = math.inf if trial.score is None else sign * trial.score
            return order.index(trial.state), worth, trial.number

        return sorted(self.trials(), key=place)

    def best_trial(self) -> Trial | None:
        """Return the best complete trial; None as long as none is complete."""
        first = next(iter(self.rank_trials()), None)
        return first if first is not None and first.state == "complete" else None

    def config(self, values: dict[str, Any]) -> TrainConfig:
        """Return the study's config with these values: what a trial trains, but for its folder."""
        return replace_values(self._plan.base, values)


def import_optuna() -> Any:
    """Return the package optuna, which logs nothing below warnings from here on."""
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
        return optuna.pruners.HyperbandPruner(min_resource=1, max_resource=VALIDATIONS)
    return optuna.pruners.NopPruner()


def _repair_journal(journal: Path) -> None:
    """Remove what a kill or a full disk leaves: Optuna's lock, for which it would wait, for ever
    where the path is relative, and the beginning of a line, behind which it reads no other."""
    for lock in journal.parent.glob(f"{journal.name}.lock*"):
        lock.unlink()
    if journal.exists():
        content = journal.read_bytes()
        os.truncate(journal, content.rfind(b"\n") + 1)


def _check_same(folder: Path, plan: StudyPlan) -> None:
    """Write what the study is of, or compare it with what it was begun with. Raise UserError where
    that is something else."""
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
        # There and back, so that tuples are lists on both sides.
        if found.get(name) != json.loads(json.dumps(value)):
            which = ", ".join(_find_differing_keys(found.get(name), value)) or name
            raise UserError(
                f"--study {folder} was begun with another {name} ({which}): its trials do not "
                "compare. Give the same command to go on, or another --study"
            )


def _make_damage_error(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is damaged: {error}. Begin another --study")


def _find_differing_keys(found: Any, wanted: Any, prefix: str = "") -> list[str]:
    """Return the keys in which two nested dicts differ."""
    if not (isinstance(found, dict) and isinstance(wanted, dict)):
        return []
    names = []
    for name in [*wanted, *(name for name in found if name not in wanted)]:
        one, other = found.get(name), json.loads(json.dumps(wanted.get(name)))
        if one != other:
            names += _find_differing_keys(one, other, f"{prefix}{name}.") or [f"{prefix}{name}"]
    return names
