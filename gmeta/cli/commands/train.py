"""`gmeta train`."""

import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from gmeta.cli.commands import rank_launch as on_ranks
from gmeta.cli.commands.overrides import Overrides
from gmeta.config.train_config import load_config
from gmeta.distributed.launch import restarts
from gmeta.distributed.stopping import AGENT_SERVES_VARIABLE, end_with_agent
from gmeta.errors import UserError
from gmeta.feeds import service
from gmeta.runs.run_folder import CONFIG_FILE, LOCK_FILE


def train(
    config: Annotated[Path, typer.Argument(help="TOML file; `gmeta config` lists every key")],
    overrides: Overrides = None,
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

    torchrun --nproc-per-node 2 -m gmeta train examples/demo.toml"""
    end_with_agent()  # first: the imports of a rank take seconds
    starts_ranks = on_ranks.starts_ranks(nproc_per_node)
    for option, value in (("--master-port", master_port), ("--max-restarts", max_restarts)):
        if value and not starts_ranks:
            raise UserError(
                f"{option} {value} is for ranks that this command starts, and it starts none. Add "
                f"--nproc-per-node 2 or more; under torchrun give {option} to torchrun"
            )
    resolved = load_config(config, overrides or [])
    root = Path(resolved.run.dir)
    # run.dir may not exist yet, but nothing above it may be a file.
    nearest = next(path for path in (root, *root.absolute().parents) if path.exists())
    if not nearest.is_dir():
        what = "is" if nearest == root else f"lies below {str(nearest)!r}, which is"
        raise UserError(
            f"run.dir = {str(root)!r} {what} a file: a folder is needed. Choose another run.dir"
        )
    # torchrun repeats the command as it was: a restarted rank finds what its first life wrote.
    is_new = not (resume or restarts()[0])
    # A run that was killed before it began leaves a lock alone: its folder is free.
    if is_new and root.is_dir() and any(path.name != LOCK_FILE for path in root.iterdir()):
        raise UserError(
            f"run.dir = {str(root)!r} is not empty: a new run needs a new folder. "
            "Choose another run.dir, or add --resume to go on from its newest checkpoint"
        )
    with ExitStack() as stack:
        if not (root / service.SHARDS_FOLDER).exists():
            # A run that is refused leaves no store: else the corrected command would find its
            # folder not empty.
            stack.callback(_remove_unused_store, root)
        # Late: loading torch takes seconds, and a wrong config is reported at once.
        if not starts_ranks:
            with on_ranks.faster_import():
                from gmeta.cli.commands.work.training_rank import train_on_rank
            train_on_rank(resolved, is_new)
            return
        on_ranks.begin_imports("train")
        with on_ranks.faster_import():
            from gmeta.cli.commands.work.preflight import check_for_ranks
        check_for_ranks(resolved, is_new)
        # With --resume: the folder was checked above, and the service's store is in it before a
        # rank looks.
        arguments = ["train", str(config), *(overrides or []), "--resume"]
        if service.needs_own_service(resolved.data):
            # The service runs here, not in a rank, so that it outlives restarts of all ranks.
            os.environ[service.SERVICE_VARIABLE] = stack.enter_context(
                service.start_embedded_service(resolved.run.dir)
            ).address
            os.environ[AGENT_SERVES_VARIABLE] = "1"
        on_ranks.start_ranks_here(arguments, nproc_per_node, master_port, max_restarts)


def _remove_unused_store(root: Path) -> None:
    """Remove the store of a run that was refused before it began."""
    if not (root / CONFIG_FILE).exists() and os.environ.get("RANK", "0") == "0":
        shutil.rmtree(root / service.SHARDS_FOLDER, ignore_errors=True)
