"""Predicts the query rows of an evaluation with the bias model and the trees."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gmeta.config.inputs import LabelPrior, NeighboursConfig
from gmeta.config.losses import Loss
from gmeta.config.train_config import DataConfig
from gmeta.data.support_views import EvalProtocol, SupportView
from gmeta.errors import UserError
from gmeta.evaluation.baselines import boosted_trees as trees
from gmeta.evaluation.baselines import episode_rows
from gmeta.evaluation.baselines.bias_model import BiasModel, choose_bias
from gmeta.evaluation.baselines.block_rows import read_rows, sample_rows
from gmeta.evaluation.baselines.boosted_trees import BoostedTrees
from gmeta.evaluation.baselines.candidates import Candidates, rank_among_candidates_N2
from gmeta.evaluation.baselines.training_sums import sum_training_rows
from gmeta.evaluation.baselines.tree_features import StatisticsMaker, TreeNeighbours
from gmeta.evaluation.report.evaluated_runs import PLACES, EvaluatedBaseline
from gmeta.metrics.scored_label import ONE_LABEL, ScoredLabel
from metaio.format.dataset import Dataset
from metaio.prepare.episodes.raw_ids import find_item_feature, with_raw_ids
from metaio.quantities import format_count
from metaio.recipes.validation_splits import find_overlapping_splits

# Rows of the tasks that are held in memory, and of those that choose the priors: with a million
# rows of clicks the grid takes a minute.
SAMPLE_ROWS, CHOOSING_ROWS = 500_000, 200_000
# Not the run's seed: the baselines are the same for runs of other seeds.
SEED = 0


@dataclass(frozen=True)
class Baselines:
    """The models beside the runs, and a line on each that is missing."""

    models: tuple[EvaluatedBaseline, ...]
    notes: tuple[str, ...] = ()


def find_item_index(dataset: Dataset, name: str) -> int | None:
    """Return the index of the single-id column that is the item; None for "": it is to be found."""
    names = [feature.name for feature in dataset.features.single]
    if name and name not in names:
        raise UserError(
            f"--item-column = {name!r} is no [[single]] column of {dataset.url}: "
            f"it has {', '.join(names) or 'none'}. Name one of them, or leave it out"
        )
    return names.index(name) if name else None


def predict_baselines(
    data: DataConfig,
    loss: Loss,
    huber_delta: float,
    dataset: Dataset,
    splits: Sequence[str],
    item_column: str = "",
    with_trees: bool = True,
    protocol: EvalProtocol = EvalProtocol(),  # noqa: B008 - frozen
    on: Dataset | None = None,
    candidates: Candidates | None = None,
    label: ScoredLabel = ONE_LABEL,
    neighbours: NeighboursConfig = NeighboursConfig(),  # noqa: B008 - frozen
) -> Baselines:
    """Return what models of `dataset` predict for query rows of `splits` of `on` (or of itself)."""
    item = find_item_index(dataset, item_column)
    train_split, valid_splits = data.train_split, data.valid_splits
    # No split of another dataset was trained on.
    is_own = on is None or on.fingerprint == dataset.fingerprint
    trained = find_overlapping_splits(train_split, dataset) if is_own else ()
    scored_splits = [split for split in splits if split not in trained]
    if not scored_splits:
        return Baselines((), (f"no yardstick: it is made from {train_split}, which is scored",))
    # Of the splits that are scored only the labels of support rows are read, as by the runs.
    read = (rows.select_label(label) for rows in read_rows(dataset, train_split))
    sums = sum_training_rows(read, dataset.features, SEED)
    train = sample_rows(dataset, train_split, SAMPLE_ROWS, SEED).select_label(label)
    valid = [
        sample_rows(dataset, split, SAMPLE_ROWS, SEED).select_label(label) for split in valid_splits
    ]
    judges = [episode_rows.sample_about(rows, CHOOSING_ROWS, SEED) for rows in valid or [train]]
    of_label = f" of {label.name}" if label.name else ""
    if not sums.num_rows or any(rows.is_support_N.all() for rows in judges):
        split_names = ", ".join(valid_splits or (train_split,))
        lacking = f"no yardstick{of_label}: {train_split} or {split_names} has no row to learn from"
        return Baselines((), (lacking,))
    bias = choose_bias(loss, sums, judges, item, SEED)
    description = _describe_bias(dataset, bias, item is None, train, valid_splits)
    request = _PredictionRequest(
        dataset if on is None else on, dataset, scored_splits, protocol, candidates, label
    )
    tables = _predict_views(request, lambda rows: bias.predict(sums, rows)[~rows.is_support_N])
    found = (EvaluatedBaseline(*description, *tables, label.name),)
    if not with_trees:
        return Baselines(found, ("boosted trees: left out, as --no-trees asks",))
    if not trees.is_available():
        return Baselines(found, (trees.MISSING,))
    describing = episode_rows.find_item_columns(train, dataset.features, bias.item)
    read = (rows.select_label(label) for rows in read_rows(dataset, train_split))
    prior = LabelPrior(sums.mean, LabelPrior.of(train.label_N).deviation)
    near = TreeNeighbours.count(read, dataset.features, neighbours, prior, SEED)
    known = StatisticsMaker(sums, dataset.features, bias, describing, near)
    is_past, in_groups = dataset.manifest.support_is_past, dataset.features.draws_negatives
    grown = trees.grow_trees(loss, known, train, valid, is_past, SEED, huber_delta, in_groups)
    if grown is None:
        few = f"boosted trees{of_label}: none, there are too few training tasks"
        return Baselines(found, (few,))
    description = _describe_trees(grown, valid_splits)
    tables = _predict_views(request, lambda rows: grown.predict(known, rows))
    return Baselines((*found, EvaluatedBaseline(*description, *tables, label.name)))


class _PredictionRequest(NamedTuple):
    dataset: Dataset
    # Its vocabularies say what the items are called.
    trained_dataset: Dataset
    splits: Sequence[str]
    protocol: EvalProtocol
    candidates: Candidates | None
    label: ScoredLabel


def _predict_views(
    request: _PredictionRequest, predict: Callable[[episode_rows.EpisodeRows], episode_rows.Floats]
) -> tuple[pa.Table, dict[int, pa.Table]]:
    """Return a row for each query row of each draw, and the same by limit of support rows."""

    def predict_known(rows: episode_rows.EpisodeRows) -> episode_rows.Floats:
        # Support rows whose label is not known teach nothing.
        return predict(rows.select_label(request.label, is_predicted=True))

    def predict_view(view: SupportView) -> pa.Table:
        predicted = _predict_view(request, view, predict_known)
        return with_raw_ids(predicted, request.dataset, request.trained_dataset)

    draws, limited = request.protocol.views(request.dataset.features.draws_negatives)
    of_sizes = {most: predict_view(view) for most, view in limited.items()}
    return pa.concat_tables(map(predict_view, draws)), of_sizes


def _predict_view(
    request: _PredictionRequest,
    view: SupportView,
    predict: Callable[[episode_rows.EpisodeRows], episode_rows.Floats],
) -> pa.Table:
    """Return a row for each query row, as EvaluatedBaseline has them."""
    parts, item = [], find_item_feature(request.dataset)
    for split in request.splits:
        for stored in read_rows(request.dataset, split):
            rows = stored.apply_view(view)
            query_N, episode_N = ~rows.is_support_N, rows.episode_N
            columns = {
                "split": pa.array([split] * int(np.count_nonzero(query_N)), pa.string()),
                "task": rows.task_T[episode_N][query_N],
                "support_rows": rows.support_lengths_T[episode_N][query_N].astype(np.int32),
                "label": request.label.label_N(rows.label_N)[query_N].astype(np.float32),
                "draw": np.full(np.count_nonzero(query_N), view.draw, np.int32),
                **_predict_rows(rows, view, request.candidates, predict),
            }
            if item is not None:
                columns["item"] = rows.ids_of(item)[query_N]
            parts.append(pa.table(columns))
    return pa.concat_tables(parts)


def _predict_rows(
    rows: episode_rows.EpisodeRows,
    view: SupportView,
    candidates: Candidates | None,
    predict: Callable[[episode_rows.EpisodeRows], episode_rows.Floats],
) -> dict[str, npt.NDArray[Any]]:
    if candidates is None:
        return {"prediction": predict(rows).astype(np.float32)}
    found, places = [np.zeros(0, np.float32)], [np.zeros((0, 2), np.int32)]
    for listed in candidates.add_candidates(rows, view):
        score_N = predict(listed.rows).astype(np.float32)
        is_sampled_N = listed.is_sampled_N[~listed.rows.is_support_N]
        found.append(score_N[~is_sampled_N])
        places.append(rank_among_candidates_N2(score_N, is_sampled_N))
    above_tied = zip(PLACES[2:], np.concatenate(places).T, strict=True)
    return {"prediction": np.concatenate(found), **dict(above_tied)}


def _describe_bias(
    dataset: Dataset,
    model: BiasModel,
    was_found: bool,
    train: episode_rows.EpisodeRows,
    valid_splits: Sequence[str],
) -> tuple[str, str, str, dict[str, str | float]]:
    item = dataset.features.single[model.item].name if model.item != episode_rows.NO_ITEM else ""
    chosen_on = ", ".join(valid_splits) or format_count(len(train.task_T), "training task")
    how = "whose means predict best" if was_found else "as asked"
    parts = [f"item ({item}, {how}; prior {model.item_prior:g})"] if item else []
    unit = "" if model.loss != "bce" else ", on log-odds"
    parts.append(f"task (prior {model.task_prior:g})")
    description = f"mean + {' + '.join(parts)}{unit}; priors chosen on {chosen_on}"
    chosen: dict[str, str | float] = {
        "item_column": item,
        "item_prior": model.item_prior,
        "task_prior": model.task_prior,
        "chosen_on": chosen_on,
    }
    return "bias model", "bias", description, chosen


def _describe_trees(
    model: BoostedTrees, valid_splits: Sequence[str]
) -> tuple[str, str, str, dict[str, str | float]]:
    chosen_on = ", ".join(valid_splits) or "a held-back fifth of the training tasks"
    setting = model.setting
    description = (
        f"{format_count(model.num_trees, 'tree')} of {setting.leaves} leaves of "
        f"{setting.leaf_rows} rows or more at rate {setting.rate:g} on top of the bias model, from "
        f"{model.num_statistics} statistics of support and columns, grown on "
        f"{format_count(model.num_rows, 'query row')} drawn of training tasks; the best of "
        f"{format_count(model.num_tried, 'setting')} on {chosen_on}"
    )
    chosen: dict[str, str | float] = {
        "num_trees": model.num_trees,
        **asdict(setting),
        "settings_tried": model.num_tried,
        "num_rows": model.num_rows,
        "num_statistics": model.num_statistics,
        "chosen_on": chosen_on,
    }
    return "boosted trees", "trees", description, chosen
