"""Which settings are tried: keys of a config, each with a range or a list of choices."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from gmeta.config.algorithm import PLAIN
from gmeta.config.former_keys import MOVED
from gmeta.config.train_config import TrainConfig, config_from_dict, types_of_keys
from gmeta.errors import ConfigError, UserError
from gmeta.runs.early_stop import make_early_stop
from gmeta_keys import read_toml

# Values are rounded to this many digits: a validation split cannot distinguish more.
DIGITS = 3
# Keys that no space may name, each with the reason: scores would not compare, or each trial has a
# value of its own.
FIXED_KEYS = {
    "data.path": "all trials are scored on the same data",
    "data.increment": "all trials are scored on the same data",
    "data.train_split": "all trials are trained on the same tasks",
    "data.valid_split": "all trials are scored on the same tasks",
    "data.eval_splits": "trials are never scored on them",
    "data.service": "a trial reads the dataset itself",
    "data.source": "a trial reads the dataset itself",
    "run.dir": "each trial has a folder of its own in the study",
    "run.start_from": "all trials begin alike",
    "run.continue_from": "all trials begin alike",
    "run.skip_increments": "all trials begin alike",
    "run.seed": "the luckiest seed is no better setting",
    "run.early_stop_metric": "all trials are compared by one metric",
}


@final
@dataclass(frozen=True)
class SearchRange:
    """Numbers from `low` to `high`, both included; with `log` drawn evenly by their logarithm."""

    key: str
    low: float
    high: float
    log: bool
    whole: bool

    def suggest(self, trial: Any) -> Any:
        """Return the value that an Optuna trial is to take, rounded to DIGITS."""
        if self.whole:
            return trial.suggest_int(self.key, int(self.low), int(self.high), log=self.log)
        value = trial.suggest_float(self.key, self.low, self.high, log=self.log)
        # Rounding may leave the range, whose ends may have more digits.
        return min(max(_round_digits(value), self.low), self.high)

    def normalise(self, value: Any) -> Any:
        """Return a value as a study stores it; None outside the range."""
        return value if self.low <= value <= self.high else None

    def bounds(self) -> list[Any]:
        """Return the values that a config must allow: the ends."""
        return [int(end) if self.whole else end for end in (self.low, self.high)]

    def change(self, value: float) -> Any:
        """Return a value well away from another, a third if three times it is outside; or None."""
        kind, ends = int if self.whole else float, (self.low, self.high)
        found = (kind(at) for at in (value * 3, value / 3) if ends[0] <= at <= ends[1])
        return next((at for at in found if at != value), None)

    def find_edge(self, value: float) -> str:
        """Return which end of the range a value is near (within a twentieth), "" for neither."""
        if not self.whole:
            share = self.place(value)
            return "lowest" if share < 0.05 else "highest" if share > 0.95 else ""
        return ""

    def place(self, value: float) -> float:
        """Return how far along the range a value lies, from 0 to 1."""
        scale = math.log if self.log else float
        low, high = scale(self.low), scale(self.high)
        return (scale(value) - low) / (high - low)

    def to_json(self) -> dict[str, Any]:
        """Return the range as the TOML table has it."""
        low, high = self.bounds()
        return {"low": low, "high": high, "log": self.log}


@final
@dataclass(frozen=True)
class SearchChoices:
    """One of several values, of any type that the key takes."""

    key: str
    values: tuple[Any, ...]

    def suggest(self, trial: Any) -> Any:
        """Return the value that an Optuna trial is to take."""
        # As JSON: Optuna's categories are plain values, and a choice may be a list.
        return json.loads(trial.suggest_categorical(self.key, [*map(json.dumps, self.values)]))

    def normalise(self, value: Any) -> Any:
        """Return a value as a study stores it; None if it is no choice."""
        # As the choice is written: a file may have 3 for 3.0, which Optuna takes for another
        # category.
        return next((json.dumps(each) for each in self.values if _are_equal(each, value)), None)

    def bounds(self) -> list[Any]:
        """Return the values that a config must allow: all of them."""
        return list(self.values)

    def change(self, value: Any) -> Any:
        """Return the last choice, or the first in place of the last."""
        return self.values[0 if _are_equal(self.values[-1], value) else -1]

    def find_edge(self, value: Any) -> str:
        """Return "": choices have no order."""
        return ""

    def place(self, value: Any) -> float:
        """Return where a choice lies among all of them, from 0 to 1."""
        at = next(at for at, each in enumerate(self.values) if _are_equal(each, value))
        return at / (len(self.values) - 1)

    def to_json(self) -> dict[str, Any]:
        """Return the choices as the TOML table has them."""
        return {"choices": list(self.values)}


Dimension = SearchRange | SearchChoices
Space = tuple[Dimension, ...]


def replace_values(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """Return the config with other values of some keys. Raises ConfigError for one not allowed."""
    raw = config.to_json()
    for key, value in values.items():
        *sections, name = key.split(".")
        keys = raw
        for section in sections:
            keys = keys[section]
        keys[name] = value
    return config_from_dict(raw)


def read_space(path: Path, config: TrainConfig) -> Space:
    """Return the space of a TOML file: `["section.key"]` with low, high and log, or choices."""
    raw = read_toml("--space", path, ConfigError)
    if not raw:
        raise UserError(
            f"--space {str(path)!r} names 0 keys: at least one is needed. Write e.g. "
            '["algorithm.inner_lr"] with low = 0.01, high = 1.0, log = true'
        )
    space = tuple(_parse_dimension(MOVED.get(key, key), entry) for key, entry in raw.items())
    _check_used(space, config.algorithm.name)
    check_space(space, config)
    return space


def _check_used(space: Space, algorithm: str) -> None:
    """Raise UserError for a key without effect on training, as the inner rate of plain runs."""
    choices = {one.key: one.values for one in space if isinstance(one, SearchChoices)}
    names = choices.get("algorithm.name", (algorithm,))
    for dimension in space:
        # Trials that differ in it alone would be the same training.
        if all(dimension.key in UNUSED_KEYS.get(name, ()) for name in names):
            raise UserError(
                f"--space has {dimension.key}, by which algorithm.name = {names[0]!r} does not "
                "train: trials that differ in it would be the same. Remove it"
            )


def check_space(space: Space, config: TrainConfig) -> None:
    """Raise ConfigError where the config does not take an end of a range, or a choice."""
    for dimension in space:
        for value in dimension.bounds():
            replace_values(config, {dimension.key: value})


def make_plain_config(config: TrainConfig) -> TrainConfig:
    """Return the config without an inner loop, in a run folder of its own."""
    if config.algorithm.name == PLAIN:
        raise UserError(
            f"--with-plain tunes plain training beside the config, and algorithm.name = {PLAIN!r} "
            "is plain training. Leave --with-plain out"
        )
    values = {"algorithm.name": PLAIN, "run.dir": f"{config.run.dir}-plain"}
    return replace_values(config, values)


def make_plain_space(space: Space) -> Space:
    """Return the space without the keys that have no effect on a plain config."""
    left_out = ("algorithm.name", *UNUSED_KEYS[PLAIN])
    kept = tuple(dimension for dimension in space if dimension.key not in left_out)
    if not kept:
        raise UserError(
            f"--space names {', '.join(one.key for one in space)} alone: nothing is left to tune "
            'plain training by. Add e.g. ["outer.dense_lr"], or leave --with-plain out'
        )
    return kept


def check_metric(space: Space, config: TrainConfig) -> None:
    """Raise ConfigError for a space in which trials would be compared by different metrics."""
    metric = make_early_stop(config).metric
    for dimension in space:
        for value in dimension.bounds():
            # Clicks are judged by AUC and ratings by MAE, say: a choice of the loss may change the
            # metric.
            other = make_early_stop(replace_values(config, {dimension.key: value})).metric
            if other != metric:
                raise ConfigError(
                    f"--space {dimension.key} = {value!r} is judged by {other}, the config by "
                    f"{metric}: the scores do not compare. Remove it, or set run.early_stop_metric"
                )


def _parse_dimension(key: str, entry: Any) -> Dimension:
    kind = _find_type(key, entry)
    if key in FIXED_KEYS:
        raise UserError(f"--space has {key}, which is not tuned: {FIXED_KEYS[key]}. Remove it")
    known = ("low", "high", "log", "choices")
    if unknown := [name for name in entry if name not in known]:
        raise UserError(
            f"--space {key} has {unknown[0]!r}: known are {', '.join(known)}. Correct it"
        )
    if "choices" in entry:
        values = entry["choices"]
        if len(entry) > 1 or not isinstance(values, list) or len(values) < 2:
            raise UserError(
                f"--space {key} = {entry!r}: choices are a list of at least 2 values, without low, "
                "high or log. Correct it"
            )
        return SearchChoices(key, tuple(values))
    low, high, log = entry.get("low"), entry.get("high"), entry.get("log", False)
    if kind not in (int, float):
        raise UserError(
            f"--space {key} is no number, so it has no range. Write choices = [...] instead"
        )
    # bool is a subclass of int: true would pass for 1.
    numbers = int if kind is int else (int, float)
    are_numbers = all(isinstance(end, numbers) and not isinstance(end, bool) for end in (low, high))
    if not (are_numbers and isinstance(log, bool)):
        wanted = "whole numbers" if kind is int else "numbers"
        raise UserError(
            f"--space {key} = {entry!r}: low and high must be {wanted}, log true or false. "
            "Correct it"
        )
    if not (low < high and math.isfinite(low) and math.isfinite(high)) or (log and low <= 0):
        allowed = "0 < low < high with log = true" if log else "low < high"
        raise UserError(f"--space {key} = {entry!r}: {allowed} is needed. Correct the range")
    whole = kind is int
    low, high = (low, high) if whole else (float(low), float(high))
    return SearchRange(key, low, high, log, whole)


def _find_type(key: str, entry: Any) -> Any:
    section, dot, name = key.partition(".")
    if not isinstance(entry, dict) or (not dot and "choices" not in entry and "low" not in entry):
        raise UserError(
            f"--space {key} = {entry!r} is no table of one key. Write the key in quotes: "
            f'["{key}.KEY"] with low and high, or choices'
        )
    types = types_of_keys()
    if key in types:
        return types[key]
    table, _, option = name.partition(".")
    # An option of a model or an algorithm from outside, which checks it itself.
    if table == "options" and option:
        bounds = entry.get("low"), entry.get("high")
        return int if all(isinstance(end, int) for end in bounds) else float
    # The config's own message, which names the nearest key.
    config_from_dict({section: {name: None}} if dot else {section: None})
    raise ConfigError(f"{key} is unknown. `gmeta config` lists every key")


# Algorithms that take no inner step.
FORWARD_ONLY = ("encoder",)
# A plain run takes no inner step either: how it is fine-tuned is chosen as it is scored.
_INNER_STEP_KEYS = ("algorithm.inner_lr", "algorithm.inner_steps")
# By which keys an algorithm does not train.
UNUSED_KEYS = {
    PLAIN: ("algorithm.plain_epochs", *_INNER_STEP_KEYS),
    **dict.fromkeys(FORWARD_ONLY, _INNER_STEP_KEYS),
}


def _are_equal(one: Any, other: Any) -> bool:
    # True equals 1 in Python, but not in a config.
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def make_log_range(key: str, low: float, high: float) -> SearchRange:
    """Return a range of a rate, its ends rounded."""
    return SearchRange(key, _round_digits(low), _round_digits(high), True, False)


def _round_digits(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
