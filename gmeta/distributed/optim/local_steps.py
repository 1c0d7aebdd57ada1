"""Steps that groups of ranks take by themselves: what they moved is averaged every so many (DiLoCo,
arXiv 2311.08105), at once or beside the steps that follow (CO2, arXiv 2401.16265)."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from gmeta.distributed.groups.levels import Levels
from gmeta.distributed.groups.local_rows import LocalRows, MovedRows, RowsOfAll, sum_moved
from gmeta.distributed.optim.local_layers import LocalLayers
from gmeta.distributed.ranks import new_control_group


class _Window(NamedTuple):
    """Steps that are over: what they moved, and the sums over all groups, which are on the way."""

    rows: list[MovedRows]
    layers_before: Tensor
    sums: Future[tuple[list[RowsOfAll], Tensor]]


@final
class LocalSteps:
    """Averages what groups of ranks move by themselves, every `levels.sync_every` steps."""

    def __init__(self, rows: LocalRows, layers: LocalLayers, levels: Levels) -> None:
        self._rows, self._layers = rows, layers
        self._num_steps, self._overlaps = levels.sync_every, levels.overlaps_sync
        assert levels.across is not None
        self._transport = levels.across.transport  # the steps themselves send nothing by it
        # All ranks, not one of each group: a ring of them crosses between two groups once.
        self._everyone = new_control_group()
        self._beside = ThreadPoolExecutor(1, "groups", levels.inside.enter_thread)
        self._since = 0
        self._under_way: _Window | None = None

    def begin_step(self) -> None:
        """Be called before each step."""
        self._layers.begin()

    def finish_step(self, step: int) -> None:
        """Be called after each step, with the number of steps before it. Collective."""
        self._since += 1
        # By the number of the step: a run that goes on has the windows of an unbroken one.
        if (step + 1) % self._num_steps == 0:
            self._end_window()
            if not self._overlaps:
                self._settle(windows_late=0)

    def sync(self) -> None:
        """Have all groups hold the same model. Collective."""
        if self._since:
            self._end_window()
        self._settle(windows_late=0)

    def _end_window(self) -> None:
        self._settle(windows_late=1)
        self._since = 0
        rows, (before, moved) = self._rows.close(), self._layers.close()

        def add_up() -> tuple[list[RowsOfAll], Tensor]:
            of_all = sum_moved(rows, self._transport)
            dist.all_reduce(moved, group=self._everyone)
            return of_all, moved.div_(self._everyone.size())

        self._under_way = _Window(rows, before, self._beside.submit(add_up))

    @torch.no_grad()
    def _settle(self, windows_late: int) -> None:
        window, self._under_way = self._under_way, None
        if window is not None:
            of_all, mean = window.sums.result()
            self._rows.settle(window.rows, of_all)
            self._layers.settle(window.layers_before, mean, windows_late)
