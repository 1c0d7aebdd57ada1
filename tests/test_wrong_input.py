"""Mistakes on the command line: one clear line, the right exit code, nothing half-written."""

import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import ClientError

from gmeta.cli.commands import sim_run
from gmeta.cli.commands.error_messages import format_error, write_error
from gmeta.cli.commands.evaluate import evaluate
from gmeta.cli.commands.export import export, predict
from gmeta.config.train_config import config_from_dict, load_config
from gmeta.errors import UserError
from gmeta.evaluation.evaluate import choose_splits
from gmeta.runs.build import check_on_data
from gmeta.runs.environment import describe_environment
from gmeta.runs.run_folder import create_run_folder
from gmeta.runs.run_lock import lock_run_folder
from gmeta_models.melu import MeLU
from metaio import Provenance, open_dataset, write_dataset
from tests.metaio.conftest import FEATURES, make_rows
from tests.support.commands import SMALL_MODEL, fresh_gmeta, gmeta, write_config
from tests.support.refusals import catch_message

# `gmeta` or `fresh_gmeta`: what the libraries say when they are imported is no line of ours.
Command = Callable[..., CompletedProcess[str]]


@pytest.fixture
def config(tmp_path: Path, click_logs: Path) -> Path:
    return write_config(tmp_path / "train.toml", click_logs, tmp_path / "run")


def refused(code: int, *arguments: str | Path, start: Command = gmeta) -> str:
    """The one line that the command ends with."""
    result = start(*arguments)
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


def test_a_split_not_there_is_named_with_those_that_are(config: Path, click_logs: Path) -> None:
    message = refused(2, "train", config, "data.train_split=tran")
    assert message == (
        f"error: data.train_split = 'tran' is not in {click_logs}: it has train, valid, user-cold, "
        "item-cold, user-item-cold. Name one of them"
    )
    with pytest.raises(UserError, match=r"Name one of them, or leave it out$"):  # as a stream must
        check_on_data(load_config(config, ["data.valid_split=vali"]))
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


def test_a_run_that_another_process_trains_is_left_alone(config: Path) -> None:
    run = config.parent / "run"
    with lock_run_folder(run):
        written = run / "checkpoints" / "tmp-step-00000004"
        written.mkdir(parents=True)
        message = refused(2, "train", config, "--resume")
        assert message == (
            f"error: process {os.getpid()} on {socket.gethostname()} is writing run folder {run}. "
            "Wait for it, or choose another place"
        )
        assert {path.name for path in run.iterdir()} == {".lock", "checkpoints"}
        assert written.exists()
    assert {path.name for path in run.iterdir()} == {"checkpoints"}


class Doubled(torch.autograd.Function):
    """Twice the outputs; nobody has written its second derivative."""

    @staticmethod
    def forward(ctx: Any, output_N: torch.Tensor) -> torch.Tensor:
        return 2.0 * output_N

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient_N: torch.Tensor) -> torch.Tensor:
        return 2.0 * gradient_N


class OnceDifferentiable(MeLU):
    def forward(self, inputs: Any) -> torch.Tensor:
        output: torch.Tensor = Doubled.apply(super().forward(inputs))
        return output


def test_what_an_own_model_raises_in_a_step_is_told_in_a_line(config: Path) -> None:
    name = f"{__name__}:OnceDifferentiable"
    result = gmeta("train", config, *SMALL_MODEL, f"model.name={name}", "algorithm.name=maml")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1] == (
        f"error: a step fails in {name}: RuntimeError: trying to differentiate twice a function "
        "that was marked with @once_differentiable. Mend it, --verbose shows the line; what has "
        'no second derivative learns with algorithm.name = "fomaml"'
    )


def test_a_port_in_use_is_named(config: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refused(
            2, "train", config, "--nproc-per-node=2", f"--master-port={port}", start=fresh_gmeta
        )
    assert message == (
        f"error: --master-port {port} cannot be used: Address already in use. "
        "Choose another, or 0 for any"
    )


@pytest.mark.parametrize("option", ["--master-port", "--max-restarts"])
@pytest.mark.parametrize("has_ranks", [False, True])
def test_what_only_ranks_that_train_starts_take_is_refused_where_it_starts_none(
    config: Path, monkeypatch: pytest.MonkeyPatch, option: str, has_ranks: bool
) -> None:
    words = ["train", config, option, "2000"]
    if has_ranks:  # as under torchrun
        words += ["--nproc-per-node", "2"]
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
    assert refused(2, *words) == (
        f"error{' on rank 0' * has_ranks}: {option} 2000 is for ranks that this command starts, "
        f"and it starts none. Add --nproc-per-node 2 or more; under torchrun give {option} to "
        "torchrun"
    )
    assert not (config.parent / "run").exists()


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


def test_a_rate_that_diverges_says_what_to_lower(config: Path) -> None:
    result = gmeta("train", config, *SMALL_MODEL, "outer.dense_lr=1e30", "outer.sparse_lr=1e30")
    assert result.returncode == 1
    assert (
        result.stderr.strip()
        .splitlines()[-1]
        .endswith(
            "training diverged. Lower outer.dense_lr, outer.sparse_lr or algorithm.inner_lr, "
            "or divide a label whose scale is far from 1"
        )
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


def test_a_file_where_a_folder_belongs_is_named(config: Path, tmp_path: Path) -> None:
    file = tmp_path / "taken"
    file.write_text("mine")
    expected = f"error: run.dir = '{file}' is a file: a folder is needed. Choose another run.dir"
    assert refused(2, "train", config, f"run.dir={file}") == expected
    assert refused(2, "train", config, f"run.dir={file}/a/b") == (
        f"error: run.dir = '{file}/a/b' lies below '{file}', which is a file: a folder is needed. "
        "Choose another run.dir"
    )
    described = {"run": {"dir": str(tmp_path / "a")}}
    create_run_folder(config_from_dict(described), describe_environment(1, "0" * 32))
    with pytest.raises(UserError) as caught:
        evaluate(tmp_path / "a", out=file)
    assert str(caught.value) == (f"--out = '{file}' is a file: a folder is needed. Choose another")
    assert file.read_text() == "mine"


def test_a_place_that_cannot_be_written_is_told_before_anything_is_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = {"run": {"dir": str(tmp_path / "a")}}
    create_run_folder(config_from_dict(described), describe_environment(1, "0" * 32))
    # Of a read-only mount; root may write where permissions forbid it.
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "a")
    expected = f"{tmp_path / 'a'} cannot be written: name another folder for the report by --out"
    assert catch_message(UserError, evaluate, tmp_path / "a") == expected


def test_a_run_without_a_checkpoint_has_nothing_to_evaluate(tmp_path: Path) -> None:
    described = {"run": {"dir": str(tmp_path / "a")}}
    create_run_folder(config_from_dict(described), describe_environment(1, "0" * 32))
    assert refused(2, "evaluate", tmp_path / "a") == (
        f"error: run {tmp_path}/a has 0 checkpoints: there is nothing to evaluate yet. "
        "Let it reach its first one"
    )


def test_a_split_that_holds_nothing_to_score_is_named(tmp_path: Path) -> None:
    """Without episodes before minutes of predicting; without query rows once that is seen."""
    rows = make_rows(12)
    rows = replace(rows, label_N=(rows.label_N > 0.5).astype(np.float32))
    data = str(tmp_path / "data")
    with write_dataset(data, FEATURES, Provenance("user", "click")) as writer:
        writer.split("train").write(rows)
        writer.split("none").write(make_rows(0))
        writer.split("support").write(replace(rows, support_lengths_T=rows.row_lengths_T))
    config = write_config(tmp_path / "train.toml", Path(data), tmp_path / "run")
    for asked in ([], ["support", "none"]):
        with pytest.raises(UserError) as caught:
            choose_splits(load_config(config, []).data, open_dataset(data), asked)
        assert str(caught.value) == (
            f"split 'none' of {data} has 0 episodes: there is nothing to score. "
            "Name other splits with --split"
        )
    assert gmeta("train", config, *SMALL_MODEL, "run.max_steps=1").returncode == 0
    assert refused(2, "evaluate", tmp_path / "run", "--split", "support") == (
        f"error: split 'support' of {data} has 0 query rows: there is nothing to score. "
        "Name other splits with --split"
    )


URL = "s3://bucket/x"
IS_URL = (
    "is a URL: a path of this machine is needed, where nothing is left half-written. Write to a "
    "path, then copy"
)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (partial(export, Path("run"), Path(URL)), f"OUT = 's3://bucket/x' {IS_URL}"),
        (partial(evaluate, Path("run"), out=Path(URL)), f"--out = 's3://bucket/x' {IS_URL}"),
        (
            partial(predict, Path("model"), "s.parquet", "q.parquet", Path(URL)),
            f"--out = 's3://bucket/x' {IS_URL}",
        ),
        (partial(sim_run.run, out=Path(URL)), f"--out = 's3://bucket/x' {IS_URL}"),
        (
            partial(predict, Path("model"), "s.parquet", "q.parquet", Path("/")),
            "--out = '/' is a folder: a file is needed. Name one in it",
        ),
    ],
)
def test_a_place_that_cannot_be_written_is_refused(work: Callable[[], None], message: str) -> None:
    assert catch_message(UserError, work) == message


def test_a_run_lives_on_this_machine(config: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_config(config, [f"run.dir={URL}"])
    assert str(caught.value) == f"run.dir = 's3://bucket/x' {IS_URL}"


def test_what_cannot_be_compared_is_told_before_anything_is_evaluated(tmp_path: Path) -> None:
    for name, loss in (("a", "bce"), ("b", "mse")):
        described = {"outer": {"loss": loss}, "run": {"dir": str(tmp_path / name)}}
        create_run_folder(config_from_dict(described), describe_environment(1, "0" * 32))
    assert catch_message(UserError, evaluate, tmp_path / "a", [tmp_path / "b"]) == (
        f"run {tmp_path}/b was trained with loss mse, {tmp_path}/a with bce: their predictions "
        "mean different things. Compare runs of one loss"
    )
    expected = f"{tmp_path}/a is named twice: a run says nothing beside itself. Leave one out"
    assert catch_message(UserError, evaluate, tmp_path / "a", [tmp_path / "a"]) == expected
    with pytest.raises(UserError) as caught:
        evaluate(tmp_path / "a", [tmp_path / "nowhere"])
    assert str(caught.value).startswith(f"{tmp_path}/nowhere is no run folder: ")


def test_a_path_that_is_not_there_is_the_users_to_mend() -> None:
    assert refused(2, "sim", "replay", "nowhere") == "error: No such file or directory: nowhere"


class Failing(BaseHTTPRequestHandler):
    """A store that is up and gives nothing."""

    def do_GET(self) -> None:
        self.send_error(503)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


def test_what_a_remote_store_says_is_one_line() -> None:
    with HTTPServer(("127.0.0.1", 0), Failing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/clicks"
        message = refused(1, "inspect", url)
        server.shutdown()
    assert message.startswith(f"error: {url}/manifest.json cannot be read: 503, ")
    assert message.endswith("Check its permissions and the network, then try again")


def test_what_nothing_of_ours_caught_of_a_store_is_one_line() -> None:
    assert format_error(ClientError("Service Unavailable.\nmore of it")) == (
        "a remote store refused or did not answer: ClientError: Service Unavailable. "
        "Check the URL, the credentials and the network, then run again",
        1,
    )


def test_memory_that_is_not_there_is_one_line(config: Path) -> None:
    message = refused(1, "train", config, "model.hidden=[1000000000000]", start=fresh_gmeta)
    assert message.startswith("error: out of memory: ")
    beyond_64_bits = refused(1, "config", config, "--check", f"model.hidden=[{2**63 - 1}]")
    assert beyond_64_bits.startswith("error: out of memory: Storage size calculation overflowed")
    assert message.endswith(
        "Less is needed with narrower or smaller tables (model.embedding_dim, hash), smaller steps "
        "(data.tasks_per_step, outer.accumulate_steps) or more ranks"
    )


def test_an_error_is_written_in_one_piece_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[str] = []
    stderr = SimpleNamespace(write=pieces.append, flush=lambda: None, isatty=lambda: False)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("RANK", "1")
    write_error("no [bold] /data/[x]")
    assert [piece for piece in pieces if piece] == ["error on rank 1: no [bold] /data/[x]\n"]


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_refused_start_leaves_nothing_in_the_way_of_the_corrected_command(
    config: Path, tmp_path: Path, ranks: int
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    command = ["train", config, *SMALL_MODEL, "data.source=service", "run.max_steps=1"]
    command += ["--nproc-per-node", str(ranks)]
    ended = gmeta(*command, f"run.start_from={empty}")
    assert ended.returncode == 2
    assert f"{empty} is no run folder: config.json is missing or broken" in ended.stderr
    assert gmeta(*command).returncode == 0


def test_inputs_that_are_refused_leave_no_unpacked_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log.csv").write_text("user,item,click\n1,2,0\n")
    (tmp_path / "schema.toml").write_text(
        '[task]\ncolumn = "user"\n[label]\ncolumn = "click"\n'
        '[[single]]\ncolumn = "itme"\nhash = 10\n'
        "[episodes]\nquery_rows = 1\n"
    )
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    message = refused(
        2,
        *("prepare", "--schema", tmp_path / "schema.toml", tmp_path / "log.csv", tmp_path / "data"),
        start=fresh_gmeta,
    )
    assert message == (
        f"error: input {tmp_path}/log.csv has no column itme; did you mean item? Correct the schema"
    )
    assert not [path.name for path in place.iterdir() if path.name.startswith("metaio-")]
