"""An exported model in memory: adapts to a task's support rows and predicts with the engine's own
learner and inner loop, on any device; tables and results are the host's.

Shape suffixes: T tasks, N rows, F single-id or pooled features, M multi-id features, V values,
K dense columns, B tables, U unique ids, D embedding width, P task-row pairs, O outputs, J parts
of a gate, E chosen episodes, X all inputs side by side"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor
from torch.nn.functional import embedding

from gmeta.adaptation.closed_form import MOST_SERVED_ROWS
from gmeta.adaptation.general_loop import AdaptedModel
from gmeta.adaptation.layout.event_inputs import put_before_dense
from gmeta.adaptation.layout.sides import Side, WorkingRows
from gmeta.data.episodes import make_full_side, with_row_copies
from gmeta.data.transfer import move_to_device
from gmeta.errors import UserError
from gmeta.platform.files.tensor_files import MappedFiles
from gmeta.platform.threads import ThreadChoice, make_compute_lock, work_to_predict
from gmeta.serving.device import HOST, on_the_cpu
from gmeta.serving.encoded_rows import (
    EncodedColumns,
    copy_shared_lists,
    count_labelled,
    empty_rows,
    find_shared_bags,
    join_rows,
    split_rows,
)
from gmeta.serving.episodes import find_tasks_P
from gmeta.serving.event_memory import EventMemory, encode_events
from gmeta.serving.exported_folder import ExportedConfig
from gmeta.serving.finite_values import (
    adaptation_error,
    check_predictions,
    find_finite_T,
    find_first_wrong,
)
from gmeta.serving.row_encoders import (
    ColumnEncoder,
    as_table,
    check_labels,
    check_task_kinds,
    select_columns,
)
from gmeta.serving.state_bytes import StateShape, from_bytes, is_renewable, pack_rows, to_bytes
from gmeta.serving.stored_tables import StoredTable, fetch_UD
from gmeta.serving.task_batches import TaskBatches
from gmeta.serving.task_matching import TaskPredictions, predict_tasks
from gmeta.serving.task_states import AdaptedTensors, TaskState, split_tasks, stack_tasks
from gmeta_models.dot import Dot
from gmeta_models.gated import row_layers
from gmeta_models.sequence.encoder import EventVectors, StateEncoder
from metaio.ragged import Int64
from metaio.read.batch import TaskBatch

if TYPE_CHECKING:  # which learner is served is the business of who loads it
    from gmeta.learner import MetaLearner, QueryPrediction

Part = TypeVar("Part")

# For how many query rows the form of an adapted layer is chosen; any number is as exact.
EXPECTED_QUERY_ROWS = 128


class ServedModel:
    """A trained model with its tables. Safe to use from several threads: they take turns. Pickled,
    it is the path of its folder, from which another process loads it again.

    Rows are columns: a mapping of names to equally long lists, arrays or tensors, or any Arrow,
    pandas or polars table. Columns that the model does not read are ignored. Every method raises
    UserError for a missing column, DataError for a column that holds what the model cannot take,
    NotFiniteError for a result that is not finite, ChangedFileError for files changed in place."""

    def __init__(
        self,
        config: ExportedConfig,
        checksum: str,
        learner: "MetaLearner",
        tables: list[StoredTable],
        files: MappedFiles,
        encoder: ColumnEncoder,
        reload: "partial[ServedModel]",
        device: torch.device = HOST,
    ) -> None:
        self.config = config
        # Names the content of the folder: a state fits the model with this checksum alone.
        self.checksum = checksum
        # Loads the same model again, in another process too.
        self._reload = reload
        # To be run only under the lock, or as a copy. Inner gradients are taken at the outputs of
        # layers and at rows: weights need none.
        self.learner = learner.requires_grad_(False).eval().to(device)
        self._device = device
        self._inner = learner.general_loop
        self._statistics = learner.statistics
        self._batches = TaskBatches(learner, config.features)
        # Statistics of lists go by the batch, in which each row then needs its own.
        items = learner.items
        of_items = items is not None and items.reads_lists
        self._reads_lists_by_row = of_items or bool(learner.statistics.multi_columns)
        self.tables = tables
        self.files = files  # of the tables and neighbours
        self._encoder = encoder
        # A key numbers the rows of all tables: one integer names a row of any table.
        rows_B = torch.tensor([table.num_rows for table in config.features.tables])
        self._first_key_B = rows_B.cumsum(0) - rows_B
        self._num_keys = int(rows_B.sum())
        self._unadapted: TaskState | None = None
        self._threads: ThreadChoice | None = None  # None: as many as torch has
        # Adapted layers act through hooks on the one model that all tasks share.
        self._lock = make_compute_lock()

    def mark_lists(self, names: Collection[str]) -> npt.NDArray[np.bool_]:
        """Return which multi-id features [M] are read from columns of these names."""
        return np.array([name in names for name in self._encoder.lists], np.bool_)

    def refusal(self, support_rows: int, who: str = "a task") -> str | None:
        """Return why `who`, with `support_rows` rows, cannot be adapted to; None if it can."""
        if not self._inner.plan.solves or support_rows <= MOST_SERVED_ROWS:
            return None
        return (
            f"{who} has {support_rows:,} support rows; {self.config.algorithm.name}, which solves "
            f"for as many unknowns, takes at most {MOST_SERVED_ROWS:,}. Keep the newest of them"
        )

    def choose_threads(self) -> None:
        """Let predict_batch find out, from now on, whether one thread or all are faster."""
        if self._threads is None:
            # For a process that only predicts: torch's number of threads is the process's.
            self._threads = ThreadChoice(torch.get_num_threads())

    def __reduce__(self) -> "tuple[partial[ServedModel], tuple[()]]":
        # Not the tensors: a process that maps the same files shares their memory.
        return self._reload, ()

    @on_the_cpu
    def adapt(self, support: object = None, events: object = None) -> "AdaptedTask":
        """Return the model adapted to one task by its labelled rows, which know the events before
        them, as all of the task's rows to predict know all events; one of both may be missing."""
        parts = [] if support is None else [self.encode(support, "support", with_label=True)]
        if parts and (num_tasks := len(np.unique(parts[0].task_N))) > 1:
            raise UserError(
                f"support holds rows of {num_tasks} tasks: adapt takes those of 1. "
                "Call predict_tasks for many tasks at once"
            )
        parts += [] if events is None else [self.encode_events(events)]
        rows = join_rows(parts) if parts else empty_rows(self.config.features)
        if rows.num_rows == 0:
            raise UserError(
                "support has 0 rows: at least 1 is needed to adapt. "
                "Call predict of the model itself for a task of which nothing is known"
            )
        return AdaptedTask(self, self.adapt_encoded(rows, [rows.num_rows])[0], rows)

    def task(self, state: bytes) -> "AdaptedTask":
        """Return the task of what `AdaptedTask.state()` of this export returned, bit for bit; of a
        state of another version that carries its support rows, the task adapted anew by them."""
        found = self.read_state(state)
        if isinstance(found, TaskState):
            return AdaptedTask(self, found, content=bytes(state))
        return AdaptedTask(self, self.adapt_encoded(found, [found.num_rows])[0], found)

    def read_support(self, state: bytes) -> EncodedColumns:
        """Return the support rows that a state of any version carries."""
        return cast(EncodedColumns, self.read_state(state, renews=True))

    def read_state(self, state: object, renews: bool = False) -> TaskState | EncodedColumns:
        """Return the state in these bytes; of another version's, or if it `renews` any, the support
        rows to adapt by."""
        of_model = self.checksum, self._state_shape, self._encoder.translation
        found = from_bytes(state, *of_model, renews)
        if isinstance(found, EncodedColumns):
            self._check_labels(found)
        return found

    def write_state(self, state: TaskState, support: EncodedColumns | None) -> bytes:
        """Return a state as bytes, which carry the support rows if there are any."""
        renewal = b"" if support is None else pack_rows(support, self._encoder.translation)
        return to_bytes(state, self.checksum, renewal)

    @cached_property
    def _state_shape(self) -> StateShape:
        layers = row_layers(self.learner.model).items()
        return StateShape(
            layers={name: (layer.in_features, layer.out_features) for name, layer in layers},
            gates_1JO=self.unadapted.gates_1JO,
            width=self.config.model.embedding_dim,
            num_keys=self._num_keys,
            features=self.config.features,
            keeps_support=self._batches.keeps_support,
        )

    @on_the_cpu
    def predict(self, rows: object) -> Tensor:
        """Return probabilities (bce) or ratings [N] without adaptation, [N, labels] of several."""
        encoded = self.encode(rows, "query", with_label=False)
        return self.predict_encoded([self.unadapted], encoded, [encoded.num_rows])

    @on_the_cpu
    def predict_tasks(
        self, support: object, query: object, allow_no_support: bool = False
    ) -> TaskPredictions:
        """Adapt to every task of `query` by its rows of `support`, and predict its query rows. Both
        need the task column. Raises UserError for a task without support rows unless that is
        allowed, for one with more than the algorithm takes, and for task columns of two types."""
        support, query = as_table(support, "support"), as_table(query, "query")
        encoded = self.encode(support, "support", with_label=True, with_task=True)
        wanted = self.encode(query, "query", with_label=False, with_task=True)
        check_task_kinds(self.config.columns.task, support, query)
        return self.predict_tasks_encoded(encoded, wanted, allow_no_support)

    @on_the_cpu
    def predict_tasks_encoded(
        self,
        support: EncodedColumns,
        query: EncodedColumns,
        allow_no_support: bool,
        row_N: Int64 | None = None,
    ) -> TaskPredictions:
        """Return the predictions of encoded rows, which hold their tasks; errors name query rows by
        `row_N`. Raises NotFiniteError: a prediction is not finite; UserError: the tasks' events are
        of another log."""
        schema = self.config.columns.schema
        if schema is not None and schema.event_files and self.learner.events is not None:
            raise UserError(
                "the model's events are of another log ([events] files), which rows of many tasks "
                "do not bring. Call adapt(support, events) for each task, or a server"
            )

        def run(batch: TaskBatch) -> tuple[Tensor, Tensor]:
            found = self.predict_batch(batch)
            before_N, after_N = map(self._to_predictions_N, (found.before_N, found.after_N))
            return before_N, after_N

        found = predict_tasks(run, self.config.features, support, query, allow_no_support)
        check_predictions(found.before_N, row_N)
        if (row := find_first_wrong(found.after_N)) is not None:
            label_N = support.label_N[support.task_N == query.task_N[row]]
            who = f"the task of query row {row if row_N is None else row_N[row]}"
            raise adaptation_error(who, label_N, found.before_N[row].numpy())
        return found

    @on_the_cpu
    def predict_batch(self, batch: TaskBatch) -> "QueryPrediction":
        """Adapt to each task of a batch and predict its query rows: logits (bce) or ratings."""
        self._check_support_rows(batch.support_lengths_T.tolist())
        chosen: AbstractContextManager[None] = nullcontext()
        if self._threads is not None:
            num_weights = sum(weight.numel() for weight in self.learner.parameters())
            work = work_to_predict(batch.num_rows, num_weights, self.learner.inner_steps)
            chosen = self._threads.use_for(work)
        with self._exclusive(), chosen:
            # Rows as they are stored: the learner itself turns them into what the inner loop takes.
            stored_UD = self._read_rows_UD(batch)
            on_host = self.learner.collate_to_predict(batch), stored_UD
            episodes, rows_UD = self._to_device(on_host)
            return self._to_host(self.learner.predict(rows_UD, episodes))

    @on_the_cpu
    def adapt_tasks(self, rows: EncodedColumns, lengths: Sequence[int]) -> AdaptedTensors:
        """Return the model adapted to several tasks, whose support rows stand task by task."""
        self._check_support_rows(count_labelled(rows, lengths))
        adapts_rows = self._inner.plan.adapts_rows
        # A length may be 0: that of a task of which nothing is known.
        with self._exclusive(), torch.enable_grad():
            nothing = empty_rows(self.config.features), [0] * len(lengths)
            unfetched = self.learner.with_support(self._batches.make((rows, lengths), nothing))
            batch, fetched_row_P, num_rows = with_row_copies(unfetched, adapts_rows)
            values_PD = self._fetch_UD(batch)
            vectors = self._event_inputs(unfetched, values_PD)
            values_PD = self.learner.projections.hide_UD(values_PD, batch.unique_lengths_B)
            if fetched_row_P is not None:
                values_PD = values_PD[fetched_row_P]
            # Where rows adapt, the inputs of the first layer change with each step.
            side = self._with_events(make_full_side(batch, not adapts_rows, num_rows), vectors)
            on_host = side, values_PD, batch.unique_lengths_B, fetched_row_P
            support, rows_PD, lengths_B, row_P = self._to_device(on_host)
            # A rate of 0: these rows do not adapt.
            working = WorkingRows(rows_PD, 0.0)
            if row_P is not None:
                working = WorkingRows(rows_PD, self.learner.rates.of_rows(lengths_B, row_P))
            adapted = self._inner.take_steps(working, support, EXPECTED_QUERY_ROWS, False)
        none = torch.zeros(0, dtype=torch.int64)
        # Rows that do not adapt are not part of a state: the tables have them.
        rows_PD, key_P, task_P = values_PD[:0], none, none
        if fetched_row_P is not None:
            rows_PD = self._to_host(adapted.rows_PD.detach())
            key_P, task_P = self._key_U(batch)[fetched_row_P], find_tasks_P(batch, num_rows)
        changes = {name: self._to_host(each) for name, each in adapted.layers.changes.items()}
        gates_TJO = {name: self._to_host(each) for name, each in adapted.layers.gates_TJO.items()}
        # Support rows are kept: the statistics of a task are features of its later query rows too.
        # So are those that are its events.
        supports = (
            split_rows(rows, lengths) if self._batches.keeps_support else [None] * len(lengths)
        )
        return AdaptedTensors(changes, gates_TJO, rows_PD, key_P, task_P, supports)

    @on_the_cpu
    def adapt_encoded(
        self, rows: EncodedColumns, lengths: Sequence[int], names: pa.Array | None = None
    ) -> list[TaskState]:
        """Return the state of each task, adapted as by `adapt_tasks`, which can be kept. Raises
        NotFiniteError: one of them is not finite; `names` are those of the tasks."""
        adapted = self.adapt_tasks(rows, lengths)
        if not (is_finite_T := find_finite_T(adapted)).all():
            task = int(is_finite_T.int().argmin())
            support = split_rows(rows, lengths)[task]
            # What it predicts before tells the scale of the labels that it was trained by.
            before_N = torch.zeros(0)
            if support.num_rows:
                before_N = self.predict_encoded([self.unadapted], support, [support.num_rows])
            who = "the task" if names is None else f"task {names[task].as_py()!r}"
            raise adaptation_error(who, support.label_N, before_N.numpy())
        return split_tasks(adapted, len(lengths))

    @on_the_cpu
    def append_encoded(self, state: TaskState, events: EncodedColumns) -> TaskState:
        """Return the state of a task with further events, as if it had adapted with all of them:
        those before the new ones are encoded no more, and it adapts anew only where a support row
        knows a new one. Raises NotFiniteError: then the result is not finite."""
        if not events.num_rows:
            return state
        known = state.support or empty_rows(self.config.features)
        rows = join_rows([known, events])
        labelled_s = known.event_times[~known.is_alone_N, 0]
        knows_s = labelled_s.max(initial=-np.inf) - self.config.features.event_delay
        if events.event_times[:, 0].min() < knows_s:
            (found,) = self.adapt_encoded(rows, [rows.num_rows])
            return found
        encoder, whole = self.learner.events, replace(state, support=rows, memory=None)
        if not isinstance(encoder, StateEncoder):
            return whole
        with self._exclusive(), torch.no_grad():
            before = state.memory if self._goes_on(state, rows, events) else None
            added = whole if before is None else replace(whole, support=events)
            return replace(whole, memory=self._encode_events(encoder, added, before))

    def _goes_on(self, state: TaskState, rows: EncodedColumns, events: EncodedColumns) -> bool:
        """Return whether what is known of earlier events holds with further ones."""
        if state.memory is None or events.event_times[:, 0].min() < state.memory.last_s:
            return False
        longest = self.config.features.event_longest
        # Support rows need old events; without one the newest `longest` are all.
        is_cut = rows.is_alone_N.all() and rows.num_rows > longest
        return not longest or (events.num_rows <= longest and not is_cut)

    def _encode_events(
        self, encoder: StateEncoder, task: TaskState, before: EventMemory | None
    ) -> EventMemory | None:
        """Return what the events of a task leave, behind those `before` them; None without any."""
        columns = self.learner.event_columns
        assert columns is not None  # of every model with an encoder
        assert task.support is not None
        row = empty_rows(self.config.features, 1)  # that knows them all
        batch = self._batches.make_query(stack_tasks([task]), row, [1])
        (rectangle,) = columns.lay_out(batch).rectangles
        times = task.support.event_times
        num_events = int(rectangle.num_events_T)
        if not num_events:
            return None
        seconds = np.sort(times[times[:, 1] > 0, 0])[-num_events:]
        rectangle, rows_UD, before = self._to_device((rectangle, self._fetch_UD(batch), before))
        return self._to_host(encode_events(encoder, rectangle, rows_UD, seconds, before))

    @on_the_cpu
    def predict_encoded(
        self, states: Sequence[TaskState], rows: EncodedColumns, lengths: Sequence[int]
    ) -> Tensor:
        """Predict as `predict_adapted`, each task in its own state; may raise NotFiniteError."""
        found = self.predict_adapted(stack_tasks(states), rows, lengths)
        check_predictions(found)
        return found

    @on_the_cpu
    def predict_adapted(
        self,
        tasks: AdaptedTensors,
        rows: EncodedColumns,
        lengths: Sequence[int],
        shared_TM: npt.NDArray[np.bool_] | None = None,
    ) -> Tensor:
        """Return probabilities (bce) or ratings [N] of the rows of these tasks, in their order. A
        task's rows have the list of its first row in the features that `shared_TM` marks."""
        bag_NM = None if shared_TM is None else find_shared_bags(lengths, shared_TM)
        if bag_NM is not None and self._reads_lists_by_row:
            rows, bag_NM = copy_shared_lists(rows, bag_NM), None
        with self._exclusive(), torch.no_grad():
            adapted, query = self._adapted_query(tasks, rows, lengths)
            if bag_NM is not None:
                query = replace(query, bag_NM=self._to_device(torch.from_numpy(bag_NM)))
            return self._to_predictions_N(self._to_host(self._inner.output_N(adapted, query)))

    def _adapted_query(
        self, tasks: AdaptedTensors, rows: EncodedColumns, lengths: Sequence[int]
    ) -> tuple[AdaptedModel, Side]:
        """Return the model adapted to these tasks, and their rows as its inputs."""
        adapts_rows = tasks.key_P.numel() > 0
        unfetched = self._batches.make_query(tasks, rows, lengths)
        batch, fetched_row_P, num_rows = with_row_copies(unfetched, adapts_rows)
        rows_PD = self._fetch_UD(batch)
        vectors = self._event_inputs(unfetched, rows_PD, tasks, lengths)
        rows_PD = self.learner.projections.hide_UD(rows_PD, batch.unique_lengths_B)
        if fetched_row_P is not None:
            # Both ascending. Rows that the support did not use are as they were trained.
            key_P = self._key_U(batch)[fetched_row_P]
            # (task, row) as one integer: a row that two tasks adapted is two rows.
            key_P += find_tasks_P(batch, num_rows) * self._num_keys
            rows_PD = rows_PD[fetched_row_P]
            known_K = tasks.key_P + tasks.task_P * self._num_keys
            # Clamped: the place of a key behind the last known one would be outside.
            place_P = torch.searchsorted(known_K, key_P).clamp_(max=known_K.numel() - 1)
            is_known_P = known_K[place_P] == key_P
            rows_PD[is_known_P] = tasks.rows_PD[place_P[is_known_P]]
        side = make_full_side(batch, constant=True, num_rows=num_rows)
        side = self._with_events(side, vectors)
        layers = tuple(tasks.changes.values()), tuple(tasks.gates_TJO.values())
        query, rows_PD, changes, gates = self._to_device((side, rows_PD, *layers))
        adapted = self._inner.restore_adapted(
            dict(zip(tasks.changes, changes, strict=True)),
            dict(zip(tasks.gates_TJO, gates, strict=True)),
            rows_PD,
        )
        return adapted, query

    @on_the_cpu
    def user_vectors(self, states: Sequence[TaskState]) -> Tensor:
        """Return the vector of each task [T, D], as it has adapted: its products with the items'
        vectors, but for one number, are their scores. Raises UserError: the model scores in
        another way."""
        if not isinstance(self.learner.model, Dot):
            raise UserError(
                f"model.name = {self.config.model.name!r} makes no vector of a user: train one "
                'with model.name = "dot", or predict rows'
            )
        # Of any item: a user's vector is what is multiplied by it.
        rows, lengths = empty_rows(self.config.features, len(states)), [1] * len(states)
        with self._exclusive(), torch.no_grad():
            adapted, query = self._adapted_query(stack_tasks(states), rows, lengths)
            return self._to_host(self.learner.user_vectors_ND(adapted, query))

    @property
    def unadapted(self) -> TaskState:
        """Return the state of a task of which nothing is known."""
        if self._unadapted is None:
            # Two threads may both make it: they make the same.
            nothing = empty_rows(self.config.features)
            (self._unadapted,) = self.adapt_encoded(nothing, [0])
        return self._unadapted

    def _check_support_rows(self, lengths: Sequence[int]) -> None:
        if refusal := self.refusal(max(lengths, default=0)):
            raise UserError(refusal)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        # A caller may be under inference mode, where no inner gradient could be taken, or under
        # autocast, which would answer in 8 bits.
        full_width = torch.autocast(self._device.type, enabled=False)
        with self._lock, torch.inference_mode(False), full_width:
            self.files.check()  # a read behind the end of a file that was cut kills the process
            yield
            self.files.check()  # a change meanwhile would mix two versions

    def _to_device(self, tree: Part) -> Part:
        return tree if self._device == HOST else move_to_device(tree, self._device)

    def _to_host(self, tree: Part) -> Part:
        return tree if self._device == HOST else move_to_device(tree, HOST)

    def _fetch_UD(self, batch: TaskBatch) -> Tensor:
        rows_UD = self._read_rows_UD(batch)
        return self.learner.starting_rows_UD(rows_UD, batch.unique_lengths_B.tolist())

    def _read_rows_UD(self, batch: TaskBatch) -> Tensor:
        self.files.check()  # once more: neighbours were read since, which takes time
        return fetch_UD(self.tables, batch.unique_ids_U, batch.unique_lengths_B)

    def _key_U(self, batch: TaskBatch) -> Tensor:
        """Return the key [U] of each fetched row; ascending, as the ids of a table are sorted."""
        first_U = self._first_key_B.repeat_interleave(batch.unique_lengths_B)
        return first_U + batch.unique_ids_U

    def _to_predictions_N(self, output_N: Tensor) -> Tensor:
        return self.learner.objectives.outer.predictions(output_N)

    def _event_inputs(
        self,
        batch: TaskBatch,
        rows_UD: Tensor,
        tasks: AdaptedTensors | None = None,
        lengths: Sequence[int] = (),
    ) -> Tensor | None:
        """Return the inputs that a batch's rows have of events, of `tasks` that remember theirs by
        what they remember; None of a model without."""
        columns, encoder = self.learner.event_columns, self.learner.events
        if columns is None or encoder is None:
            return None
        layout, rows_UD = self._to_device((columns.lay_out(batch), rows_UD))
        with torch.no_grad():
            if tasks is None or not tasks.remembers:
                vectors: EventVectors = encoder(layout, rows_UD)
            else:
                state_TD = torch.cat([one.state_TD for one in tasks.memories if one is not None])
                state_ND = state_TD.repeat_interleave(torch.tensor(lengths), dim=0)
                target_ND = embedding(layout.target_NM, rows_UD).sum(dim=1)
                vectors = EventVectors(self._to_device(state_ND), target_ND)
            return self._to_host(vectors.inputs_NX())

    def _with_events(self, side: Side, vectors_NX: Tensor | None) -> Side:
        return side if vectors_NX is None else put_before_dense(side, vectors_NX)

    def example_values(self, count: int) -> dict[str, list[Any]]:
        """Return up to `count` raw values of each sparse column whose table says which it knows."""
        return self._encoder.example_values(count)

    def columns_read(self, with_label: bool) -> list[str]:
        """Return the columns that `encode` reads, the task's too."""
        return list(dict.fromkeys([self.config.columns.task, *self._encoder.names(with_label)]))

    def encode(
        self, rows: object, what: str, with_label: bool, with_task: bool = False
    ) -> EncodedColumns:
        """Return rows as ids and numbers; `what` names them in errors."""
        columns = self.config.columns
        names = [columns.task] * with_task + self._encoder.names(with_label)
        batch = select_columns(as_table(rows, what), names, [columns.task], what)
        encoded = self._encoder.encode(batch, with_label)
        if with_label:
            self._check_labels(encoded)
        return encoded

    def encode_events(self, rows: object) -> EncodedColumns:
        """Return events of one task as ids, numbers and times. Raises UserError: the model reads
        none, or they are of several."""
        names, features = self._encoder.event_names(), self.config.features
        if self.learner.events is None or not names:
            raise UserError(
                "the model reads no events: it was trained without model.events. Leave them out"
            )
        batch = select_columns(as_table(rows, "event"), names, [self.config.columns.task], "event")
        found = self._encoder.encode_events(batch, empty_rows(features, batch.num_rows))
        if (num_tasks := len(np.unique(found.task_N))) > 1:
            raise UserError(f"the events are of {num_tasks} tasks: those of 1 are needed")
        return found

    def _check_labels(self, rows: EncodedColumns) -> None:
        may_lack = bool(self.config.features.labels)
        known = self.config.losses, may_lack, self.config.label_range
        check_labels(rows.label_N[~rows.is_alone_N], self.config.columns.label, *known)


class AdaptedTask:
    """A model adapted to one task: the change of each layer and the rows that its support uses."""

    def __init__(
        self,
        model: ServedModel,
        state: TaskState,
        support: EncodedColumns | None = None,
        content: bytes = b"",
    ) -> None:
        self._model = model
        self._state = state
        self._support = support  # that it adapted by in this process
        self._content = content  # that it was read from

    def __reduce__(self) -> NoReturn:
        # A copy would adapt layers of its own, which no model runs through.
        raise UserError(
            "a task that a model was adapted to cannot be pickled or copied: its layers are those "
            "of this process. Send its state() instead, and call task(state) of the model there"
        )

    @property
    def is_current(self) -> bool:
        """Return whether the bytes that it was read from are of this export; else keep `state()`
        in their place."""
        return bool(self._content)

    def state(self, with_support: bool = False) -> bytes:
        """Return the task as bytes, which `ServedModel.task` of the same export takes anywhere;
        `with_support` they carry the support rows, and other versions renew them. Raises UserError
        for a task read from a state that carries none."""
        if not with_support:
            # No support rows are in them unless the model takes statistics of these.
            return self._model.write_state(self._state, None)
        if self._support is not None:
            return self._model.write_state(self._state, self._support)
        if is_renewable(self._content):
            return self._content
        raise UserError(
            "the task was read from a state that carries no support rows. Adapt it by its rows, "
            "or leave out with_support"
        )

    def append(self, events: object) -> None:
        """Take further events of the task: predictions are then those of a task that adapted with
        all of them, and those before are encoded no more. An event that a support row knows, being
        older, has the task adapt anew."""
        encoded = self._model.encode_events(events)
        self._state = self._model.append_encoded(self._state, encoded)
        self._support, self._content = self._state.support, b""

    def user_vector(self) -> Tensor:
        """Return the task's vector [D], for an index of the items' vectors; see user_vectors."""
        return self._model.user_vectors([self._state])[0]

    def predict(self, rows: object) -> Tensor:
        """Return probabilities (bce) or ratings [N] of rows of the task, [N, labels] of several."""
        encoded = self._model.encode(rows, "query", with_label=False)
        return self._model.predict_encoded([self._state], encoded, [encoded.num_rows])
