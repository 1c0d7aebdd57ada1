"""How much a command says on standard error: -q and -v, which its ranks and processes inherit."""

import os

VARIABLE = "GMETA_VERBOSITY"
QUIET, VERBOSE = "quiet", "verbose"


def is_quiet() -> bool:
    """Return whether nothing but results, warnings and errors is wanted."""
    return os.environ.get(VARIABLE) == QUIET


def is_verbose() -> bool:
    """Return whether more than usual is wanted."""
    return os.environ.get(VARIABLE) == VERBOSE
