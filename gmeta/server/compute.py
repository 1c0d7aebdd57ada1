"""All requests that wait, answered together by one version of the model: encoded at once, adapted
at once, scored at once. A request that is wrong gets its own error and holds up nobody else's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gmeta.errors import UserError
from gmeta.server.cache import Entry, TaskCache
from gmeta.server.errors import RequestError, bad
from gmeta.server.protocol import BEFORE, PREDICTION, Answer, Inference, Outcome
from gmeta.serving.rows import EncodedColumns, join_rows, no_rows, split_rows
from gmeta.serving.states import TaskState
from gmeta.serving.tasks import cuts
from metaio.errors import MetaIOError

if TYPE_CHECKING:
    from gmeta.serving.model import ServedModel

Observe = Callable[[str, float], None]  # a stage, and how many seconds it took


@dataclass
class _Share:
    """One request of a batch, as far as it has come."""

    request: Inference
    support: pa.Table | None = None  # rows to adapt by now
    entry: Entry | None = None  # where they come from, if not from the request
    state: TaskState | None = None
    cache: str = ""
    support_rows: int = 0
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
    _adapt(shares, model, version, cache, observe)
    _predict(shares, model, observe)
    return [
        share.error or Answer(version, share.outputs, share.support_rows, share.cache)
        for share in shares
    ]


def _find_state(share: _Share, model: ServedModel, version: str, cache: TaskCache) -> None:
    """Decide what a request's task is: to adapt now, in the cache, or unknown."""
    request = share.request
    if request.support is not None:
        share.support = request.support
        share.cache = "stored" if request.task_key is not None else ""
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


def _adapt(
    shares: list[_Share], model: ServedModel, version: str, cache: TaskCache, observe: Observe
) -> None:
    """Give every task that is to adapt its state, and the cache those that have a key."""
    began_s = time.perf_counter()
    waiting = [share for share in shares if share.support is not None and share.error is None]
    if not waiting:
        return
    tables = [share.support for share in waiting if share.support is not None]
    encoded = _encode(model, tables, "support", with_label=True)
    rows: list[EncodedColumns] = []
    for share, found in zip(waiting, encoded, strict=True):
        if isinstance(found, RequestError):
            share.error = found
        elif len(np.unique(found.task_N)) > 1:
            share.error = bad(
                f"the support rows are of {len(np.unique(found.task_N))} tasks; a request is of "
                "one. Send a request for each"
            )
        else:
            rows.append(found)
    waiting = [share for share in waiting if share.error is None]
    observe("encode", time.perf_counter() - began_s)
    began_s = time.perf_counter()
    for chosen in _cut(rows):
        lengths = [rows[place].num_rows for place in chosen]
        states = model.adapt_encoded(join_rows([rows[place] for place in chosen]), lengths)
        for place, adapted in zip(chosen, states, strict=True):
            waiting[place].state = adapted
    observe("adapt", time.perf_counter() - began_s)
    for share in waiting:
        key, support, state = share.request.task_key, share.support, share.state
        if key is None or support is None or state is None:
            continue
        if share.entry is not None:
            cache.restore(key, share.entry, state, version)
        else:
            cache.put(key, support, state, version)


def _predict(shares: list[_Share], model: ServedModel, observe: Observe) -> None:
    """Give every request its outputs."""
    began_s = time.perf_counter()
    empty = no_rows(model.config.features)
    for share in shares:
        if share.request.query is None:
            share.outputs = {name: np.zeros(0, np.float32) for name in share.request.outputs}
    asking = [share for share in shares if share.request.query is not None and share.error is None]
    tables = [share.request.query for share in asking if share.request.query is not None]
    rows: list[EncodedColumns] = []
    for share, found in zip(asking, _encode(model, tables, "query", with_label=False), strict=True):
        share.error = found if isinstance(found, RequestError) else None
        rows.append(empty if isinstance(found, RequestError) else found)
    observe("encode", time.perf_counter() - began_s)
    began_s = time.perf_counter()
    for name in (PREDICTION, BEFORE):
        wanted = [
            place
            for place, share in enumerate(asking)
            if name in share.request.outputs and share.error is None
        ]
        for chosen in _cut([rows[place] for place in wanted]):
            places = [wanted[place] for place in chosen]
            states = [_state(asking[place], model, name) for place in places]
            lengths = [rows[place].num_rows for place in places]
            joined = join_rows([rows[place] for place in places])
            values_N = model.predict_encoded(states, joined, lengths).numpy()
            for place, values in zip(places, np.split(values_N, np.cumsum(lengths)), strict=False):
                asking[place].outputs[name] = values
    observe("predict", time.perf_counter() - began_s)


def _state(share: _Share, model: ServedModel, output: str) -> TaskState:
    if output == BEFORE or share.state is None:
        return model.unadapted
    return share.state


def _cut(rows: Sequence[EncodedColumns]) -> list[list[int]]:
    """Return the places of the parts, those of like size together, in runs that padding does not
    make much larger."""
    if not rows:
        return []
    sizes = np.array([max(part.num_rows, 1) for part in rows])
    return [run.tolist() for run in cuts(np.argsort(sizes, kind="stable"), sizes)]


def _encode(
    model: ServedModel, tables: Sequence[pa.Table], what: str, with_label: bool
) -> list[EncodedColumns | RequestError]:
    """Return the rows of each table, or why they cannot be read. Tables of one schema are encoded
    together, and one by one where one of them is wrong."""
    found: dict[int, EncodedColumns | RequestError] = {}
    alike: dict[tuple[object, ...], list[int]] = {}
    for place, table in enumerate(tables):
        key = (*table.column_names, *table.schema.types)
        alike.setdefault(key, []).append(place)
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
    except (UserError, MetaIOError) as error:
        return bad(str(error))
