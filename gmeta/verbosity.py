"""How a command talks: -q, -v and --json, which its ranks and processes inherit."""

import os

VARIABLE = "GMETA_VERBOSITY"
JSON_VARIABLE = "GMETA_JSON"
QUIET, VERBOSE = "quiet", "verbose"


def is_quiet() -> bool:
    """Return whether nothing but results and errors is wanted."""
    return os.environ.get(VARIABLE) == QUIET


def is_verbose() -> bool:
    """Return whether more than usual is wanted."""
    return os.environ.get(VARIABLE) == VERBOSE


def is_json() -> bool:
    """Return whether standard output is for one JSON object alone."""
    return os.environ.get(JSON_VARIABLE) == "1"
