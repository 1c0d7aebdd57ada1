"""TaskBatch: the episodes of one rank's share of a step as tensors, ready for one embedding lookup.

Shape suffixes: T tasks, N rows, F single-id or pooled features, M multi-id features, V values, B
tables, U unique ids, K dense columns, P task-row pairs"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from metaio.ragged import sum_rows


@dataclass
class TaskBatch:
    """Episodes with contiguous rows, support before query."""

    task_T: Tensor  # int64, the task each episode belongs to
    row_offsets_T1: Tensor  # int64, first row of each episode, then N
    # int64, support rows of each episode; the rest of its rows are query rows
    support_lengths_T: Tensor
    label_N: Tensor  # float32; [N, labels] where there are several, NaN: not known
    dense_NK: Tensor  # float32
    # Table by table, in the order of Features.tables. An id may stand twice only if no episode uses
    # both positions: within an episode equal ids must be one row to adapt.
    unique_ids_U: Tensor  # int64
    unique_lengths_B: Tensor  # int64
    # One gather of the fetched rows [U, D] serves all features.
    positions_NF: Tensor  # int32, into unique_ids_U
    # int32, into unique_ids_U; row by row, feature by feature within a row
    multi_positions_V: Tensor
    multi_lengths_NM: Tensor  # int32
    # int64, how the raw data names each row; empty where the dataset stores no row ids
    row_id_N: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    # float32, what each row's loss is multiplied by; empty where the dataset stores no weights
    weight_N: Tensor = field(default_factory=lambda: torch.zeros(0))
    # Events, in time, of each episode; empty where the dataset stores none. A row knows the first
    # `events_before_N` of its episode's.
    num_events_T: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    event_positions: Tensor = field(  # int32, into unique_ids_U: C columns of ids
        default_factory=lambda: torch.zeros(0, 0, dtype=torch.int32)
    )
    event_numbers: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    events_before_N: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))
    # int32, into unique_ids_U: the ids of items that are no row's, a column each; empty unless some
    # were drawn for a loss
    drawn_positions: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int32))

    @property
    def num_tasks(self) -> int:
        """Return the number of episodes; 0 for a rank without work."""
        return self.task_T.numel()

    @property
    def uses_all_ids(self) -> bool:
        """Return whether a row reads each of the unique ids."""
        is_used_U = np.zeros(self.unique_ids_U.numel(), np.bool_)
        is_used_U[self.positions_NF.numpy()] = True
        is_used_U[self.multi_positions_V.numpy()] = True
        return bool(is_used_U.all())

    @property
    def num_rows(self) -> int:
        """Return the number of support and query rows."""
        return len(self.label_N)

    def tasks(self, begin: int, end: int) -> "TaskBatch":
        """Return episodes [begin, end), with all unique ids of the batch."""
        first, last = (int(self.row_offsets_T1[task]) for task in (begin, end))
        # Ids of multi-id features lie row by row, so neighbouring rows are one range of them.
        values_before = self.multi_lengths_NM[:first].sum()
        values = slice(values_before, values_before + self.multi_lengths_NM[first:last].sum())
        events = slice(*(int(self.num_events_T[:task].sum()) for task in (begin, end)))
        return TaskBatch(
            task_T=self.task_T[begin:end],
            row_offsets_T1=self.row_offsets_T1[begin : end + 1] - first,
            support_lengths_T=self.support_lengths_T[begin:end],
            label_N=self.label_N[first:last],
            dense_NK=self.dense_NK[first:last],
            unique_ids_U=self.unique_ids_U,
            unique_lengths_B=self.unique_lengths_B,
            positions_NF=self.positions_NF[first:last],
            multi_positions_V=self.multi_positions_V[values],
            multi_lengths_NM=self.multi_lengths_NM[first:last],
            row_id_N=self.row_id_N[first:last],
            weight_N=self.weight_N[first:last],
            num_events_T=self.num_events_T[begin:end],
            event_positions=self.event_positions[events],
            event_numbers=self.event_numbers[events],
            events_before_N=self.events_before_N[first:last],
            drawn_positions=self.drawn_positions,
        )

    def with_ids(self, ids_U: Tensor, lengths_B: Tensor, place_U: Tensor) -> "TaskBatch":
        """Return the batch with these unique ids; `place_U` is each earlier one's place there."""
        positions = "positions_NF", "multi_positions_V", "event_positions", "drawn_positions"
        moved = {name: place_U[getattr(self, name).to(torch.int64)] for name in positions}
        return replace(self, unique_ids_U=ids_U, unique_lengths_B=lengths_B, **moved)

    def map(self, move: Callable[[Tensor], Tensor]) -> "TaskBatch":
        """Return the batch with every tensor replaced by `move(tensor)`."""
        return TaskBatch(**{own.name: move(getattr(self, own.name)) for own in fields(self)})

    def to(self, device: torch.device, non_blocking: bool = False) -> "TaskBatch":
        """Return a copy on a device; TorchRec's pipelines call this method."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "TaskBatch":
        """Return a copy in page-locked memory, so that copying to CUDA can overlap compute."""
        return self.map(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell CUDA's caching allocator that `stream` uses the tensors."""
        for own in fields(self):
            getattr(self, own.name).record_stream(stream)


def empty_batch(
    num_tables: int,
    num_single: int,
    num_multi: int,
    num_dense: int,
    num_labels: int = 1,
    num_event_columns: int = 0,
    num_event_numbers: int = 0,
) -> TaskBatch:
    """Return a batch without episodes."""

    # A rank without work still takes part in every collective, or its peers would hang.
    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(*shape, dtype=dtype)

    return TaskBatch(
        task_T=zeros(0),
        row_offsets_T1=zeros(1),
        support_lengths_T=zeros(0),
        label_N=zeros(0, *[num_labels][: num_labels > 1], dtype=torch.float32),
        dense_NK=zeros(0, num_dense, dtype=torch.float32),
        unique_ids_U=zeros(0),
        unique_lengths_B=zeros(num_tables),
        positions_NF=zeros(0, num_single, dtype=torch.int32),
        multi_positions_V=zeros(0, dtype=torch.int32),
        multi_lengths_NM=zeros(0, num_multi, dtype=torch.int32),
        event_positions=zeros(0, num_event_columns, dtype=torch.int32),
        event_numbers=zeros(0, num_event_numbers, dtype=torch.float32),
    )


class TaskRows(NamedTuple):
    """The rows of each episode's working copy, episode by episode, ascending by position."""

    level1_position_P: Tensor  # int64, into TaskBatch.unique_ids_U
    positions_NF: Tensor  # int64, into the P pairs
    multi_positions_V: Tensor  # int64, into the P pairs


def deduplicate_task_rows(batch: TaskBatch) -> TaskRows:
    """Return positions into one row per (episode, unique id), where `rows_UD[level1_position_P]`
    are the copies to adapt: `level1_position_P[positions_NF]` equals `batch.positions_NF`.

    >>> deduplicate_task_rows(empty_batch(1, 1, 0, 0)).level1_position_P.tolist()
    []"""
    # A pair is one number, so that one np.unique finds them. A row that two episodes use is two
    # pairs: each episode adapts its own copy.
    num_positions = max(batch.unique_ids_U.numel(), 1)
    if batch.num_tasks == 1 and batch.uses_all_ids:
        # Each id is its own pair: nothing to sort.
        places_P = torch.arange(batch.unique_ids_U.numel())
        return TaskRows(places_P, batch.positions_NF.long(), batch.multi_positions_V.long())
    row_lengths_T = np.diff(batch.row_offsets_T1.numpy())
    episode_N = np.repeat(np.arange(batch.num_tasks) * num_positions, row_lengths_T)
    values_N = sum_rows(batch.multi_lengths_NM.numpy())
    positions_NF, multi_V = batch.positions_NF.numpy(), batch.multi_positions_V.numpy()
    num_single = positions_NF.size
    keys_NF, keys_V = positions_NF + episode_N[:, None], multi_V + np.repeat(episode_N, values_N)
    pairs_P, ranks = np.unique(np.concatenate([keys_NF.ravel(), keys_V]), return_inverse=True)
    return TaskRows(
        torch.from_numpy(pairs_P % num_positions),
        torch.from_numpy(ranks[:num_single].reshape(positions_NF.shape)),
        torch.from_numpy(ranks[num_single:]),
    )
