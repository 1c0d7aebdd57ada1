"""How a subcommand gets its ranks: it is one, alone or under torchrun, or it starts them."""

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gmeta.distributed.launch import launch, under_torchrun
from gmeta.errors import GMetaError, UserError
from gmeta.platform.forking import forking_context


def starts_ranks(nproc_per_node: int) -> bool:
    """Return whether this process starts ranks; else it is one."""
    return nproc_per_node > 1 and not under_torchrun()


def modules_of_ranks(command: str) -> list[str]:
    """Return what a rank of `gmeta COMMAND` imports, in the order to import it."""
    work = {"train": ["training_rank"], "evaluate": ["evaluation_rank"]}.get(command, [])
    modules = [command, *(f"work.{name}" for name in work)]
    return [
        "gmeta.cli.main",
        *(f"gmeta.cli.commands.{name}" for name in modules),
        "gmeta.pipeline.preload_last",
    ]


def begin_imports(command: str) -> list[str]:
    """Have the process that ranks are forked from import what they need, beside the checks of this
    one; return the modules."""
    modules = modules_of_ranks(command)
    forking_context(modules)
    return modules


def start_ranks_here(
    arguments: Sequence[str], nproc_per_node: int, master_port: int, max_restarts: int
) -> None:
    """Start ranks that run `gmeta ARGUMENTS`, wait for them, and exit with their code unless 0."""
    preload = modules_of_ranks(arguments[0])
    code = launch(arguments, nproc_per_node, master_port, max_restarts, preload)
    if code:
        sys.exit(code)


@contextmanager
def faster_import() -> Iterator[None]:
    """Turn the garbage collector off for the imports inside."""
    # An import makes 600,000 objects that live as long as the rank: walking over them again and
    # again took a quarter of the import.
    gc.disable()
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("torchrec", "fbgemm_gpu"):
            raise
        raise UserError(
            f"{error.name} is not installed: training, evaluating and exporting a run need it, "
            "serving does not. Run: gmeta install-torchrec"
        ) from error
    except OSError as error:
        # The CUDA build of fbgemm loads the driver's libraries as it is imported.
        raise GMetaError(
            f"fbgemm-gpu cannot be loaded: {error}. On a machine without an NVIDIA driver make a "
            "fresh environment, and run gmeta install-torchrec there"
        ) from error
    finally:
        # Later collections do not walk over the imported objects either.
        gc.freeze()
        gc.enable()
