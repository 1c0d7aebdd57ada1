"""All requests that wait, answered together by one version: encoded, adapted, scored at once. A
request that is wrong gets its own error and holds up nobody else's."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gmeta.errors import UserError
from gmeta.serving.encoded_rows import EncodedColumns, empty_rows, join_rows, split_rows
from gmeta.serving.finite_values import find_finite_T
from gmeta.serving.outputs import BEFORE, PREDICTION
from gmeta.serving.served_model import ServedModel
from gmeta.serving.server.inference_protocol import InferenceAnswer, InferenceRequest, Outcome
from gmeta.serving.server.request_errors import RequestError, bad_request
from gmeta.serving.server.request_rows import RequestRows
from gmeta.serving.server.task_cache import CachedTask, TaskCache
from gmeta.serving.server.tensors import TASK_LENGTHS
from gmeta.serving.server.traffic import Traffic
from gmeta.serving.task_matching import cut_runs
from gmeta.serving.task_states import AdaptedTensors, TaskState, split_tasks, stack_tasks
from metaio.errors import MetaIOError

Observe = Callable[[str, float], None]  # a stage, and how many seconds it took


@dataclass
class _BatchShare:
    """One request of a batch, and what is computed of it so far."""

    request: InferenceRequest
    support: RequestRows | None = None  # rows to adapt by, in this batch
    entry: CachedTask | None = None  # the cache's, where the request has no rows
    state: TaskState | None = None  # where it need not be adapted now
    cache: str = ""
    known: str = "state"  # of the task, where no rows are to adapt by
    new_state: bytes = b""  # for the caller
    support_rows: int = 0
    encoded_support: EncodedColumns | None = None  # the support rows as ids and numbers
    encoded_query: EncodedColumns | None = None  # the query rows
    events: pa.Table | None = None  # of the task, those that the cache has first
    outputs: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    error: RequestError | None = None
    tasks: "list[_BatchShare]" = field(default_factory=list)  # of a request of several, each one's

    @property
    def gives_state(self) -> bool:
        """Return whether the caller gets the state that is made in this batch."""
        return self.request.returns_state or self.request.state is not None

    def split_tasks(self) -> "list[_BatchShare]":
        """Return a share for each task of the request: this one where it is of one."""
        if self.request.num_tasks == 1:
            return [self]
        sides = (self.encoded_support, self.support), (self.encoded_query, self.request.query)
        parts = [
            [None] * self.request.num_tasks
            if rows is None or side is None
            else split_rows(rows, side.lengths_T)
            for rows, side in sides
        ]
        self.tasks = [
            replace(self, encoded_support=support, encoded_query=query, outputs={})
            for support, query in zip(*parts, strict=True)
        ]
        return self.tasks

    def outcome(self, version: str) -> Outcome:
        """Return the answer, or the first error of its tasks."""
        shares = self.tasks or [self]
        if error := next((share.error for share in shares if share.error is not None), self.error):
            return error
        outputs = {
            name: np.concatenate([share.outputs[name] for share in shares])
            for name in shares[0].outputs
        }
        return InferenceAnswer(version, outputs, self.support_rows, self.cache, self.new_state)


def answer_all(
    model: ServedModel,
    version: str,
    cache: TaskCache,
    requests: Sequence[InferenceRequest],
    observe: Observe,
    traffic: Traffic | None = None,
) -> list[Outcome]:
    """Return the answer or the error of each request, all from this version of the model."""
    shares = [_BatchShare(request) for request in requests]
    for share in shares:
        _find_state(share, model, version, cache)
    began_s = time.perf_counter()
    _encode_sides(shares, model)
    for share in shares:
        if share.error is None and (share.request.events is not None or share.events is not None):
            share.error = _take_events(share, model, version, cache)
    observe("encode", time.perf_counter() - began_s)
    right = [task for share in shares if share.error is None for task in share.split_tasks()]
    # Tasks that adapt now are predicted by the tensors they adapted in, neither split nor stacked.
    fresh = [share for share in right if share.state is None]
    sizes = [(_num_rows(one.encoded_support), _num_rows(one.encoded_query)) for one in fresh]
    for chosen in _cut_batches(sizes):
        _adapt_and_predict([fresh[place] for place in chosen], model, version, cache, observe)
    began_s = time.perf_counter()
    known = [share for share in right if share.state is not None]
    for chosen in _cut_batches([(0, _num_rows(share.encoded_query)) for share in known]):
        some = [known[place] for place in chosen]
        states = [share.state for share in some if share.state is not None]
        _predict(some, PREDICTION, model, stack_tasks(states))
    comparing = [share for share in right if BEFORE in share.request.outputs]
    for chosen in _cut_batches([(0, _num_rows(share.encoded_query)) for share in comparing]):
        some = [comparing[place] for place in chosen]
        # Without adaptation all tasks have the one state.
        _predict(some, BEFORE, model, stack_tasks([model.unadapted] * len(some)))
    observe("predict", time.perf_counter() - began_s)
    if traffic is not None:
        _note_traffic([share for share in right if share.error is None], model, traffic)
    return [share.outcome(version) for share in shares]


def _note_traffic(tasks: Sequence[_BatchShare], model: ServedModel, traffic: Traffic) -> None:
    support = [one.encoded_support for one in tasks if one.encoded_support is not None]
    query = [one.encoded_query for one in tasks if one.encoded_query is not None]
    known = ["rows" if one.encoded_support is not None else one.known for one in tasks]
    values = [one.outputs[PREDICTION] for one in tasks if PREDICTION in one.outputs]
    traffic.note(model, known, values, (support, query))


def _find_state(share: _BatchShare, model: ServedModel, version: str, cache: TaskCache) -> None:
    """Decide what a request's task is: to adapt now, in the cache, or unknown."""
    request = share.request
    if request.state is not None:
        _read_state(share, model, request.state)
        return
    if request.support is not None:
        share.support = request.support
    elif request.task_key is None:
        # Neither rows nor a key: a task of which nothing is known, but perhaps events.
        share.state, share.known = model.unadapted, "none"
        return
    else:
        entry = cache.get(request.task_key)
        if entry is None:
            share.error = RequestError(
                404,
                f"task {request.task_key!r} is not in the cache: it was never sent, its time is "
                "over or others took its place. Send its support rows with it; or leave out "
                "task_key to predict without adaptation",
            )
            return
        share.entry, share.support_rows = entry, entry.support.num_rows
        share.events = entry.events
        # Another version's state is of other weights: the task adapts anew by its kept rows.
        if entry.state is not None and entry.version == version:
            share.state, share.cache = entry.state, "hit"
            return
        share.support, share.cache = RequestRows.of(entry.support), "restored"
    share.support_rows = share.support.table.num_rows


def _read_state(share: _BatchShare, model: ServedModel, content: bytes) -> None:
    """Take the task from a state that its caller kept, or its support rows where another version
    made it."""
    try:
        state = model.read_state(content)
    except (UserError, MetaIOError) as error:
        share.error = bad_request(str(error))
        return
    if isinstance(state, TaskState):
        share.state, share.cache = state, "kept"
        return
    share.encoded_support, share.cache, share.support_rows = state, "renewed", state.num_rows
    share.error = _find_support_error(model, state, [state.num_rows])
    if state.num_rows > share.request.most_state_rows:
        share.error = RequestError(
            413,
            f"the task's state carries {state.num_rows} support rows; at most "
            f"{share.request.most_state_rows} are allowed. Adapt to fewer, or start the server "
            "with a higher --max-rows",
        )


def _encode_sides(shares: Sequence[_BatchShare], model: ServedModel) -> None:
    """Encode every request's rows as ids and numbers, or note the error where that fails."""
    adapting = [share for share in shares if share.support is not None and share.error is None]
    tables = [share.support.table for share in adapting if share.support is not None]
    parts = _encode_tables(model, tables, "support", with_label=True)
    for share, encoded_rows in zip(adapting, parts, strict=True):
        if isinstance(encoded_rows, RequestError):
            share.error = encoded_rows
        elif share.support is not None:
            share.encoded_support = encoded_rows
            share.error = _find_support_error(model, encoded_rows, share.support.lengths_T)
    asking = [share for share in shares if share.request.query is not None and share.error is None]
    tables = [one.request.query.table for one in asking if one.request.query is not None]
    parts = _encode_tables(model, tables, "query", with_label=False)
    for share, encoded in zip(asking, parts, strict=True):
        if isinstance(encoded, RequestError):
            share.error = encoded
        else:
            share.encoded_query = encoded


def _take_events(
    share: _BatchShare, model: ServedModel, version: str, cache: TaskCache
) -> RequestError | None:
    """Give a request's task its events: a state at once, rows to adapt by beside them; return what
    is wrong with them."""
    request, new = share.request, share.request.events
    try:
        if new is not None:
            tables = [new.table] if share.events is None else [share.events, new.table]
            share.events = pa.concat_tables(tables, promote_options="permissive").combine_chunks()
        assert share.events is not None
        if share.events.num_rows > request.most_state_rows:
            return RequestError(
                413,
                f"the task has {share.events.num_rows} events; at most {request.most_state_rows} "
                "are kept. Send it anew with its newest, or start the server with a higher "
                "--max-rows",
            )
        if share.state is None:
            known = share.encoded_support or empty_rows(model.config.features)
            share.encoded_support = join_rows([known, model.encode_events(share.events)])
        elif new is not None:
            share.state = model.append_encoded(share.state, model.encode_events(new.table))
            _keep_appended(share, model, version, cache)
    except (UserError, MetaIOError, pa.ArrowException) as error:
        return bad_request(f"events: {error}")
    return None


def _keep_appended(share: _BatchShare, model: ServedModel, version: str, cache: TaskCache) -> None:
    """Keep a state with further events where its task is kept, or give it to the caller."""
    assert share.state is not None
    key, entry = share.request.task_key, share.entry
    if key is not None and entry is not None:
        is_kept = cache.put(key, entry.support, share.state, version, share.events)
        share.cache = "appended" if is_kept else "too_large"
    if share.gives_state:
        share.cache = "appended"
        share.new_state = model.write_state(share.state, share.state.support)


def _find_support_error(
    model: ServedModel, rows: EncodedColumns, lengths_T: Sequence[int]
) -> RequestError | None:
    # Support rows may name their task, but those of `lengths_T` are of one.
    changes_N = np.flatnonzero(np.diff(rows.task_N)) + 1
    if not np.isin(changes_N, np.cumsum(lengths_T)).all():
        return bad_request(
            f"the support rows are of {len(np.unique(rows.task_N))} tasks; a request is of one, or "
            f"of several that {TASK_LENGTHS} tells apart. Send a request for each, or these inputs"
        )
    if refusal := model.refusal(max(lengths_T), "the request"):
        return RequestError(413, refusal)
    return None


def _num_rows(rows: EncodedColumns | None) -> int:
    return 0 if rows is None else rows.num_rows


def _adapt_and_predict(
    shares: list[_BatchShare], model: ServedModel, version: str, cache: TaskCache, observe: Observe
) -> None:
    """Adapt to these requests' tasks and predict their query rows, and keep those with a key."""
    began_s = time.perf_counter()
    supports = [share.encoded_support for share in shares if share.encoded_support is not None]
    lengths = [rows.num_rows for rows in supports]
    tasks = model.adapt_tasks(join_rows(supports), lengths)
    # Splitting copies every tensor: left out where nobody wants a state kept.
    if any(share.request.task_key is not None or share.gives_state for share in shares):
        states, finite = split_tasks(tasks, len(shares)), find_finite_T(tasks).tolist()
        for share, state, is_finite in zip(shares, states, finite, strict=True):
            key = share.request.task_key
            if not is_finite:  # never kept: later requests would be refused for this one's rows
                share.error = _not_finite_error("adaptation to")
            elif key is not None and share.entry is not None and share.request.events is None:
                cache.restore(key, share.entry, state, version)
            elif key is not None and share.support is not None:
                is_kept = cache.put(key, share.support.table, state, version, share.events)
                kept = "stored" if share.entry is None else "appended"
                share.cache = kept if is_kept else "too_large"
            if share.error is None and share.gives_state:
                share.new_state = model.write_state(state, share.encoded_support)
    adapted_s = time.perf_counter()
    observe("adapt", adapted_s - began_s)
    _predict(shares, PREDICTION, model, tasks)
    observe("predict", time.perf_counter() - adapted_s)


def _predict(
    shares: Sequence[_BatchShare], output: str, model: ServedModel, tasks: AdaptedTensors
) -> None:
    nothing = empty_rows(model.config.features)
    # A request with support rows alone has none to predict.
    rows = [share.encoded_query or nothing for share in shares]
    lengths = [part.num_rows for part in rows]
    shared = [share.request.query and share.request.query.shared_lists for share in shares]
    # A feature of lists by a task's: whether all rows of the task have the list of its first.
    shared_TM = (
        np.stack([model.mark_lists(lists or ()) for lists in shared]) if any(shared) else None
    )
    values_N = model.predict_adapted(tasks, join_rows(rows), lengths, shared_TM).numpy()
    ends = np.cumsum(lengths)
    for share, values in zip(shares, np.split(values_N, ends[:-1]), strict=True):
        share.outputs[output] = values
        if not np.isfinite(values).all():
            share.error = _not_finite_error(f"{output} of")


def _not_finite_error(what: str) -> RequestError:
    return bad_request(
        f"the {what} these rows is not finite: a dense value or label is too large for this model "
        "to adapt by. Correct the rows"
    )


def _cut_batches(sizes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return runs of tasks of like size, as places in `sizes` (support and query rows)."""
    if not sizes:
        return []
    support_T, query_T = np.array(sizes).T
    # A task without rows, too, has a place in a batch.
    longest_T = np.maximum(support_T + query_T, 1)
    return [run.tolist() for run in cut_runs(np.lexsort((query_T, support_T)), longest_T)]


def _encode_tables(
    model: ServedModel, tables: Sequence[pa.Table], what: str, with_label: bool
) -> list[EncodedColumns | RequestError]:
    encoded: dict[int, EncodedColumns | RequestError] = {}
    alike: dict[str, list[int]] = {}
    for place, table in enumerate(tables):
        # Arrow joins tables of one schema only; each call of encode has a cost of its own.
        alike.setdefault(table.schema.to_string(), []).append(place)
    for places in alike.values():
        try:
            joined = pa.concat_tables([tables[place] for place in places])
            rows = model.encode(joined, what, with_label)
            parts = split_rows(rows, [tables[place].num_rows for place in places])
            encoded.update(zip(places, parts, strict=True))
        except (UserError, MetaIOError):  # one by one: only those that are wrong get an error
            for place in places:
                encoded[place] = _encode_table(model, tables[place], what, with_label)
    return [encoded[place] for place in range(len(tables))]


def _encode_table(
    model: ServedModel, table: pa.Table, what: str, with_label: bool
) -> EncodedColumns | RequestError:
    try:
        return model.encode(table, what, with_label)
    except UserError as error:
        return bad_request(str(error))
    except MetaIOError as error:  # it names a column, which both sides have
        return bad_request(f"{what} rows: {error}")
