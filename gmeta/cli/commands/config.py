"""`gmeta config`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from gmeta.cli.commands import rank_launch as on_ranks
from gmeta.cli.commands.console import make_console, show_table
from gmeta.cli.commands.overrides import Overrides
from gmeta.config.train_config import TrainConfig, describe_config, load_config
from gmeta.errors import UserError
from gmeta.tuning.config_toml import format_config


def config(
    path: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="TOML file; without: list every key")
    ] = None,
    overrides: Overrides = None,
    short: Annotated[
        bool, typer.Option("--short", help="leave out what has its default value")
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="hold it against its data, model and algorithm; print a line"),
    ] = False,
) -> None:
    """Show a config with every key resolved, as TOML to copy; without one, list every key.

    gmeta config

    gmeta config examples/demo.toml outer.dense_lr=0.01 > mine.toml

    gmeta config mine.toml --check"""
    if path is None:
        if check or short:
            raise UserError("there is no config to look at. Name a TOML file before the options")
        table = Table("key", "default", "meaning")
        for key, default, meaning in describe_config():
            table.add_row(key, default, meaning)
        return show_table(make_console(), table)
    if check:
        resolved = load_checked_config(path, overrides or [])
        make_console().print(
            f"{path} is right: {resolved.algorithm.name} with {resolved.model.name} on "
            f"{resolved.data.path}, into {resolved.run.dir}"
        )
        return None
    resolved = load_config(path, overrides or [])
    command = " ".join(["gmeta config", str(path), *(overrides or [])])
    typer.echo(format_config(resolved, command, every=not short), nl=False)
    return None


def load_checked_config(path: Path, overrides: Sequence[str]) -> TrainConfig:
    """Return a config, checked against its data, model and algorithm."""
    resolved = load_config(path, overrides)
    # Late: loading torch takes seconds, and a wrong key is reported at once.
    with on_ranks.faster_import():
        from gmeta.cli.commands.work.preflight import check_for_ranks
    check_for_ranks(resolved, is_new=False)
    return resolved
