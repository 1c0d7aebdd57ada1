"""`gmeta install-torchrec` names the versions that belong together, and a stand-in pip takes."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gmeta.cli.commands import install_torchrec as command
from gmeta.cli.commands import rank_launch
from gmeta.errors import UserError
from tests.support.commands import gmeta
from tests.support.refusals import catch_message

REQUIREMENTS = Path(__file__).parents[2] / "deploy" / "requirements" / "cpu.txt"


def test_its_versions_are_those_of_the_requirements() -> None:
    pins = dict(line.split("==") for line in REQUIREMENTS.read_text().split("\n") if "==" in line)
    release = ".".join(pins["torch"].split(".")[:2])
    assert command.TRIPLES[release] == (pins["torchrec"], pins["fbgemm-gpu-cpu"])
    assert next(iter(command.TRIPLES)) == release
    done = gmeta("install-torchrec", "--dry-run")
    assert f"fbgemm-gpu-cpu=={pins['fbgemm-gpu-cpu']} torchrec=={pins['torchrec']}" in done.stderr
    # No path that is gone when the command has ended.
    stand_in = f"fbgemm_gpu-{pins['fbgemm-gpu-cpu']}{command.STAND_IN}-py3-none-any.whl"
    assert f" install {stand_in} " in done.stderr
    assert f"{stand_in} is an empty package that this command writes" in done.stderr


def test_pip_takes_the_stand_in(tmp_path: Path) -> None:
    wheel, target = command.write_stand_in(tmp_path, "1.8.0"), tmp_path / "installed"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    subprocess.run([*pip, "--target", target, wheel], check=True)
    (info,) = target.iterdir()
    assert "Requires-Dist: fbgemm-gpu-cpu==1.8.0" in (info / "METADATA").read_text()
    assert all(".dist-info/" in name for name in zipfile.ZipFile(wheel).namelist())


@pytest.mark.parametrize(("found", "is_refused"), [("1.8.0", True), ("1.8.0+cpu.shim", False)])
def test_the_cuda_build_is_not_overwritten(
    monkeypatch: pytest.MonkeyPatch, found: str, is_refused: bool
) -> None:
    monkeypatch.setattr(command, "version", lambda name: "2.13.0" if name == "torch" else found)
    if is_refused:
        message = catch_message(UserError, command.install_torchrec, True)
        assert message.startswith("fbgemm-gpu 1.8.0, the CUDA build, is installed")
    else:
        command.install_torchrec(True)


def test_an_unknown_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "version", lambda name: "2.99.1")
    message = catch_message(UserError, command.install_torchrec, True)
    assert message.startswith("torch is 2.99.1: torchrec is known to fit 2.13, ")


def test_a_missing_torchrec_names_the_command() -> None:
    with pytest.raises(UserError) as missing, rank_launch.faster_import():
        raise ModuleNotFoundError("No module named 'torchrec'", name="torchrec")
    assert str(missing.value).endswith("Run: gmeta install-torchrec")
