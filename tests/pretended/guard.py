"""Builds and loads the stand-in for CUDA's device guard."""

import ctypes
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

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

    It is named by torch's version, and appears whole: several processes may build it at a time.
    """
    import torch
    from torch.utils.cpp_extension import include_paths

    library = folder / f"guard-{torch.__version__}-{sysconfig.get_python_version()}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{library.name}.{os.getpid()}"
    torch_library = Path(torch.__file__).parent / "lib"
    subprocess.run(
        [str(compiler()), "-O0", "-shared", "-fPIC", "-std=c++20", str(SOURCE),
         *(f"-I{path}" for path in include_paths()), f"-L{torch_library}", "-lc10", "-ltorch_cpu",
         f"-Wl,-rpath,{torch_library}", "-o", str(part)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    part.replace(library)
    return library


def load_guard() -> None:
    """Load the library that the environment names; before the first backward of the process, when
    torch counts its devices."""
    ctypes.CDLL(os.environ[VARIABLE])
