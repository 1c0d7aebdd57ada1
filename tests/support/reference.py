"""Slow and obvious: every algorithm as a loop over tasks with explicit weights and tables."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from gmeta.adaptation.adaptation_plan import adaptable_layers
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.learner import MetaLearner
from gmeta.losses.row_losses import LossFunction, row_losses_N
from gmeta_models.gated import GatedModel, head_layers
from gmeta_models.inputs import RowInputs
from metaio.format.features import Features, FeatureSpec, TableSpec
from metaio.read.batch import TaskBatch

# (outputs of some rows of a task, the task, which rows, whether in the inner loop) -> the loss of
# each row
RowLoss = Callable[[Tensor, "Task", range, bool], Tensor]
SECOND_ORDER = ("maml", "anil", "metasgd")


@dataclass(frozen=True)
class Task:
    """One episode in plain lists; the first `num_support` rows are the support set."""

    single: list[list[int]]  # [rows][F]
    multi: list[list[list[int]]]  # [rows][M][ids]
    dense: list[list[float]]  # [rows][K]
    label: list[float] | list[list[float]]  # of several labels a list a row; NaN: not known
    num_support: int
    weight: list[float] | None = None


def some_features(
    num_single: int, num_multi: int, num_dense: int, shared_table: bool = False,
    history: bool = False,
) -> Features:  # fmt: skip
    """A table per feature of 3, 4, 5, ... rows, or one for all; `history`: m0 uses s0's."""
    names = [f"s{i}" for i in range(num_single)] + [f"m{i}" for i in range(num_multi)]
    tables_of = {name: "shared" if shared_table else name for name in names}
    if history:
        tables_of["m0"] = tables_of["s0"]
    tables = list(dict.fromkeys(tables_of.values()))
    specs = [FeatureSpec(name, tables_of[name]) for name in names]
    return Features(
        tables=tuple(TableSpec(table, 3 + index) for index, table in enumerate(tables)),
        single=tuple(specs[:num_single]),
        multi=tuple(specs[num_single:]),
        dense=tuple(f"d{i}" for i in range(num_dense)),
    )


def random_task(features: Features, num_support: int, num_query: int, rng: random.Random) -> Task:
    """Random ids in every table, 0/1 labels, bags of 0 to 3 ids with repeats."""
    rows_of = {table.name: table.num_rows for table in features.tables}
    rows = range(num_support + num_query)
    return Task(
        single=[[rng.randrange(rows_of[f.table]) for f in features.single] for _ in rows],
        multi=[
            [
                [rng.randrange(rows_of[f.table]) for _ in range(rng.randrange(4))]
                for f in features.multi
            ]
            for _ in rows
        ],
        dense=[[rng.gauss(0, 1) for _ in features.dense] for _ in rows],
        label=[float(rng.random() < 0.5) for _ in rows],
        num_support=num_support,
    )


def rows_left_out(
    label: Sequence[float], num_support: int, row: int, in_groups: bool = False
) -> range:
    """The rows of a task whose labels a row may not see: its own, or its group's."""
    if row >= num_support or not in_groups:
        return range(row, row + 1)
    first, end = row, row + 1
    while first > 0 and label[first] <= 0:
        first -= 1
    while end < num_support and label[end] <= 0:
        end += 1
    return range(first, end)


def batch_of(tasks: Sequence[Task], features: Features) -> TaskBatch:
    """The tasks as a TaskBatch, ids of each table sorted and unique."""
    table_of = {feature.name: feature.table for feature in features.sparse}
    used: dict[str, set[int]] = {table.name: set() for table in features.tables}
    rows = [
        (single, multi)
        for task in tasks
        for single, multi in zip(task.single, task.multi, strict=True)
    ]
    for single, multi in rows:
        for feature, one in zip(features.single, single, strict=True):
            used[feature.table].add(one)
        for feature, bag in zip(features.multi, multi, strict=True):
            used[feature.table].update(bag)
    position: dict[tuple[str, int], int] = {}
    for table in features.tables:
        for row_id in sorted(used[table.name]):
            position[table.name, row_id] = len(position)
    single_positions = [
        position[table_of[f.name], one]
        for single, _ in rows
        for f, one in zip(features.single, single, strict=True)
    ]
    multi_positions = [
        position[f.table, one]
        for _, multi in rows
        for f, bag in zip(features.multi, multi, strict=True)
        for one in bag
    ]
    sizes = [len(task.label) for task in tasks]
    return TaskBatch(
        task_T=torch.arange(len(tasks)),
        row_offsets_T1=torch.tensor([0, *np.cumsum(sizes, dtype=int).tolist()]),
        support_lengths_T=torch.tensor([task.num_support for task in tasks], dtype=torch.int64),
        label_N=torch.tensor(
            [label for task in tasks for label in task.label], dtype=torch.float32
        ),
        dense_NK=torch.tensor(
            [row for task in tasks for row in task.dense], dtype=torch.float64
        ).view(len(rows), len(features.dense)),
        unique_ids_U=torch.tensor([row_id for _, row_id in position], dtype=torch.int64),
        unique_lengths_B=torch.tensor([len(used[table.name]) for table in features.tables]),
        positions_NF=torch.tensor(single_positions, dtype=torch.int32).view(
            len(rows), len(features.single)
        ),
        multi_positions_V=torch.tensor(multi_positions, dtype=torch.int32),
        multi_lengths_NM=torch.tensor(
            [[len(bag) for bag in multi] for _, multi in rows], dtype=torch.int32
        ).view(len(rows), len(features.multi)),
        weight_N=torch.tensor([weight for task in tasks for weight in task.weight or []]),
    )


def ids_twice(batch: TaskBatch) -> TaskBatch:
    """The batch with every id twice: every other task takes its rows from the second place."""
    ids_B = batch.unique_ids_U.split(batch.unique_lengths_B.tolist())
    length_U = torch.repeat_interleave(batch.unique_lengths_B, batch.unique_lengths_B)
    table_U = torch.repeat_interleave(batch.unique_lengths_B)
    start_U = (batch.unique_lengths_B.cumsum(0) - batch.unique_lengths_B)[table_U]
    is_second_N = torch.repeat_interleave(
        torch.arange(batch.num_tasks) % 2, batch.row_offsets_T1.diff()
    )
    is_second_V = torch.repeat_interleave(is_second_N, batch.multi_lengths_NM.sum(dim=1))

    def moved(position: Tensor, is_second: Tensor) -> Tensor:
        there = position + start_U[position] + is_second * length_U[position]
        return there.to(position.dtype)

    return replace(
        batch,
        unique_ids_U=torch.cat([ids for of_table in ids_B for ids in (of_table, of_table)]),
        unique_lengths_B=2 * batch.unique_lengths_B,
        positions_NF=moved(batch.positions_NF, is_second_N[:, None]),
        multi_positions_V=moved(batch.multi_positions_V, is_second_V),
    )


def rows_inputs(
    task: Task, features: Features, tables: dict[str, Tensor], rows: range
) -> RowInputs:
    """What a model sees of some rows of a task, looked up one by one."""
    width = next(iter(tables.values())).shape[1]
    dtype = next(iter(tables.values())).dtype
    single = [
        tables[f.table][task.single[row][i]] for row in rows for i, f in enumerate(features.single)
    ]
    values = [
        tables[f.table][one]
        for row in rows
        for i, f in enumerate(features.multi)
        for one in task.multi[row][i]
    ]
    num_multi = len(features.multi)
    bags = [
        position * num_multi + i
        for position, row in enumerate(rows)
        for i in range(num_multi)
        for _ in task.multi[row][i]
    ]
    return RowInputs(
        single_NFD=torch.stack(single).view(len(rows), len(features.single), width)
        if single
        else torch.zeros(len(rows), len(features.single), width, dtype=dtype),
        bag_values_VD=torch.stack(values) if values else torch.zeros(0, width, dtype=dtype),
        bag_index_V=torch.tensor(bags, dtype=torch.int64),
        num_multi=num_multi,
        dense_NK=torch.tensor([task.dense[row] for row in rows], dtype=dtype).view(
            len(rows), len(features.dense)
        ),
    )


def rates_by_name(learner: MetaLearner, features: Features) -> dict[str, Tensor]:
    """A learner's learned rates by name, each shaped to multiply its gradient; or none."""
    if not isinstance(learner.rates, nn.Module):
        return {}
    rates = dict(learner.rates.named_parameters())
    found = {}
    for name, layer in learner.model.named_modules():
        weight = rates.get(f"layers.{name.replace('.', '/')}.weight")
        if weight is not None and isinstance(layer, nn.Linear):
            found[f"{name}.weight"] = weight[:, None] if weight.dim() == 1 else weight
            found[f"{name}.bias"] = rates.get(f"layers.{name.replace('.', '/')}.bias", weight)
    if "tables_BC" in rates:
        chosen = learner._config.adapt_embeddings
        names = [table.name for table in features.tables]
        tables = sorted(chosen, key=names.index) if isinstance(chosen, tuple) else names
        found |= dict(zip(tables, rates["tables_BC"], strict=True))
    return found


def start_of(
    model: nn.Module, tables: dict[str, Tensor], features: Features, task: Task
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights, gated where the model has gates, and the tables that a task starts from."""
    weights = dict(model.named_parameters())
    if isinstance(model, GatedModel):
        weights = {name: value for name, value in weights.items() if name[:5] != "gate."}
        support = rows_inputs(task, features, tables, range(task.num_support))
        sum_1X = model.seen_NX(support).sum(dim=0, keepdim=True)
        for name, gate_TO in model.gates_TO(sum_1X / max(task.num_support, 1)).items():
            weights[f"{name}.weight"] = weights[f"{name}.weight"] * gate_TO[0, :, None]
            weights[f"{name}.bias"] = weights[f"{name}.bias"] * gate_TO[0]
    # Clones: what the rows did for the gates is no part of the inner gradient.
    return weights, {name: table.clone() for name, table in tables.items()}


def adapt(
    model: nn.Module, tables: dict[str, Tensor], features: Features, task: Task,
    algorithm: AlgorithmConfig, row_loss: RowLoss, rates: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:  # fmt: skip
    """Weights and tables after the inner loop, every adapted value written out, and Reptile's pull:
    a scalar whose gradient is theta - theta_t.

    `rates` by name of weight or table replace algorithm.inner_lr."""
    layers = adaptable_layers(model, algorithm.adapt_layers)
    weights, tables = start_of(model, tables, features, task)
    start = weights | tables
    moved = dict.fromkeys(start, 0.0)
    for _ in range(algorithm.inner_steps if task.num_support else 0):
        inputs = rows_inputs(task, features, tables, range(task.num_support))
        output = functional_call(model, weights, (inputs,))
        support_losses = row_loss(output, task, range(task.num_support), True)
        if algorithm.name == "ridge":
            weights |= solved(model, weights, layers, output, support_losses, algorithm)
            continue
        support_loss = support_losses.sum() / (task.num_support + algorithm.support_prior)
        now = weights | tables
        grads = torch.autograd.grad(
            support_loss, list(now.values()), create_graph=algorithm.name in SECOND_ORDER,
            retain_graph=True, allow_unused=True,
        )  # fmt: skip
        for (name, value), grad in zip(now.items(), grads, strict=True):
            if grad is None:
                continue
            move = rates.get(name, algorithm.inner_lr) * grad
            if name in [f"{head}.bias" for head in head_layers(model)]:
                move = move * algorithm.bias_rate
            moved[name] = moved[name] + move.detach()
            chosen = algorithm.adapt_embeddings
            if name in tables and (name in chosen if isinstance(chosen, tuple) else chosen):
                tables[name] = value - move
            elif name.rpartition(".")[0] in layers:
                weights[name] = value - move
    pull = torch.stack([(value * moved[name]).sum() for name, value in start.items()]).sum()
    return weights, tables, pull


def solved(
    model: nn.Module, weights: dict[str, Tensor], layers: Mapping[str, nn.Linear], output: Tensor,
    losses: Tensor, algorithm: AlgorithmConfig,
) -> dict[str, Tensor]:  # fmt: skip
    """The layers' weights behind one step of ridge regression with as many unknowns."""
    names = [name for name in weights if name.rpartition(".")[0] in layers]
    moving = [weights[name] for name in names]
    rows = [torch.autograd.grad(one, moving, create_graph=True) for one in output]
    heads = [f"{head}.bias" for head in head_layers(model)]
    # A rate of its own: the prior variance of that weight.
    scale = torch.cat(
        [
            torch.full_like(weights[name], algorithm.bias_rate if name in heads else 1.0).flatten()
            for name in names
        ]
    ).sqrt()
    jacobian = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows]) * scale
    (slope,) = torch.autograd.grad(losses.sum(), output, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), output, create_graph=True)
    precision = torch.eye(len(scale), dtype=output.dtype) / algorithm.inner_lr
    system = precision + jacobian.T @ (bend.unsqueeze(1) * jacobian)
    move = scale * torch.linalg.solve(system, jacobian.T @ slope)
    move = move * len(output) / (len(output) + algorithm.support_prior)
    parts = move.split([weight.numel() for weight in moving])
    return {
        name: weight - part.view_as(weight)
        for name, weight, part in zip(names, moving, parts, strict=True)
    }


def one_label(loss: str, huber_delta: float) -> RowLoss:
    """The loss of rows that have one label, all of the same weight."""
    function = LossFunction(loss, huber_delta)

    def row_loss(output: Tensor, task: Task, rows: range, is_inner: bool) -> Tensor:
        label = torch.tensor(task.label, dtype=output.dtype)
        return row_losses_N(function, output, label[rows.start : rows.stop])

    return row_loss


def outer_loss(
    model: nn.Module, tables: dict[str, Tensor], features: Features, tasks: Sequence[Task],
    algorithm: AlgorithmConfig, loss: str, rates: Mapping[str, Tensor] = MappingProxyType({}),
    huber_delta: float = 1.0, row_loss: RowLoss | None = None,
) -> Tensor:  # fmt: skip
    """Mean over the tasks with query rows of the mean query loss; over all rows if the algorithm is
    none; Reptile's value and gradient, over the tasks with support rows. `row_loss` is that of
    several labels, in place of `loss`."""
    terms, row_loss = [], row_loss or one_label(loss, huber_delta)
    for task in tasks:
        if algorithm.name == "none":
            nothing = replace(task, num_support=0)
            weights, _ = start_of(model, tables, features, nothing)
            inputs = rows_inputs(task, features, tables, range(len(task.label)))
            output = functional_call(model, weights, (inputs,))
            terms.extend(row_loss(output, task, range(len(task.label)), False))
            continue
        weights, own, pull = adapt(model, tables, features, task, algorithm, row_loss, rates)
        query = range(task.num_support, len(task.label))
        output = functional_call(model, weights, (rows_inputs(task, features, own, query),))
        score = row_loss(output, task, query, False).mean()
        if algorithm.name == "reptile":
            if task.num_support:
                shown = score.detach() if query else torch.zeros_like(score)
                terms.append(shown + pull - pull.detach())
        elif query:
            terms.append(score)
    return torch.stack(terms).mean()
