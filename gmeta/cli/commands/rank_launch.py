"""How a subcommand gets its ranks: it is one itself, alone or under torchrun, or it starts them."""

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gmeta.distributed.launch import launch, under_torchrun
from gmeta.errors import GMetaError


def starts_ranks(nproc_per_node: int) -> bool:
    """Return whether this process starts ranks; False: it is a rank itself."""
    return nproc_per_node > 1 and not under_torchrun()


def start_ranks_here(
    arguments: Sequence[str], nproc_per_node: int, master_port: int, max_restarts: int
) -> None:
    """Start ranks that run `gmeta ARGUMENTS`, wait for them, and end with their exit code if it is
    not 0."""
    code = launch(arguments, nproc_per_node, master_port, max_restarts)
    if code:
        sys.exit(code)


@contextmanager
def faster_import() -> Iterator[None]:
    """Keep the garbage collector off what is imported inside: 600,000 objects that live as long as
    the rank. Looking through them took a quarter of the import. Raises GMetaError: the CUDA build
    of fbgemm found none of the driver's libraries, which it loads when it is imported."""
    gc.disable()
    try:
        yield
    except OSError as error:
        raise GMetaError(
            f"fbgemm-gpu cannot be loaded: {error}. On a machine without an NVIDIA driver install "
            "deploy/requirements/cpu.txt into a fresh environment; see docs/install.md"
        ) from error
    finally:
        gc.freeze()
        gc.enable()
