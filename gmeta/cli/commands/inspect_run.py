"""`gmeta inspect` on a run folder or a checkpoint."""

from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

from gmeta.cli.commands.console import make_console, make_table, print_result, show_table, size_text
from gmeta.errors import GMetaError
from gmeta.runs.checkpoints.checkpoint_summary import CheckpointSummary, summarise_checkpoint
from gmeta.runs.checkpoints.lineage import describe_increments, read_lineage
from gmeta.runs.run_folder import RunFolder, list_checkpoints
from metaio.quantities import format_count

# Values of a checkpoint's own description that --json shows.
ABOUT = ("step", "epoch", "epoch_step", "best_step", "best_score", "world_size", "config_digest")


def inspect_run(root: Path, verify: bool) -> None:
    """Show a run's checkpoints; exit code 1 if one is incomplete or damaged."""
    folder = RunFolder(root)
    config, digest = folder.read_config_and_digest()
    console = make_console()
    console.print(
        f"run {root}: {config.algorithm.name} with {config.model.name} on {config.data.path}, "
        f"config {digest}"
    )
    paths = list_checkpoints(folder.checkpoints)
    if not paths:
        console.print("no checkpoint yet")
        print_result(kind="run", checkpoints=[], problems=[])
        return
    summaries, unreadable = [], []
    for path in paths:
        try:
            summaries.append(summarise_checkpoint(path, verify))
        except GMetaError as error:
            # The other checkpoints may be what the caller wants to see.
            unreadable.append(str(error))
    if summaries:
        _print_list(console, summaries, digest)
        _print_checkpoint(console, summaries[-1])
    # Last, behind the tables: a terminal shows what is wrong without scrolling.
    _finish(summaries, verify, unreadable)


def _print_list(console: Console, summaries: list[CheckpointSummary], digest: str) -> None:
    # The newest checkpoint decides: when an older one was written it may have been the best so far.
    best_step = summaries[-1].about.get("best_step")
    heads = ("step", "epoch", "ranks", "config", "size", "", "")
    table = make_table("Checkpoints", *heads, text=("epoch", "config", ""))
    for summary in summaries:
        about = summary.about
        written_with = about.get("config_digest", "?")
        table.add_row(
            f"{about['step']:,}",
            f"{about['epoch'] + 1} + {format_count(about['epoch_step'], 'step')}"
            if about["epoch_step"]
            else f"{about['epoch']} done",
            str(about.get("world_size", "?")),
            "same" if written_with == digest else written_with,
            size_text(summary.disk_bytes),
            "damaged" if summary.problems else "complete",
            "best" if best_step == about["step"] else "",
        )
    show_table(console, table)


def inspect_checkpoint(path: Path, verify: bool) -> None:
    """Show what is in one checkpoint; exit code 1 if it is incomplete or damaged."""
    summary = summarise_checkpoint(path, verify)
    about = summary.about
    console, num_ranks = make_console(), about.get("world_size", "?")
    place = f"epoch {about['epoch'] + 1}, {format_count(about['epoch_step'], 'step')} into it"
    if not about["epoch_step"]:
        place = f"behind epoch {about['epoch']}"
    console.print(
        f"checkpoint {path}: step {about['step']:,}, {place}, written by {num_ranks} "
        f"{'rank' if num_ranks == 1 else 'ranks'}, "
        f"config {about.get('config_digest', '?')}, {size_text(summary.disk_bytes)}"
    )
    _print_checkpoint(console, summary)
    _finish([summary], verify)


def _print_checkpoint(console: Console, summary: CheckpointSummary) -> None:
    if lineage := read_lineage(summary.about):
        console.print(f"trained on {describe_increments(lineage)}")
    heads = ("table", "rows", "width", "type", "bytes", "optimizer state")
    text = ("table", "tensor", "shape", "type", "optimizer state")
    tables = make_table(f"Tables of {summary.path.name}", *heads, text=text)
    for table in summary.tables:
        state = ", ".join(f"{name} {size_text(size)}" for name, size in table.state_bytes.items())
        tables.add_row(
            table.name,
            f"{table.num_rows:,}",
            str(table.width),
            table.dtype,
            size_text(table.num_bytes),
            state or "none",
        )
    show_table(console, tables)
    layers = make_table("Layers", "tensor", "shape", "type", "bytes", "optimizer state", text=text)
    for layer in summary.layers:
        shape = " x ".join(map(str, layer.shape)) or "1"
        state = ", ".join(layer.state) or "none"
        layers.add_row(layer.name, shape, layer.dtype, size_text(layer.num_bytes), state)
    show_table(console, layers)


def _finish(
    summaries: list[CheckpointSummary], verify: bool, unreadable: Sequence[str] = ()
) -> None:
    problems = [*unreadable, *(problem for summary in summaries for problem in summary.problems)]
    print_result(
        kind="run",
        checkpoints=[
            {
                "path": summary.path,
                "bytes": summary.disk_bytes,
                "tables": {
                    one.name: {"rows": one.num_rows, "width": one.width, "type": one.dtype}
                    for one in summary.tables
                },
                **{key: summary.about.get(key) for key in ABOUT},
            }
            for summary in summaries
        ],
        problems=problems,
    )
    for problem in problems:
        make_console().print(problem)
    if problems:
        raise typer.Exit(1)
    without = [summary.path.name for summary in summaries if not summary.has_checksums]
    if without:
        make_console().print(
            f"complete: every file is there in full; {', '.join(without)} came without checksums, "
            "from an older release"
        )
    elif verify:
        make_console().print("complete: every file is there, and as its checksum says")
    else:
        make_console().print(
            "complete: every file is there in full; --verify reads them and checks checksums"
        )
