"""Which rows an increment learns each label from: a label that matures has a window of its own, so
much older than the increment's, and the windows of all increments follow one another.

Shape suffixes: N rows, L labels"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from metaio.errors import TooFewRowsError
from metaio.prepare.episodes.encoded_rows import EncodedRows, concatenate_rows, select_rows
from metaio.prepare.schema.schema import Schema
from metaio.ragged import find_run_starts
from metaio.stream.window import StreamClock

LabelCounts = Counter[tuple[str, str]]  # of rows, by label and what became of it
_EVER, _NEVER = np.iinfo(np.int64).min, np.iinfo(np.int64).max


@dataclass(frozen=True)
class LabelWindow:
    """The span of event time whose rows show some labels for the first time, as query rows."""

    start: int
    stop: int
    labels: tuple[int, ...]
    # By label: from which time on rows before the window do not show it yet.
    unknown_from: tuple[int, ...]

    @property
    def support_before(self) -> int:
        """Return the time from which on a row is no support, as it would show no label."""
        return min(self.start, max(self.unknown_from))

    def contains(self, rows: EncodedRows) -> npt.NDArray[np.bool_]:
        """Return which rows are of the window."""
        return (rows.time_N >= self.start) & (rows.time_N < self.stop)

    def mask(self, rows: EncodedRows) -> EncodedRows:
        """Return the rows with NaN for the labels that they do not show."""
        # Where no label matures all are shown, and nothing is copied.
        if len(self.labels) == len(self.unknown_from) and min(self.unknown_from) >= self.start:
            return rows
        label_NL = rows.label_N.copy().reshape(rows.num_rows, len(self.unknown_from))
        is_within_N = rows.time_N >= self.start
        for at, unknown_from in enumerate(self.unknown_from):
            is_shown_N = is_within_N if at in self.labels else np.zeros_like(is_within_N)
            is_shown_N = is_shown_N | (~is_within_N & (rows.time_N < unknown_from))
            label_NL[~is_shown_N, at] = np.nan
        return replace(rows, label_N=label_NL.reshape(rows.label_N.shape))


@dataclass(frozen=True)
class LabelWindows:
    """The windows of an increment's labels, those of labels that need not wait first."""

    windows: tuple[LabelWindow, ...]
    # By label: the rows before were learnt, once the increment before this one stands, and once
    # this one does.
    learnt_before: tuple[int, ...]
    learnt_after: tuple[int, ...]
    matures: bool  # whether any label does

    @classmethod
    def of(cls, clock: StreamClock, learnt: Sequence[int], stop: int) -> Self:
        """Return the windows of an increment whose own ends at `stop`."""
        start = _EVER if clock.start is None else clock.start
        # A person may have set the window back: rows that were learnt are not learnt again.
        before = tuple(
            min(start, known) if delay else start
            for delay, known in zip(
                clock.delays, learnt or [start] * len(clock.delays), strict=True
            )
        )
        after = tuple(
            max(known, stop - delay) if delay else _NEVER
            for delay, known in zip(clock.delays, before, strict=True)
        )
        unknown_from = tuple(
            known if delay else _NEVER for delay, known in zip(clock.delays, before, strict=True)
        )
        windows = []
        for delay in sorted(set(clock.delays)):
            labels = tuple(at for at, own in enumerate(clock.delays) if own == delay)
            windows.append(LabelWindow(before[labels[0]], after[labels[0]], labels, unknown_from))
        return cls(tuple(windows), before, after, max(clock.delays) > 0)

    @property
    def first(self) -> LabelWindow:
        """Return the window in which a row is query for the first time."""
        return self.windows[0]

    @property
    def waits_from(self) -> int | None:
        """Return from which time on every row is needed by later increments."""
        return min(self.learnt_after) if self.matures else None

    def find_ripe(self, rows: EncodedRows) -> npt.NDArray[np.bool_]:
        """Return which rows are of a window of labels that matured."""
        found_N = np.zeros(rows.num_rows, np.bool_)
        for window in self.windows if self.matures else ():
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

    def account(self, merged: "MergedRows", num_query: int) -> dict[str, int]:
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

    def count(self, schema: Schema, merged: "MergedRows", newest: EncodedRows) -> LabelCounts:
        """Return for each label that matures how many rows are ripe, wait for it, and were
        corrected, in time or too late to be learnt."""
        found = LabelCounts()
        time_N = merged.rows.time_N
        label_NL = merged.rows.label_N.reshape(len(time_N), len(self.learnt_before))
        for window in self.windows if self.matures else ():
            for at in window.labels:
                if window.stop == _NEVER:
                    continue
                name = schema.labels[at].name or schema.labels[at].column
                is_ripe_N = window.contains(merged.rows) & ~np.isnan(label_NL[:, at])
                is_late_N = time_N < window.start
                changed_N = merged.is_changed_NL[:, at]
                found[name, "ripe"] = int(is_ripe_N.sum())
                found[name, "waiting"] = int((newest.time_N >= window.stop).sum())
                found[name, "corrected"] = int((changed_N & ~is_late_N).sum())
                found[name, "too_late"] = int((changed_N & is_late_N).sum())
        return found


@dataclass(frozen=True)
class MergedRows:
    """Earlier and new rows of some tasks, each once, with the labels that came last."""

    rows: EncodedRows
    is_new_N: npt.NDArray[np.bool_]
    is_changed_NL: npt.NDArray[np.bool_]  # labels of earlier rows
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
        return MergedRows(both, is_new_N, np.zeros(label_NL.shape, np.bool_), 0)
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
    merged = replace(merged, label_N=found_NL.reshape(merged.label_N.shape).astype(np.float32))
    return MergedRows(merged, is_new_N, is_changed_NL, both.num_rows - len(kept))


def nest(counts: LabelCounts) -> dict[str, dict[str, int]]:
    """Return the counts of each label as a report has them."""
    found: dict[str, dict[str, int]] = {}
    for (label, what), count in counts.items():
        found.setdefault(label, {})[what] = count
    return found
