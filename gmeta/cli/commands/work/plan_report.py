"""The work of `gmeta plan`: its tables on the screen."""

from gmeta.cli.capacity import Capacity, plan_capacity
from gmeta.cli.commands.console import make_console, make_table, print_result, show_table
from gmeta.config.sharding import keeps_tables_beyond
from gmeta.config.train_config import TrainConfig
from gmeta.distributed.cluster_spec import CapacityOverrides, Cluster, Speeds
from gmeta.distributed.ranks import quieten
from gmeta.distributed.sharding_estimate import RESERVED


def show_plan(
    config: TrainConfig, overrides: CapacityOverrides, cluster: Cluster, speeds: Speeds
) -> None:
    """Print where training would put the tables, and what a step costs."""
    quieten()
    planned = plan_capacity(config, overrides, cluster, speeds)
    _print_result(planned, cluster)
    _print_tables(planned)
    _print_memory(planned, cluster, config)
    _print_step(planned, cluster)
    _print_levels(planned)


def _print_result(planned: Capacity, cluster: Cluster) -> None:
    estimate, step = planned.estimate, planned.step
    print_result(
        gpus=cluster.world_size,
        gpus_per_host=cluster.ranks_per_host,
        gpu_memory=cluster.device_bytes,
        tables=estimate.tables,
        gpu_bytes=estimate.device_bytes_W.tolist(),
        host_bytes_per_gpu=estimate.host_bytes_W.tolist(),
        file_bytes_per_gpu=estimate.file_bytes_W.tolist(),
        checkpoint_copy_bytes_per_gpu=estimate.copied_bytes_W.tolist(),
        long_events=planned.long_events and planned.long_events._asdict(),
        step={
            "tasks_per_gpu": step.tasks,
            "rows_per_gpu": step.rows,
            "ids_measured": planned.measured,
            "flop_per_gpu": step.flops,
            "seconds": estimate.step_s,
            "parts": {
                name: {"bytes": num_bytes, "seconds": seconds}
                for name, (num_bytes, seconds) in estimate.parts.items()
            },
        },
        levels=[
            {
                "groups": sharding.groups,
                "sync_every": sharding.sync_every,
                "gpu_bytes": float(other.device_bytes_W.max()),
                "network_bytes": other.network_bytes,
                "seconds": other.step_s,
            }
            for sharding, other in planned.levels
        ],
    )


def _print_tables(planned: Capacity) -> None:
    heads = ("table", "rows", "width", "sharded", "memory", "GPUs", "bytes")
    placed = make_table("Tables", *heads, text=("table", "sharded", "memory"))
    sent_heads = ("table", "ids", "bytes of ids", "of rows and gradients")
    sent = make_table("What a GPU sends in a step", *sent_heads, text=("table",))
    for name, table in planned.estimate.tables.items():
        placed.add_row(
            name,
            f"{table['rows']:,}",
            str(table["width"]),
            table["kind"],
            table["placement"],
            format_ranks(table["ranks"]),
            _format_bytes(table["bytes"]),
        )
        sent.add_row(
            name,
            f"{table['ids_per_step']:,.0f}",
            _format_bytes(table["id_bytes_per_step"]),
            _format_bytes(table["row_bytes_per_step"]),
        )
    show_table(make_console(), placed)
    show_table(make_console(), sent)


def format_ranks(ranks: list[int]) -> str:
    """Return the GPUs that hold rows of a table: 0-6, or 3, 5, 9-11."""
    cuts = [place for place in range(1, len(ranks)) if ranks[place] != ranks[place - 1] + 1]
    runs = [ranks[low:high] for low, high in zip([0, *cuts], [*cuts, len(ranks)], strict=True)]
    spans = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    # More spans would not fit beside the other columns.
    return ", ".join(spans) if len(spans) <= 3 else f"{len(ranks)} of {ranks[0]}-{ranks[-1]}"


def _print_memory(planned: Capacity, cluster: Cluster, config: TrainConfig) -> None:
    estimate, in_background = planned.estimate, config.run.checkpoint_in_background
    device_W = estimate.device_bytes_W
    # Of tables beyond the GPUs no copy is made: a step waits.
    is_copied = in_background and not keeps_tables_beyond(config.sharding)
    copied_W = estimate.copied_bytes_W * is_copied
    host_W = estimate.host_bytes_W + copied_W
    lines = [
        f"memory of a GPU: {_format_bytes(device_W.min())} to {_format_bytes(device_W.max())} of "
        f"{_format_bytes(cluster.device_bytes)}",
        f"  tables, optimizers, layers and the rows of a step; {RESERVED:.0%} are kept free",
    ]
    if planned.long_events is not None:
        tasks, _, kept = planned.long_events
        lines.append(
            f"  {_format_bytes(kept)} of them for slices of the {tasks:,.0f} long tasks of a step"
        )
    if host_W.any():
        most, there = float(host_W.max()), cluster.host_bytes
        lines.append(
            f"memory of the host for a GPU: up to {_format_bytes(most)} of {_format_bytes(there)}"
        )
        if is_copied:
            too_much = "; too much: set run.checkpoint_in_background = false" * (most > there)
            lines.append(
                f"  {_format_bytes(copied_W.max())} for a checkpoint's copy of them{too_much}"
            )
    if (in_file := float(estimate.file_bytes_W.max())) > 0:
        lines.append(f"local disk for a GPU: up to {_format_bytes(in_file)} in sharding.file_dir")
    make_console().print("\n".join(lines))


def _print_step(planned: Capacity, cluster: Cluster) -> None:
    estimate, step = planned.estimate, planned.step
    how = "counted in the dataset" if planned.measured else "as stated"
    make_console().print(
        f"\nstep: {planned.tasks_per_step:,} tasks, {step.tasks:,.0f} on a GPU with "
        f"{step.rows:,.0f} rows; ids {how}"
    )
    table = make_table("Time of a step", "part", "bytes", "ms", text=("part",))
    for name, (num_bytes, seconds) in estimate.parts.items():
        # Sums of floats are not exactly 0.
        if num_bytes >= 1 or (seconds and not num_bytes):
            table.add_row(
                name, _format_bytes(num_bytes) if num_bytes else "", f"{seconds * 1e3:.3f}"
            )
    table.add_row("products and bytes alone, one by one", "", f"{estimate.step_s * 1e3:.3f}")
    show_table(make_console(), table)
    make_console().print(
        "A step takes longer. Not in it: launches of kernels, element-wise work, latency,\n"
        "reading. Forward and backward of a small MAML with 128 tasks took an H200 0.9 ms as a\n"
        "CUDA graph and 3.7 to 5.3 ms without: docs/gpu.md"
    )


def _print_levels(planned: Capacity) -> None:
    if not planned.levels:
        return
    heads = ("groups", "averaged", "memory of a GPU", "sent to other hosts", "ms")
    table = make_table("Two levels of network: sharding.groups", *heads, text=("averaged",))
    for sharding, other in planned.levels:
        every = f"every {sharding.sync_every} steps" if sharding.sync_every > 1 else "every step"
        table.add_row(
            str(sharding.groups),
            "" if sharding.groups == 1 else every,
            _format_bytes(float(other.device_bytes_W.max())),
            _format_bytes(other.network_bytes),
            f"{other.step_s * 1e3:.3f}",
        )
    show_table(make_console(), table)


def _format_bytes(num_bytes: float) -> str:
    """Return bytes in powers of 1,000, as memory and networks are sold."""
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:,.0f} B" if unit == "B" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.1f} TB"
