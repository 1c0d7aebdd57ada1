"""An exported model in memory: adapts to a task's support rows and predicts, on the CPU.

The engine's own learner and inner loop do both, on rows fetched from the exported tables.

Shape suffixes: N rows, T tasks, U fetched rows, P rows that adapted, D embedding width, B tables.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from gmeta.adaptation.general_loop import Adapted
from gmeta.adaptation.rows.sides import WorkingRows
from gmeta.batches.episodes import every_row
from gmeta.errors import UserError
from gmeta.learner import MetaLearner, QueryPrediction
from gmeta.serving.columns import (
    ColumnEncoder,
    as_table,
    check_labels,
    check_task_kinds,
    select,
)
from gmeta.serving.device import on_the_cpu
from gmeta.serving.folder import ExportedConfig
from gmeta.serving.rows import EncodedColumns, task_batch
from gmeta.serving.tables import StoredTable, fetch_UD
from gmeta.serving.tasks import TaskPredictions, predict_tasks
from metaio.read.batch import TaskBatch

# For how many query rows the form of an adapted layer is chosen; any number is as exact.
_EXPECTED_QUERY_ROWS = 128


class ServedModel:
    """A trained model with its tables. Safe to use from several threads: they take turns. Pickled,
    as for another process, it is the path of its folder, from which it is loaded again.

    Rows are columns: a mapping of names to equally long lists, arrays or tensors, or any Arrow,
    pandas or polars table. Columns that the model does not read are ignored. Every method raises
    UserError for a missing column, DataError for a column that holds what the model cannot take.
    """

    def __init__(
        self,
        config: ExportedConfig,
        learner: MetaLearner,
        tables: list[StoredTable],
        encoder: ColumnEncoder,
        reload: "partial[ServedModel]",
    ) -> None:
        """Make a model; `reload` makes the same one again, in another process too."""
        self.config = config
        self._reload = reload
        # Inner gradients are taken at the outputs of layers and at rows, never at weights.
        self._learner = learner.requires_grad_(False).eval()
        self._inner = learner.general_loop
        self._statistics = learner.statistics
        self._tables = tables
        self._encoder = encoder
        rows_B = torch.tensor([table.num_rows for table in config.features.tables])
        self._first_key_B = rows_B.cumsum(0) - rows_B
        # Adapted layers act through hooks on the one model that all tasks share.
        self._lock = threading.Lock()

    def __reduce__(self) -> "tuple[partial[ServedModel], tuple[()]]":
        # Not the tensors: a process that maps the same files shares their memory.
        return self._reload, ()

    @on_the_cpu
    def adapt(self, support: object) -> "AdaptedTask":
        """Return the model adapted to one task by its labelled rows, with or without the task
        column.

        Raises:
            UserError: there are no rows, or rows of several tasks.
        """
        rows = self._encode(support, "support", with_label=True)
        if rows.num_rows == 0:
            raise UserError(
                "support has 0 rows: at least 1 is needed to adapt. "
                "Call predict of the model itself for a task of which nothing is known"
            )
        num_tasks = len(np.unique(rows.task_N))
        if num_tasks > 1:
            raise UserError(
                f"support holds rows of {num_tasks} tasks: adapt takes those of 1. "
                "Call predict_tasks for many tasks at once"
            )
        batch = self._statistics.widened(self._one_task(rows, as_support=True))
        # What new rows of the task share with its support is asked for again with each of them.
        kept = rows if self._statistics.width else None
        with self._exclusive(), torch.enable_grad():
            return AdaptedTask(self, *self._adapt(batch), kept)

    @on_the_cpu
    def predict(self, rows: object) -> Tensor:
        """Return probabilities (bce) or ratings [N] by the meta-parameters, without adaptation."""
        batch = self._query(rows, support=None)
        with self._exclusive(), torch.no_grad():
            query = every_row(batch, constant=True)
            unadapted = self._inner.unadapted(WorkingRows(self._fetch_UD(batch), 0.0), query)
            return self._shown_N(self._inner.output_N(unadapted, query))

    @on_the_cpu
    def predict_tasks(
        self, support: object, query: object, allow_no_support: bool = False
    ) -> TaskPredictions:
        """Adapt to every task of `query` by its rows of `support`, and predict its query rows.

        Both need the task column. Many tasks at once take a fraction of the time of one by one.

        Raises:
            UserError: a task has no support rows and that is not allowed; the task column holds
                integers on one side and text on the other.
        """
        support, query = as_table(support, "support"), as_table(query, "query")
        encoded = self._encode(support, "support", with_label=True, with_task=True)
        wanted = self._encode(query, "query", with_label=False, with_task=True)
        check_task_kinds(self.config.columns.task, support, query)

        def run(batch: TaskBatch) -> tuple[Tensor, Tensor]:
            prediction = self.predict_batch(batch)
            return self._shown_N(prediction.before_N), self._shown_N(prediction.after_N)

        return predict_tasks(run, self.config.features, encoded, wanted, allow_no_support)

    @on_the_cpu
    def predict_batch(self, batch: TaskBatch) -> QueryPrediction:
        """Adapt to each task of a prepared batch and predict its query rows: logits (bce) or
        ratings, before and after.
        """
        with self._exclusive():
            episodes = self._learner.arrange_to_predict(batch)
            return self._learner.predict(self._fetch_UD(batch), episodes)

    @on_the_cpu
    def predict_adapted(
        self, adapted: Adapted, key_P: Tensor, support: EncodedColumns | None, rows: object
    ) -> Tensor:
        """Return predictions [N] with a task's adapted parameters; `key_P` tells which row of which
        table each adapted row is, `support` is what it adapted to, if the model asks for that."""
        batch = self._query(rows, support)
        with self._exclusive(), torch.no_grad():
            rows_UD, key_U = self._fetch_UD(batch), self._key_U(batch)
            # Rows that the support did not use are the task's as they were trained.
            known_U = torch.isin(key_U, key_P)
            rows_UD[known_U] = adapted.rows_PD[torch.searchsorted(key_P, key_U[known_U])]
            query = every_row(batch, constant=True)
            return self._shown_N(self._inner.output_N(Adapted(adapted.layers, rows_UD), query))

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        # A caller may be under inference mode, where no inner gradient could be taken, or under
        # autocast, which would answer in 8 bits.
        with self._lock, torch.inference_mode(False), torch.autocast("cpu", enabled=False):
            yield

    def _adapt(self, batch: TaskBatch) -> tuple[Adapted, Tensor]:
        """Return the adapted parameters of a batch of one support set, and the keys of its rows."""
        support = every_row(batch, constant=not self._inner.config.adapt_embeddings)
        # Of one task, the distinct (task, row) pairs are the fetched rows themselves.
        place_U = torch.arange(batch.unique_ids_U.numel())
        rate = self._learner.rates.of_rows(batch.unique_lengths_B, place_U)
        rows = WorkingRows(self._fetch_UD(batch), rate)
        adapted = self._inner.take_steps(rows, support, _EXPECTED_QUERY_ROWS, second_order=False)
        return Adapted(adapted.layers, adapted.rows_PD.detach()), self._key_U(batch)

    def _fetch_UD(self, batch: TaskBatch) -> Tensor:
        rows_UD = fetch_UD(self._tables, batch.unique_ids_U, batch.unique_lengths_B)
        return self._learner.starting_rows_UD(rows_UD, batch.unique_lengths_B)

    def _key_U(self, batch: TaskBatch) -> Tensor:
        """Return the place [U] of each fetched row among the rows of all tables; ascending, as ids
        are sorted."""
        first_U = self._first_key_B.repeat_interleave(batch.unique_lengths_B)
        return first_U + batch.unique_ids_U

    def _shown_N(self, output_N: Tensor) -> Tensor:
        return torch.sigmoid(output_N) if self.config.loss == "bce" else output_N

    def _query(self, rows: object, support: EncodedColumns | None) -> TaskBatch:
        """Return a batch of one task of these query rows, and what its support says of them."""
        query = self._encode(rows, "query", with_label=False)
        batch = self._one_task(query, as_support=False)
        if support is None:
            return self._statistics.widened(batch)
        sizes = support.num_rows, query.num_rows
        chosen = np.arange(sizes[0]), np.arange(sizes[1])
        lengths_T = np.array(sizes[:1]), np.array(sizes[1:])
        both = task_batch(self.config.features, support, query, chosen, lengths_T)
        return replace(batch, dense_NK=self._statistics.widened(both).dense_NK[sizes[0] :])

    def _one_task(self, rows: EncodedColumns, as_support: bool) -> TaskBatch:
        """Return a batch of one task that has all rows on one side."""
        none, every = np.zeros(0, np.int64), np.arange(rows.num_rows)
        sides = (every, none) if as_support else (none, every)
        lengths_T = np.array([len(sides[0])]), np.array([len(sides[1])])
        return task_batch(self.config.features, rows, rows, sides, lengths_T)

    def _encode(
        self, rows: object, what: str, with_label: bool, with_task: bool = False
    ) -> EncodedColumns:
        columns = self.config.columns
        names = [columns.task] * with_task + self._encoder.names(with_label)
        batch = select(as_table(rows, what), names, [columns.task], what)
        encoded = self._encoder.encode(batch, with_label)
        if with_label:
            check_labels(encoded.label_N, columns.label, self.config.loss)
        return encoded


class AdaptedTask:
    """A model adapted to one task: the change of each layer and the rows that its support uses; the
    support itself, where the model takes statistics of it.
    """

    def __init__(
        self,
        model: ServedModel,
        adapted: Adapted,
        key_P: Tensor,
        support: EncodedColumns | None,
    ) -> None:
        self._model = model
        self._adapted = adapted
        self._key_P = key_P
        self._support = support

    def __reduce__(self) -> NoReturn:
        # A copy would adapt layers of its own, which no model runs through.
        raise UserError(
            "a task that a model was adapted to cannot be pickled or copied: its layers are those "
            "of this process. Send the model and the support rows, and call adapt there"
        )

    def predict(self, rows: object) -> Tensor:
        """Return probabilities (bce) or ratings [N] of rows of the task; rows as ServedModel says.

        Raises:
            UserError: a column is missing.
            DataError: a column holds what the model cannot take.
        """
        return self._model.predict_adapted(self._adapted, self._key_P, self._support, rows)
