"""Ragged rows of many tasks as padded [T, rows, ...] blocks and back, for products inside each
task.

Shape suffixes: T tasks, N rows, H longest list or task, X all inputs side by side"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowLayout:
    """Where the rows of each task stand among N task-major rows."""

    lengths_T: Tensor  # int64
    num_rows: int  # N
    longest: int  # L
    # Target of each row in the padded [T * H] block; None: all tasks have H rows, a view will do.
    padded_index_N: Tensor | None

    @classmethod
    def of(cls, lengths_T: Tensor) -> "RowLayout":
        """Make the layout of tasks with these numbers of rows, 0 among them."""
        num_tasks = lengths_T.numel()
        longest = int(lengths_T.max()) if num_tasks else 0
        num_rows = int(lengths_T.sum())
        if num_rows == num_tasks * longest:
            return cls(lengths_T, num_rows, longest, None)
        task_N = torch.repeat_interleave(
            torch.arange(num_tasks, device=lengths_T.device), lengths_T
        )
        starts_T = lengths_T.cumsum(0) - lengths_T
        within_N = torch.arange(num_rows, device=lengths_T.device) - starts_T[task_N]
        return cls(lengths_T, num_rows, longest, task_N * longest + within_N)

    @property
    def num_tasks(self) -> int:
        """Count the tasks: T."""
        return self.lengths_T.numel()

    def pad(self, rows: Tensor) -> Tensor:
        """Return rows [N, ...] as [T, L, ...], zero where a task has fewer."""
        shape = (self.num_tasks, self.longest, *rows.shape[1:])
        if self.padded_index_N is None:
            return rows.reshape(shape)
        block = rows.new_zeros(self.num_tasks * self.longest, *rows.shape[1:])
        return block.index_copy(0, self.padded_index_N, rows).view(shape)

    def unpad(self, block: Tensor) -> Tensor:
        """Return blocks [T, L, ...] as rows [N, ...], the inverse of `pad`."""
        flat = block.reshape(self.num_tasks * self.longest, *block.shape[2:])
        return flat if self.padded_index_N is None else flat.index_select(0, self.padded_index_N)

    def blocks(self, rows_NX: Tensor) -> list[Tensor]:
        """Return the rows padded, as the one block that they are."""
        return [self.pad(rows_NX)]

    def join_blocks(self, blocks: Sequence[Tensor]) -> Tensor:
        """Return the one block as rows [N, X]."""
        return self.unpad(blocks[0])

    def spread(self, values: Tensor) -> Tensor:
        """Return the value of each row's task: [T, ...] -> [N, ...]."""
        return values.repeat_interleave(self.lengths_T, dim=0, output_size=self.num_rows)

    def mean_TX(self, rows_NX: Tensor) -> Tensor:
        """Return the mean of each task's rows; 0 if it has none."""
        task_N = self.spread(torch.arange(self.num_tasks, device=self.lengths_T.device))
        sums_TX = rows_NX.new_zeros(self.num_tasks, rows_NX.shape[1]).index_add(0, task_N, rows_NX)
        return sums_TX / self.lengths_T.clamp(min=1).to(rows_NX.dtype).unsqueeze(1)

    def mean_weights_N(self, dtype: torch.dtype, prior: float = 0.0) -> Tensor:
        """Return 1 / (rows of the task + prior): a weighted sum is then the sum of the tasks'
        means, smoothed as if `prior` more rows had the value 0."""
        return self.spread(1.0 / (self.lengths_T.to(dtype) + prior))
