"""A task's adaptation as plain tensors: taken out of a batch, kept, and stacked with others.

Shape suffixes: T tasks, S support rows, D embedding width, P task-row pairs, I inputs, O outputs, J
parts of a gate"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from gmeta.adaptation.plain_update import LowRankUpdate, MaterialisedUpdate, PlainUpdate
from gmeta.serving.encoded_rows import EncodedColumns
from gmeta.serving.event_memory import EventMemory


@dataclass(frozen=True)
class TaskState:
    """One task's adaptation: each adapted layer's change, gates, adapted rows by key; tensors begin
    with a dimension of 1. An unknown task has gates, and neither changes nor rows."""

    changes: Mapping[str, PlainUpdate]
    gates_1JO: Mapping[str, Tensor]
    rows_PD: Tensor
    # The place of each row among the rows of all tables; ascending, as it is bisected.
    key_P: Tensor
    # Kept only where the model takes statistics of them, or events, also those alone.
    support: EncodedColumns | None = None
    # Of events that were appended; made anew where it is missing.
    memory: EventMemory | None = None

    @property
    def num_bytes(self) -> int:
        """Count the bytes of the tensors and of the support rows."""
        tensors = [*self.gates_1JO.values(), self.rows_PD, self.key_P]
        for change in self.changes.values():
            tensors += tensors_of(change)
        arrays = [] if self.support is None else vars(self.support).values()
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        num_bytes += 0 if self.memory is None else self.memory.num_bytes
        return num_bytes + sum(int(array.nbytes) for array in arrays)


@dataclass(frozen=True)
class AdaptedTensors:
    """The adaptation of T tasks; `task_P`, ascending, is the task of each row."""

    changes: Mapping[str, PlainUpdate]
    gates_TJO: Mapping[str, Tensor]
    rows_PD: Tensor
    key_P: Tensor
    task_P: Tensor
    supports: Sequence[EncodedColumns | None]
    memories: Sequence[EventMemory | None] = ()

    @property
    def remembers(self) -> bool:
        """Return whether what each task's events say is known."""
        return len(self.memories) > 0 and None not in self.memories


def split_tasks(adapted: AdaptedTensors, num_tasks: int) -> list[TaskState]:
    """Return the state of each task."""
    counts = torch.bincount(adapted.task_P, minlength=num_tasks).tolist()
    # Views: each is cloned below, since a state that is kept must not keep the whole batch.
    rows, keys = adapted.rows_PD.split(counts), adapted.key_P.split(counts)
    changes = {name: _split_change(change) for name, change in adapted.changes.items()}
    gates = {name: gate_TJO.detach().split(1) for name, gate_TJO in adapted.gates_TJO.items()}
    return [
        TaskState(
            {name: layer_changes[task] for name, layer_changes in changes.items()},
            {name: gates_1JO[task].clone() for name, gates_1JO in gates.items()},
            rows[task].clone(),
            keys[task].clone(),
            _copy_rows(adapted.supports[task]),
        )
        for task in range(num_tasks)
    ]


def stack_tasks(states: Sequence[TaskState]) -> AdaptedTensors:
    """Return the tasks side by side, in their order."""
    if len(states) == 1:  # as it is, without copies
        (one,) = states
        task_P = torch.zeros_like(one.key_P)
        return AdaptedTensors(
            *(one.changes, one.gates_1JO, one.rows_PD, one.key_P, task_P),
            [one.support],
            [one.memory],
        )
    names = dict.fromkeys(name for state in states for name in state.changes)
    changes = {name: _stack_changes([one.changes.get(name) for one in states]) for name in names}
    gates = states[0].gates_1JO  # the same layers in every state
    gates_TJO = {name: torch.cat([one.gates_1JO[name] for one in states]) for name in gates}
    counts = torch.tensor([state.key_P.numel() for state in states])
    return AdaptedTensors(
        changes,
        gates_TJO,
        torch.cat([state.rows_PD for state in states]),
        torch.cat([state.key_P for state in states]),
        torch.arange(len(states)).repeat_interleave(counts),
        [state.support for state in states],
        [state.memory for state in states],
    )


def _copy_rows(rows: EncodedColumns | None) -> EncodedColumns | None:
    return rows and EncodedColumns(*(array.copy() for array in vars(rows).values()))


def _split_change(change: PlainUpdate) -> list[PlainUpdate]:
    """Return the change of each task, without the rows that padded it."""
    if isinstance(change, MaterialisedUpdate):
        pairs = zip(change.weight_TIO.split(1), change.bias_T1O.split(1), strict=True)
        return [MaterialisedUpdate(weight.clone(), bias.clone()) for weight, bias in pairs]
    # A row without a gradient changes nothing: that of padding, or behind a ReLU that is 0.
    counts_TS = (change.scaled_grads_TSO != 0).any(dim=2)
    counts = counts_TS.sum(dim=1).tolist()
    activations = change.activations_TSI[counts_TS].split(counts)
    grads = change.scaled_grads_TSO[counts_TS].split(counts)
    return [
        LowRankUpdate(activation.unsqueeze(0).clone(), grad.unsqueeze(0).clone(), change.bias_rate)
        for activation, grad in zip(activations, grads, strict=True)
    ]


def _stack_changes(changes: Sequence[PlainUpdate | None]) -> PlainUpdate:
    """Return the changes of one layer side by side; None is no change."""
    some = next(change for change in changes if change is not None)
    are_matrices = any(isinstance(change, MaterialisedUpdate) for change in changes)
    if isinstance(some, LowRankUpdate) and not are_matrices:
        # The bias's rate is the layer's, so it is the same for all.
        none = [tensor[:, :0] for tensor in tensors_of(some)]
        nothing = LowRankUpdate(none[0], none[1], some.bias_rate)
        # Factors of fewer rows are padded with zeros, which add nothing to the product.
        pairs = [tensors_of(change or nothing) for change in changes]
        activations, grads = (_pad_rows(list(tensors)) for tensors in zip(*pairs, strict=True))
        return LowRankUpdate(activations, grads, some.bias_rate)
    matrices = [None if change is None else _materialise(change) for change in changes]
    shape = next(change for change in matrices if change is not None)
    zero = MaterialisedUpdate(*(torch.zeros_like(tensor) for tensor in tensors_of(shape)))
    pairs = [tensors_of(change or zero) for change in matrices]
    # A matrix for all where one has one: factors of the others are few, and one form is one
    # product.
    weights, biases = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
    return MaterialisedUpdate(weights, biases)


def tensors_of(change: PlainUpdate) -> list[Tensor]:
    """Return what a change is made of; each has T as its first dimension."""
    if isinstance(change, LowRankUpdate):
        return [change.activations_TSI, change.scaled_grads_TSO]
    return [change.weight_TIO, change.bias_T1O]


def _materialise(change: PlainUpdate) -> MaterialisedUpdate:
    if isinstance(change, MaterialisedUpdate):
        return change
    activations_TSI, grads_TSO = change.activations_TSI, change.scaled_grads_TSO
    bias_T1O = grads_TSO.sum(dim=1, keepdim=True) * change.bias_rate
    return MaterialisedUpdate(activations_TSI.mT @ grads_TSO, bias_T1O)


def _pad_rows(parts: list[Tensor]) -> Tensor:
    longest = max(rows.shape[1] for rows in parts)
    return torch.cat([pad(rows, (0, 0, 0, longest - rows.shape[1])) for rows in parts])
