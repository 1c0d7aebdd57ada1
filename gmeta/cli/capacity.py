"""Plans a run for GPUs that are not here: where each table goes, and what a step costs."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from gmeta.cli.capacity_levels import count_touched, most_groups, other_levels
from gmeta.config.inputs import NeighboursConfig
from gmeta.config.labels import LabelsConfig
from gmeta.config.sharding import (
    ShardingConfig,
    check_admission,
    check_groups,
    check_sequences,
    check_sharding,
)
from gmeta.config.table_widths import WIDTH_MULTIPLE, widths_of_tables
from gmeta.config.train_config import DataConfig, TrainConfig
from gmeta.data.features.support_statistics import NO_STATISTICS
from gmeta.data.reader import open_reader
from gmeta.distributed.cluster_spec import CapacityOverrides, Cluster, Speeds
from gmeta.distributed.groups.costs import with_groups
from gmeta.distributed.sequence.plan_events import LongEventsCost, estimate_long_events
from gmeta.distributed.sharding_estimate import (
    RESERVED,
    ShardingEstimate,
    StepWork,
    estimate,
    suggest_fits,
)
from gmeta.distributed.sharding_plan import check_clipping, describe_plan, merge_plans, plan_on
from gmeta.distributed.torchrec_planner import NoPlaceError
from gmeta.distributed.unsharded import make_unsharded_tables
from gmeta.errors import ConfigError, UserError
from gmeta.learner import MetaLearner
from gmeta.runs.build import build, build_learner
from gmeta.runs.resolve import resolve
from gmeta_models.internals import ONEDNN_LINEAR
from metaio.format.dataset import Dataset
from metaio.format.features import Features, FeatureSpec, TableSpec
from metaio.read.batch import TaskBatch

# Batches whose ids are counted, and tasks whose operations are.
MEASURED_BATCHES, COUNTED_TASKS = 4, 8


@dataclass(frozen=True)
class Capacity:
    """A sharding plan, what it needs of each rank, and the step that it was made for."""

    estimate: ShardingEstimate
    step: StepWork
    tasks_per_step: int  # of all ranks
    measured: bool  # the ids are the dataset's, not stated
    long_events: LongEventsCost | None  # None: no ranks encode a task together
    # Other ways to use the network: groups of ranks, steps between averages, and their estimates.
    levels: tuple[tuple[ShardingConfig, ShardingEstimate], ...] = ()


def plan_capacity(
    config: TrainConfig, overrides: CapacityOverrides, cluster: Cluster, speeds: Speeds
) -> Capacity:
    """Return the plan and the cost of a step. Raises ConfigError where the tables do not fit."""
    features, learner, data, dataset = _build_model(config, overrides)
    width, seed = config.model.embedding_dim, config.run.seed
    step, events_T = _describe_step(
        data, seed, width, overrides, features, learner, dataset, cluster.world_size
    )
    step = replace(step, row_counts=sum(steps > 0 for steps in config.model.admission))
    # A stated share of distinct ids replaces the counted one.
    is_measured = dataset is not None and not overrides.unique_share
    long_events = _cost_long_events(config, learner, events_T, step, cluster.world_size)
    widths = widths_of_tables(features, config.model)
    sizes = {table.name: (table.num_rows, widths[table.name]) for table in features.tables}

    def estimate_for(chosen: ShardingConfig) -> ShardingEstimate:
        check_groups(chosen, cluster.world_size)
        group = cluster.group_of(chosen.groups)
        # Without values: a table of any number of rows takes no memory here.
        tables = make_unsharded_tables(features, config.model, config.outer)
        tasks_per_step = data.tasks_per_step // chosen.groups
        plan = merge_plans(plan_on(tables, chosen, tasks_per_step, group))
        check_clipping(plan, config.outer.clip_norm)
        description = describe_plan(plan, group.world_size, chosen)
        found = estimate(description, sizes, chosen, config.outer, step, group, speeds)
        if long_events is not None:
            found = _add_long_events(found, long_events, cluster, speeds)
        if chosen.groups == 1:
            return found
        counted = dataset if is_measured and not overrides.rows_per_task else None
        touched = count_touched(data, seed, step, sizes, counted, chosen, group.world_size)
        return with_groups(found, touched, sizes, chosen, config.outer, step, cluster, speeds)

    misfit = ""
    try:
        found = estimate_for(config.sharding)
    except NoPlaceError:
        misfit = "TorchRec's planner finds no place for the tables"
        # Row-wise on the GPUs is the estimate from which the message says what would fit.
        by_rows = replace(config.sharding, default="row_wise", tables=(), placement="device")
        found = estimate_for(replace(by_rows, placements=()))
    device, host = found.device_bytes_W.max(), found.host_bytes_W.max()
    usable = cluster.device_bytes * (1 - RESERVED)
    # RESERVED is for activations and for what libraries keep.
    if not misfit and device > usable:
        misfit = (
            f"GPU {int(found.device_bytes_W.argmax())} would hold {device / 1e9:,.1f} GB, and "
            f"{usable / 1e9:,.1f} GB of {cluster.device_bytes / 1e9:,.1f} GB are for that"
        )
    elif not misfit and host > cluster.host_bytes:
        misfit = (
            f"the host would hold {host / 1e9:,.1f} GB for a GPU, and has "
            f"{cluster.host_bytes / 1e9:,.1f} GB for each"
        )
    if misfit:
        # fbgemm's kernels take widths that are multiples of this.
        narrower = range(WIDTH_MULTIPLE, config.model.embedding_dim, WIDTH_MULTIPLE)
        group = cluster.group_of(config.sharding.groups)
        suggestions = suggest_fits(found, narrower, config.outer, config.sharding, group)
        groups = config.sharding.groups
        if fewer := most_groups(groups - 1, groups, found, cluster, usable):
            suggestions = [f"sharding.groups = {fewer}"]
        raise ConfigError(
            f"the tables do not fit on {cluster.world_size} GPUs: {misfit}. What would fit: "
            f"{', or '.join(suggestions) or 'GPUs with more memory (--gpu-memory)'}"
        )
    compared = other_levels(config.sharding, found, cluster, usable)
    levels = tuple((chosen, estimate_for(chosen)) for chosen in compared)
    return Capacity(found, step, data.tasks_per_step, is_measured, long_events, levels)


def _cost_long_events(
    config: TrainConfig, learner: MetaLearner, events_T: list[int], step: StepWork, ranks: int
) -> LongEventsCost | None:
    sharding = config.sharding
    if sharding.sequence == "none" or learner.events is None:
        return None
    long_T = [one for one in events_T if one >= sharding.sequence_from]
    rows = round(step.rows / step.tasks)
    try:
        return estimate_long_events(learner.events, sharding.sequence, long_T, rows, ranks)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _add_long_events(
    found: ShardingEstimate, cost: LongEventsCost, cluster: Cluster, speeds: Speeds
) -> ShardingEstimate:
    """Return the estimate with what long tasks keep on a GPU, and send."""
    link = speeds.nvlink if cluster.world_size <= cluster.ranks_per_host else speeds.network
    part = {"events of long tasks": (cost.sent_bytes, cost.sent_bytes / link)}
    return replace(
        found,
        device_bytes_W=found.device_bytes_W + cost.kept_bytes,
        fixed_bytes=found.fixed_bytes + cost.kept_bytes,
        parts=found.parts | part,
    )


def _build_model(
    config: TrainConfig, overrides: CapacityOverrides
) -> tuple[Features, MetaLearner, DataConfig, Dataset | None]:
    """Return the columns with the stated numbers of rows, a model of them, the data's section with
    a step of equal tasks, and any dataset."""
    dataset, statistics = None, NO_STATISTICS
    # A URL is opened without a look: exists() knows local paths only.
    if Path(config.data.path).exists() or "://" in config.data.path:
        config = resolve(config)
        dataset, built = build(config)
        features, statistics = _with_table_rows(dataset.features, overrides.rows), built.statistics
    # Without a dataset each stated table is one single-id column.
    elif overrides.rows and overrides.rows_per_task:
        tables = tuple(TableSpec(name, rows) for name, rows in overrides.rows.items())
        single = tuple(FeatureSpec(name, name) for name in overrides.rows)
        features = Features(tables=tables, single=single, multi=(), dense=())
        if of_step := config.data.rows_per_step:
            num_tasks = max(1, round(of_step / overrides.rows_per_task))
            config = replace(config, data=replace(config.data, tasks_per_step=num_tasks))
    else:
        raise UserError(
            f"data.path = {config.data.path!r} holds no dataset: name every table and the rows of "
            "a task, as --rows item=1e9 --rows user=1e8 --rows-per-task 40, or prepare the data"
        )
    names = [table.name for table in features.tables]
    check_sequences(config.sharding, config.model.events, config.outer.accumulate_steps)
    check_sharding(config.sharding, names, config.outer.sparse_optimizer)
    check_admission(config.model.admission, config.sharding, config.algorithm.name, names)
    # Item features and labels of the config name columns of a dataset.
    items, labels, neighbours = None, LabelsConfig(), NeighboursConfig()
    if dataset is not None:
        items, labels, neighbours = config.item_features, config.labels, config.neighbours
    losses = config.outer.loss, config.outer.huber_delta
    try:
        features.check()
        learner = build_learner(
            features, config.model, config.algorithm, *losses, statistics, items, labels, neighbours
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    # As slices of a step are all alike here, so are tasks.
    data = replace(config.data, rows_per_step=0, task_cost=(1.0, 0.0))
    return features, learner, data, dataset


def _with_table_rows(features: Features, rows: Mapping[str, int]) -> Features:
    names = [table.name for table in features.tables]
    if unknown := [name for name in rows if name not in names]:
        raise UserError(
            f"--rows names {unknown[0]!r}, which is no table: the dataset has {', '.join(names)}. "
            "Name one of them"
        )
    tables = (replace(t, num_rows=rows.get(t.name, t.num_rows)) for t in features.tables)
    return replace(features, tables=tuple(tables))


def _describe_step(
    data: DataConfig,
    seed: int,
    width: int,
    overrides: CapacityOverrides,
    features: Features,
    learner: MetaLearner,
    dataset: Dataset | None,
    world_size: int,
) -> tuple[StepWork, list[int]]:
    """Return the work of one rank in a step, and the events of each task of all ranks."""
    tasks: float = -(-data.tasks_per_step // world_size)
    ids: dict[str, float] = {}
    measured: dict[str, float] = {}
    # Without a dataset half of a task's rows are support.
    support = query = overrides.rows_per_task / 2
    events_T: list[int] = []
    if dataset is not None:
        measured_step = _measure_step(data, seed, dataset, world_size)
        tasks, support, query, measured, events_T = measured_step
        ids = measured
        # The ids grow with the rows: what is counted is scaled, not replaced.
        if overrides.rows_per_task:
            scale = overrides.rows_per_task / (support + query)
            support, query = support * scale, query * scale
            ids = {name: count * scale for name, count in ids.items()}
    rows = tasks * (support + query)
    if dataset is None or overrides.unique_share:
        unique_share = overrides.unique_share or 1.0
        of_table = {table.name: 0 for table in features.tables}
        for feature in features.sparse:
            of_table[feature.table] += 1
        ids = {name: unique_share * rows * count for name, count in of_table.items()}
    # A batch asks for more ids than the table has rows only where bundles and blocks repeat some.
    most = {t.name: max(float(t.num_rows), measured.get(t.name, 0.0)) for t in features.tables}
    ids = {name: min(ids[name], most[name]) for name in most}
    # Matrix products are counted for one task of the mean size, then scaled to the rows of a step.
    sides = max(round(support), 1), max(round(query), 1)
    num_events = sum(events_T) // max(len(events_T), 1)
    flops = count_flops(learner, features, width, *sides, num_events)
    num_weights = sum(weight.numel() for weight in learner.parameters())
    # Those of the measured batches, as often as a step of all ranks has so many tasks.
    num_tasks = round(tasks * world_size)
    of_step = (events_T * -(-num_tasks // max(len(events_T), 1)))[:num_tasks]
    return StepWork(tasks, rows, ids, flops * rows / sum(sides), num_weights), of_step


def _measure_step(
    data: DataConfig, seed: int, dataset: Dataset, world_size: int
) -> tuple[float, float, float, dict[str, float], list[int]]:
    """Return a rank's tasks in a step, their support and query rows, the ids of each table, and
    the events of each task that was looked at."""
    # Measured in the first batches: the rest of the split is not read.
    names = [table.name for table in dataset.features.tables]
    split = data.train_split
    tasks = -(-data.tasks_per_step // world_size)
    if not data.blocks_per_step:
        # A split smaller than a step would give no batch: as many ranks as it has tasks for.
        world_size = max(1, min(world_size, dataset.split(split).num_episodes // tasks))
        data = replace(data, tasks_per_step=tasks * world_size)
    support = rows = num_tasks = 0
    events_T: list[int] = []
    id_counts: list[list[int]] = []
    with open_reader(data, seed, dataset, split, world_size - 1, world_size) as reader:
        # An epoch's last step is smaller: it would lower the mean.
        for batch in itertools.islice(
            reader.batches(0), min(MEASURED_BATCHES, max(1, reader.num_steps() - 1))
        ):
            support += int(batch.support_lengths_T.sum())
            rows, num_tasks = rows + batch.num_rows, num_tasks + batch.num_tasks
            events_T += batch.num_events_T.tolist()
            # An id of several bundles or blocks counts in each of them, as it travels with each.
            id_counts.append(batch.unique_lengths_B.tolist())
    ids = dict(zip(names, np.mean(id_counts, axis=0).tolist(), strict=True))
    of_step = num_tasks / len(id_counts) if data.blocks_per_step else tasks
    sides = support / num_tasks, (rows - support) / num_tasks
    return of_step, *sides, ids, events_T


def count_flops(
    learner: MetaLearner, features: Features, width: int, support_rows: int, query_rows: int,
    num_events: int = 0,
) -> float:  # fmt: skip
    """Return a task's floating-point operations, forward and backward, of matrix products alone."""
    rows_T = torch.full((COUNTED_TASKS,), support_rows + query_rows)
    num_rows = int(rows_T.sum())
    num_single, num_multi = len(features.single), len(features.multi)
    # At least one id for each table.
    num_ids, total_events = max(num_rows, len(features.tables)), COUNTED_TASKS * num_events
    batch = TaskBatch(
        task_T=torch.arange(COUNTED_TASKS),
        row_offsets_T1=torch.cat([torch.zeros(1, dtype=torch.int64), rows_T.cumsum(0)]),
        support_lengths_T=torch.full((COUNTED_TASKS,), support_rows),
        # One label is [N], several are [N, L].
        label_N=torch.zeros(num_rows, *[features.num_labels][: features.num_labels > 1]),
        dense_NK=torch.zeros(num_rows, len(features.dense)),
        # Which row is looked up costs the same.
        unique_ids_U=torch.zeros(num_ids, dtype=torch.int64),
        unique_lengths_B=torch.tensor(
            [len(part) for part in np.array_split(np.arange(num_ids), len(features.tables))]
        ),
        positions_NF=torch.arange(num_rows, dtype=torch.int32)[:, None].repeat(1, num_single),
        multi_positions_V=torch.arange(num_rows, dtype=torch.int32).repeat_interleave(num_multi),
        multi_lengths_NM=torch.ones(num_rows, num_multi, dtype=torch.int32),
        # Every row knows all of them: one that knows fewer costs the same.
        num_events_T=torch.full((COUNTED_TASKS,), num_events),
        event_positions=torch.zeros(total_events, len(features.events), dtype=torch.int32),
        event_numbers=torch.zeros(total_events, features.num_event_numbers),
        events_before_N=torch.full((num_rows,), num_events, dtype=torch.int32),
    )
    # Values do not change the number of operations: zeros do.
    rows_UD = torch.zeros(num_ids, width, requires_grad=True)
    if learner.items is not None:
        learner.items.set_from_sums(learner.items.empty_sums())
    if learner.neighbours is not None:
        learner.neighbours.set_lists(learner.neighbours.lists())
    # FlopCounterMode knows neither products that are added in place nor those of oneDNN.
    unknown_to_torch = {
        torch.ops.aten.baddbmm_: _count_operations,
        torch.ops.aten.addmm_: _count_operations,
        # A linear layer's weight is [outputs, inputs]: reversed it is the second factor.
        ONEDNN_LINEAR: lambda rows, weight, *_, **__: _count_operations(None, rows, weight[::-1]),
    }
    with FlopCounterMode(display=False, custom_mapping=unknown_to_torch) as counter:
        episodes = learner.collate(batch)
        learner(rows_UD, episodes, 1.0).backward()
    learner.zero_grad()
    total: int = counter.get_total_flops()
    return total / COUNTED_TASKS


def _count_operations(_: Any, left: Sequence[int], right: Sequence[int], **__: Any) -> int:
    """Return the operations of a matrix product, batched or not, from the shapes of its factors."""
    # A multiplication and an addition each.
    return 2 * math.prod(left) * right[-1]
