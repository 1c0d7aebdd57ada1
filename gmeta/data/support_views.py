"""Views of stored episodes for an evaluation: support and query rows drawn anew, or less support.

Shape suffixes: T tasks, N rows"""

from dataclasses import dataclass

import numpy as np

from gmeta.data.hash_rng import draw_for_rows, mix_key, reorder_rows
from gmeta.data.row_groups import RaggedEpisodes, find_groups, redraw_groups
from metaio.ragged import Int64, owners, places
from metaio.read.batch import TaskBatch

# Not the run's: draws are the same for all runs, which are compared on the same rows.
SEED = 0
# Separate random streams: which rows are drawn, and the order in which support rows are shown.
_DRAW_STREAM, _SUPPORT_STREAM = 1, 2


@dataclass(frozen=True)
class SupportView:
    """Draw 0 is the episodes as stored; in other draws each task's rows are shuffled, and as many
    as before are its support. At most `max_support` support rows are shown. `in_groups`: a draw
    keeps groups of find_groups whole, and as many of them as before are support."""

    draw: int = 0
    max_support: int | None = None
    in_groups: bool = False

    def of(self, batch: TaskBatch) -> TaskBatch:
        """Return the batch with this view's rows alone."""
        # The common case takes no copy of the batch.
        return batch if self.is_stored else reorder_rows(batch, *self.order_rows(batch))

    @property
    def is_stored(self) -> bool:
        """Return whether the view has all rows as they are stored."""
        return not self.draw and self.max_support is None

    def order_rows(self, rows: RaggedEpisodes) -> tuple[Int64, Int64]:
        """Return which rows are seen, in their order, and how many of each episode support it."""
        task_T, row_offsets_T1 = np.asarray(rows.task_T), np.asarray(rows.row_offsets_T1)
        support_T = np.asarray(rows.support_lengths_T)
        rows_T = np.diff(row_offsets_T1)
        task_N, within_N = owners(rows_T), places(rows_T)
        order_N = np.arange(len(task_N))
        if self.draw:
            group_N = find_groups(rows) if self.in_groups else order_N
            key = mix_key(SEED, _DRAW_STREAM, self.draw)
            draw_N = draw_for_rows(task_T, row_offsets_T1, key)
            order_N, support_T = redraw_groups(rows, group_N, draw_N)
        if self.max_support is None:
            return order_N, support_T
        # By the task alone, so that a smaller number of rows is a subset of a larger one. Rows
        # stand task by task in any order, so places in it are numbered as stored rows are.
        place_N = draw_for_rows(task_T, row_offsets_T1, mix_key(SEED, _SUPPORT_STREAM))
        is_query_N = within_N >= support_T[task_N]
        place_N[is_query_N] = 1 + within_N[is_query_N]  # behind all support rows, as they were
        by_place_N = np.lexsort((place_N, task_N))
        seen_N = is_query_N | (within_N < self.max_support)
        return order_N[by_place_N[seen_N]], np.minimum(support_T, self.max_support)


STORED = SupportView()


@dataclass(frozen=True)
class EvalProtocol:
    """The views of an evaluation: draws of support and query rows, the stored one first, and for
    each of `support_sizes` at most that many of the stored support rows."""

    draws: int = 1
    support_sizes: tuple[int, ...] = ()

    def views(self, in_groups: bool) -> tuple[list[SupportView], dict[int, SupportView]]:
        """Return the draws, and the view of each support size; `in_groups`: see SupportView."""
        draws = [SupportView(draw, in_groups=in_groups) for draw in range(self.draws)]
        return draws, {most: SupportView(max_support=most) for most in self.support_sizes}
