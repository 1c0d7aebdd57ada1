"""`gmeta train`."""

import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from gmeta.commands import on_ranks
from gmeta.config import TrainConfig, load_config
from gmeta.errors import UserError
from gmeta.feeds.service import SERVICE_VARIABLE, SHARDS_FOLDER, needs_own_service, own_service
from gmeta.parallel.stopping import AGENT_SERVES_VARIABLE
from gmeta.runs.folder import CONFIG_FILE, LOCK_FILE


def train(
    config: Annotated[Path, typer.Argument(help="TOML file; `gmeta config` lists every key")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="replace values of the config"),
    ] = None,
    nproc_per_node: Annotated[int, typer.Option(min=1, help="ranks to start on this machine")] = 1,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on from the run folder's newest checkpoint")
    ] = False,
    master_port: Annotated[
        int, typer.Option(min=0, max=65535, help="rendezvous port; 0: any free one")
    ] = 0,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="restart all ranks so often when one dies")
    ] = 0,
) -> None:
    """Train a model; on several ranks with --nproc-per-node, or under torchrun.

    gmeta train examples/demo.toml --nproc-per-node 2

    gmeta train examples/demo.toml algorithm.name=none run.dir=runs/plain

    torchrun --nproc-per-node 2 -m gmeta train examples/demo.toml
    """
    resolved = load_config(config, overrides or [])
    _check_run_folder(resolved, resume)
    with ExitStack() as stack:
        if not (Path(resolved.run.dir) / SHARDS_FOLDER).exists():
            stack.callback(_drop_unused_store, Path(resolved.run.dir))
        # Loading torch takes seconds: not before the config is known to be right.
        if not on_ranks.starts_ranks(nproc_per_node):
            with on_ranks.importing():
                from gmeta.commands.work.train import train_on_rank
            train_on_rank(resolved)
            return
        from gmeta.build import check_on_data
        from gmeta.checkpoints.settled import settled

        check_on_data(settled(resolved))
        # The run folder was checked above; by the time a rank looks, the service's store is in it.
        arguments = ["train", str(config), *(overrides or []), "--resume"]
        if needs_own_service(resolved):
            # Here, not in a rank: it lives through the restarts of all ranks.
            os.environ[SERVICE_VARIABLE] = stack.enter_context(own_service(resolved)).address
            os.environ[AGENT_SERVES_VARIABLE] = "1"
        on_ranks.start(arguments, nproc_per_node, master_port, max_restarts)


def _drop_unused_store(root: Path) -> None:
    """Remove the store of a run that was refused before it began: the corrected command would find
    a folder that is not empty."""
    if not (root / CONFIG_FILE).exists() and os.environ.get("RANK", "0") == "0":
        shutil.rmtree(root / SHARDS_FOLDER, ignore_errors=True)


def _check_run_folder(config: TrainConfig, resume: bool) -> None:
    # torchrun repeats the command as it was: a restarted rank finds what its first life wrote.
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    root = Path(config.run.dir)
    if root.exists() and not root.is_dir():
        raise UserError(
            f"run.dir = {str(root)!r} is a file: a folder is needed. Choose another run.dir"
        )
    # A lock without a run is what a run left that was killed before it began.
    holds_run = root.is_dir() and any(path.name != LOCK_FILE for path in root.iterdir())
    if holds_run and not (resume or restarted):
        raise UserError(
            f"run.dir = {str(root)!r} is not empty: a new run needs a new folder. "
            "Choose another run.dir, or add --resume to go on from its newest checkpoint"
        )
    if config.run.mirror and not (resume or restarted):
        from gmeta.checkpoints.mirror import check_new_mirror

        check_new_mirror(config.run.mirror, root)
