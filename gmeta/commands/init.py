"""`gmeta init`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gmeta.commands.screen import screen
from gmeta.config import TrainConfig, config_from_dict
from gmeta.errors import UserError
from gmeta.files.whole import write_whole
from gmeta.tuning.written import config_toml
from metaio.prepare.guess import MOST_DISTINCT_SHARE, Guess, Role, first_rows, guess, schema_toml

SCHEMA_FILE, CONFIG_FILE = "schema.toml", "train.toml"


def init(
    inputs: Annotated[
        list[str],
        typer.Argument(metavar="LOG...", help="CSV, JSON lines or Parquet; the first is looked at"),
    ],
    out: Annotated[Path, typer.Option(help="folder of the two files")] = Path(),
    task: Annotated[str, typer.Option(help="column of what the model adapts to")] = "",
    label: Annotated[str, typer.Option(help="column of what it predicts")] = "",
    time: Annotated[str, typer.Option(help="column that orders a task's rows")] = "",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace files that are there")
    ] = False,
) -> None:
    """Write a first schema and config, with comments, from looking at a log's first rows.

    gmeta init 'logs/*.parquet' --label click
    """
    paths = [out / SCHEMA_FILE, out / CONFIG_FILE]
    for path in paths:
        if path.exists() and not overwrite:
            raise UserError(
                f"{path} is there: it would be lost. Give another folder (--out), or add "
                "--overwrite"
            )
    roles: tuple[tuple[Role, str], ...] = (("task", task), ("label", label), ("time", time))
    given = {role: column for role, column in roles if column}
    found = guess(first_rows(inputs), given)
    config = config_toml(_config(found, out), _header(found), every=False)
    out.mkdir(parents=True, exist_ok=True)
    for path, text in zip(paths, (schema_toml(found, inputs), config), strict=True):
        write_whole(path, text.encode())
    console = screen()
    (used_task,), (used_label,) = found.of("task"), found.of("label")
    inputs_of: tuple[Role, ...] = ("single", "multi", "dense", "vector")
    features = [column.name for role in inputs_of for column in found.of(role)]
    console.print(
        f"task {used_task.name}, label {used_label.name}, {len(features)} inputs: "
        f"{', '.join(features)}"
    )
    for column in found.of("left out"):
        console.print(f"left out: {column.name}")
    console.print(
        f"\nRead and correct {paths[0]} and {paths[1]}, then:\n"
        f"  gmeta prepare --schema {paths[0]} {' '.join(map(_shell, inputs))} {out / 'data'}\n"
        f"  gmeta config {paths[1]} --check\n"
        f"  gmeta train {paths[1]}"
    )


def _config(found: Guess, out: Path) -> TrainConfig:
    """Return a config that trains MAML on what the schema makes."""
    return config_from_dict(
        {
            "data": {"path": str(out / "data"), "valid_split": "valid"},
            **_statistics(found),
            "outer": {"loss": "mse" if found.is_rating else "bce"},
            "model": {"output_bias": found.mean_label if found.is_rating else 0.0},
            "algorithm": {"inner_lr": 0.1},
            "run": {"dir": str(out / "runs" / "maml"), "epochs": 3, "keep_best": True},
        }
    )


def _statistics(found: Guess) -> dict[str, Any]:
    """Return the sections that give the model what training and support rows say, as the baselines
    of an evaluation have it. The column with most values counts as the item, but for those of
    which nearly every row has its own."""
    most = MOST_DISTINCT_SHARE * found.num_rows
    ids = [column for column in found.of("single") if column.num_distinct <= most]
    item = max(ids, key=lambda column: column.num_distinct).name if ids else ""
    sections: dict[str, Any] = {
        "support_features": {"task": True, "columns": ["*"], "residual_of": item}
    }
    if item:
        sections["item_features"] = {"columns": [column.name for column in ids]}
    if not found.of("time"):
        # Support that is the past is drawn by nobody; else training draws its own: of the clicks of
        # MovieLens-100k without their time, validation's logloss is .579 with it, .615 without.
        sections["augment"] = {"resplit_support": True}
    return sections


def _header(found: Guess) -> str:
    (label,) = found.of("label")
    return (
        f"Made by gmeta init for the label {label.name}. Rates and sizes are only a start:\n"
        "gmeta tune chooses them on the validation split (docs/tuning.md). The keys that are not "
        "here\nhave their defaults: gmeta config lists them."
    )


def _shell(text: str) -> str:
    return f"'{text}'" if any(mark in text for mark in "*?[ ") else text
