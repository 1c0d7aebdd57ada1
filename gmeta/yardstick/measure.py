"""The yardstick of an evaluation: what the bias model and the trees predict of the same query rows.

They are made from the training split, a block at a time, and, where the config names any, chosen on
the validation splits, each of which counts alike; in a split that is scored they read no labels but
those of support rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gmeta.batches.views import Shown, View
from gmeta.config import DataConfig
from gmeta.errors import UserError
from gmeta.losses.config import Loss
from gmeta.metrics.labels import ONE_LABEL, ScoredLabel
from gmeta.report.runs import PLACES, EvaluatedYardstick
from gmeta.yardstick import trees
from gmeta.yardstick.bias import BiasModel, choose_bias
from gmeta.yardstick.candidates import Candidates, places_N2
from gmeta.yardstick.features import Known
from gmeta.yardstick.reading import read_rows, sample_rows
from gmeta.yardstick.rows import NO_ITEM, EpisodeRows, Floats, describing_columns, some_of
from gmeta.yardstick.sums import sum_training_rows
from gmeta.yardstick.trees import Trees
from metaio.counted import counted
from metaio.format.dataset import Dataset
from metaio.prepare.raw_ids import item_place, with_raw_ids
from metaio.recipes.carved import sharing_rows

# Whole tasks with about the first number of rows are held in memory, and tasks with the second
# choose the priors: with a million rows of clicks the grid takes a minute.
SAMPLE_ROWS, CHOOSING_ROWS = 500_000, 200_000
# Not that of the run: the yardstick is the same for runs of other seeds.
SEED = 0


@dataclass(frozen=True)
class Yardsticks:
    """What stands beside the runs, and lines about what does not."""

    models: tuple[EvaluatedYardstick, ...]
    notes: tuple[str, ...] = ()


def item_index(dataset: Dataset, name: str) -> int | None:
    """Return which single column is the item; None, for the name "", that it is to be found.

    Raises:
        UserError: there is no such column.
    """
    names = [feature.name for feature in dataset.features.single]
    if name and name not in names:
        raise UserError(
            f"--item-column = {name!r} is no [[single]] column of {dataset.url}: "
            f"it has {', '.join(names) or 'none'}. Name one of them, or leave it out"
        )
    return names.index(name) if name else None


def measure(
    data: DataConfig,
    loss: Loss,
    huber_delta: float,
    dataset: Dataset,
    splits: Sequence[str],
    item_column: str = "",
    with_trees: bool = True,
    shown: Shown = Shown(),  # noqa: B008 - frozen
    on: Dataset | None = None,
    candidates: Candidates | None = None,
    label: ScoredLabel = ONE_LABEL,
) -> Yardsticks:
    """Return the predictions of the bias model and of the trees, made from the rows of `dataset`
    where the label is known, for the query rows of `splits` of `on` (None: of the same dataset), as
    the runs were shown them.

    Raises:
        UserError: there is no such item column.
        FormatError: a file is missing or damaged.
    """
    item = item_index(dataset, item_column)
    train_split, valid_splits = data.train_split, data.valid_splits
    is_own = on is None or on.fingerprint == dataset.fingerprint
    trained = sharing_rows(train_split, dataset) if is_own else ()
    scored = [split for split in splits if split not in trained]
    if not scored:
        return Yardsticks((), (f"no yardstick: it is made from {train_split}, which is scored",))
    read = (rows.of_label(label) for rows in read_rows(dataset, train_split))
    sums = sum_training_rows(read, dataset.features, SEED)
    train = sample_rows(dataset, train_split, SAMPLE_ROWS, SEED).of_label(label)
    valid = [
        sample_rows(dataset, split, SAMPLE_ROWS, SEED).of_label(label) for split in valid_splits
    ]
    judges = [some_of(rows, CHOOSING_ROWS, SEED) for rows in valid or [train]]
    of_label = f" of {label.name}" if label.name else ""
    if not sums.num_rows or any(rows.is_support_N.all() for rows in judges):
        told_on = ", ".join(valid_splits or (train_split,))
        lacking = f"no yardstick{of_label}: {train_split} or {told_on} has no row to learn from"
        return Yardsticks((), (lacking,))
    bias = choose_bias(loss, sums, judges, item, SEED)
    told = _told_bias(dataset, bias, item is None, train, valid_splits)
    asked = _Asked(dataset if on is None else on, dataset, scored, shown, candidates, label)
    tables = _predicted(asked, lambda rows: bias.predict(sums, rows)[~rows.is_support_N])
    found = (EvaluatedYardstick(*told, *tables, label.name),)
    if not with_trees:
        return Yardsticks(found, ("boosted trees: left out, as --no-trees asks",))
    if not trees.available():
        return Yardsticks(found, (trees.MISSING,))
    describing = describing_columns(train, dataset.features, bias.item)
    known = Known(sums, dataset.features, bias, describing)
    is_past = dataset.manifest.support_is_past
    grown = trees.grow(loss, known, train, valid, is_past, SEED, huber_delta)
    if grown is None:
        few = f"boosted trees{of_label}: none, there are too few training tasks"
        return Yardsticks(found, (few,))
    told = _told_trees(grown, valid_splits)
    tables = _predicted(asked, lambda rows: grown.predict(known, rows))
    return Yardsticks((*found, EvaluatedYardstick(*told, *tables, label.name)))


class _Asked(NamedTuple):
    """Which rows a model is asked of."""

    dataset: Dataset
    known: Dataset  # says what the items are called
    splits: Sequence[str]
    shown: Shown
    candidates: Candidates | None
    label: ScoredLabel


def _predicted(
    asked: _Asked, predict: Callable[[EpisodeRows], Floats]
) -> tuple[pa.Table, dict[int, pa.Table]]:
    """Return a row for each query row of each draw, and the same for each number of support rows;
    `predict` gets only those support rows whose label is known."""

    def by_known(rows: EpisodeRows) -> Floats:
        return predict(rows.of_label(asked.label, is_predicted=True))

    def of(view: View) -> pa.Table:
        return with_raw_ids(_predicted_view(asked, view, by_known), asked.dataset, asked.known)

    limited = {most: of(View(max_support=most)) for most in asked.shown.support_sizes}
    return pa.concat_tables([of(View(draw)) for draw in range(asked.shown.draws)]), limited


def _predicted_view(
    asked: _Asked, view: View, predict: Callable[[EpisodeRows], Floats]
) -> pa.Table:
    """Return a row for each query row: split, task, support_rows, label, prediction, draw, the item
    where one is known, and its place among candidates where there are any.
    """
    parts, item = [], item_place(asked.dataset)
    for split in asked.splits:
        for stored in read_rows(asked.dataset, split):
            rows = stored.seen(view)
            query_N, episode_N = ~rows.is_support_N, rows.episode_N
            columns = {
                "split": pa.array([split] * int(np.count_nonzero(query_N)), pa.string()),
                "task": rows.task_T[episode_N][query_N],
                "support_rows": rows.support_lengths_T[episode_N][query_N].astype(np.int32),
                "label": asked.label.label_N(rows.label_N)[query_N].astype(np.float32),
                "draw": np.full(np.count_nonzero(query_N), view.draw, np.int32),
                **_outputs(rows, view, asked.candidates, predict),
            }
            if item is not None:
                columns["item"] = rows.ids_of(item)[query_N]
            parts.append(pa.table(columns))
    return pa.concat_tables(parts)


def _outputs(
    rows: EpisodeRows,
    view: View,
    candidates: Candidates | None,
    predict: Callable[[EpisodeRows], Floats],
) -> dict[str, npt.NDArray[Any]]:
    """Return the prediction of each query row, and its place among candidates if there are any."""
    if candidates is None:
        return {"prediction": predict(rows).astype(np.float32)}
    found, places = [np.zeros(0, np.float32)], [np.zeros((0, 2), np.int32)]
    for listed in candidates.parts(rows, view):
        score_M = predict(listed.rows).astype(np.float32)
        is_sampled_M = listed.is_sampled_M[~listed.rows.is_support_N]
        found.append(score_M[~is_sampled_M])
        places.append(places_N2(score_M, is_sampled_M))
    above_tied = zip(PLACES[2:], np.concatenate(places).T, strict=True)
    return {"prediction": np.concatenate(found), **dict(above_tied)}


def _told_bias(
    dataset: Dataset,
    model: BiasModel,
    was_found: bool,
    train: EpisodeRows,
    valid_splits: Sequence[str],
) -> tuple[str, str, str, dict[str, str | float]]:
    """Return the model's names, a line on how it was chosen, and what was chosen."""
    item = dataset.features.single[model.item].name if model.item != NO_ITEM else ""
    chosen_on = ", ".join(valid_splits) or counted(len(train.task_T), "training task")
    how = "whose means predict best" if was_found else "as asked"
    parts = [f"item ({item}, {how}; prior {model.item_prior:g})"] if item else []
    unit = "" if model.loss != "bce" else ", on log-odds"
    parts.append(f"task (prior {model.task_prior:g})")
    told = f"mean + {' + '.join(parts)}{unit}; priors chosen on {chosen_on}"
    chosen: dict[str, str | float] = {
        "item_column": item,
        "item_prior": model.item_prior,
        "task_prior": model.task_prior,
        "chosen_on": chosen_on,
    }
    return "bias model", "bias", told, chosen


def _told_trees(
    model: Trees, valid_splits: Sequence[str]
) -> tuple[str, str, str, dict[str, str | float]]:
    """Return the model's names, a line on how it was chosen, and what was chosen."""
    chosen_on = ", ".join(valid_splits) or "a held-back fifth of the training tasks"
    setting = model.setting
    told = (
        f"{counted(model.num_trees, 'tree')} of {setting.leaves} leaves of "
        f"{setting.leaf_rows} rows or more at rate {setting.rate:g} on top of the bias model, from "
        f"{model.num_statistics} statistics of support and columns, grown on "
        f"{counted(model.num_rows, 'query row')} drawn of training tasks; the best of "
        f"{counted(model.num_tried, 'setting')} on {chosen_on}"
    )
    chosen: dict[str, str | float] = {
        "num_trees": model.num_trees,
        "leaves": setting.leaves,
        "leaf_rows": setting.leaf_rows,
        "rate": setting.rate,
        "settings_tried": model.num_tried,
        "num_rows": model.num_rows,
        "num_statistics": model.num_statistics,
        "chosen_on": chosen_on,
    }
    return "boosted trees", "trees", told, chosen
