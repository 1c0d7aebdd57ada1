"""`gmeta install-torchrec`: what training needs beside the wheel."""

import base64
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from gmeta.cli.commands.console import make_console
from gmeta.errors import GMetaError, UserError

# By torch's release: torchrec and fbgemm-gpu-cpu. Their wheels do not say what belongs together.
TRIPLES = {"2.13": ("1.8.0", "1.8.0"), "2.12": ("1.7.0", "1.7.0"), "2.11": ("1.6.1", "1.6.0")}
STAND_IN = "+cpu.shim"


def install_torchrec(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print what pip would install, and run nothing")
    ] = False,
) -> None:
    """Install torchrec and fbgemm into this environment, in the versions that fit its torch.

    gmeta install-torchrec

    For training, on a CPU or on CUDA: which of both is torch's own build. torchrec asks for
    fbgemm-gpu, whose CUDA build overwrites the files of fbgemm-gpu-cpu and does not load without a
    driver: an empty package of that name stands in for it."""
    torch = version("torch")
    release = ".".join(torch.split(".")[:2])
    if release not in TRIPLES:
        raise UserError(
            f"torch is {torch}: torchrec is known to fit {', '.join(TRIPLES)}. Install one of "
            "them, such as pip install torch==2.13.0"
        )
    _check_environment()
    torchrec, fbgemm = TRIPLES[release]
    with tempfile.TemporaryDirectory() as folder:
        stand_in = write_stand_in(Path(folder), fbgemm)
        packages = [str(stand_in), f"fbgemm-gpu-cpu=={fbgemm}", f"torchrec=={torchrec}"]
        # With torch named, pip keeps the build that is there.
        command = [sys.executable, "-m", "pip", "install", *packages, f"torch=={torch}"]
        # The folder is gone by the time that somebody reads its name.
        text = " ".join(command).replace(f"{folder}/", "")
        console = make_console(stderr=True)
        console.print(Text(text))  # no string, which would be folded: it may be copied
        console.print(
            f"{stand_in.name} is an empty package that this command writes into a "
            "temporary folder, for pip alone"
        )
        if dry_run:
            return
        code = subprocess.run(command, check=False).returncode
    if code:
        raise GMetaError(f"pip ended with exit code {code}: its lines above say why")
    make_console().print(f"torchrec {torchrec} and fbgemm-gpu-cpu {fbgemm} are installed")


def write_stand_in(folder: Path, fbgemm: str) -> Path:
    """Write the wheel of an empty distribution fbgemm-gpu that needs fbgemm-gpu-cpu."""
    number = f"{fbgemm}{STAND_IN}"
    info = f"fbgemm_gpu-{number}.dist-info"
    files = {
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: fbgemm-gpu\nVersion: {number}\n"
            "Summary: Empty stand-in, so that torchrec takes the CPU build\n"
            f"Requires-Dist: fbgemm-gpu-cpu=={fbgemm}\n"
        ),
        f"{info}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: gmeta\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    record = "".join(f"{name},{_digest(text)},{len(text)}\n" for name, text in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    path = folder / f"fbgemm_gpu-{number}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _check_environment() -> None:
    """Raise UserError where pip is missing, or the CUDA build of fbgemm-gpu is there."""
    if find_spec("pip") is None:
        raise UserError(
            f"{sys.executable} has no pip, which this command runs. Add it: "
            f"{sys.executable} -m ensurepip"
        )
    try:
        found = version("fbgemm-gpu")
    except PackageNotFoundError:
        return
    if not found.endswith(STAND_IN):
        raise UserError(
            f"fbgemm-gpu {found}, the CUDA build, is installed, and shares its files with "
            "fbgemm-gpu-cpu. On a machine with a driver it trains as it is; else make a fresh "
            "environment"
        )
