"""Mistakes on the command line: one clear line, the right exit code, nothing half-written."""

import shutil
import socket
from pathlib import Path

import pytest

from tests.commands import SMALL_MODEL, gmeta, write_config


@pytest.fixture
def config(tmp_path: Path, click_logs: Path) -> Path:
    return write_config(tmp_path / "train.toml", click_logs, tmp_path / "run")


def refused(code: int, *arguments: str | Path) -> str:
    """The one line that the command ends with."""
    result = gmeta(*arguments)
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


def test_an_unknown_key_is_named_with_the_nearest(config: Path) -> None:
    message = refused(2, "train", config, "outer.dense_lrr=1")
    assert message == "error: outer.dense_lrr is unknown; did you mean outer.dense_lr?"


def test_a_split_that_is_not_there_is_named_with_those_that_are(
    config: Path, click_logs: Path
) -> None:
    message = refused(2, "train", config, "data.train_split=tran")
    assert message == (
        f"error: data.train_split = 'tran' is not in {click_logs}: it has train, valid, user-cold, "
        "item-cold, user-item-cold. Name one of them"
    )
    assert not (config.parent / "run").exists()


def test_a_run_folder_in_use_is_not_overwritten(config: Path) -> None:
    run = config.parent / "run"
    run.mkdir()
    (run / "precious.txt").write_text("mine")
    message = refused(2, "train", config)
    assert message == (
        f"error: run.dir = '{run}' is not empty: a new run needs a new folder. Choose another "
        "run.dir, or add --resume to go on from its newest checkpoint"
    )
    assert [path.name for path in run.iterdir()] == ["precious.txt"]


def test_a_port_in_use_is_named(config: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refused(2, "train", config, "--nproc-per-node=2", f"--master-port={port}")
    assert message == (
        f"error: --master-port {port} cannot be used: Address already in use. "
        "Choose another, or 0 for any"
    )


def test_a_truncated_shard_is_named_and_the_job_fails(config: Path, click_logs: Path) -> None:
    damaged = config.parent / "damaged"
    shutil.copytree(click_logs, damaged)
    largest = max(damaged.rglob("*.parquet"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-100])
    result = gmeta("train", config, f"data.path={damaged}")
    assert result.returncode == 1
    # What it tells of the tables comes first: data is read only when training begins.
    message = result.stderr.strip().splitlines()[-1]
    assert message.startswith("error: ")
    assert largest.name in message
    assert "Traceback" not in result.stderr


def test_a_dataset_that_is_not_there_is_named(config: Path) -> None:
    message = refused(2, "train", config, "data.path=/nowhere")
    assert message == (
        "error: /nowhere holds no dataset: manifest.json is missing. "
        "Give a folder that gmeta prepare made"
    )


def test_a_tables_optimizer_that_needs_cuda_is_refused_on_a_cpu(config: Path) -> None:
    message = refused(2, "train", config, "run.device=cpu", "outer.sparse_optimizer=adam")
    assert message == (
        "error: outer.sparse_optimizer = 'adam' needs CUDA: fbgemm has no such fused update on a "
        "CPU. Choose one of sgd, adagrad, rowwise_adagrad"
    )
    assert not (config.parent / "run").exists()


def test_a_rate_that_diverges_says_what_to_lower(config: Path) -> None:
    result = gmeta("train", config, *SMALL_MODEL, "outer.dense_lr=1e30", "outer.sparse_lr=1e30")
    assert result.returncode == 1
    assert (
        result.stderr.strip()
        .splitlines()[-1]
        .endswith("training diverged. Lower outer.dense_lr, outer.sparse_lr or algorithm.inner_lr")
    )


def test_evaluating_what_is_no_run_is_refused(tmp_path: Path) -> None:
    message = refused(2, "evaluate", tmp_path)
    assert message == (
        f"error: {tmp_path} is no run folder: config.json is missing or broken. "
        "Give the run.dir of a training run"
    )


def test_an_unknown_split_to_evaluate_is_named_with_those_that_are(config: Path) -> None:
    assert gmeta("train", config, *SMALL_MODEL, "run.max_steps=1").returncode == 0
    message = refused(2, "evaluate", config.parent / "run", "--split", "cold")
    assert message.startswith("error: split 'cold' is not in ")
    environment = config.parent / "run" / "environment.json"
    environment.write_text(
        environment.read_text().replace('"dataset_fingerprint": "', '"dataset_fingerprint": "0')
    )
    message = refused(1, "evaluate", config.parent / "run")
    assert message.endswith(
        "its ids may mean other values. Bring back that dataset, or train on this one"
    )
    assert not (config.parent / "run" / "evaluation").exists()
