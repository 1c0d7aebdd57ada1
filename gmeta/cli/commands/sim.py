"""`gmeta sim ...`: what a policy for stragglers gains, simulated, and its decisions replayed."""

import typer

from gmeta.cli.commands.sim_replay import replay
from gmeta.cli.commands.sim_run import simulate

sim = typer.Typer(
    help="Simulate a job with stragglers, and replay the decisions of a policy.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
)
sim.command("run")(simulate)
sim.command("replay")(replay)
