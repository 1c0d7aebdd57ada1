"""A process with a pretended GPU, for tests and for benchmarks/gpu.py: the stand-in for CUDA's
device guard is built and loaded, and functions are called there. Imports torch only inside: the
guard comes before it."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

SOURCE = Path(__file__).with_name("guard.cpp")
# Where the library lies that a test or a benchmark has built for the process it starts.
VARIABLE = "GMETA_PRETENDED_GUARD"


def missing_for_guard() -> str:
    """Return what the guard cannot be built without; empty: nothing."""
    import torch

    if torch.version.cuda is not None:
        return "a CPU build of torch: this one has a CUDA of its own"
    if compiler() is None:
        return "a C++ compiler: c++ or g++, or one that CXX names"
    return ""


def compiler() -> str | None:
    """Return the C++ compiler, if there is one."""
    return next(
        (
            found
            for name in (os.environ.get("CXX"), "c++", "g++")
            if name and (found := shutil.which(name))
        ),
        None,
    )


def built_guard(folder: Path) -> Path:
    """Compile the guard into a folder, unless it lies there; return the library.

    It is named by torch's version, and appears whole: several processes may build it at a time."""
    import torch

    library = folder / f"guard-{torch.__version__}-{sysconfig.get_python_version()}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{library.name}.{os.getpid()}"
    # Not by torch.utils.cpp_extension, whose setuptools fails where a test has looked for pip.
    torch_library = Path(torch.__file__).parent / "lib"
    headers = [torch_library.parent / "include" / part for part in ("", "torch/csrc/api/include")]
    subprocess.run(
        [str(compiler()), "-O0", "-shared", "-fPIC", "-std=c++20", str(SOURCE),
         *(f"-I{path}" for path in headers), f"-L{torch_library}", "-lc10", "-ltorch_cpu",
         f"-Wl,-rpath,{torch_library}", "-o", str(part)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    part.replace(library)
    return library


def load_guard() -> None:
    """Load the library before the process's first backward, when torch counts its devices."""
    ctypes.CDLL(os.environ[VARIABLE])


def call_pretended(
    guard: Path, module: str, function: str, *arguments: Any, **variables: str
) -> Any:
    """Return what a function returns there, of arguments and a result that JSON can hold.

    Raises:
        RuntimeError: it failed; with what it printed."""
    command = [sys.executable, "-m", "tests.pretended", module, function, json.dumps(arguments)]
    folders = [str(ROOT / folder) for folder in ("", "models", "protos", "benchmarks")]
    path = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path, VARIABLE: str(guard), **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if run.returncode:
        raise RuntimeError(f"{module}.{function} failed:\n{run.stdout}{run.stderr}")
    return json.loads(run.stdout.splitlines()[-1])
