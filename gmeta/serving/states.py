"""What a task's adaptation is, as plain tensors: taken out of a batch that adapted together, kept,
and put together again with others for one pass over all their query rows.

Shape suffixes: T tasks, S support rows (of all steps), P rows that adapted, D embedding width, O
output width, I input width, M parts of a gate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from gmeta.adaptation.layer_change import LayerChange, LowRankChange, MaterialisedChange
from gmeta.serving.rows import EncodedColumns


@dataclass(frozen=True)
class TaskState:
    """One task's adaptation: the change of each layer that adapted, the gates, and the embedding
    rows that adapted, by key.

    Every tensor of a change or a gate has 1 as its first dimension. A task of which nothing is
    known has no changes and no rows, and the gates of no rows.
    """

    changes: Mapping[str, LayerChange]
    gates_1MO: Mapping[str, Tensor]
    rows_PD: Tensor
    key_P: Tensor  # the place of each row among the rows of all tables; ascending
    support: EncodedColumns | None = None  # where the model takes statistics of it

    @property
    def num_bytes(self) -> int:
        """Count the bytes of the tensors and of the support rows."""
        tensors = [*self.gates_1MO.values(), self.rows_PD, self.key_P]
        for change in self.changes.values():
            tensors += _tensors(change)
        arrays = [] if self.support is None else vars(self.support).values()
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return num_bytes + sum(int(array.nbytes) for array in arrays)


@dataclass(frozen=True)
class AdaptedTensors:
    """The adaptation of T tasks; `task_P`, ascending, is the task of each row."""

    changes: Mapping[str, LayerChange]
    gates_TMO: Mapping[str, Tensor]
    rows_PD: Tensor
    key_P: Tensor
    task_P: Tensor
    supports: Sequence[EncodedColumns | None]


def split(adapted: AdaptedTensors, num_tasks: int) -> list[TaskState]:
    """Return the state of each task, in tensors of its own: keeping one does not keep the batch."""
    counts = torch.bincount(adapted.task_P, minlength=num_tasks).tolist()
    rows, keys = adapted.rows_PD.split(counts), adapted.key_P.split(counts)
    changes = {name: _apart(change) for name, change in adapted.changes.items()}
    return [
        TaskState(
            {name: apart[task] for name, apart in changes.items()},
            {
                name: gate_TMO[task : task + 1].detach().clone()
                for name, gate_TMO in adapted.gates_TMO.items()
            },
            rows[task].clone(),
            keys[task].clone(),
            _copied(adapted.supports[task]),
        )
        for task in range(num_tasks)
    ]


def stacked(states: Sequence[TaskState]) -> AdaptedTensors:
    """Return the tasks side by side, in their order. Factors of fewer rows are padded with zeros,
    which change nothing; where one task has a matrix for a layer, all get one."""
    names = dict.fromkeys(name for state in states for name in state.changes)
    changes = {name: _together([state.changes.get(name) for state in states]) for name in names}
    gates_TMO = {
        name: torch.cat([state.gates_1MO[name] for state in states]) for name in states[0].gates_1MO
    }
    counts = torch.tensor([state.key_P.numel() for state in states])
    return AdaptedTensors(
        changes,
        gates_TMO,
        torch.cat([state.rows_PD for state in states]),
        torch.cat([state.key_P for state in states]),
        torch.arange(len(states)).repeat_interleave(counts),
        [state.support for state in states],
    )


def _copied(rows: EncodedColumns | None) -> EncodedColumns | None:
    if rows is None:
        return None
    return EncodedColumns(*(array.copy() for array in vars(rows).values()))


def _apart(change: LayerChange) -> list[LayerChange]:
    """Return the change of each task, without the rows that padded it."""
    if isinstance(change, MaterialisedChange):
        pairs = zip(change.weight_TIO, change.bias_T1O, strict=True)
        return [
            MaterialisedChange(weight.unsqueeze(0).clone(), bias.unsqueeze(0).clone())
            for weight, bias in pairs
        ]
    # A row without a gradient changes nothing: that of padding, or behind a ReLU that is 0.
    counts_TS = (change.scaled_grads_TSO != 0).any(dim=2)
    counts = counts_TS.sum(dim=1).tolist()
    activations = change.activations_TSI[counts_TS].split(counts)
    grads = change.scaled_grads_TSO[counts_TS].split(counts)
    return [
        LowRankChange(activation.unsqueeze(0).clone(), grad.unsqueeze(0).clone(), change.bias_rate)
        for activation, grad in zip(activations, grads, strict=True)
    ]


def _together(changes: Sequence[LayerChange | None]) -> LayerChange:
    """Return the changes of one layer side by side; None is no change."""
    some = next(change for change in changes if change is not None)
    if isinstance(some, LowRankChange) and not any(
        isinstance(change, MaterialisedChange) for change in changes
    ):
        # The bias's rate is the layer's, so it is the same for all.
        none = [tensor[:, :0] for tensor in _tensors(some)]
        nothing = LowRankChange(none[0], none[1], some.bias_rate)
        pairs = [_tensors(change or nothing) for change in changes]
        activations, grads = (_padded(list(tensors)) for tensors in zip(*pairs, strict=True))
        return LowRankChange(activations, grads, some.bias_rate)
    found = [None if change is None else _matrix(change) for change in changes]
    shape = next(change for change in found if change is not None)
    zero = MaterialisedChange(*(torch.zeros_like(tensor) for tensor in _tensors(shape)))
    pairs = [_tensors(change or zero) for change in found]
    # A matrix for all where one has one: factors of the others are few, and one form is one
    # product.
    weights, biases = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
    return MaterialisedChange(weights, biases)


def _tensors(change: LayerChange) -> list[Tensor]:
    if isinstance(change, LowRankChange):
        return [change.activations_TSI, change.scaled_grads_TSO]
    return [change.weight_TIO, change.bias_T1O]


def _matrix(change: LayerChange) -> MaterialisedChange:
    if isinstance(change, MaterialisedChange):
        return change
    activations_TSI, grads_TSO = change.activations_TSI, change.scaled_grads_TSO
    bias_T1O = grads_TSO.sum(dim=1, keepdim=True) * change.bias_rate
    return MaterialisedChange(activations_TSI.mT @ grads_TSO, bias_T1O)


def _padded(rows_1SX: list[Tensor]) -> Tensor:
    longest = max(rows.shape[1] for rows in rows_1SX)
    return torch.cat([pad(rows, (0, 0, 0, longest - rows.shape[1])) for rows in rows_1SX])
