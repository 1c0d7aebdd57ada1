"""Which rows an increment learns each label from: a label that matures has a window of its own, so
much older than the increment's, and the windows of all increments follow one another.

Shape suffixes: N rows, L labels"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from metaio.errors import TooFewRowsError
from metaio.prepare.episodes.encoded_rows import EncodedRows, concatenate_rows, select_rows
from metaio.prepare.schema.schema import Schema
from metaio.ragged import find_run_starts

if TYPE_CHECKING:
    from metaio.stream.stream_state import StreamState
    from metaio.stream.window import StreamClock

LabelCounts = Counter[tuple[str, str]]  # of rows, by label and what became of it
_EVER, _NEVER = np.iinfo(np.int64).min, np.iinfo(np.int64).max


@dataclass(frozen=True)
class LabelWindow:
    """A span of event time whose rows, as query rows, show some labels."""

    start: int
    stop: int
    labels: tuple[int, ...]
    # By label: from which time on rows before the window do not show it yet.
    unknown_from: tuple[int, ...]
    weighed: tuple[int, ...] = ()  # labels that are shown as 0, whatever they are
    risen: bool = False  # they are shown instead where they have come to be above 0

    @property
    def support_before(self) -> int:
        """Return the time from which on a row is no support, as it would show no label."""
        return min(self.start, max(self.unknown_from))

    def contains(self, rows: EncodedRows) -> npt.NDArray[np.bool_]:
        """Return which rows are of the window."""
        return (rows.time_N >= self.start) & (rows.time_N < self.stop)

    def mask(self, merged: MergedRows) -> EncodedRows:
        """Return the rows as the window shows them: with NaN for labels that are not known."""
        rows, num_labels = merged.rows, len(self.unknown_from)
        # Where no label matures all are shown, and nothing is copied.
        shows_all = len(self.labels) == num_labels and not self.weighed
        if shows_all and min(self.unknown_from) >= self.start:
            return rows
        label_NL = rows.label_N.copy().reshape(rows.num_rows, num_labels)
        is_within_N = rows.time_N >= self.start
        for at, unknown_from in enumerate(self.unknown_from):
            is_hidden_N = ~is_within_N & (rows.time_N >= unknown_from)
            if at not in self.labels:
                is_hidden_N |= is_within_N
            elif self.risen:
                is_hidden_N |= is_within_N & ~merged.is_risen_NL[:, at]
            elif at in self.weighed:
                label_NL[is_within_N, at] = 0.0
            label_NL[is_hidden_N, at] = np.nan
        return replace(rows, label_N=label_NL.reshape(rows.label_N.shape))

    def find_tasks(self, rows: EncodedRows) -> npt.NDArray[np.uint64]:
        """Return the tasks that have rows of the window; with `risen` those that show something,
        of rows that `mask` returned."""
        is_own_N = self.contains(rows)
        if self.risen:
            is_own_N &= ~np.isnan(rows.label_N.reshape(len(is_own_N), -1)).all(axis=1)
        return np.unique(rows.task_hash_N[is_own_N])


@dataclass(frozen=True)
class LabelWindows:
    """The windows of an increment's labels, those of labels that need not wait first."""

    windows: tuple[LabelWindow, ...]
    # By label: the rows before are final, once the increment before this one stands, and once this
    # one does.
    ripe_before: tuple[int, ...]
    ripe_after: tuple[int, ...]
    # Where rows are shown again when a label has risen: begins of windows, this one's last.
    opened: tuple[int, ...] = ()
    waits_from: int | None = None  # every row from then on is needed by later increments

    @classmethod
    def of(
        cls,
        schema: Schema,
        clock: StreamClock,
        before: StreamState,
        window: tuple[int, int],
        is_train: bool,
    ) -> Self:
        """Return the windows of an increment whose own is `window`; the split that is trained
        alone shows labels before they are final."""
        (begin, stop), delays = window, clock.delays
        if clock.is_backfill:
            # Rows from behind it, which the stream has, are neither query nor support.
            every = tuple(range(len(delays)))
            return cls((LabelWindow(begin, stop, every, (_NEVER,) * len(delays)),), (), ())
        start = _EVER if clock.start is None else clock.start
        # A person may have set the window back: rows that were learnt are not learnt again.
        known = before.ripe or (start,) * len(delays)
        ripe = tuple(min(start, own) for own in known)
        after = tuple(
            max(own, stop - delay) if delay else _NEVER
            for own, delay in zip(ripe, delays, strict=True)
        )
        weighed = tuple(at for at, label in enumerate(schema.labels) if label.is_weighed)
        open_before = tuple(own for own in before.opened if own < start)
        opened = _drop_closed(
            (*open_before, start), stop, max((delays[at] for at in weighed), default=0)
        )
        weighed = weighed if is_train else ()
        shown_after = [0 if at in weighed else delay for at, delay in enumerate(delays)]

        def unknown_from(begin: int) -> tuple[int, ...]:
            return tuple(
                _NEVER if not delay else max(begin - delay, _EVER) if at in weighed else ripe[at]
                for at, delay in enumerate(delays)
            )

        windows = []
        for delay in sorted(set(shown_after)):
            labels = tuple(at for at, own in enumerate(shown_after) if own == delay)
            begin = ripe[labels[0]] if delay else start
            end = after[labels[0]] if delay else _NEVER
            windows.append(LabelWindow(begin, end, labels, unknown_from(begin), weighed))
        for begin, end in pairwise((*open_before, start, _NEVER)) if weighed else ():
            windows.append(LabelWindow(begin, end, weighed, unknown_from(begin), weighed, True))
        waits = [own for own, delay in zip(after, delays, strict=True) if delay]
        waits += [max(opened[0] - delays[at], _EVER) for at in weighed]
        return cls(tuple(windows), ripe, after, opened, min(waits, default=None))

    @property
    def first(self) -> LabelWindow:
        """Return the window in which a row is query for the first time."""
        return self.windows[0]

    @property
    def matures(self) -> bool:
        """Return whether any label does."""
        return self.waits_from is not None

    @property
    def hidden(self) -> tuple[int, ...]:
        """Return the labels that rows of the window do not show as support."""
        return self.first.weighed

    def find_ripe(self, rows: EncodedRows) -> npt.NDArray[np.bool_]:
        """Return which rows are of a window of labels that matured."""
        found_N = np.zeros(rows.num_rows, np.bool_)
        for window in self.windows:
            if window.stop != _NEVER and not window.risen:
                found_N |= window.contains(rows)
        return found_N

    def check_ripe(self, rows: Counter[str], schema: Schema) -> None:
        """Raise TooFewRowsError if all rows that were read wait for their labels."""
        num_query = rows.total() - sum(rows[name] for name in ("corrections", "late", "waiting"))
        if self.matures and not num_query:
            late = next(label for label in schema.labels if label.matures is not None)
            raise TooFewRowsError(
                f"no row is as old as label {late.column} needs to mature, {late.matures}: there "
                "is nothing to learn yet. Wait for newer files"
            )

    def account(self, merged: MergedRows, num_query: int) -> dict[str, int]:
        """Return what became of new rows that are no query rows of the first window, of which there
        are `num_query`: they correct others, came too late to be learnt, or wait. Those that wait
        no more count negative."""
        if not self.matures:
            return {}
        num_in_time = int((merged.rows.time_N[merged.is_new_N] >= self.first.start).sum())
        return {
            "corrections": merged.num_corrections,
            "late": int(merged.is_new_N.sum()) - num_in_time,
            "waiting": num_in_time - num_query,
        }

    def count(self, schema: Schema, merged: MergedRows, newest: EncodedRows) -> LabelCounts:
        """Return for each label that matures how many rows are ripe, wait for it, and were
        corrected, in time or too late to be learnt."""
        found, time_N = LabelCounts(), merged.rows.time_N
        label_NL = merged.rows.label_N.reshape(len(time_N), len(schema.labels))
        for at, label in enumerate(schema.labels):
            if label.matures is not None:
                name = label.name or label.column
                is_late_N, changed_N = time_N < self.ripe_before[at], merged.is_changed_NL[:, at]
                is_ripe_N = ~is_late_N & (time_N < self.ripe_after[at])
                found[name, "ripe"] = int((is_ripe_N & ~np.isnan(label_NL[:, at])).sum())
                found[name, "waiting"] = int((newest.time_N >= self.ripe_after[at]).sum())
                found[name, "corrected"] = int((changed_N & ~is_late_N).sum())
                found[name, "too_late"] = int((changed_N & is_late_N).sum())
        return found


def _drop_closed(begins: tuple[int, ...], stop: int, delay: int) -> tuple[int, ...]:
    """Return the windows, of which the last ends at `stop`, that have rows younger than `delay`."""
    ends = (*begins[1:], stop)
    return tuple(begin for begin, end in zip(begins, ends, strict=True) if end > stop - delay)


@dataclass(frozen=True)
class MergedRows:
    """Earlier and new rows of some tasks, each once, with the labels that came last."""

    rows: EncodedRows
    is_new_N: npt.NDArray[np.bool_]
    is_changed_NL: npt.NDArray[np.bool_]  # labels of earlier rows
    is_risen_NL: npt.NDArray[np.bool_]  # labels above 0 that were not so before, and are not final
    num_corrections: int  # rows that only correct another


def merge_rows(
    schema: Schema, labels: LabelWindows, past: EncodedRows, rows: EncodedRows
) -> MergedRows:
    """Return the rows; where labels mature, those with the [row_id] of another one are merged into
    it. Of several labels that come together the greatest counts: a click, and its conversion."""
    both = concatenate_rows(schema, [past, rows])
    label_NL = both.label_N.reshape(both.num_rows, len(schema.labels))
    is_new_N = np.arange(both.num_rows) >= past.num_rows
    if not labels.matures:
        unchanged_NL = np.zeros(label_NL.shape, np.bool_)
        return MergedRows(both, is_new_N, unchanged_NL, unchanged_NL, 0)
    row_id_N = both.row_id_NR[:, 0]
    # Whatever the order in which an engine reads them.
    order_N = np.lexsort((label_NL[:, 0], both.time_N, is_new_N, row_id_N, both.task_hash_N))
    is_first_N = find_run_starts(both.task_hash_N[order_N]) | find_run_starts(row_id_N[order_N])
    firsts = np.flatnonzero(is_first_N)
    kept, ordered_NL = order_N[firsts], label_NL[order_N]
    newest_NL = np.where(is_new_N[order_N, None], ordered_NL, np.nan)
    if len(firsts):  # reduceat takes no empty array
        newest_NL = np.fmax.reduceat(newest_NL, firsts, axis=0)
    before_NL = label_NL[kept]
    found_NL = np.where(np.isnan(newest_NL), before_NL, newest_NL)
    is_new_N = is_new_N[kept]
    is_changed_NL = (found_NL != before_NL) & ~np.isnan(found_NL) & ~is_new_N[:, None]
    merged = select_rows(both, kept)
    # A new row that is late was not shown as one of label 0.
    is_open_NL = merged.time_N[:, None] >= np.array(labels.ripe_before)
    is_open_NL &= ~is_new_N[:, None] | (merged.time_N >= labels.first.start)[:, None]
    is_risen_NL = (found_NL > 0) & is_open_NL & (is_new_N[:, None] | ~(before_NL > 0))
    merged = replace(merged, label_N=found_NL.reshape(merged.label_N.shape).astype(np.float32))
    num_corrections = both.num_rows - len(kept)
    return MergedRows(merged, is_new_N, is_changed_NL, is_risen_NL, num_corrections)


def nest(counts: LabelCounts) -> dict[str, dict[str, int]]:
    """Return the counts of each label as a report has them."""
    found: dict[str, dict[str, int]] = {}
    for (label, what), count in counts.items():
        found.setdefault(label, {})[what] = count
    return found
