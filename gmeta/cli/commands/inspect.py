"""`gmeta inspect`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gmeta.cli.commands import console as consoles
from gmeta.cli.commands.inspect_channel import inspect_channel
from gmeta.cli.commands.inspect_model import inspect_model, is_model
from gmeta.cli.commands.inspect_stream import inspect_stream
from gmeta.errors import UserError
from gmeta.platform.files.atomic_write import write_atomically
from gmeta.platform.files.local_paths import check_local, is_url
from gmeta.serving.channel.channel import Channel, is_channel
from gmeta.serving.channel.current_version import is_channel_at, promotions_at
from gmeta.serving.channel.remote_channel import channel_at
from metaio.format.dataset import Dataset, open_dataset
from metaio.format.inspection import SKEW_PERCENT, LabelUsage, SplitSummary, find_damage, summarise
from metaio.format.inspection_chart import draw_summaries
from metaio.stream.chain import is_stream


def inspect(
    path: Annotated[
        str,
        typer.Argument(
            help="a prepared dataset, a stream or a channel (folder or URL), a run, a checkpoint "
            "or an exported model"
        ),
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="check every checksum; exit code 1 if one differs")
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(help="dataset: write a PNG of episode sizes and id skew, or a page: .html"),
    ] = None,
) -> None:
    """Show what a dataset, stream, run, checkpoint, exported model or channel holds.

    Dataset: tasks, rows, support and query sizes, ids in use and their skew. Stream: its
    increments, how its tables grow, alarms, what was refused. Run or checkpoint: steps, tables,
    layers, and whether all of it is there. Exported model: which columns it reads, and what they
    hold. Channel: its versions, which one is served, what was decided.

    gmeta inspect data/ml --picture data/ml.png

    gmeta inspect s3://bucket/clicks --verify

    gmeta inspect runs/demo/maml

    gmeta inspect exports/clicks

    gmeta inspect channels/clicks"""
    inspect_other = _find_inspector(path)
    if inspect_other is not None:
        if picture is not None:
            raise UserError(f"{path} is no dataset: --picture is for datasets. Leave it out")
        inspect_other(verify)
        return
    if picture is not None:
        check_local("--picture", picture)
        if verify:
            raise UserError(
                "--picture has no effect with --verify, which draws none. Leave one out"
            )
    known: list[str] = []
    # With --verify a split without its block table is reported beside other damage, not raised.
    dataset = open_dataset(path, known if verify else None)
    console = consoles.make_console()
    if verify:
        with consoles.show_progress("reading") as advance:
            messages = find_damage(dataset, advance, known)
        for message in messages:
            console.print(message)
        consoles.print_result(kind="dataset", path=dataset.url, problems=messages)
        if messages:
            raise typer.Exit(1)
        num_files = 1 + sum(1 for _ in dataset.files())
        console.print(f"{dataset.url} is intact: {num_files} files, every checksum matches.")
        return
    with consoles.show_progress("reading") as advance:
        summaries = summarise(dataset, advance)
    _print_summary(console, dataset, summaries)
    if picture is not None:
        if picture.suffix == ".html":
            # Late: without a page nothing is drawn.
            from gmeta.evaluation.report.dataset_page import render_dataset

            content = render_dataset(dataset, summaries).encode()
        else:
            content = draw_summaries(summaries, picture)
        picture.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(picture, content)
        console.print(f"picture: {picture}")


def _find_inspector(place: str) -> Callable[[bool], None] | None:
    """Return the function that shows a model, stream, channel, run or checkpoint, if it is one."""
    if is_stream(place):
        return partial(inspect_stream, place)
    if is_url(place):
        # Runs, checkpoints and exports are local: at a URL there is a stream, a channel or a
        # dataset.
        if not is_channel_at(place):
            return None
        return partial(inspect_channel, place, channel_at(place), promotions_at(place))
    path = Path(place)
    if is_channel(path):
        channel = Channel(path)
        return partial(inspect_channel, place, channel, channel.promotions())
    if is_model(path):
        return partial(inspect_model, path)
    if not (is_run(path) or is_checkpoint(path)):
        return None
    # Late, as a checkpoint's index is read by torch, which takes seconds to load: a dataset need
    # not wait.
    from gmeta.cli.commands.inspect_run import inspect_checkpoint, inspect_run

    return partial(inspect_run if is_run(path) else inspect_checkpoint, path)


def is_run(path: Path) -> bool:
    """Return whether this is a run folder; one without a checkpoint yet counts."""
    # A dataset has a manifest in place of these, and an exported model has no environment.
    marks = (path / "environment.json", path / "checkpoints")
    return (path / "config.json").is_file() and any(mark.exists() for mark in marks)


def is_checkpoint(path: Path) -> bool:
    """Return whether this folder is one checkpoint of a run."""
    # By its place, not its content: a damaged checkpoint must be recognised too.
    return path.is_dir() and path.name.startswith("step-") and path.parent.name == "checkpoints"


def _print_summary(console: Console, dataset: Dataset, summaries: list[SplitSummary]) -> None:
    manifest = dataset.manifest
    console.print(
        f"task {dataset.task}, label {dataset.label}, seed {manifest.seed}, "
        f"protocol: {manifest.protocol or 'none'}\nfingerprint {dataset.fingerprint}"
    )
    consoles.show_table(console, _sizes_table(summaries))
    for name, split in dataset.splits.items():
        if number := split.blocks.bundle_tasks:
            console.print(f"{name}: in bundles of {number:,} episodes that train together")
    for line in filter(None, map(_describe_events, summaries)):
        console.print(line)
    consoles.print_result(**_to_document(dataset, summaries))
    if summaries:
        consoles.show_table(console, _tables_table(summaries[0]))
        console.print(_unknown_id_lines(summaries))


def _to_document(dataset: Dataset, summaries: list[SplitSummary]) -> dict[str, Any]:
    return {
        "kind": "dataset",
        "path": dataset.url,
        "fingerprint": dataset.fingerprint,
        "task": dataset.task,
        "label": dataset.label,
        "protocol": dataset.manifest.protocol,
        "splits": {
            summary.name: {
                "tasks": summary.num_tasks,
                "episodes": len(summary.support_T),
                "rows": summary.num_rows,
                "support": _three_sizes(summary.support_T.tolist()),
                "query": _three_sizes(summary.query_T.tolist()),
                "label_mean": summary.labels[0].mean,
                "labels": {
                    label.name: {"mean": label.mean, "rows": label.num_known}
                    for label in summary.labels
                },
                "bundle_tasks": dataset.split(summary.name).blocks.bundle_tasks,
                **(
                    {
                        "events": {
                            "stored": int(summary.events.num_events_T.sum()),
                            "known": _three_sizes(summary.events.known_N.tolist()),
                            "cut_share": summary.events.cut_share,
                        }
                    }
                    if summary.events is not None
                    else {}
                ),
            }
            for summary in summaries
        },
        "tables": {
            use.name: {
                "rows": use.num_rows,
                "ids_used": use.num_used,
                "top_share": {str(percent): use.top_share(percent) for percent in SKEW_PERCENT},
                "unknown_share": use.unknown_share,
            }
            for use in (summaries[0].tables if summaries else ())
        },
    }


def _three_sizes(sizes: list[int]) -> dict[str, int]:
    if not sizes:
        return {}
    return {"least": min(sizes), "median": sorted(sizes)[len(sizes) // 2], "most": max(sizes)}


def _describe_events(summary: SplitSummary) -> str:
    """Return a line on a split's events; "" without."""
    usage = summary.events
    if usage is None:
        return ""
    cut = ""
    if usage.longest:
        cut = f", {usage.cut_share:.1%} of the rows know longest = {usage.longest:,} or more"
    return (
        f"{summary.name}: {int(usage.num_events_T.sum()):,} events, stored once a task; a row "
        f"knows {_spread(usage.known_N.tolist())}{cut}"
    )


def _sizes_table(summaries: list[SplitSummary]) -> Table:
    title = "Episodes (support and query rows: least / median / most)"
    heads = ("split", "tasks", "episodes", "rows", "support", "query")
    names = [label.name for label in summaries[0].labels] if summaries else []
    table = consoles.make_table(title, *heads, *names, text=("split",))
    for summary in summaries:
        table.add_row(
            summary.name,
            f"{summary.num_tasks:,}",
            f"{len(summary.support_T):,}",
            f"{summary.num_rows:,}",
            _spread(summary.support_T.tolist()),
            _spread(summary.query_T.tolist()),
            *(_mean(label, summary.num_rows) for label in summary.labels),
        )
    return table


def _mean(label: LabelUsage, num_rows: int) -> str:
    """Return a label's mean, and over how many rows where some have none."""
    of = "" if label.num_known == num_rows else f" of {label.num_known:,}"
    return f"{label.mean:.3f}{of}"


def _spread(sizes: list[int]) -> str:
    return " / ".join(f"{size:,}" for size in _three_sizes(sizes).values()) or "-"


def _tables_table(summary: SplitSummary) -> Table:
    skew = [f"top {percent} %" for percent in SKEW_PERCENT]
    title = f"Embedding tables in {summary.name} (share of uses by the most used ids)"
    table = consoles.make_table(title, "table", "rows", "ids used", *skew, text=("table",))
    for use in summary.tables:
        shares = [_percent(use.top_share(percent)) for percent in SKEW_PERCENT]
        table.add_row(use.name, f"{use.num_rows:,}", f"{use.num_used:,}", *shares)
    return table


def _unknown_id_lines(summaries: list[SplitSummary]) -> str:
    """Return a line for each table whose row 0 is used: the share of unknown ids by split."""
    lines = []
    for index, table in enumerate(summaries[0].tables):
        shares = {s.name: s.tables[index].unknown_share for s in summaries}
        share_texts = [f"{name} {_percent(share)}" for name, share in shares.items() if share > 0]
        if share_texts:
            lines.append(f"  {table.name}: {', '.join(share_texts)}")
    return "\n".join(["Ids outside the vocabulary (row 0):", *lines]) if lines else ""


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
