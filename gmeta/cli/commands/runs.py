"""`gmeta runs`."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from gmeta.cli.commands.console import make_console, make_table, show_table
from gmeta.errors import GMetaError, UserError
from gmeta.platform.files.atomic_write import write_atomically
from gmeta.runs.listing import RunSummary, find_differing_keys, find_runs, summarise_run
from gmeta.runs.run_folder import RunFolder
from gmeta.tuning.config_toml import format_toml_value

_RUNS = Path("runs")


def runs(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FOLDER]...", help="runs, or folders with runs below; default: runs/"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for scripts")] = False,
    page: Annotated[
        Path | None, typer.Option(help="also draw two to four runs that are named as a page: .html")
    ] = None,
) -> None:
    """List runs with how far they came and their best validation; compare some that are named.

    gmeta runs

    gmeta runs runs/demo/maml runs/demo/plain"""
    chosen_folders = folders or [_RUNS]
    run_folders = [run for folder in chosen_folders for run in find_runs(folder)]
    if not run_folders:
        raise UserError(
            f"no run is in {', '.join(map(str, chosen_folders))}, nor three folders below. Name "
            "the folder of your runs"
        )
    summaries, broken = [], []
    for run in run_folders:
        try:
            summaries.append(summarise_run(run))
        except GMetaError as error:
            # The other runs may be what the caller wants to see.
            broken.append(str(error))
    # Only runs that are named one by one are compared: those of a folder are many.
    compared = len(run_folders) > 1 and [run.root for run in run_folders] == chosen_folders
    differing = find_differing_keys([run.read_config() for run in run_folders]) if compared else []
    if page is not None:
        _draw_page(page, run_folders, summaries, differing if compared else None)
    if as_json:
        keys = [
            {
                "key": key,
                **{str(run.root): value for run, value in zip(run_folders, values, strict=True)},
            }
            for key, values in differing
        ]
        runs_told = [asdict(summary) for summary in summaries]
        typer.echo(json.dumps({"runs": runs_told, "differing": keys, "broken": broken}, indent=2))
        return
    _print_list(summaries)
    if compared:
        _print_comparison(run_folders, differing)
        _print_scores(summaries)
    for line in broken:
        make_console(stderr=True).print(f"not listed: {line}")


def _draw_page(
    page: Path,
    run_folders: Sequence[RunFolder],
    summaries: Sequence[RunSummary],
    differing: Sequence[tuple[str, list[object]]] | None,
) -> None:
    # Late: drawing takes a second to import.
    from gmeta.evaluation.report.runs_page import MAX_RUNS, render_runs

    if differing is None or not len(summaries) == len(run_folders) <= MAX_RUNS:
        raise UserError(
            f"--page draws 2 to {MAX_RUNS} runs that can be read and are named one by one, not "
            f"{len(run_folders)}. Name them: gmeta runs RUN RUN --page {page}"
        )
    texts = [(key, list(map(format_toml_value, values))) for key, values in differing]
    write_atomically(page, render_runs(run_folders, summaries, texts).encode())
    make_console(stderr=True).print(f"page: {page}")


def _print_list(summaries: Sequence[RunSummary]) -> None:
    heads = ("run", "algorithm", "model", "step", "loss", "valid", "best", "at step", "last line")
    table = make_table("Runs", *heads, text=("run", "algorithm", "model", "valid"))
    for one in summaries:
        table.add_row(
            one.run,
            one.algorithm,
            one.model,
            _number(one.step, ","),
            _number(one.loss, ".4f"),
            one.metric if one.best is not None else "",
            _number(one.best, ".4f"),
            _number(one.best_step, ","),
            _format_age(one.logged_s),
        )
    show_table(make_console(), table)


def _print_comparison(
    run_folders: Sequence[RunFolder], differing: Sequence[tuple[str, list[object]]]
) -> None:
    console = make_console()
    if not differing:
        console.print("Their configs are the same.")
        return
    names = [str(run.root) for run in run_folders]
    table = make_table("Keys that differ", "key", *names, text=("key", *names))
    for key, values in differing:
        table.add_row(key, *(format_toml_value(value) for value in values))
    show_table(console, table)


def _print_scores(summaries: Sequence[RunSummary]) -> None:
    metrics = list(dict.fromkeys(name for one in summaries for name in one.scores))
    if not metrics:
        return
    names = [one.run for one in summaries]
    table = make_table("Scores of the best validation", "metric", *names, text=("metric",))
    for metric in metrics:
        table.add_row(metric, *(_number(one.scores.get(metric), ".4f") for one in summaries))
    show_table(make_console(), table)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _format_age(logged_s: float | None) -> str:
    """Return the age in the largest unit of which there are at least two."""
    if logged_s is None:
        return "nothing logged"
    seconds = max(0.0, time.time() - logged_s)
    for unit, name in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name} ago"
    return f"{seconds:.0f} s ago"
