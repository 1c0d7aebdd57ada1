"""Runs functions in a process with a pretended GPU, for tests and for benchmarks/gpu.py."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.pretended.guard import VARIABLE

ROOT = Path(__file__).resolve().parents[2]


def call_pretended(
    guard: Path, module: str, function: str, *arguments: Any, **variables: str
) -> Any:
    """Return what a function returns there, of arguments and a result that JSON can hold.

    Raises:
        RuntimeError: it failed; with what it printed.
    """
    command = [sys.executable, "-m", "tests.pretended", module, function, json.dumps(arguments)]
    folders = [str(ROOT / folder) for folder in ("", "models", "protos", "benchmarks")]
    path = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path, VARIABLE: str(guard), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(f"{module}.{function} failed:\n{run.stdout}{run.stderr}")
    return json.loads(run.stdout.splitlines()[-1])
