"""`gmeta tune`."""

import json
import os
import shutil
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from gmeta.commands.on_ranks import importing
from gmeta.commands.screen import print_result, screen, show_table, table_of
from gmeta.config import DataConfig, RunConfig, load_config
from gmeta.errors import ConfigError, GMetaError, UserError
from gmeta.files.local import check_local
from gmeta.files.whole import write_whole
from gmeta.outer.early_stop import EarlyStop, early_stop_of
from gmeta.resolve_names import with_names
from gmeta.runs.folder import LOCK_FILE
from gmeta.runs.lock import held_alone
from gmeta.tuning.outcome import (
    best_toml,
    check_any_complete,
    edge_lines,
    results_json,
    short_names,
    shown_score,
    shown_value,
    told_counts,
    trial_line,
)
from gmeta.tuning.space import (
    Space,
    check_metric,
    check_space,
    default_space,
    plain_config,
    plain_space,
    read_space,
)
from gmeta.tuning.study import (
    STUDY_FILE,
    VALIDATIONS,
    Plan,
    PrunerName,
    Study,
    import_optuna,
)
from gmeta.tuning.trials import (
    TrialRunner,
    said_by,
    started,
    trial_processes,
    trial_run,
)
from metaio.counted import counted
from metaio.format.dataset import Dataset
from metaio.recipes.carved import sharing_rows

BEST_FILE = "best.toml"
RESULTS_FILE = "results.json"
CHECK_LOG = "check.log"
WORK = "gmeta.commands.work.tune"


def tune(
    config: Annotated[Path, typer.Argument(help="TOML file, as of `gmeta train`")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="replace values of the config"),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="runs to try, those of before included")] = 20,
    space: Annotated[
        Path | None,
        typer.Option(help="TOML of keys and ranges; default: rates, steps, algorithm and loss"),
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
    seed: Annotated[int, typer.Option(min=0, help="seed of what is tried")] = 0,
) -> None:
    """Choose settings by short runs that are scored on the validation split.

    gmeta tune train.toml --trials 20

    gmeta tune train.toml --trials 20 --with-plain

    Each trial is a run in the study's folder; the same command goes on where it was stopped. Writes
    best.toml, a config for `gmeta train`.
    """
    import_optuna()
    base = load_config(config, overrides or [])
    at_a_time = _num_parallel(parallel)
    folder = study or Path(f"{base.run.dir}-tune")
    check_local("--study", folder)
    base, dataset = with_names(base)
    _check_tunable(base.data, dataset)
    decides = early_stop_of(base)
    base = replace(base, run=_with_validations(base.run, base.data, dataset))
    labels = dataset.features.labels
    chosen = read_space(space, base) if space else default_space(base, labels)
    ends_early = _pruner_of(pruner, with_plain)
    sides = {"": (folder, Plan(base, chosen, ends_early, seed, dataset.fingerprint))}
    if with_plain:
        plain = plain_config(base)
        of_plain = plain_space(chosen) if space else default_space(plain, labels)
        check_space(of_plain, plain)
        beside = folder.with_name(f"{folder.name}-plain")
        sides["plain"] = (beside, Plan(plain, of_plain, ends_early, seed, dataset.fingerprint))
    for place, plan in sides.values():
        check_metric(plan.space, plan.base)
        _check_folder(place)
    found = {}
    # One context for both: processes are forked from a server that is started once.
    with trial_processes(at_a_time, WORK) as context:
        for side, (place, plan) in sides.items():
            with held_alone(place):
                checked = replace(plan.base, run=trial_run(plan.base.run, place / "check"))
                _check_on_data(checked.to_json(), place, context)
                opened = Study(place, plan, decides)
                runner = TrialRunner(opened, place, decides.metric, partial(_trial, False), context)
                _try(opened, runner, plan.space, decides, trials, at_a_time)
                found[side] = _conclude(opened, runner, place, plan, decides)
    first = found.pop("")
    print_result({**first, **found})


def _trial(is_check: bool, config: dict[str, Any], log: str, place: int, says: Connection) -> None:
    # In the trial's process: this one stays without torch.
    with importing():
        from gmeta.commands.work.tune import be_trial

    be_trial(is_check, config, log, place, says)


def _pruner_of(asked: PrunerName | None, with_plain: bool) -> PrunerName:
    """Return the pruner. Raise UserError where runs of both sides would be ended early, more of one
    side than of the other."""
    if with_plain and asked not in (None, "none"):
        raise UserError(
            f"--pruner = {asked!r} with --with-plain: it ends more runs of one side than of the "
            "other, and as many trials would not be as much work. Leave --pruner out"
        )
    return "none" if with_plain else asked or "median"


def _check_tunable(data: DataConfig, dataset: Dataset) -> None:
    """Raise ConfigError where scores would say nothing: there is no split to score trials on, or it
    is one that the config trains on or reports on."""
    if not data.valid_splits:
        raise ConfigError(
            'data.valid_split = "": trials are scored on a validation split, and on no other. '
            "Set it, or prepare data with one: [splits] shares in the schema"
        )
    trained = data.train_split
    for split in data.valid_splits:
        if split in sharing_rows(trained, dataset):
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


def _num_parallel(asked: int) -> int:
    cores = len(os.sched_getaffinity(0))
    if asked > cores:
        raise UserError(
            f"--parallel = {asked}, but this process may use {counted(cores, 'core')}: trials "
            f"would wait for each other. Choose 1 to {cores}"
        )
    return asked or min(2, cores)


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--study = {str(folder)!r} is a file: a folder is needed. Choose another")
    # What was left by a study that was killed before its first trial.
    left = (LOCK_FILE, CHECK_LOG)
    holds_other = folder.is_dir() and any(path.name not in left for path in folder.iterdir())
    if holds_other and not (folder / STUDY_FILE).exists():
        raise UserError(
            f"--study = {str(folder)!r} is not empty and holds no study. Choose another folder"
        )


def _with_validations(run: RunConfig, data: DataConfig, dataset: Dataset) -> RunConfig:
    """Return the section with VALIDATIONS validations a run unless it says how many: a run that
    validates only at its end cannot be pruned.
    """
    if run.valid_every_steps or data.blocks_per_step or data.train_split not in dataset.splits:
        return run
    steps = dataset.splits[data.train_split].num_episodes // data.tasks_per_step * run.epochs
    total = min(steps, run.max_steps or steps)
    return replace(run, valid_every_steps=max(1, total // VALIDATIONS))


def _check_on_data(config: dict[str, Any], folder: Path, context: ForkServerContext) -> None:
    """Check the config itself, before trials of it fail one by one. Raise GMetaError with the line
    of `gmeta train` where it does not fit its dataset."""
    log = folder / CHECK_LOG
    process, said = started(context, partial(_trial, True), config, log)
    if line := said_by(process, said).failure:
        raise UserError(line)
    if process.exitcode:
        raise GMetaError(f"the config's check ended with exit code {process.exitcode}; see {log}")
    log.unlink(missing_ok=True)


def _try(
    study: Study,
    runner: TrialRunner,
    space: Space,
    decides: EarlyStop,
    trials: int,
    parallel: int,
) -> None:
    """Run the trials that are left, and report each as it ends."""
    console = screen(stderr=True)
    for number in study.interrupted:
        # What it trained is tried anew, with the same values.
        folder = runner.folder_of(number).root
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_suffix(".log").unlink(missing_ok=True)
        console.print(f"trial {number}: was interrupted; its values are tried again")
    if done := study.num_tried():
        console.print(f"goes on behind {counted(done, 'trial')}")
    for trial in runner.run(trials, parallel):
        console.print(trial_line(study, trial, space, decides.metric))


def _conclude(
    study: Study, runner: TrialRunner, folder: Path, plan: Plan, decides: EarlyStop
) -> dict[str, Any]:
    """Print all trials, the best first, write what was found and return it."""
    write_whole(folder / RESULTS_FILE, results_json(study, decides).encode())
    best = check_any_complete(study, folder)
    splits, path = " + ".join(plan.base.data.valid_splits), folder / BEST_FILE
    write_whole(path, best_toml(study, best, splits, decides.metric, path).encode())
    show_table(screen(), _table(study, plan.space, decides))
    lines = [
        *edge_lines(plan.space, best),
        f"best: {decides.metric} {shown_score(best.score)} on split {splits!r}, trial "
        f"{best.number} ({told_counts(study)})",
        *([best.note] if best.note else []),
        f"train it: gmeta train {path}",
        f"or take that trial as it is: gmeta evaluate {runner.folder_of(best.number).root}",
    ]
    screen(stderr=True).print("\n".join(lines))
    return {"best": path, **json.loads(results_json(study, decides))}


def _table(study: Study, space: Space, decides: EarlyStop) -> Table:
    score_head = f"{decides.metric} {'↑' if decides.higher_is_better else '↓'}"
    table = table_of("", "trial", score_head, "state", *short_names(space), text=("state",))
    table.title = None
    for trial in study.ranked():
        if trial.state == "interrupted":
            continue
        shown = [shown_value(trial.values.get(dimension.key)) for dimension in space]
        table.add_row(str(trial.number), shown_score(trial.score), trial.state, *shown)
    return table
