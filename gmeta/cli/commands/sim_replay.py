"""`gmeta sim replay`: repeats a policy's decisions from their log."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from gmeta.antdt.policies import find_policy
from gmeta.antdt.stragglers.controller import replay_line
from gmeta.antdt.stragglers.straggler_config import load_straggler_config
from gmeta.errors import UserError


def replay(
    log: Annotated[Path, typer.Argument(help="decision log of gmeta shard-service --decisions")],
    config: Annotated[
        Path | None, typer.Option(help="TOML with \\[monitor] and \\[controller]")
    ] = None,
    policy: Annotated[
        str, typer.Option(help="another policy than the config's: what would it have done?")
    ] = "",
) -> None:
    """Decide once more from the logged inputs, and say where it comes out differently.

    Exit code 1 when a decision differs."""
    controller = load_straggler_config(config).controller
    if policy:
        controller = replace(controller, policy=policy)
    function = find_policy(controller.policy)
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line]
    if not lines:
        raise UserError(f"{log} is empty: the service decided nothing yet. Nothing to replay")
    num_different = 0
    for number, line in enumerate(lines, 1):
        logged, now = replay_line(line, controller, function)
        if logged != now:
            num_different += 1
            typer.echo(
                f"line {number}\n  logged: {_format_rulings(logged)}\n"
                f"  now:    {_format_rulings(now)}"
            )
    typer.echo(f"{len(lines)} evaluations replayed, {num_different} different")
    if num_different:
        raise typer.Exit(1)


def _format_rulings(rulings: list[dict[str, object]]) -> str:
    return (
        "; ".join(
            f"{r['kind']} {r['worker_id']}".strip() + ("" if r["allowed"] else f" ({r['note']})")
            for r in rulings
        )
        or "nothing"
    )
