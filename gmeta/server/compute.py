"""All requests that wait, answered together by one version of the model: encoded at once, adapted
at once, scored at once. A request that is wrong gets its own error and holds up nobody else's.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gmeta.errors import UserError
from gmeta.server.cache import Entry, TaskCache
from gmeta.server.errors import RequestError, bad
from gmeta.server.protocol import Answer, Inference, Outcome
from gmeta.serving.model import ServedModel
from gmeta.serving.outputs import BEFORE, PREDICTION
from gmeta.serving.rows import EncodedColumns, join_rows, no_rows, split_rows
from gmeta.serving.states import AdaptedTensors, TaskState, split, stacked
from gmeta.serving.tasks import cuts
from metaio.errors import MetaIOError

Observe = Callable[[str, float], None]  # a stage, and how many seconds it took


@dataclass
class _Share:
    """One request of a batch, and what is computed of it so far."""

    request: Inference
    support: pa.Table | None = None  # rows to adapt by, in this batch
    entry: Entry | None = None  # the cache's, where the request has no rows
    state: TaskState | None = None  # where it need not be adapted now
    cache: str = ""
    support_rows: int = 0
    known: EncodedColumns | None = None  # the support rows as ids and numbers
    asked: EncodedColumns | None = None  # the query rows
    outputs: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    error: RequestError | None = None


def answer_all(
    model: ServedModel,
    version: str,
    cache: TaskCache,
    requests: Sequence[Inference],
    observe: Observe,
) -> list[Outcome]:
    """Return the answer or the error of each request, all from this version of the model."""
    shares = [_Share(request) for request in requests]
    for share in shares:
        _find_state(share, model, version, cache)
    began_s = time.perf_counter()
    _encode_sides(shares, model)
    observe("encode", time.perf_counter() - began_s)
    right = [share for share in shares if share.error is None]
    fresh = [share for share in right if share.state is None]
    for chosen in _cut([(_rows(share.known), _rows(share.asked)) for share in fresh]):
        _adapt_and_predict([fresh[place] for place in chosen], model, version, cache, observe)
    began_s = time.perf_counter()
    known = [share for share in right if share.state is not None]
    for chosen in _cut([(0, _rows(share.asked)) for share in known]):
        some = [known[place] for place in chosen]
        states = [share.state for share in some if share.state is not None]
        _predict(some, PREDICTION, model, stacked(states))
    comparing = [share for share in right if BEFORE in share.request.outputs]
    for chosen in _cut([(0, _rows(share.asked)) for share in comparing]):
        some = [comparing[place] for place in chosen]
        _predict(some, BEFORE, model, stacked([model.unadapted] * len(some)))
    observe("predict", time.perf_counter() - began_s)
    return [
        share.error or Answer(version, share.outputs, share.support_rows, share.cache)
        for share in shares
    ]


def _find_state(share: _Share, model: ServedModel, version: str, cache: TaskCache) -> None:
    """Decide what a request's task is: to adapt now, in the cache, or unknown."""
    request = share.request
    if request.support is not None:
        share.support = request.support
    elif request.task_key is None:
        share.state = model.unadapted
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
        if entry.state is not None and entry.version == version:
            share.state, share.cache = entry.state, "hit"
            return
        share.support, share.cache = entry.support, "restored"
    share.support_rows = share.support.num_rows


def _encode_sides(shares: Sequence[_Share], model: ServedModel) -> None:
    """Encode every request's rows as ids and numbers, or note the error where that fails."""
    adapting = [share for share in shares if share.support is not None and share.error is None]
    tables = [share.support for share in adapting if share.support is not None]
    for share, known in zip(
        adapting, _encode(model, tables, "support", with_label=True), strict=True
    ):
        if isinstance(known, RequestError):
            share.error = known
        elif len(np.unique(known.task_N)) > 1:
            share.error = bad(
                f"the support rows are of {len(np.unique(known.task_N))} tasks; a request is of "
                "one. Send a request for each"
            )
        elif refusal := model.refusal(known.num_rows, "the request"):
            share.error = RequestError(413, refusal)
        else:
            share.known = known
    asking = [share for share in shares if share.request.query is not None and share.error is None]
    tables = [share.request.query for share in asking if share.request.query is not None]
    for share, asked in zip(asking, _encode(model, tables, "query", with_label=False), strict=True):
        if isinstance(asked, RequestError):
            share.error = asked
        else:
            share.asked = asked


def _rows(rows: EncodedColumns | None) -> int:
    return 0 if rows is None else rows.num_rows


def _adapt_and_predict(
    shares: Sequence[_Share],
    model: ServedModel,
    version: str,
    cache: TaskCache,
    observe: Observe,
) -> None:
    """Adapt to these requests' tasks and predict their query rows, and keep those with a key."""
    began_s = time.perf_counter()
    supports = [share.known for share in shares if share.known is not None]
    lengths = [rows.num_rows for rows in supports]
    tasks = model.adapt_together(join_rows(supports), lengths)
    if any(share.request.task_key is not None for share in shares):
        for share, state in zip(shares, split(tasks, len(shares)), strict=True):
            key = share.request.task_key
            if key is not None and share.entry is not None:
                cache.restore(key, share.entry, state, version)
            elif key is not None and share.support is not None:
                is_kept = cache.put(key, share.support, state, version)
                share.cache = "stored" if is_kept else "too_large"
    adapted_s = time.perf_counter()
    observe("adapt", adapted_s - began_s)
    _predict(shares, PREDICTION, model, tasks)
    observe("predict", time.perf_counter() - adapted_s)


def _predict(
    shares: Sequence[_Share], output: str, model: ServedModel, tasks: AdaptedTensors
) -> None:
    """Give these requests an output, each with its task's parameters."""
    nothing = no_rows(model.config.features)
    rows = [share.asked or nothing for share in shares]
    lengths = [part.num_rows for part in rows]
    values_N = model.predict_together(tasks, join_rows(rows), lengths).numpy()
    ends = np.cumsum(lengths)
    for share, values in zip(shares, np.split(values_N, ends[:-1]), strict=True):
        share.outputs[output] = values
        if not np.isfinite(values).all():
            share.error = bad(
                f"the {output} of these rows is not finite: a dense value or label is too large "
                "for this model to adapt by. Correct the rows"
            )


def _cut(sizes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return the places of tasks in `sizes` (support and query rows), those of like size together,
    in runs that padding does not make much larger."""
    if not sizes:
        return []
    support_T, query_T = np.array(sizes).T
    longest_T = np.maximum(support_T + query_T, 1)
    return [run.tolist() for run in cuts(np.lexsort((query_T, support_T)), longest_T)]


def _encode(
    model: ServedModel, tables: Sequence[pa.Table], what: str, with_label: bool
) -> list[EncodedColumns | RequestError]:
    """Return the rows of each table, or why they cannot be read. Tables of one schema are encoded
    together, and one by one where one of them is wrong."""
    found: dict[int, EncodedColumns | RequestError] = {}
    alike: dict[str, list[int]] = {}
    for place, table in enumerate(tables):
        alike.setdefault(table.schema.to_string(), []).append(place)
    for places in alike.values():
        try:
            together = pa.concat_tables([tables[place] for place in places])
            rows = model.encode(together, what, with_label)
            parts = split_rows(rows, [tables[place].num_rows for place in places])
            found.update(zip(places, parts, strict=True))
        except (UserError, MetaIOError):
            for place in places:
                found[place] = _encode_alone(model, tables[place], what, with_label)
    return [found[place] for place in range(len(tables))]


def _encode_alone(
    model: ServedModel, table: pa.Table, what: str, with_label: bool
) -> EncodedColumns | RequestError:
    try:
        return model.encode(table, what, with_label)
    except UserError as error:
        return bad(str(error))
    except MetaIOError as error:  # it names a column, which both sides have
        return bad(f"{what} rows: {error}")
