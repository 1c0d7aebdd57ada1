"""`gmeta tune`."""

import json
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from gmeta.cli.commands.console import make_console, make_table, print_result, show_table
from gmeta.cli.commands.overrides import Overrides
from gmeta.cli.commands.rank_launch import faster_import
from gmeta.config.algorithm import PLAIN
from gmeta.config.train_config import DataConfig, RunConfig, load_config
from gmeta.errors import ConfigError, GMetaError, UserError
from gmeta.platform.files.atomic_write import write_atomically
from gmeta.platform.files.checked_json import read_json
from gmeta.platform.files.local_paths import check_local
from gmeta.runs.early_stop import EarlyStop, make_early_stop
from gmeta.runs.resolve_names import with_names
from gmeta.runs.run_folder import LOCK_FILE
from gmeta.runs.run_lock import lock_run_folder
from gmeta.tuning import outcome
from gmeta.tuning.default_space import IdTables, make_default_space
from gmeta.tuning.search_space import (
    Space,
    check_metric,
    check_space,
    make_plain_config,
    make_plain_space,
    read_space,
    replace_values,
)
from gmeta.tuning.study import (
    PATIENCE,
    STUDY_FILE,
    VALIDATIONS,
    PrunerName,
    Study,
    StudyPlan,
    import_optuna,
)
from gmeta.tuning.trials import (
    TrialRunner,
    make_trial_run,
    start_process,
    trial_processes,
    wait_for_report,
)
from metaio.format.dataset import Dataset
from metaio.prepare.schema.schema_file import read_item_rule
from metaio.quantities import format_count
from metaio.recipes.validation_splits import find_overlapping_splits

BEST_FILE, PAGE_FILE = "best.toml", "study.html"
RESULTS_FILE = "results.json"
CHECK_LOG, TREES_LOG = "check.log", "trees.log"
WORK = "gmeta.cli.commands.work.trial_process"


def tune(
    config: Annotated[Path, typer.Argument(help="TOML file, as of `gmeta train`")],
    overrides: Overrides = None,
    trials: Annotated[int, typer.Option(min=1, help="runs to try, those of before included")] = 20,
    space: Annotated[
        Path | None,
        typer.Option(help="TOML of keys and ranges; default: by the config (docs/tuning.md)"),
    ] = None,
    study: Annotated[
        Path | None, typer.Option(help="folder of the study; default: the config's run.dir + -tune")
    ] = None,
    parallel: Annotated[
        int, typer.Option(min=0, help="runs at a time; 0: 2, or 1 on a single core")
    ] = 0,
    pruner: Annotated[
        PrunerName | None,
        typer.Option(
            help="which runs end early: median, hyperband, none; default: median, none --with-plain"
        ),
    ] = None,
    with_plain: Annotated[
        bool,
        typer.Option(
            "--with-plain", help="tune plain training too, by as many runs, none cut short"
        ),
    ] = False,
    trees: Annotated[
        bool, typer.Option("--trees/--no-trees", help="also grow gradient-boosted trees to compare")
    ] = True,
    seed: Annotated[int, typer.Option(min=0, help="seed of what is tried")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on with a study, and refuse to begin one")
    ] = False,
) -> None:
    """Choose settings by short runs that are scored on the validation split.

    gmeta tune train.toml --trials 20

    gmeta tune train.toml --trials 20 --with-plain

    Each trial is a run in the study's folder; the same command goes on where it was stopped. Writes
    best.toml, a config for `gmeta train`, and study.html; the last line says what to train, and
    what it gains over boosted trees."""
    # Before the config is read: without the extra no study can begin.
    import_optuna()
    base = load_config(config, overrides or [])
    at_a_time = _num_parallel(parallel)
    folder = study or Path(f"{base.run.dir}-tune")
    check_local("--study", folder)
    if resume and not (folder / STUDY_FILE).exists():
        raise UserError(
            f"--resume, but --study = {str(folder)!r} holds no study to go on with. Correct the "
            "folder, or leave --resume out to begin one"
        )
    base, dataset = with_names(base)
    _check_tunable(base.data, dataset)
    decides = make_early_stop(base)
    base = replace(base, run=_with_validations(base.run, base.data, dataset))
    columns = dataset.features.labels, _list_tables(dataset)
    chosen = read_space(space, base) if space else make_default_space(base, *columns)
    ends_early = choose_pruner(pruner, with_plain)
    sides = {"": (folder, StudyPlan(base, chosen, ends_early, seed, dataset.fingerprint))}
    if with_plain:
        plain = make_plain_config(base)
        of_plain = make_plain_space(chosen) if space else make_default_space(plain, *columns)
        check_space(of_plain, plain)
        plan = StudyPlan(plain, of_plain, ends_early, seed, dataset.fingerprint)
        sides["plain"] = (folder.with_name(f"{folder.name}-plain"), plan)
    # Both studies are checked before either starts: the second would fail hours later.
    for place, plan in sides.values():
        check_metric(plan.space, plan.base)
        _check_folder(place)
    results: dict[str, Any] = {}
    tuned: list[outcome.TunedSide] = []
    baseline: dict[str, Any] = {}
    # One context for both studies: the fork server imports torch once.
    with trial_processes(at_a_time, WORK) as context:
        for side, (place, plan) in sides.items():
            # Only one process at a time may have a study open.
            with lock_run_folder(place):
                checked = replace(plan.base, run=make_trial_run(plan.base.run, place / "check"))
                _check_on_data(checked.to_json(), place, context)
                opened = Study(place, plan, decides)
                runner = TrialRunner(
                    opened, place, decides.metric, partial(_run_trial, "train"), context
                )
                _run_trials(opened, runner, plan.space, decides, trials, at_a_time)
                if trees and not side and opened.best_trial() is not None:
                    baseline = _score_trees(plan, place, decides, context)
                of_trees = {"trees": baseline} if baseline and not side else {}
                results[side] = _print_results(opened, runner, place, plan, decides, **of_trees)
                name = "plain" if plan.base.algorithm.name == PLAIN else "adapted"
                tuned.append(outcome.TunedSide(name, opened, plan.space, place / BEST_FILE))
    shown = " + ".join(base.data.valid_splits), decides
    path = _show_best(folder / PAGE_FILE, tuned, baseline.get("score"), *shown)
    first = results.pop("")
    print_result(**first, **results, train=path, page=folder / PAGE_FILE)


def _show_best(
    page: Path, tuned: list[outcome.TunedSide], trees: float | None, splits: str, decides: EarlyStop
) -> Path:
    """Draw the page, print what to train, and return its config."""
    path, line = outcome.choose_side(tuned, trees, splits, decides)
    # Late: drawing takes a second to import.
    with faster_import():
        from gmeta.tuning.study_page import render_study
    write_atomically(page, render_study(line, tuned, trees, splits, decides).encode())
    make_console(stderr=True).print(f"pictures: {page}\n{line}")
    return path


def _run_trial(part: str, config: dict[str, Any], log: str, place: int, says: Connection) -> None:
    # Imported in the trial's process alone: `gmeta tune` itself stays without torch.
    with faster_import():
        from gmeta.cli.commands.work.trial_process import run_as_trial
    run_as_trial(part, config, log, place, says)


def choose_pruner(pruner: PrunerName | None, with_plain: bool) -> PrunerName:
    """Return the pruner. Raises UserError for one that would end runs of both studies early."""
    if with_plain and pruner not in (None, "none"):
        raise UserError(
            f"--pruner = {pruner!r} with --with-plain: it ends more runs of one side than of the "
            "other, and as many trials would not be as much work. Leave --pruner out"
        )
    return "none" if with_plain else pruner or "median"


def _check_tunable(data: DataConfig, dataset: Dataset) -> None:
    """Raise ConfigError where there is no split that trials may be scored on."""
    if not data.valid_splits:
        raise ConfigError(
            'data.valid_split = "": trials are scored on a validation split, and on no other. '
            "Set it, or prepare data with one: [splits] shares in the schema"
        )
    trained = data.train_split
    for split in data.valid_splits:
        if split in find_overlapping_splits(trained, dataset):
            # A split that was carved out of the training split, or the other way round, shares rows
            # with it.
            holds = "is data.train_split too" if split == trained else f"holds rows of {trained!r}"
            raise ConfigError(
                f"data.valid_split = {split!r} {holds}: what was trained on tells nothing of "
                "unseen tasks. Name another split"
            )
        if split in data.eval_splits:
            raise ConfigError(
                f"data.valid_split = {split!r} is in data.eval_splits too: what chose the settings "
                "is no measure of them. Take it out of one of the two"
            )
    if data.source != "static":
        raise ConfigError(
            f"data.source = {data.source!r}: a trial reads the dataset itself. "
            "Add data.source=static"
        )


def _list_tables(dataset: Dataset) -> IdTables:
    rule, features = read_item_rule(dataset.manifest), dataset.features
    names = tuple(table.name for table in features.tables)
    items = (one for one in features.single if rule is not None and one.name == rule.column)
    item = next(items, None)
    return IdTables(names, item.name, item.table) if item is not None else IdTables(names)


def _num_parallel(parallel: int) -> int:
    cores = len(os.sched_getaffinity(0))
    if parallel > cores:
        raise UserError(
            f"--parallel = {parallel}, but this process may use {format_count(cores, 'core')}: "
            f"trials would wait for each other. Choose 1 to {cores}"
        )
    return parallel or min(2, cores)


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--study = {str(folder)!r} is a file: a folder is needed. Choose another")
    # A study that was killed before its first trial leaves these alone: the folder is still free.
    left = (LOCK_FILE, CHECK_LOG)
    holds_other = folder.is_dir() and any(path.name not in left for path in folder.iterdir())
    if holds_other and not (folder / STUDY_FILE).exists():
        raise UserError(
            f"--study = {str(folder)!r} is not empty and holds no study. Choose another folder"
        )


def _with_validations(run: RunConfig, data: DataConfig, dataset: Dataset) -> RunConfig:
    """Return the section with VALIDATIONS validations a run, unless it says how many, and an early
    end where they get no better."""
    if run.keep_best and not run.early_stop_patience:
        # Without the best restored an early end would take the worst of them.
        run = replace(run, early_stop_patience=PATIENCE)
    if run.valid_every_steps or data.blocks_per_step or data.train_split not in dataset.splits:
        return run
    # A run that validates only at its end cannot be pruned.
    split = dataset.splits[data.train_split]
    tasks_per_step = data.mean_tasks_per_step(split.num_episodes, split.num_rows)
    steps = split.num_episodes // tasks_per_step * run.epochs
    total = min(steps, run.max_steps or steps)
    return replace(run, valid_every_steps=max(1, total // VALIDATIONS))


def _check_on_data(config: dict[str, Any], folder: Path, context: ForkServerContext) -> None:
    """Raise GMetaError, as `gmeta train` would, where the config does not fit its dataset."""
    # Once for the study: else each of its trials would fail by itself.
    log = folder / CHECK_LOG
    process, receiver = start_process(context, partial(_run_trial, "check"), config, log)
    if line := wait_for_report(process, receiver).failure:
        raise UserError(line)
    if process.exitcode:
        raise GMetaError(f"the config's check ended with exit code {process.exitcode}; see {log}")
    log.unlink(missing_ok=True)


def _run_trials(
    study: Study, runner: TrialRunner, space: Space, decides: EarlyStop, trials: int, parallel: int
) -> None:
    console = make_console(stderr=True)
    for number in study.interrupted:
        # The same values are tried again from the start: a half-trained run is not resumed.
        folder = runner.folder_of(number).root
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_suffix(".log").unlink(missing_ok=True)
        console.print(f"trial {number}: was interrupted; its values are tried again")
    if done := study.count_tried():
        console.print(f"goes on behind {format_count(done, 'trial')}")
    for trial in runner.run(trials, parallel):
        console.print(outcome.describe_trial(study, trial, space, decides.metric))


def _score_trees(
    plan: StudyPlan, folder: Path, decides: EarlyStop, context: ForkServerContext
) -> dict[str, Any]:
    """Return score and description of the boosted trees on the validation splits, made once."""
    with suppress(OSError, ValueError):
        known: dict[str, Any] = read_json(folder / RESULTS_FILE).get("trees", {})
        if known.get("score") is not None:
            return known
    # With the most inputs that a trial has.
    near = (one.bounds() for one in plan.space if one.key == "neighbours.column")
    items = [name for names in near for name in names if name] or [plan.base.neighbours.column]
    config = replace_values(plan.base, {"neighbours.column": items[0]})
    log = folder / TREES_LOG
    started = start_process(context, partial(_run_trial, "trees"), config.to_json(), log)
    report = wait_for_report(*started)
    text = f"{decides.metric} {outcome.format_score(report.score)}, {report.adapts}"
    lost = f"boosted trees: no score; see {log}"
    line = report.failure or (lost if report.score is None else f"boosted trees: {text}")
    make_console(stderr=True).print(line)
    return {"score": report.score, "note": report.failure or report.adapts}


def _print_results(
    study: Study,
    runner: TrialRunner,
    folder: Path,
    plan: StudyPlan,
    decides: EarlyStop,
    **more: Any,
) -> dict[str, Any]:
    told = outcome.format_results(study, decides, **more)
    write_atomically(folder / RESULTS_FILE, told.encode())
    best = outcome.check_any_complete(study, folder)
    splits, path = " + ".join(plan.base.data.valid_splits), folder / BEST_FILE
    text = outcome.format_best_config(study, best, splits, decides.metric, path)
    write_atomically(path, text.encode())
    show_table(make_console(), _trials_table(study, plan.space, decides))
    lines = [
        *outcome.describe_edges(plan.space, best),
        f"best: {decides.metric} {outcome.format_score(best.score)} on split {splits!r}, trial "
        f"{best.number} ({outcome.describe_counts(study)})",
        *([best.note] if best.note else []),
        f"train it: gmeta train {path}",
        f"or take that trial as it is: gmeta evaluate {runner.folder_of(best.number).root}",
    ]
    make_console(stderr=True).print("\n".join(lines))
    return {"best": path, **json.loads(told)}


def _trials_table(study: Study, space: Space, decides: EarlyStop) -> Table:
    score_head = f"{decides.metric} {'↑' if decides.higher_is_better else '↓'}"
    table = make_table(
        "", "trial", score_head, "state", *outcome.shorten_keys(space), text=("state",)
    )
    table.title = None
    for trial in study.rank_trials():
        # Its values were tried again under another number.
        if trial.state == "interrupted":
            continue
        values = [outcome.format_value(trial.values.get(dimension.key)) for dimension in space]
        table.add_row(str(trial.number), outcome.format_score(trial.score), trial.state, *values)
    return table
