"""What is asked and answered, in figures: predictions, and what they are against labels that come
back; ids that the model does not know; tasks without support; inputs against training.

Shape suffixes: N rows, F single-id or pooled features, M multi-id features, V values, K dense
columns, L labels"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, Counter, Summary

from gmeta.metrics.catalogue import predicted_by
from gmeta.serving.encoded_rows import EncodedColumns, join_rows, split_rows, take_rows
from gmeta.serving.exported_folder import ExportedConfig
from gmeta.serving.served_model import ServedModel

# One batch of so many is looked at row by row: shares and means need no more, callers no less.
EVERY_BATCHES = 16
_MOST_ROWS = 256  # of support, scored anew


class _Tracked(NamedTuple):
    """Which columns can tell something: places and names."""

    labels: tuple[str, ...]  # "" of one without a name
    singles: dict[int, str]  # whose values a vocabulary holds: row 0 stands for all others
    multis: dict[int, str]
    dense: dict[int, str]  # that training standardised: its mean is 0, its deviation 1

    @classmethod
    def of(cls, config: ExportedConfig) -> "_Tracked":
        features, schema = config.features, config.columns.schema
        known = config.columns.vocabularies

        def has_unknown(table: str) -> bool:
            return schema is None or table in known

        dense = enumerate(() if schema is None else schema.dense)
        return cls(
            tuple(features.labels) or ("",),
            {at: one.name for at, one in enumerate(features.single) if has_unknown(one.table)},
            {at: one.name for at, one in enumerate(features.multi) if has_unknown(one.table)},
            {at: one.column for at, one in dense if one.standardise},
        )


@final
class Traffic:
    """Counts what a server is asked; one a process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, summary = partial(Counter, registry=registry), partial(Summary, registry=registry)
        text = "Tasks that were predicted, by what was known of them: rows, state, or none."
        self._tasks = counter("gmeta_serve_tasks", text, ["support"])
        for support in ("rows", "state", "none"):
            self._tasks.labels(support)
        self._predictions = summary("gmeta_serve_prediction", "Predictions.", ["label"])
        # Of one batch in EVERY_BATCHES.
        text = "Ids of query rows in a sample of batches, by whether the model knows them."
        self._ids = counter("gmeta_serve_ids", text, ["column", "known"])
        # Of each side of the mean: a sum that falls would look like a counter that began anew.
        text = "Dense values in a sample of query rows: how far from training's mean, in deviations"
        self._deviations = counter("gmeta_serve_input_deviations", text, ["column", "side"])
        text = "The same, squared: 1 in training."
        self._squares = summary("gmeta_serve_input_squared_deviation", text, ["column"])
        text = (
            "Predictions of support rows of a sample before adaptation, where the label is known."
        )
        self._scored = summary("gmeta_serve_scored_prediction", text, ["label"])
        self._labels = summary("gmeta_serve_scored_label", "The labels of these rows.", ["label"])
        self._batches = 0
        self._config: ExportedConfig | None = None

    def note(
        self,
        model: ServedModel,
        supports: Sequence[str],
        answers: Sequence[npt.NDArray[np.float32]],
        sides: tuple[Sequence[EncodedColumns], Sequence[EncodedColumns]],
    ) -> None:
        """Count a batch: what is known of each task, its predictions [N] or [N, L], and the support
        rows to adapt by and query rows of all tasks."""
        if self._config is not model.config:
            self._config, self._tracked = model.config, _Tracked.of(model.config)
        for known in supports:
            self._tasks.labels(known).inc()
        if answers:
            self._add_by_label(self._predictions, np.concatenate(answers))
        self._batches += 1
        if (self._batches - 1) % EVERY_BATCHES:
            return
        support, query = sides
        if query:
            self._note_inputs(join_rows(query))
        if support:
            self._note_labels(model, join_rows(support))

    def _note_inputs(self, rows: EncodedColumns) -> None:
        tracked = self._tracked
        for at, name in tracked.singles.items():
            self._add_ids(name, rows.num_rows, int(np.count_nonzero(rows.ids_NF[:, at])))
        if tracked.multis:
            num_rows, width = rows.lengths_NM.shape
            feature_V = np.repeat(np.tile(np.arange(width), num_rows), rows.lengths_NM.ravel())
            counts = np.bincount(feature_V, minlength=width)
            known = np.bincount(feature_V[rows.values_V != 0], minlength=width)
            for at, name in tracked.multis.items():
                self._add_ids(name, counts[at], known[at])
        for at, name in tracked.dense.items():
            value_N = rows.dense_NK[:, at].astype(np.float64)
            self._deviations.labels(name, "above").inc(float(value_N.clip(min=0).sum()))
            self._deviations.labels(name, "below").inc(float(-value_N.clip(max=0).sum()))
            _add(self._squares.labels(name), len(value_N), np.square(value_N).sum())

    def _add_ids(self, column: str, count: int, known: int) -> None:
        self._ids.labels(column, "yes").inc(int(known))
        self._ids.labels(column, "no").inc(int(count) - int(known))

    def _note_labels(self, model: ServedModel, rows: EncodedColumns) -> None:
        # Before adaptation: of the rows that a task adapts by, its own model says too much.
        if any(predicted_by(loss) == "score" for loss in model.config.losses):
            return
        rows = take_rows(rows, np.flatnonzero(~rows.is_alone_N))  # events alone have no label
        (first,) = split_rows(rows, [min(rows.num_rows, _MOST_ROWS)])
        predicted = model.predict_encoded([model.unadapted], first, [first.num_rows]).numpy()
        # NaN: such a label is not known.
        self._add_by_label(self._scored, np.where(np.isnan(first.label_N), np.nan, predicted))
        self._add_by_label(self._labels, first.label_N)

    def _add_by_label(self, summary: Summary, values: npt.NDArray[np.float32]) -> None:
        value_NL = values.reshape(len(values), len(self._tracked.labels)).astype(np.float64)
        counts_L, sums_L = np.isfinite(value_NL).sum(axis=0), np.nansum(value_NL, axis=0)
        for label, count, total in zip(self._tracked.labels, counts_L, sums_L, strict=True):
            _add(summary.labels(label), count, total)


def _add(summary: Any, count: int, total: float) -> None:
    # A thousand candidates are one call, where `observe` would take a thousand.
    summary._count.inc(int(count))
    summary._sum.inc(float(total))
