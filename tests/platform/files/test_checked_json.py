"""Every JSON file that people hand on is read whole, or refused in one line: 500 changes each."""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import gmeta
from gmeta.config.train_config import config_from_dict
from gmeta.errors import GMetaError, UserError
from gmeta.evaluation.report.learning_curves import make_learning_curves
from gmeta.metrics.catalogue import Scoring
from gmeta.platform.files.checked_json import json_object
from gmeta.platform.files.checksums import FileChecksum
from gmeta.runs.checkpoints.progress_file import format_progress, read_about
from gmeta.runs.checkpoints.selected_checkpoint import check_config, tied_config
from gmeta.runs.run_folder import RunFolder, create_run_folder, truncate_metrics
from gmeta.runs.run_progress import RunProgress
from metaio.format.manifest import canonical_json, xxh3_hex
from tests.support.exported import random_rows, write_random_model
from tests.support.structured import NUM_CHANGES, changed_texts

CONFIG = config_from_dict({"data": {"path": "logs"}, "run": {"dir": "runs/a"}})


@pytest.mark.parametrize(
    "text", ["[]", "1", "{", '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', "[" * 100_000]
)
def test_what_is_no_object_of_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        json_object(text)


def refusals(path: Path, texts: list[str], read: Callable[[], object]) -> int:
    """How many of the texts `read` refuses, each in one line; any other error fails the test."""
    told = []
    for text in texts:
        path.write_text(text)
        try:
            read()
        except GMetaError as error:
            told.append(str(error))
    assert [line for line in told if not line.isprintable()] == []
    return len(told)


def test_a_changed_config_of_a_run_is_read_or_refused(tmp_path: Path) -> None:
    folder = create_run_folder(config_from_dict({"run": {"dir": str(tmp_path)}}), {})
    texts = list(changed_texts(CONFIG.to_json(), seed=1))
    assert refusals(tmp_path / "config.json", texts, folder.read_config) > NUM_CHANGES // 2


def test_a_changed_environment_of_a_run_says_nothing_of_its_data(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    texts = list(changed_texts({"dataset_fingerprint": "0" * 32, "packages": {}}, seed=2))
    check = partial(folder.check_dataset, "logs", "0" * 32)
    assert refusals(tmp_path / "environment.json", texts, check) > NUM_CHANGES // 4


@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_changed_progress_file_is_read_or_refused(tmp_path: Path, is_sealed: bool) -> None:
    entries = {name: FileChecksum(7, "0" * 16) for name in (".metadata", "__0_0.distcp")}
    writer = {"world_size": 2, "config_digest": "0" * 12, "config": tied_config(CONFIG)}
    about = json.loads(format_progress(RunProgress(step=4, best_score=0.5), writer, entries))
    texts = sealed(about, seed=3) if is_sealed else list(changed_texts(about, seed=3))

    def read() -> None:
        check_config(tmp_path, CONFIG)
        assert set(RunProgress.__dataclass_fields__) <= read_about(tmp_path).keys()

    least = NUM_CHANGES // 2 if is_sealed else NUM_CHANGES - 20
    assert refusals(tmp_path / "progress.json", texts, read) > least


def test_of_a_changed_log_the_steps_that_are_left_are_kept(tmp_path: Path) -> None:
    line = {"step": 3, "epoch": 0, "loss": 0.5, "samples_per_s": 9.5, "valid": {"auc": 0.5}}
    folder = RunFolder(tmp_path)
    whole = json.dumps({**line, "step": 2})
    kept = 0
    for number, text in enumerate(changed_texts(line, seed=4)):
        folder.metrics.write_text(f"{whole}\n{text}\n")
        if number % 50 == 0:  # it waits for the disk
            truncate_metrics(folder, 3)
        first, *others = folder.read_metrics()
        assert first == json.loads(whole)
        kept += len(others)
        make_learning_curves([first, *others], Scoring("bce"))
    assert 0 < kept < NUM_CHANGES


def test_a_changed_config_of_a_model_is_read_or_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_random_model(model)
    rows = random_rows(2)
    body = json.loads((model / "config.json").read_text())

    def read() -> None:
        served = gmeta.load(model, verify=False)
        # Of another column's name it says that the rows lack it, however that is spelled.
        if served.config.algorithm.inner_steps == 2:
            with suppress(UserError):
                assert served.adapt(rows).predict(rows).shape == (2,)

    refused = refusals(model / "config.json", sealed(body, seed=5), read)
    assert refused > NUM_CHANGES // 2


def sealed(body: dict[str, Any], seed: int) -> list[str]:
    """Changed texts whose checksum fits, but for those that are no JSON."""
    del body["checksum"]
    texts = []
    for text in changed_texts(body, seed):
        try:
            changed = json.loads(text)
            changed["checksum"] = xxh3_hex(canonical_json(changed))
            texts.append(json.dumps(changed))
        except (ValueError, RecursionError):
            texts.append(text)
    return texts
