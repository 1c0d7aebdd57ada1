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

from tests.support.commands import (
    SMALL_MODEL,
    environment,
    losses,
    metrics,
    without_pictures,
    write_config,
)
from tests.support.forked import run_forked
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()
CHOSEN = [
    *("model.name=fm", "model.options.scale=0.5", "outer.loss=focal", "algorithm.name=boil"),
    *('evaluation.metrics=["auc", "top_half"]', "data.valid_split=valid"),
    *('run.callbacks=["enough"]', 'run.loggers=["csv"]'),
]
# A user's program that loads the export and predicts two rows of a task.
PREDICT = """
import sys, gmeta
from metaio.recipes.synthetic import FEATURES_DENSE, FEATURES_SINGLE
rows = dict.fromkeys(FEATURES_SINGLE, [1, 2]) | dict.fromkeys(FEATURES_DENSE, [0.5, 1.0])
rows["tags"] = [[1], [2, 3]]
model = gmeta.load(sys.argv[1])
task = model.adapt({**rows, "click": [1, 0]})
print(type(model.learner.model).__module__, len(task.predict(rows)))
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
    names = ("fm", "losses", "boil", "coldstart", "metrics", "hooks", "data")
    modules = {f"myrec/{name}.py" for name in names}
    assert written == {"pyproject.toml", *modules, *tests}
    return folder


@pytest.fixture(scope="module")
def site(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with the wheel of the page's package, as pip would unpack it."""
    (sources / "myrec" / "__init__.py").touch()
    wheels = tmp_path_factory.mktemp("wheels")
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(wheels)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=sources, env=environment(), capture_output=True,
        text=True, timeout=2 * PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = wheels.iterdir()
    site = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(site)
    return site


def forked(program: str, *arguments: str | Path, at: Path, code: int = 0, **variables: str) -> str:
    """The output of `python -m PROGRAM` in the folder `at`, whose package it imports itself."""
    roots = [str(at), str(ROOT), str(ROOT / "models"), str(ROOT / "protos")]
    env = {**environment(), "PYTHONPATH": os.pathsep.join(roots), **variables}
    done = run_forked(program, *arguments, env=env, cwd=at, anew=("myrec",), first=without_pictures)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_packages_own_tests_pass(sources: Path, site: Path) -> None:
    options = ("-p", "no:cacheprovider", "-o", f"pythonpath={site}", "--rootdir", sources, "tests")
    told = forked("pytest", *options, at=sources)
    assert "3 passed" in told


def test_the_new_algorithm_equals_a_loop_and_gets_the_fused_one(site: Path, tmp_path: Path) -> None:
    (tmp_path / "test_boil.py").write_text(
        "from dataclasses import replace\n"
        "from gmeta.config.algorithm import AlgorithmConfig\n"
        "from gmeta.adaptation.fused.fused_loop import FusedLoop\n"
        "from gmeta.runs.build import build_learner\n"
        "from gmeta_models import ModelConfig\n"
        "from tests.support import reference\n"
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
        "    assert learner.route == 'fused'\n"
    )
    written = tmp_path / "test_boil.py"
    told = forked("pytest", "-p", "no:cacheprovider", "--rootdir", tmp_path, written, at=site)
    assert "2 passed" in told


# The page's outer loss by two learners of the same weights: MAML, and MAML whose steps go nowhere.
COLD_AND_WARM = """
import random
import torch
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.runs.build import build_learner
from gmeta_models import ModelConfig
from tests.support import reference

def test_cold_and_warm():
    rng, features = random.Random(0), reference.some_features(2, 1, 1)
    tasks = [reference.random_task(features, *rows, rng) for rows in ((3, 2), (0, 1), (2, 4))]
    batch = reference.batch_of(tasks, features)
    drawn_UD = torch.randn(len(batch.unique_ids_U), 4, dtype=torch.float64)

    def found(name, inner_lr):
        torch.manual_seed(0)
        config = AlgorithmConfig(name=name, inner_steps=2, inner_lr=inner_lr)
        model = ModelConfig(name="melu", embedding_dim=4, hidden=(5, 3))
        learner = build_learner(features, model, config, "bce").double()
        rows_UD = drawn_UD.clone().requires_grad_()
        loss = learner(rows_UD, learner.collate(batch), weight=1.0)
        return [loss, *torch.autograd.grad(loss, [rows_UD, *learner.parameters()])]

    both, cold, warm = found("cold_and_warm", 0.3), found("maml", 0.0), found("maml", 0.3)
    assert not torch.allclose(cold[0], warm[0])
    for mine, one, other in zip(both, cold, warm, strict=True):
        torch.testing.assert_close(mine, (one + other) / 2, rtol=1e-9, atol=1e-10)
"""


def test_an_outer_loss_of_ones_own_is_what_its_page_says(site: Path, tmp_path: Path) -> None:
    written = tmp_path / "test_coldstart.py"
    written.write_text(COLD_AND_WARM)
    told = forked("pytest", "-p", "no:cacheprovider", "--rootdir", tmp_path, written, at=site)
    assert "1 passed" in told


def test_two_ranks_train_and_resume_it_and_the_export_is_loaded(
    site: Path, tmp_path: Path, click_logs: Path
) -> None:
    folder, model = tmp_path / "run", tmp_path / "model"
    config = write_config(tmp_path / "train.toml", click_logs, folder)
    two = ["train", config, *SMALL_MODEL, *CHOSEN, "--nproc-per-node", "2"]
    told = forked("gmeta", *two, at=site)
    ended = len(losses(folder))
    assert 4 <= ended < 8
    assert re.search(rf"stopped by Enough: the loss is 0.\d+ behind step {ended}, and", told)
    forked("gmeta", *two, "--resume", "run.callbacks=[]", at=site)
    assert len(losses(folder)) == 8
    rows = [line.split(",") for line in (folder / "losses.csv").read_text().split()]
    assert [float(loss) for _, loss in rows] == losses(folder)
    assert not (folder / "tensorboard").exists()
    assert "top_half" in metrics(folder)[-1]["valid"]
    assert metrics(folder)[0]["head_grad_norm"] > 0
    ran_on = json.loads((folder / "environment.json").read_text())
    mine = {"package": "myrec", "version": "1.2.0"}
    named = ("model.name", "algorithm.name", "outer.loss: focal")
    named = (*named, "evaluation.metrics: top_half", "run.loggers: csv")
    assert ran_on["plugins"] == dict.fromkeys(named, mine)

    told = forked("gmeta", "evaluate", folder, "--no-trees", at=site)
    assert "top half" in told
    evaluation = json.loads((folder / "evaluation" / "evaluation.json").read_text())
    assert '"top_half"' in json.dumps(evaluation)
    forked("gmeta", "export", folder, model, at=site)
    (site / "ask_model.py").write_text(PREDICT)
    assert forked("ask_model", model, at=site).split() == ["myrec.fm", "2"]
    # Elsewhere, where nobody installed it.
    told = forked("gmeta", "evaluate", folder, at=tmp_path, code=1)
    assert f"{folder} was made with evaluation.metrics = 'top_half', which is not here" in told
    assert "It was made with myrec 1.2.0." in told
    told = forked("gmeta", "export", folder, tmp_path / "other", at=tmp_path, code=1)
    assert f"{folder} was made with model.name = 'fm', which is not here: known are cbml" in told
    assert "Traceback" not in told


def test_an_import_path_needs_no_entry_point_but_trust_where_it_comes_from_elsewhere(
    sources: Path, tmp_path: Path, click_logs: Path
) -> None:
    own = tmp_path / "own"  # without what a build leaves beside it
    shutil.copytree(sources / "myrec", own / "myrec")
    (own / "ask_model.py").write_text(PREDICT)
    folder, model = tmp_path / "run", tmp_path / "model"
    config = write_config(tmp_path / "train.toml", click_logs, folder)
    chosen = ["model.name=myrec.fm:FM", "outer.loss=myrec.losses:FOCAL", "run.max_steps=1"]
    forked("gmeta", "train", config, *SMALL_MODEL, *chosen, at=own)
    ran_on = json.loads((folder / "environment.json").read_text())
    mine = {"package": "myrec", "version": "not installed"}
    assert ran_on["plugins"] == dict.fromkeys(
        ("model.name", "outer.loss: myrec.losses:FOCAL"), mine
    )
    export = ["export", folder, model]
    told = forked("gmeta", *export, at=own, code=1)
    assert "set GMETA_PLUGINS=myrec if you trust it" in told
    forked("gmeta", *export, at=own, GMETA_PLUGINS="other,myrec")
    told = forked("ask_model", model, at=own, code=1)
    assert "set GMETA_PLUGINS=myrec if you trust it" in told
    forked("ask_model", model, at=own, GMETA_PLUGINS="myrec")


def test_raw_rows_go_through_its_transform(site: Path, tmp_path: Path) -> None:
    rows = [f"{n % 30},{n},{n % 9},{n % 2}\n" for n in range(240)]
    (tmp_path / "log.csv").write_text("user,day,item,click\n" + "".join(rows))
    (transform,) = re.findall(r"```toml\n(\[transform\].*?)```", PAGE, re.S)
    (tmp_path / "schema.toml").write_text(
        'task = { column = "user" }\nlabel = { column = "click" }\n'
        '[[single]]\ncolumn = "item"\nhash = 20\n[[single]]\ncolumn = "weekend"\nhash = 3\n'
        '[episodes]\nby = "random"\nquery_rows = 2\nmin_rows = 3\nmax_rows = 30\n'
        "[splits]\nshares = { train = 0.6, cold = 0.4 }\n" + transform
    )
    paths = [tmp_path / name for name in ("schema.toml", "log.csv", "data")]
    forked("gmeta", "prepare", "--schema", *paths, at=site)
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    told = {"function": "weekend", "package": "myrec", "version": "1.2.0"}
    assert told == manifest["report"]["transform"]
