"""The package of docs/extending.md: built, installed and used from outside the repository."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.commands import SMALL_MODEL, environment, losses, write_config
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()
CHOSEN = ["model.name=fm", "model.options.scale=0.5", "algorithm.name=boil"]
# A user's program that loads the export and predicts two rows of a task.
PREDICT = """
import sys, gmeta
from metaio.recipes.synthetic import FEATURES_DENSE, FEATURES_SINGLE
rows = dict.fromkeys(FEATURES_SINGLE, [1, 2]) | dict.fromkeys(FEATURES_DENSE, [0.5, 1.0])
rows["tags"] = [[1], [2, 3]]
model = gmeta.load(sys.argv[1])
task = model.adapt({**rows, "click": [1, 0]})
print(type(model._learner.model).__module__, len(task.predict(rows)))
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every file that the page tells to write."""
    folder = tmp_path_factory.mktemp("sources")
    found = re.findall(r"`([\w/]+\.(?:py|toml))`:\n\n```\w+\n(.*?)```", PAGE, re.S)
    for path, text in found:
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    written = {path for path, _ in found}
    tests = {"tests/test_fm.py", "tests/test_boil.py"}
    assert written == {"pyproject.toml", "myrec/fm.py", "myrec/boil.py", *tests}
    return folder


@pytest.fixture(scope="module")
def site(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with the wheel of the page's package, as pip would unpack it."""
    (sources / "myrec" / "__init__.py").touch()
    wheels = tmp_path_factory.mktemp("wheels")
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(wheels)!r})"
    run(sources, sys.executable, "-c", code)
    (wheel,) = wheels.iterdir()
    site = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(site)
    return site


def run(
    cwd: Path, *command: str | Path, path: Path | None = None, code: int = 0, **variables: str
) -> str:
    """The output of a command that ends with `code`; `path` comes before the present one."""
    env = {**environment(), **variables}
    roots = [str(ROOT), str(ROOT / "models"), str(ROOT / "protos")]
    env["PYTHONPATH"] = os.pathsep.join([*([str(path)] if path else []), *roots])
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True,
        timeout=2 * PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def gmeta(cwd: Path, *arguments: str | Path, path: Path | None = None, code: int = 0) -> str:
    return run(cwd, sys.executable, "-m", "gmeta", *arguments, path=path, code=code)


def test_the_packages_own_tests_pass(sources: Path, site: Path) -> None:
    told = run(sources, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", path=site)
    assert "2 passed" in told


def test_the_new_algorithm_equals_a_loop_and_gets_the_fused_one(site: Path, tmp_path: Path) -> None:
    (tmp_path / "test_boil.py").write_text(
        "from dataclasses import replace\n"
        "from gmeta.adaptation.config import AlgorithmConfig\n"
        "from gmeta.adaptation.fused.loop import FusedLoop\n"
        "from gmeta.build import build_learner\n"
        "from gmeta_models import ModelConfig\n"
        "from tests import reference\n"
        "from tests.adaptation.agreement import assert_equals_loop\n"
        "MELU = ModelConfig(name='melu', embedding_dim=4, hidden=(5, 3))\n"
        "BODY = AlgorithmConfig(name='maml', inner_steps=3,\n"
        "    adapt_layers=('decision.0', 'decision.2'))\n"
        "BOIL = replace(BODY, name='boil', adapt_layers=('*',))\n"
        "def test_loop():\n"
        "    tasks, columns = [(3, 2), (0, 1), (2, 4)], (2, 1, 1)\n"
        "    assert_equals_loop(tasks, columns, MELU, BOIL, slow=BODY)\n"
        "    own = ModelConfig(name='fm', embedding_dim=4)\n"
        "    maml = AlgorithmConfig(name='maml')\n"
        "    assert_equals_loop(tasks, columns, own, maml, slow=maml)\n"
        "def test_fused():\n"
        "    learner = build_learner(reference.some_features(2, 1, 1), MELU, BOIL, 'bce')\n"
        "    assert isinstance(learner._fused_loop, FusedLoop)\n"
    )
    told = run(tmp_path, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", path=site)
    assert "2 passed" in told


def test_two_ranks_train_and_resume_it_and_the_export_is_loaded(
    site: Path, tmp_path: Path, click_logs: Path
) -> None:
    config = write_config(tmp_path / "train.toml", click_logs, tmp_path / "run")
    two = ["train", config, *SMALL_MODEL, *CHOSEN, "--nproc-per-node", "2"]
    gmeta(tmp_path, *two, "run.max_steps=4", path=site)
    gmeta(tmp_path, *two, "--resume", path=site)
    assert len(losses(tmp_path / "run")) == 8
    ran_on = json.loads((tmp_path / "run" / "environment.json").read_text())
    mine = {"package": "myrec", "version": "1.2.0"}
    assert ran_on["plugins"] == {"model.name": mine, "algorithm.name": mine}

    gmeta(tmp_path, "evaluate", "run", path=site)
    gmeta(tmp_path, "export", "run", "model", path=site)
    told = run(tmp_path, sys.executable, "-c", PREDICT, "model", path=site)
    assert told.split() == ["myrec.fm", "2"]
    # Elsewhere, where nobody installed it.
    told = gmeta(tmp_path, "evaluate", "run", code=1)
    assert "run was made with model.name = 'fm', which is not here: known are cbml, din" in told
    assert "It was made with myrec 1.2.0." in told
    assert "Traceback" not in told


def test_an_import_path_needs_no_entry_point_but_trust_where_it_comes_from_elsewhere(
    sources: Path, tmp_path: Path, click_logs: Path
) -> None:
    own = tmp_path / "own"  # without what a build leaves beside it
    shutil.copytree(sources / "myrec", own / "myrec")
    config = write_config(tmp_path / "train.toml", click_logs, tmp_path / "run")
    chosen = ["model.name=myrec.fm:FM", "run.max_steps=1"]
    gmeta(tmp_path, "train", config, *SMALL_MODEL, *chosen, path=own)
    ran_on = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert ran_on["plugins"] == {"model.name": {"package": "myrec", "version": "not installed"}}
    told = gmeta(tmp_path, "export", "run", "model", path=own, code=1)
    assert "set GMETA_PLUGINS=myrec if you trust it" in told
    trusted = [sys.executable, "-m", "gmeta", "export", "run", "model"]
    run(tmp_path, *trusted, path=own, GMETA_PLUGINS="other,myrec")
    told = run(tmp_path, sys.executable, "-c", PREDICT, "model", path=own, code=1)
    assert "set GMETA_PLUGINS=myrec if you trust it" in told
    run(tmp_path, sys.executable, "-c", PREDICT, "model", path=own, GMETA_PLUGINS="myrec")
