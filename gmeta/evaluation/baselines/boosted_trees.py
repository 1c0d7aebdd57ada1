"""Gradient-boosted trees (LightGBM) on statistics of support and item, on top of the bias model.

Trained on the query rows of training tasks, with the loss of the run beside them; leaves, rows of a
leaf, rate and number of trees are chosen on validation tasks, or a fifth of the training tasks.
Shape suffixes: T tasks, N rows, X all inputs side by side"""

import importlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gmeta.config.losses import Loss
from gmeta.data.row_groups import find_groups, redraw_groups
from gmeta.data.sums import NUM_FOLDS
from gmeta.evaluation.baselines.bias_model import to_predictions
from gmeta.evaluation.baselines.episode_rows import (
    DRAW_STREAM,
    MASK_STREAM,
    Bools,
    EpisodeRows,
    Floats,
    hash_uniform,
)
from gmeta.evaluation.baselines.training_sums import NO_FOLD, assign_folds
from gmeta.evaluation.baselines.tree_features import Statistics, StatisticsMaker
from gmeta.metrics.catalogue import LIST_LOSSES
from metaio.hashing import splitmix64
from metaio.ragged import Int64, offsets, places

OBJECTIVES: dict[str, dict[str, Any]] = {
    "bce": {"objective": "binary", "metric": "binary_logloss"},
    "mse": {"objective": "regression", "metric": "l2"},
    "huber": {"objective": "huber", "metric": "huber"},
    "mae": {"objective": "regression_l1", "metric": "l1"},
}
# A ranking loss has no objective here: predictions of the label rank as scores do.
OBJECTIVES |= dict.fromkeys(LIST_LOSSES, OBJECTIVES["mse"])
# For clicks with fractions among them, which "binary" would take for 1.
FRACTIONS = {"objective": "cross_entropy", "metric": "cross_entropy"}
# One key after the other, each with the best of those before; the first value of a key stands until
# it is that key's turn.
GRID = {"leaves": (7, 15, 31, 63), "leaf_rows": (50, 20, 200), "rate": (0.1, 0.03)}
MAX_TREES = 1_000
PATIENCE_TREES = 30
# Trees that are grown to choose the number of threads.
TRIED_TREES = 5
# Query rows to grow trees on: the support of each task is drawn again until there are so many.
WANTED_ROWS, MAX_DRAWS = 100_000, 10
# Share of training rows whose item is treated as a new one, as the items of cold splits are.
UNSEEN_SHARE = 0.2
# deterministic, force_row_wise: the same trees with any number of threads. boost_from_average: they
# start from the bias model's output.
FIXED = {
    "verbosity": -1,
    "deterministic": True,
    "force_row_wise": True,
    "seed": 0,
    "feature_fraction": 0.8,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "boost_from_average": False,
    "feature_pre_filter": False,
}
MISSING = "boosted trees: they need the extra, pip install 'gmeta[lightgbm]'"


@dataclass(frozen=True)
class TreeSetting:
    """The parameters that trees are grown with."""

    leaves: int = 7
    leaf_rows: int = 50
    rate: float = 0.1


@dataclass(frozen=True)
class BoostedTrees:
    """A grown model and the setting that was chosen for it, out of `num_tried`."""

    loss: Loss
    booster: Any
    setting: TreeSetting
    num_tried: int
    num_trees: int
    num_rows: int
    num_statistics: int

    def predict(self, known: StatisticsMaker, rows: EpisodeRows) -> Floats:
        """Return the predictions of the query rows of unseen tasks: probabilities for bce."""
        given = known.make_statistics(rows, np.full(rows.num_rows, NO_FOLD))
        raw_N = self.booster.predict(given.values_NX, raw_score=True) if self.num_trees else 0.0
        return to_predictions(self.loss, given.start_N + raw_N)


def is_available() -> bool:
    """Return whether LightGBM can be imported."""
    try:
        importlib.import_module("lightgbm")
    # OSError: LightGBM's library finds no OpenMP.
    except (ImportError, OSError):
        return False
    return True


def grow_trees(
    loss: Loss,
    known: StatisticsMaker,
    train: EpisodeRows,
    valid: Sequence[EpisodeRows],
    support_is_past: bool,
    seed: int,
    huber_delta: float = 1.0,
    in_groups: bool = False,
    grid: Mapping[str, Sequence[float]] = GRID,
    max_trees: int = MAX_TREES,
) -> BoostedTrees | None:
    """Return trees grown on `train`, chosen by the mean loss of the groups `valid`."""
    library = importlib.import_module("lightgbm")
    training_set, is_held_back_N = make_training_statistics(
        known, train, support_is_past, seed, in_groups
    )
    if not valid:
        # Without validation tasks one fold of the training tasks judges.
        fitted = _filter_statistics(training_set, ~is_held_back_N)
        judges = [_filter_statistics(training_set, is_held_back_N)]
    else:
        folds = [assign_folds(rows.task_T, seed)[rows.episode_N] for rows in valid]
        fitted = training_set
        judges = [known.make_statistics(*one) for one in zip(valid, folds, strict=True)]
    if not all(len(rows.label_N) for rows in (fitted, *judges)):
        # One of both sides has no query row.
        return None
    data = _make_dataset(library, fitted)
    # Every group has the same weight, however many rows it has.
    sizes = np.array([len(rows.label_N) for rows in judges])
    weight_N = np.repeat(1.0 / sizes, sizes)
    validation_set = _make_dataset(library, _concatenate_statistics(judges), data, weight_N)
    is_fraction = loss == "bce" and bool((training_set.label_N % 1 != 0).any())
    objective = FRACTIONS if is_fraction else OBJECTIVES[loss]
    # "huber" alone reads alpha.
    objective = objective | {"alpha": huber_delta}
    objective = objective | {"num_threads": _choose_threads(library, objective, data)}
    found: dict[TreeSetting, tuple[float, int]] = {}
    best = TreeSetting()
    # One key after the other: seven settings, not twenty-four, as each is a training of its own.
    for key, values in grid.items():
        for value in values:
            changed: dict[str, Any] = {key: value}
            setting = replace(best, **changed)
            if setting not in found:
                found[setting] = _grow_once(
                    library, objective, data, validation_set, setting, max_trees
                )
        best = min(found, key=lambda one: found[one][0])
    num_trees = found[best][1]
    # With all training tasks, those that judged among them.
    booster = library.train(
        _make_parameters(objective, best),
        _make_dataset(library, training_set),
        num_boost_round=num_trees,
    )
    num_statistics = training_set.values_NX.shape[1]
    return BoostedTrees(
        loss, booster, best, len(found), num_trees, len(training_set.label_N), num_statistics
    )


def make_training_statistics(
    known: StatisticsMaker,
    train: EpisodeRows,
    support_is_past: bool,
    seed: int,
    in_groups: bool = False,
) -> tuple[Statistics, Bools]:
    """Return the statistics of all draws' query rows, and which of them are of held-back tasks."""
    num_query = int((~train.is_support_N).sum())
    num_draws = min(max(WANTED_ROWS // max(num_query, 1), 1), MAX_DRAWS)
    parts, held_back = [], []
    for draw in range(num_draws):
        rows = redraw_support(train, draw, support_is_past, seed, in_groups)
        fold_N = assign_folds(rows.task_T, seed)[rows.episode_N]
        unseen_N = hash_uniform(_hash_places_N(rows), MASK_STREAM, seed + draw) < UNSEEN_SHARE
        parts.append(known.make_statistics(rows, fold_N, unseen_N))
        held_back.append((fold_N == NUM_FOLDS - 1)[~rows.is_support_N])
    return _concatenate_statistics(parts), np.concatenate(held_back)


def _concatenate_statistics(parts: Sequence[Statistics]) -> Statistics:
    return Statistics(
        np.concatenate([part.values_NX for part in parts]),
        np.concatenate([part.start_N for part in parts]),
        np.concatenate([part.label_N for part in parts]),
        parts[0].names,
    )


def redraw_support(
    rows: EpisodeRows, draw: int, support_is_past: bool, seed: int, in_groups: bool = False
) -> EpisodeRows:
    """Return the episodes with other support and query rows; draw 0 has the stored ones.
    `in_groups`: groups of find_groups stay whole, and are counted in place of rows."""
    if draw == 0:
        return rows
    group_N = find_groups(rows) if in_groups else np.arange(rows.num_rows)
    if not support_is_past:
        # Rows in no order are shuffled, and as many of them are support as before.
        draw_N = hash_uniform(_hash_places_N(rows), DRAW_STREAM, seed + draw)
        return rows.reorder(*redraw_groups(rows, group_N, draw_N))
    starts = offsets(np.bincount(group_N))
    tasks, supports = rows.episode_N[starts[:-1]], rows.is_support_N[starts[:-1]]
    groups_T, supporting_T = (
        np.bincount(tasks, weights, len(rows.task_T)).astype(np.int64)
        for weights in (None, supports)
    )
    share_T = hash_uniform(rows.task_T, DRAW_STREAM, seed + draw)
    # Where support is the past it ends earlier, after a random row, and as many rows follow as
    # before: a draw may not look ahead.
    earlier_T = (share_T * supporting_T).astype(np.int64)
    # At least one support row where there was one.
    earlier_T += supporting_T > 0
    ends_T = offsets(groups_T)[:-1] + earlier_T
    lengths_T = starts[ends_T + groups_T - supporting_T] - rows.row_offsets_T1[:-1]
    return rows.select_first_rows(lengths_T, starts[ends_T] - rows.row_offsets_T1[:-1])


def _hash_places_N(rows: EpisodeRows) -> Int64:
    """Return a number for each row that depends only on its task and its place there."""
    within_N = places(np.diff(rows.row_offsets_T1))
    mixed_N: Int64 = splitmix64(rows.task_T.astype(np.uint64)).view(np.int64)[rows.episode_N]
    return mixed_N + within_N


def _filter_statistics(given: Statistics, keep_N: Bools) -> Statistics:
    return replace(
        given,
        values_NX=given.values_NX[keep_N],
        start_N=given.start_N[keep_N],
        label_N=given.label_N[keep_N],
    )


def _make_dataset(
    library: Any, given: Statistics, like: Any = None, weight_N: Floats | None = None
) -> Any:
    """Return statistics as a LightGBM dataset, with the bins of `like` if given."""
    return library.Dataset(
        given.values_NX, given.label_N, init_score=given.start_N, reference=like,
        weight=weight_N, free_raw_data=False, params=FIXED,
    )  # fmt: skip


def _make_parameters(objective: dict[str, Any], setting: TreeSetting) -> dict[str, Any]:
    chosen = {
        "num_leaves": setting.leaves,
        "min_data_in_leaf": setting.leaf_rows,
        "learning_rate": setting.rate,
    }
    return {**FIXED, **objective, **chosen}


def _choose_threads(library: Any, objective: dict[str, Any], data: Any) -> int:
    """Return 1, or 0 for all cores, whichever is faster here and now; the trees are the same."""
    data.construct()
    # Beside other work threads wait for each other: that took twenty times as long.
    seconds = dict.fromkeys((1, 0), 0.0)
    for threads in seconds:
        parameters = _make_parameters(objective | {"num_threads": threads}, TreeSetting())
        began_s = time.perf_counter()
        library.train(parameters, data, num_boost_round=TRIED_TREES)
        seconds[threads] = time.perf_counter() - began_s
    return min(seconds, key=lambda threads: seconds[threads])


def _grow_once(
    library: Any,
    objective: dict[str, Any],
    data: Any,
    against: Any,
    setting: TreeSetting,
    max_trees: int,
) -> tuple[float, int]:
    booster = library.train(
        _make_parameters(objective, setting),
        data,
        num_boost_round=max_trees,
        valid_sets=[against],
        callbacks=[library.early_stopping(PATIENCE_TREES, verbose=False)],
    )
    ((_, value),) = booster.best_score["valid_0"].items()
    return float(value), int(booster.best_iteration)
