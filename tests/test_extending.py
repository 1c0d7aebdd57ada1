"""The walk-through of docs/extending.md, followed to the letter on a copy of the repository."""

import re
import shutil
from collections import Counter
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from gmeta.adaptation.algorithms.registry import ALGORITHMS
from gmeta_models import MODELS
from tests.commands import SMALL_MODEL, environment, metrics, write_config
from tests.forked import run_forked

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("gmeta", "metaio", "models", "protos", "tests")
PACKAGES = ("gmeta", "metaio", "gmeta_models", "gmeta_protos", "tests")


@pytest.fixture
def extended(tmp_path: Path) -> Path:
    """A copy of the repository with every file and line that the page tells to write."""
    copy = tmp_path / "copy"
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", copy)
    page = (ROOT / "docs" / "extending.md").read_text()
    for text, block in re.findall(
        r"([^`\n]*(?:`[^`]+`[^`\n]*)+\n\n)```python\n(.*?)```", page, re.S
    ):
        path = copy / re.findall(r"`([\w/]+\.py)`", text)[-1]
        if "Register" in text:
            (registry,) = re.findall(r"the dict `(\w+)`", text)
            register(path, registry, block)
        else:
            assert not path.exists()
            path.write_text(block)
    return copy


def register(path: Path, registry: str, block: str) -> None:
    """Add the block's import to the imports of a file and its entry to the dict."""
    imported, entry = block.split("\n\n")
    text = path.read_text()
    start = re.search(rf"^{registry}: .* = {{\n", text, re.M)
    assert start is not None
    text = text[: start.end()] + entry.rstrip("\n") + "\n" + text[start.end() :]
    first_import = re.search(r"^from (?:gmeta_models|gmeta)\.", text, re.M)
    assert first_import is not None
    path.write_text(text[: first_import.start()] + imported + "\n" + text[first_import.start() :])


def run(extended: Path, program: str, *arguments: str | Path) -> CompletedProcess[str]:
    return run_forked(program, *arguments, env=environment(), cwd=extended, anew=PACKAGES)


def test_the_new_model_and_algorithm_pass_their_tests_and_those_of_all(extended: Path) -> None:
    found = re.findall(r"`(tests/[\w/]+\.py)`", (ROOT / "docs" / "extending.md").read_text())
    written = [path for path in found if not (ROOT / path).exists()]
    assert written == ["tests/models/test_fm.py", "tests/adaptation/test_boil.py"]
    shared = ["tests/models/test_models.py", "tests/adaptation/test_every_pair_learns.py"]
    names = "fm or boil"
    result = run(extended, "pytest", "-rp", *written, *shared, "-k", names, "-o", "addopts=")
    assert result.returncode == 0, result.stdout
    passed = Counter(re.findall(r"^PASSED ([\w/]+\.py)::", result.stdout, re.M))
    assert set(passed) == {*written, *shared}
    assert passed[shared[1]] == len(MODELS) + 1 + len(ALGORITHMS)  # each pair with one of the two


def test_the_new_algorithm_gets_the_fused_loop_without_knowing_of_it(extended: Path) -> None:
    (extended / "tests/test_fused.py").write_text(
        "from gmeta.adaptation.config import AlgorithmConfig\n"
        "from gmeta.adaptation.fused.loop import FusedLoop\n"
        "from gmeta.build import build_learner\n"
        "from gmeta_models import ModelConfig\n"
        "from tests import reference\n"
        "def test_fused():\n"
        "    features, model = reference.some_features(2, 1, 1), ModelConfig(name='melu')\n"
        "    learner = build_learner(features, model, AlgorithmConfig(name='boil'), 'bce')\n"
        "    assert isinstance(learner._fused_loop, FusedLoop)\n"
    )
    result = run(extended, "pytest", "tests/test_fused.py", "-o", "addopts=")
    assert result.returncode == 0, result.stdout


def test_the_new_model_trains_by_the_new_algorithm(extended: Path, click_logs: Path) -> None:
    config = write_config(extended / "train.toml", click_logs, extended / "run")
    chosen = ["model.name=fm", "algorithm.name=boil"]
    result = run(extended, "gmeta", "train", config, *SMALL_MODEL, *chosen)
    assert result.returncode == 0, result.stderr
    assert [line["step"] for line in metrics(extended / "run")] == list(range(1, 9))
