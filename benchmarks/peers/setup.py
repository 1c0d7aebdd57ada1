"""Makes .venv-peers, the peers' environment: their requirements and learn2learn's MAML."""

import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements-peers.txt"
DATA_REQUIREMENTS = REQUIREMENTS.with_name("requirements-peers-data.txt")
# Mosaic's own __init__ imports its image and text datasets, hence torchvision.
STREAMING_INIT = "from streaming.base import MDSWriter, StreamingDataset\n"
LEARN2LEARN = "0.2.0"
# learn2learn's own __init__ files import compiled loaders, gym and torchvision: empty ones do not.
LEARN2LEARN_FILES = (
    "_version.py",
    "algorithms/maml.py",
    "algorithms/base_learner.py",
    "utils/__init__.py",
)
LEARN2LEARN_EMPTY = ("__init__.py", "algorithms/__init__.py")


def set_up(folder: Path) -> None:
    """Create the environment in `folder`, or bring it up to date. Needs a package index.

    Raises:
        subprocess.CalledProcessError: pip failed; its own output says why."""
    if not python_of(folder).exists():
        venv.create(folder, with_pip=True)
    (folder / ".gitignore").write_text("*\n")
    pip = [str(python_of(folder)), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", "-r", str(REQUIREMENTS)], check=True)
    with tempfile.TemporaryDirectory() as downloads:
        source = [
            "--no-deps",
            "--no-binary",
            "learn2learn",
            "--dest",
            downloads,
            f"learn2learn=={LEARN2LEARN}",
        ]
        subprocess.run([*pip, "download", *source], check=True)
        unpack_learn2learn(
            Path(downloads) / f"learn2learn-{LEARN2LEARN}.tar.gz", _site_packages(folder)
        )


def set_up_data(folder: Path) -> None:
    """Install what metaio_reader.py compares with into `folder`, which goes on its path.

    Raises:
        subprocess.CalledProcessError: pip failed; its own output says why."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    # No dependencies: torch, numpy and pyarrow are the project's own, so that only readers differ.
    options = ["--no-deps", "--upgrade", "--target", str(folder), "-r", str(DATA_REQUIREMENTS)]
    subprocess.run([*pip, *options], check=True)
    (folder / "streaming" / "__init__.py").write_text(STREAMING_INIT)


def python_of(folder: Path) -> Path:
    """The interpreter of the environment, whether it exists or not."""
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def unpack_learn2learn(archive: Path, site_packages: Path) -> None:
    """Copy the files of MAML out of the source archive, without the package's imports."""
    with tarfile.open(archive) as source:
        for name in LEARN2LEARN_FILES:
            member = source.extractfile(f"learn2learn-{LEARN2LEARN}/learn2learn/{name}")
            if member is None:
                raise FileNotFoundError(
                    f"learn2learn {LEARN2LEARN} has no file {name}; report this with its archive"
                )
            target = site_packages / "learn2learn" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(member.read())
    for name in LEARN2LEARN_EMPTY:
        (site_packages / "learn2learn" / name).touch()


def _site_packages(folder: Path) -> Path:
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    answer = subprocess.run(
        [str(python_of(folder)), "-c", query], capture_output=True, text=True, check=True
    )
    return Path(answer.stdout.strip())
