"""`gmeta sim run`: the job's time under each way of dealing with stragglers."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from gmeta.antdt.simulation.job_config import JobConfig
from gmeta.antdt.simulation.scenario_study import StudyResult, find_methods, run_study
from gmeta.antdt.simulation.traces import SCENARIOS, recorded_trace
from gmeta.antdt.stragglers.straggler_config import load_straggler_config
from gmeta.cli.commands.console import make_console, print_result, progress_bars, show_table
from gmeta.evaluation.report.chart_files import render_sheet
from gmeta.evaluation.report.stragglers import completion_chart
from gmeta.platform.files.atomic_write import write_atomically
from gmeta.platform.files.local_paths import check_local

MAX_WORKERS = 4096


def run(
    workers: Annotated[
        int, typer.Option(min=2, max=MAX_WORKERS, help="workers of the cluster")
    ] = 1000,
    steps: Annotated[int, typer.Option(min=1, help="steps of the job, a second each")] = 3600,
    scenario: Annotated[
        list[str] | None,
        typer.Option(help="transient, persistent, deterministic, mixed, busy; default: all"),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="a method's name, or FILE.py:FUNCTION with a policy; default: all"),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="recorded stragglers: decision log, or CSV with time_s,worker,slowdown"),
    ] = None,
    restart_stops_job: Annotated[
        bool, typer.Option("--restart-stops-job", help="as torchrun: one restart stops all ranks")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="seed of stragglers and noise")] = 0,
    config: Annotated[
        Path | None, typer.Option(help="TOML with \\[monitor] and \\[controller]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="folder for results.json and completion.png")
    ] = None,
) -> None:
    """Show how long a job takes with each way of dealing with stragglers, in simulated time.

    gmeta sim run --workers 200 --steps 900 --scenario mixed"""
    if out is not None:
        check_local("--out", out)
        # Made first: at the end a wrong place would cost minutes.
        out.mkdir(parents=True, exist_ok=True)
    # A recording says itself how many workers it has: --workers is for drawn ones.
    if trace is not None:
        workers = recorded_trace(trace, seed)[1]
    settings = load_straggler_config(config)
    job = JobConfig(
        num_workers=workers,
        num_steps=steps,
        restart_stops_job=restart_stops_job,
        seed=seed,
        restart_cost_s=settings.controller.restart_cost_s,
        min_tasks=settings.controller.min_tasks,
        hold_windows=settings.controller.hold_windows,
        monitor=settings.monitor,
        controller=settings.controller,
    )
    results = []
    # A recording is one scenario. Each method takes about equally long, so each is one unit of the
    # bar.
    scenarios = 1 if trace is not None else len(scenario or SCENARIOS)
    with progress_bars() as progress:
        bar = progress.add_task("simulating", total=scenarios * len(find_methods(method or [])))
        for result in run_study(job, scenario or [], method or [], trace):
            results.append(result)
            progress_text = f"{result.scenario}: {result.method} {result.slowdown:.2f}"
            # Cut to 28 characters: a bar of 80 columns has no more for it.
            progress.update(bar, advance=1, description=f"{progress_text:.28}")
    print_result(**_to_document(job, results))
    show_table(make_console(), _results_table(job, results))
    if out is not None:
        text = f"{json.dumps(_to_document(job, results), indent=1)}\n"
        write_atomically(out / "results.json", text.encode())
        chart = completion_chart(results, f"{job.num_workers} workers, seed {job.seed}")
        write_atomically(out / "completion.png", render_sheet(chart)["png"])


def _results_table(job: JobConfig, results: list[StudyResult]) -> Table:
    bsp_s = {r.scenario: r.outcome.completion_s for r in results if r.method == "BSP"}
    table = Table("stragglers", "method", "completion", "times healthy", "faster than BSP",
                  "adjustments", "restarts", box=None, pad_edge=False)  # fmt: skip
    for name, how, outcome, _ in results:
        faster = f"{bsp_s[name] / outcome.completion_s:.2f}" if name in bsp_s else ""
        table.add_row(
            name,
            how,
            f"{outcome.completion_s:.0f} s",
            f"{outcome.completion_s / job.healthy_s:.2f}",
            faster,
            str(outcome.num_adjustments),
            str(outcome.num_restarts),
        )
    return table


def _to_document(job: JobConfig, results: list[StudyResult]) -> dict[str, Any]:
    rows = [{"scenario": r.scenario, "method": r.method, **r.outcome._asdict()} for r in results]
    return {"job": asdict(job), "healthy_s": job.healthy_s, "results": rows}
