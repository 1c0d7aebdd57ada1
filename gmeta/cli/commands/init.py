"""`gmeta init`."""

import math
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from gmeta.cli.commands.console import make_console
from gmeta.config.train_config import TrainConfig, config_from_dict
from gmeta.errors import UserError
from gmeta.platform.files.atomic_write import write_atomically
from gmeta.platform.files.checked_json import read_json
from gmeta.runs.chosen_adaptation import CHOSEN_ADAPTATION_FILE
from gmeta.tuning.config_toml import format_config
from metaio.prepare.source.infer_roles import InferredRoles, Role, infer_roles
from metaio.prepare.source.profile import read_log_sample
from metaio.prepare.source.schema_template import (
    format_schema,
    has_events,
    name_table,
    propose_episodes,
)
from metaio.quantities import format_count

# Steps of an epoch that a config aims at, and bounds on the tasks of a step: few tasks in large
# steps make too few steps to learn anything.
STEPS_PER_EPOCH, LEAST_TASKS, MOST_TASKS = 50, 4, 128
# As long as it takes: validation ends a run.
EPOCHS, PATIENCE = 60, 15
# Of the meta-learned run, which begins with the plain one: its rates are to fall before it ends.
EPOCHS_FROM_PLAIN = 30
# Of ids with fewer rows than this on average the statistics say all that there is to know: a table
# of them learns its few training rows by heart.
ROWS_OF_AN_ID = 30
MOST_ITEMS_OF_MANY_NEIGHBOURS = 100_000
FEW_TASKS = 300
# Of a model that reads events, whose encoder needs embeddings that are learnt: at the rates for
# statistics it learns little. Chosen on the validation split of a log of purchases.
WITH_EVENTS: dict[str, dict[str, Any]] = {
    "model": {
        "embedding_dim": 64,
        "events": "sasrec",
        "event_options": {"blocks": 1, "dropout": 0.3},
    },
    "outer": {
        "dense_lr": 0.003,
        "sparse_optimizer": "adam",
        "sparse_lr": 0.002,
        "embedding_init_std": 0.02,
        "sparse_weight_decay": 0.0,
    },
    "run": {"epochs": 6, "early_stop_patience": 5},
}
SCHEMA_FILE, CONFIG_FILE = "schema.toml", "train.toml"


def init(
    inputs: Annotated[
        list[str],
        typer.Argument(metavar="LOG...", help="CSV, JSON lines or Parquet: files, globs, folders"),
    ],
    out: Annotated[Path, typer.Option(help="folder of the two files")] = Path(),
    task: Annotated[str, typer.Option(help="column of what the model adapts to")] = "",
    label: Annotated[str, typer.Option(help="column of what it predicts")] = "",
    time: Annotated[str, typer.Option(help="column that orders a task's rows")] = "",
    separator: Annotated[
        str | None,
        typer.Option(help=r"between two values of a CSV, such as ';', '\t', '::' or '\x01'"),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace files that are there")
    ] = False,
    events: Annotated[
        bool, typer.Option("--events", help="also read each task's earlier rows, in time")
    ] = False,
    run: Annotated[
        bool, typer.Option("--run", help="also prepare, train both runs and evaluate: to a report")
    ] = False,
) -> None:
    """Write a first schema and config, with comments, from looking at a log's first rows.

    gmeta init 'logs/*.parquet' --label click

    gmeta init log.csv --run"""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out = {str(out)!r} is a file: a folder is needed. Choose another")
    paths = [out / SCHEMA_FILE, out / CONFIG_FILE]
    for path in paths:
        if path.exists() and not overwrite:
            raise UserError(
                f"{path} is there: it would be lost. Give another folder (--out), or add "
                "--overwrite"
            )
    roles: tuple[tuple[Role, str], ...] = (("task", task), ("label", label), ("time", time))
    roles_given = {role: column for role, column in roles if column}
    guessed = infer_roles(read_log_sample(inputs, separator), roles_given)
    if events and not has_events(guessed):
        raise UserError(
            "--events: events are the items of a task's earlier rows, and no column was found for "
            f"the {'item' if guessed.select('time') else 'time'}. Name the time with --time, or "
            "leave --events out"
        )
    header = (
        f"Made by gmeta init for the label {guessed.label.name}. Rates and sizes are only a "
        "start:\ngmeta tune chooses them on the validation split (docs/tuning.md). The keys that "
        "are not here\nhave their defaults: gmeta config lists them."
    )
    config = format_config(_first_config(guessed, out, events), header, every=False)
    texts = format_schema(guessed, inputs, events), config
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as undone:
        for path, text in zip(paths, texts, strict=True):
            # One file without the other would make the next call refuse the folder.
            if not path.exists():
                undone.callback(path.unlink, missing_ok=True)
            write_atomically(path, text.encode())
        # Both files are written: neither is removed any more.
        undone.pop_all()
    console = make_console()
    (used_task,), (used_label,) = guessed.select("task"), guessed.select("label")
    features = [column.name for column in guessed.inputs]
    times = "".join(f", time {column.name}" for column in guessed.select("time"))
    console.print(
        f"task {used_task.name}, label {used_label.name}{times}, {len(features)} inputs: "
        f"{', '.join(features)}"
    )
    for column in guessed.select("left out"):
        console.print(f"left out: {column.name}: {guessed.reasons[column.name]}")
    dealt = propose_episodes(guessed)
    dropped = 1 - dealt.num_tasks / len(guessed.task_sizes)
    last = f"the last {format_count(dealt.query_rows, 'row')} of each to be predicted"
    sides = [f"{column.name} says which are predicted" for column in guessed.select("side")]
    console.print(
        f"{dealt.num_tasks:,} tasks of at least {dealt.min_rows} rows ({dropped:.0%} have fewer); "
        f"{(*sides, last)[0]}"
    )
    if dealt.num_tasks < FEW_TASKS:
        console.print(
            f"{dealt.num_tasks:,} tasks are few to learn from, and to tell settings apart: "
            "look at the intervals of an evaluation before anything else"
        )
    schema, config, data, runs = (
        str(out / name) for name in (SCHEMA_FILE, CONFIG_FILE, "data", "runs")
    )
    plain = f"{runs}/maml-plain"
    steps = [
        ["prepare", "--schema", schema, *inputs, data],
        ["train", config, "algorithm.name=none", f"run.dir={plain}"],
        ["train", config, *begin_with(plain)],
        ["evaluate", f"{runs}/maml", "--against", plain],
    ]
    if run:
        _run_steps(steps)
        _name_better(Path(runs) / "maml", Path(plain), out)
        return
    # The lines are for a shell, and a path may have spaces.
    first, *others = (f"  gmeta {shlex.join(words)}\n" for words in steps)
    config = shlex.quote(config)
    console.print(
        f"\nRead and correct {paths[0]} and {paths[1]}, then (--run does all of it):\n"
        f"{first}  gmeta inspect {shlex.quote(data)}\n{''.join(others)}"
        f"or, for settings of both that suit the log, in place of the two trainings:\n"
        f"  gmeta tune {config} --with-plain\n"
        f"  gmeta train {shlex.quote(f'{runs}/maml-tune/best.toml')}\n"
        f"  gmeta train {shlex.quote(f'{runs}/maml-tune-plain/best.toml')}\n"
        f"In the end export the run with the smaller value in {CHOSEN_ADAPTATION_FILE}, its error "
        "on validation:\n"
        f"  gmeta {shlex.join(['export', f'{runs}/maml', str(out / 'model')])}"
    )
    if has_events(guessed) and not events:
        console.print("To also read each task's earlier rows in time, add --events and --overwrite")


def begin_with(plain: str) -> list[str]:
    """Return the settings of a meta-learned run that goes on from a plain one, and stays that where
    validation finds nothing better."""
    return [f"run.start_from={plain}", f"run.epochs={EPOCHS_FROM_PLAIN}"]


def _run_steps(steps: list[list[str]]) -> None:
    """Run commands one after the other, each in a process of its own, with a line before it."""
    for number, words in enumerate(steps, start=1):
        make_console().print(
            f"\n[{number} of {len(steps)}] gmeta {shlex.join(words)}", markup=False
        )
        status = subprocess.call([sys.executable, "-m", "gmeta", *words])
        if status:
            raise typer.Exit(status)  # the command has said why


def _name_better(meta: Path, plain: Path, out: Path) -> None:
    """Print which of two evaluated runs is better on validation, with the command to export it."""
    files = {run: run / CHOSEN_ADAPTATION_FILE for run in (meta, plain)}
    if not all(file.exists() for file in files.values()):
        make_console().print("\nToo few validation tasks to choose between both runs by.")
        return
    found = {run: read_json(file) for run, file in files.items()}
    # Both are losses of the same tasks, at the rate and steps that are best there. Level: the one
    # that learnt to adapt.
    better = min(found, key=lambda run: float(found[run]["value"]))
    values = ", ".join(f"{run.name} {one['value']:.4f}" for run, one in found.items())
    export = shlex.join(["export", str(better), str(out / "model")])
    make_console().print(
        f"\nOn validation ({found[meta]['metric']}): {values}. {better.name} is the better "
        f"one; it adapts to new tasks as it was evaluated:\n  gmeta {export}",
        markup=False,
    )


def _first_config(guessed: InferredRoles, out: Path, reads_events: bool) -> TrainConfig:
    sections: dict[str, Any] = {
        "data": {
            "path": str(out / "data"),
            "valid_split": guessed.valid_split,
            "tasks_per_step": _tasks_per_step(propose_episodes(guessed).num_training_tasks),
        },
        **_statistics_sections(guessed),
        **_evaluation_section(guessed),
        "model": {
            "name": "melu",
            "hidden": [64, 64],
            "without": [
                name_table(column)
                for column in guessed.select("single")
                if guessed.num_rows < ROWS_OF_AN_ID * column.num_distinct
            ],
            # What a regression of the statistics says, a model need not learn.
            "linear_start": True,
        },
        "algorithm": {
            # What validation chose on several logs, or near it.
            **({"inner_lr": 0.03, "inner_steps": 3} if guessed.is_rating else {"inner_lr": 0.1}),
            "support_prior": 10.0,
            "adapt_embeddings": False,
        },
        # The loss is the headline's, whatever the label's unit.
        **({"labels": {"standardise": True}} if guessed.is_rating else {}),
        "outer": {
            "loss": "mae" if guessed.is_rating else "bce",
            "dense_lr": 0.01,
            # A rare id stays near 0, as shrinkage would have it.
            "sparse_weight_decay": 8.0,
            "lr_schedule": "linear",
        },
        "run": {
            "dir": str(out / "runs" / "maml"),
            "epochs": EPOCHS,
            "early_stop_patience": PATIENCE,
            # As trees are: AUC does not notice a wrong level.
            **({} if guessed.is_rating else {"early_stop_metric": "logloss"}),
        },
    }
    for name, changed in (WITH_EVENTS if reads_events else {}).items():
        sections[name] |= changed
    return config_from_dict(sections)


def _tasks_per_step(num_tasks: int) -> int:
    """Return the tasks of a step, a power of 2, that give an epoch about STEPS_PER_EPOCH steps."""
    power = round(math.log2(max(1.0, num_tasks / STEPS_PER_EPOCH)))
    return min(max(1 << power, LEAST_TASKS), MOST_TASKS)


def _evaluation_section(guessed: InferredRoles) -> dict[str, Any]:
    """Return the [evaluation] section for a query row a task, and ratings beyond a scale of 5."""
    keys: dict[str, Any] = {}
    if propose_episodes(guessed).query_rows == 1:
        # One row has no order.
        keys["metrics"] = ["mae", "rmse", "auc"] if guessed.is_rating else ["auc", "logloss"]
    # On a scale up to 5 the defaults hold: 4 and 5 are good.
    stars = guessed.label.least >= 0 and 4 <= guessed.label.most <= 5
    if guessed.is_rating and not stars and guessed.median_label > 0:
        keys |= {"positive_rating": guessed.median_label, "unit": f"of {guessed.label.name}"}
    return {"evaluation": keys} if keys else {}


def _statistics_sections(guessed: InferredRoles) -> dict[str, Any]:
    """Return the sections of statistics of training and support rows, which the baselines have."""
    sections: dict[str, Any] = {"support_features": {"task": True, "columns": ["*"]}}
    if guessed.item:
        sections["support_features"]["residual_of"] = guessed.item
        # Not columns of users and contexts: with few values each, their numbers of rows are large
        # inputs, by which an inner step goes too far. Of the clicks of MovieLens-100k with age,
        # occupation and hour the logloss of validation is .580, and .591 with these.
        ids = [one for one in guessed.ids if one.name in guessed.item_and_its_columns]
        columns = [*ids, *guessed.select("multi")]
        sections["item_features"] = {"columns": [column.name for column in columns]}
        if not guessed.is_rating:
            sections["item_features"]["log_odds"] = True
        (num_items,) = (one.num_distinct for one in guessed.ids if one.name == guessed.item)
        # 200 of 8,700 items took the AUC of grocery's carts from .680 to .708; 8 bytes each.
        count = {"count": 200} if num_items <= MOST_ITEMS_OF_MANY_NEIGHBOURS else {}
        sections["neighbours"] = {"column": guessed.item} | count
    if not guessed.select("time"):
        # Rows with times keep their order, as support is the past. Others are split anew each
        # epoch: of the clicks of MovieLens-100k without their time the logloss of validation is
        # .579 with it, .615 without.
        # As many support rows as a new task has: of the carts of a shop the number of views
        # says who buys, and with other numbers the logloss of validation is .299, not .270.
        sections["augment"] = {"resplit_support": True, "max_support_share": 0.0}
    return sections
