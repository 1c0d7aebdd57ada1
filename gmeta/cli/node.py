"""`python -m gmeta.cli.node OPTIONS -m gmeta ARGUMENTS`: torchrun after a check of the config."""

# A mistake in the config is reported once, with exit code 2: torchrun would start all ranks
# --max-restarts times before it gave up. One process for both, as both load torch.
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from gmeta.cli.commands.config import load_checked_config
from gmeta.cli.commands.rank_launch import begin_imports
from gmeta.cli.main import main
from gmeta.distributed.launch import run_agent
from gmeta.errors import UserError


def run_node(arguments: Sequence[str]) -> None:
    """Check the config of `gmeta train` against its data and model, then run the node's ranks and
    exit with their code."""
    words = [one for one in arguments if not one.startswith("-")]
    modules = begin_imports(words[0]) if words else []
    match words:
        case []:
            raise UserError("train-node needs a command: name one, such as train CONFIG")
        case ["train"]:
            raise UserError("train needs a config: name its TOML file before the options")
        case ["train", config, *overrides]:
            load_checked_config(Path(config), overrides)
    # Late, as the check has loaded most of torch by now, and a wrong command needs none of it.
    from torch.distributed.run import main as torchrun

    sys.exit(run_agent(torchrun, modules))


if __name__ == "__main__":
    # Behind `-m gmeta` stand the arguments of gmeta; those before are torchrun's.
    main(partial(run_node, sys.argv[sys.argv.index("-m") + 2 :]))
