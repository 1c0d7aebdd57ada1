"""The installed wheel, in an environment of its own, beside folders of our folders' names."""

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import zipfile
from email.parser import Parser
from functools import cache
from pathlib import Path

import pytest
import yaml

import gmeta
from tests.support.commands import SMALL_MODEL, environment, metrics, write_config
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (
    "pyproject.toml", "README.md", "LICENSE",
    "gmeta", "metaio", "models", "protos",
)  # fmt: skip
OWN = ("gmeta", "gmeta_keys", "gmeta_models", "gmeta_protos", "metaio")
USERS = ("models", "protos", "tests")
# Every interpreter of the environment says, before it does anything, where it has our code from.
TELL = f"""
import importlib.util, os
found = [importlib.util.find_spec(name).origin for name in {OWN}]
with open(os.environ["TOLD"], "a") as file:
    print(*found, file=file)
"""
PREDICT = """
import gmeta
from metaio.recipes.synthetic import FEATURES_DENSE, FEATURES_SINGLE
rows = dict.fromkeys(FEATURES_SINGLE, [1, 2]) | dict.fromkeys(FEATURES_DENSE, [0.5, 1.0])
rows["tags"] = [[1], [2, 3]]
task = gmeta.load("model").adapt({**rows, "click": [1, 0]})
print(gmeta.__version__, len(task.predict(rows)))
"""


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """The output of a command that must not fail, started without the path to this repository."""
    env = {**environment(), **variables}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True,
        timeout=2 * PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, sources: Path, out: Path) -> Path:
    """What setuptools makes of `sources`."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    run(sys.executable, "-c", code, cwd=sources)
    (made,) = out.iterdir()
    return made


def copy(source: Path, target: Path) -> None:
    """As a Dockerfile's COPY, without what an image's context leaves out."""
    if source.is_dir():
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(source, target, ignore=ignored, dirs_exist_ok=True)
    else:
        shutil.copy(source, target)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        copy(ROOT / name, folder / name)
    return build("sdist", folder, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    # Python 3.11 has no filter of extractall before 3.11.4, and Debian 12 has 3.11.2.
    subprocess.run(["tar", "-xf", sdist, "-C", folder], check=True)
    (sources,) = folder.iterdir()
    return build("wheel", sources, tmp_path_factory.mktemp("wheel"))


def test_the_source_distribution_has_what_is_no_code_as_well(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= {"LICENSE", "gmeta/evaluation/report/page.html"}


def test_the_wheel_installs_every_module_under_names_of_its_own(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    roots = {ROOT: ("gmeta", "metaio"), ROOT / "models": ("gmeta_models",)}
    roots[ROOT / "protos"] = ("gmeta_protos", "gmeta_keys")
    files = {
        str(path.relative_to(root))
        for root, packages in roots.items()
        for package in packages
        for path in (root / package).rglob("*")
        if path.suffix in (".py", ".html", ".css")
    }
    metadata = f"gmeta-{gmeta.__version__}.dist-info"
    assert {name for name in names if not name.startswith(metadata)} == files
    assert {name.split("/")[0].removesuffix(".py") for name in names} == {*OWN, metadata}


def test_the_wheel_says_under_which_licence_and_with_which_torch_it_runs(wheel: Path) -> None:
    folder = f"gmeta-{gmeta.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        metadata = Parser().parsestr(archive.read(f"{folder}/METADATA").decode())
        licence = archive.read(f"{folder}/licenses/LICENSE").decode()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert licence == (ROOT / "LICENSE").read_text()
    needed = metadata.get_all("Requires-Dist") or []
    assert any(re.fullmatch("torch(?=.*>=)(?=.*<).*", line) for line in needed), needed
    # torchrec would bring fbgemm's CUDA build to every laptop: gmeta install-torchrec brings both.
    always = [line for line in needed if "extra ==" not in line]
    assert not any("torchrec" in line or "fbgemm" in line for line in always), needed


@pytest.mark.parametrize(
    ("image", "modules"),
    [
        ("service", ("gmeta.cli.commands.shard_service", "gmeta.cli.commands.shards")),
        (
            "trainer-cpu",
            ("gmeta.training", "gmeta.serving.model_loader", "metaio.prepare.engines.local"),
        ),
        (
            "trainer-cuda",
            ("gmeta.training", "gmeta.serving.model_loader", "metaio.prepare.engines.local"),
        ),
    ],
)
def test_what_an_image_copies_installs_and_imports(image: str, modules: tuple[str, ...]) -> None:
    text = (ROOT / f"deploy/docker/{image}.Dockerfile").read_text()
    build_stage = text[: text.index("pip install --no-deps .")]
    copied = re.findall(r"^COPY (?!--)(.+)", build_stage, flags=re.MULTILINE)
    install_and_import(tuple(copied), modules)


@cache  # both images that train copy and import the same
def install_and_import(copied: tuple[str, ...], modules: tuple[str, ...]) -> None:
    """Install what these lines of COPY bring, and import the modules."""
    # Others' packages, but not the path files there, which lead to this repository.
    code = (
        "import gc, sys; gc.disable(); "
        f"sys.path += [{sysconfig.get_path('purelib')!r}]; import {', '.join(modules)}"
    )
    with tempfile.TemporaryDirectory() as folder:
        sources, out, installed = (Path(folder, name) for name in ("sources", "out", "installed"))
        out.mkdir()
        for line in copied:
            *names, target = line.split()
            (sources / target).mkdir(parents=True, exist_ok=True)
            for name in names:
                copy(ROOT / name, sources / target)
        with zipfile.ZipFile(build("wheel", sources, out)) as archive:
            archive.extractall(installed)
        run(sys.executable, "-S", "-c", code, cwd=installed)


@pytest.mark.distributed
def test_a_wheel_works_beside_a_users_models_protos_and_tests(wheel: Path, tmp_path: Path) -> None:
    venv, here, told = tmp_path / "venv", tmp_path / "here", tmp_path / "told"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    python = venv / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    run(*pip, "--no-deps", "--no-index", "--disable-pip-version-check", wheel, cwd=tmp_path)
    (site,) = venv.glob("lib/python*/site-packages")
    # By a .pth file, so that those over there, of the editable install, are not read.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # Not as sitecustomize, of which Debian's Python has one that comes first.
    (site / "tell_modules.py").write_text(TELL)
    (site / "tell_modules.pth").write_text("import tell_modules\n")
    for name in USERS:
        (here / name).mkdir(parents=True)
        (here / name / "__init__.py").write_text("raise ImportError('a package of the user')\n")

    def command(*arguments: str | Path) -> str:
        return run(venv / "bin" / "gmeta", *arguments, cwd=here, TOLD=str(told))

    assert command("--version") == f"gmeta {gmeta.__version__}\n"
    command("prepare", "--recipe", "synthetic", "--tasks", "200", "--items", "50", "data")
    config = write_config(here / "train.toml", Path("data"), Path("run"))
    command("train", config, *SMALL_MODEL, "run.max_steps=2", "--nproc-per-node", "2")
    assert [line["step"] for line in metrics(here / "run") if "loss" in line] == [1, 2]
    command("export", "run", "model")
    said = run(python, "-c", PREDICT, cwd=here, TOLD=str(told))
    assert said == f"{gmeta.__version__} 2\n"

    lines = [line.split() for line in told.read_text().splitlines()]
    # Five commands, and the process that ranks are forked from.
    assert len(lines) >= 6
    seen = [origin for found in lines for origin in found if not origin.startswith(str(site))]
    assert seen == []


def test_the_citation_is_of_this_version_and_names_both_papers() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert (cited["cff-version"], cited["type"]) == ("1.2.0", "software")
    assert cited["version"] == gmeta.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert cited["license"] == project["license"]
    papers = [paper["identifiers"][0]["value"] for paper in cited["references"]]
    assert papers == ["arXiv:2401.04338", "arXiv:2404.09679"]
    assert all(one["title"] and one["authors"] and one["type"] for one in cited["references"])
