"""`make images-check`: images are built of the Dockerfiles and started as their own user, without a
registry: a Debian of debootstrap stands in for the pinned base.

pip takes packages in a build from where it does on this machine. TORCH_INDEX of the environment
stands in for the index of torch."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.rendering import ROOT

SUITE = "bookworm"  # that of the pinned base, with the same Python
PACKAGES = "ca-certificates,python3-venv,python-is-python3"
NEEDED = ("buildah", "debootstrap")
USER = "10001:10001"
# What a machine says where no base may be made.
NOT_PERMITTED = ("only run as root", "Permission denied", "peration not permitted")


class CommandError(Exception):
    """A command failed, as its last lines say."""


def run(*words: str | Path) -> str:
    """A command's stdout. Raises CommandError."""
    done = subprocess.run([str(one) for one in words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CommandError(f"{words}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


class Builder:
    """Builds images in a storage of its own, and runs their commands."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own = ["--root", str(folder / "images"), "--runroot", str(folder / "run")]

    def buildah(self, command: str, *words: str | Path) -> str:
        """The stdout of a command of buildah."""
        return run("buildah", *self._own, command, *words).strip()

    def make_base(self) -> None:
        """Make the image `python-base`."""
        system = self._folder / "system"
        run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, system)
        container = self.buildah("from", "scratch")
        self.buildah("copy", "--quiet", container, system, "/")
        self.buildah("commit", "--quiet", "--rm", container, "python-base")
        shutil.rmtree(system)

    def build(self, name: str, *words: str) -> None:
        """Build deploy/docker/NAME.Dockerfile as the image NAME."""
        file = ROOT / f"deploy/docker/{name}.Dockerfile"
        arguments = ["--build-arg", "BASE_IMAGE=localhost/python-base", *words]
        mounts = [f"--volume={each}:{each}:ro" for each in self._pip_files()]
        mounts.append(f"--volume={self._folder / 'pip.conf'}:/etc/pip.conf:ro")
        self.buildah(
            "build", "--isolation", "chroot", "--format", "docker", "--tag", name,
            "--file", file, *mounts, *arguments, ROOT,
        )  # fmt: skip

    def _pip_files(self) -> list[Path]:
        """Write pip.conf, all that pip is told on this machine, and return what it refers to."""
        told = ConfigParser(interpolation=None)
        told["global"] = {}
        for line in run(sys.executable, "-m", "pip", "config", "list").splitlines():
            key, _, value = line.partition("=")
            told["global"][key.rpartition(".")[2]] = value.strip("'\"").replace("\\n", " ")
        with (self._folder / "pip.conf").open("w") as file:
            told.write(file)
        words = " ".join(told["global"].values()).split()
        # The pages of an index refer to files beside their folder.
        paths = [
            Path(word.removeprefix("file://")).parent if word.startswith("file://") else Path(word)
            for word in words
        ]
        return [path for path in paths if path.is_absolute() and path.exists()]

    def start(self, name: str, *calls: Sequence[str]) -> list[str]:
        """Run the entry point of an image with each list of arguments, one after the other in one
        container, as the image's user; return what they print."""
        container = self.buildah("from", f"localhost/{name}")
        config: dict[str, Any] = json.loads(self.buildah("inspect", container))["OCIv1"]["config"]
        assert config["User"] == USER
        entry = config["Entrypoint"]
        try:
            return [
                self.buildah("run", "--isolation", "chroot", container, "--", *entry, *words)
                for words in calls
            ]
        finally:
            self.buildah("rm", container)


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    """One that has its base."""
    if missing := [one for one in NEEDED if not shutil.which(one)]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    folder = tmp_path_factory.mktemp("images")
    made = Builder(folder)
    try:
        made.make_base()
    except CommandError as error:
        if any(one in str(error) for one in NOT_PERMITTED):
            pytest.skip(f"no image can be built here: {str(error).splitlines()[-1]}")
        raise
    yield made
    shutil.rmtree(folder)


@pytest.mark.timeout(3600)
def test_the_image_of_the_shard_service_starts(builder: Builder) -> None:
    builder.build("service")
    version, service = builder.start("service", ["--version"], ["shard-service", "--help"])
    assert version.startswith("gmeta ")
    assert "--tls-client-ca" in service


@pytest.mark.timeout(3600)
def test_the_image_of_trainers_prepares_trains_and_exports(builder: Builder) -> None:
    index = os.environ.get("TORCH_INDEX")
    builder.build("trainer-cpu", *(["--build-arg", f"TORCH_INDEX={index}"] if index else []))
    config = ["/opt/gmeta/examples/demo.toml", "data.path=/data/demo", "run.dir=/runs/demo"]
    version, *_, exported = builder.start(
        "trainer-cpu",
        ["--version"],
        ["prepare", "--recipe", "synthetic", "--tasks", "200", "/data/demo"],
        ["train", *config, "run.max_steps=2"],
        ["export", "/runs/demo", "/runs/model", "--json"],
    )
    assert version.startswith("gmeta ")
    assert json.loads(exported)
