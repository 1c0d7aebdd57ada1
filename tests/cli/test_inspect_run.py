"""`gmeta inspect` on a run and on a checkpoint: what is in it, and whether all of it is there."""

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from gmeta.cli.commands.inspect_run import inspect_checkpoint, inspect_run
from gmeta.config.train_config import config_from_dict, digest_of
from gmeta.errors import GMetaError, UserError
from gmeta.evaluation.evaluate import choose_splits
from gmeta.runs.checkpoints.checkpoint_summary import summarise_checkpoint
from gmeta.runs.checkpoints.checkpoint_writer import _discard
from gmeta.runs.checkpoints.progress_file import (
    format_progress,
    read_about,
    read_file_entries,
    read_progress,
)
from gmeta.runs.run_folder import RunFolder, create_run_folder, list_checkpoints
from tests.support.commands import SMALL_MODEL, gmeta, succeed, write_config
from tests.support.refusals import catch_message


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory, click_logs: Path) -> Path:
    """A run of 8 steps with checkpoints of steps 4 and 8."""
    folder = tmp_path_factory.mktemp("inspect-run")
    config = write_config(folder / "train.toml", click_logs, folder / "run")
    succeed("train", config, *SMALL_MODEL, "run.checkpoint_every_steps=4")
    return folder / "run"


@pytest.fixture
def run(tmp_path: Path, trained_once: Path) -> Path:
    return Path(shutil.copytree(trained_once, tmp_path / "run"))


def test_a_key_of_a_later_release_makes_no_other_config_of_a_run(tmp_path: Path) -> None:
    config = config_from_dict({"run": {"dir": str(tmp_path / "run")}})
    folder = create_run_folder(config, {})
    assert folder.read_config_and_digest() == (config, config.digest)
    # As written by a release that had one key less.
    saved = config.to_json()
    del saved["run"]["start_from"]
    (folder.root / "config.json").write_text(json.dumps(saved))
    assert folder.read_config_and_digest() == (config, digest_of(saved))
    assert digest_of(saved) != config.digest
    assert folder.read_config() == config


def test_a_run_that_has_no_checkpoint_yet_is_a_run(tmp_path: Path) -> None:
    config = config_from_dict({"run": {"dir": str(tmp_path / "run")}})
    create_run_folder(config, {})
    found = gmeta("inspect", "run", cwd=tmp_path)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout == (
        f"run run: maml with {config.model.name} on , config {config.digest}\nno checkpoint yet\n"
    )


def test_a_run_and_its_checkpoints_are_described_a_cut_file_told(run: Path, tmp_path: Path) -> None:
    of_run = succeed("inspect", run)
    rows = [line.split() for line in of_run.stdout.splitlines()]
    # step, epoch, ranks, config, size
    expected = [["4", "1", "+", "4", "steps", "1"], ["8", "1", "+", "8", "steps", "1"]]
    assert [row[:6] for row in rows if row[-1:] == ["complete"]] == expected
    (item,) = [row for row in rows if row[:1] == ["item"]]
    num_rows = int(item[1].replace(",", ""))
    assert item[2:] == ["4", "float32", *size(num_rows * 16), "momentum1", *size(num_rows * 4)]
    (layer,) = [row for row in rows if row[:1] == ["model.bottom.0.bias"]]
    assert layer[1:] == ["8", "float32", "32", "B", "exp_avg,", "exp_avg_sq,", "step"]

    newest = run / "checkpoints" / "step-00000008"
    whole = gmeta("inspect", newest)
    assert whole.stdout.startswith(
        f"checkpoint {newest}: step 8, epoch 1, 8 steps into it, written by 1 rank, config "
    )
    assert whole.stdout.endswith(
        "complete: every file is there in full; --verify reads them and checks checksums\n"
    )

    file = newest / "__0_0.distcp"
    num_bytes = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    cut = gmeta("inspect", run)
    assert cut.returncode == 1
    assert cut.stdout.splitlines()[-1] == (
        f"{file} has {num_bytes - 1:,} bytes, progress.json says {num_bytes:,}: it was cut short "
        "or rewritten"
    )
    refused = gmeta("inspect", run, "--picture", tmp_path / "sizes.png")
    assert refused.returncode == 2
    expected = f"error: {run} is no dataset: --picture is for datasets. Leave it out"
    assert refused.stderr.strip() == expected


def test_one_checkpoint_is_the_best_and_one_behind_an_epoch_says_so(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Step 4 was the best when it was written; step 8, which ended the epoch, was better.
    for path, epoch, epoch_step in zip(
        list_checkpoints(run / "checkpoints"), (0, 1), (4, 0), strict=True
    ):
        about = read_about(path)
        progress = replace(read_progress(path), epoch=epoch, epoch_step=epoch_step)
        progress = replace(progress, best_step=progress.step, best_score=0.5)
        written = format_progress(progress, {}, read_file_entries(about))
        (path / "progress.json").write_text(written)
    inspect_run(run, verify=False)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    expected = [("4", "1", "+", "complete"), ("8", "1", "done", "best")]
    assert [(*row[:3], row[-1]) for row in rows if "complete" in row] == expected
    inspect_checkpoint(path, verify=False)
    assert ": step 8, behind epoch 1, written by ? ranks, " in capsys.readouterr().out


def test_a_damaged_checkpoint_hides_no_other(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older, newest = list_checkpoints(run / "checkpoints")
    (newest / "progress.json").write_text('{"step": 8')
    with pytest.raises(typer.Exit) as ended:
        inspect_run(run, verify=False)
    assert ended.value.exit_code == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.split()[-1:] == ["complete"]] == ["4"]
    assert f"Tables of {older.name}" in map(str.strip, lines)
    assert lines[-1].startswith(f"checkpoint {newest} cannot be loaded: its progress.json is ")


def test_checksums_of_a_checkpoint_are_checked_where_asked_for(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = list_checkpoints(run / "checkpoints")[-1]
    inspect_checkpoint(checkpoint, verify=True)
    assert last_line(capsys) == "complete: every file is there, and as its checksum says"
    file = checkpoint / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    inspect_run(run, verify=False)  # by sizes alone it is whole
    capsys.readouterr()
    with pytest.raises(typer.Exit):
        inspect_run(run, verify=True)
    expected = f"{file} differs from the checksum in progress.json: it was altered"
    assert last_line(capsys) == expected


def test_a_checkpoint_without_checksums_is_held_against_its_index(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = list_checkpoints(run / "checkpoints")[-1]
    about = read_about(checkpoint)
    del about["files"]
    (checkpoint / "progress.json").write_text(json.dumps(about))
    inspect_checkpoint(checkpoint, verify=True)
    assert last_line(capsys) == (
        f"complete: every file is there in full; {checkpoint.name} came without checksums, from an "
        "older release"
    )
    file = checkpoint / "__0_0.distcp"
    num_bytes = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    (problem,) = summarise_checkpoint(checkpoint).problems
    assert problem == (
        f"{file} holds {num_bytes - 1:,} bytes, the index says {num_bytes:,}: it was cut short"
    )


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.splitlines()[-1]


def test_a_resumed_run_reads_past_a_half_written_line(tmp_path: Path, click_logs: Path) -> None:
    run = tmp_path / "run"
    config = write_config(tmp_path / "train.toml", click_logs, run)
    assert gmeta("train", config, *SMALL_MODEL, "run.max_steps=2").returncode == 0
    lines = RunFolder(run).read_metrics()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "epo')  # as far as the disk had room
    assert RunFolder(run).read_metrics() == lines
    (run / "metrics.jsonl").unlink()
    resumed = succeed("train", config, *SMALL_MODEL, "run.max_steps=2", "--resume")
    assert "speed" not in resumed.stderr.rpartition("trained: ")[2]


def test_checkpoints_stand_in_the_order_of_their_steps(tmp_path: Path) -> None:
    for name in ("step-99999999", "step-100000000", "tmp-step-00000001"):
        (tmp_path / name).mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-99999999", "step-100000000"]


def test_a_broken_progress_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "progress.json").write_text('{"step": 1')
    assert catch_message(GMetaError, read_progress, tmp_path).startswith(
        f"checkpoint {tmp_path} cannot be loaded: its progress.json is missing or broken "
    )


def test_an_old_checkpoint_goes_or_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "step-00000001"
    old.mkdir()
    (old / "open-elsewhere").touch()

    def busy(folder: Path) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    monkeypatch.setattr(shutil, "rmtree", busy)
    _discard(old)
    assert list_checkpoints(tmp_path) == []
    assert (tmp_path / "tmp-step-00000001" / "open-elsewhere").exists()


def test_a_dataset_without_a_split_to_score_says_so() -> None:
    dataset: Any = SimpleNamespace(splits={"train": None})
    config = config_from_dict({"data": {"path": "logs"}})
    assert catch_message(UserError, choose_splits, config.data, dataset, []) == (
        "logs has no split but train, which the run was trained or chosen by: there is nothing to "
        "score. Name one with --split, or train on data with one split more"
    )


@pytest.mark.parametrize("trained_on", ["train", "fit"])
def test_what_is_carved_out_of_the_training_split_is_not_scored_as_unseen(trained_on: str) -> None:
    names = ("train", "user-cold", "fit", "valid-user-cold", "valid-item-cold")
    dataset: Any = SimpleNamespace(splits={name: SimpleNamespace(num_episodes=1) for name in names})
    data = {"path": "logs", "train_split": trained_on}
    assert choose_splits(config_from_dict({"data": data}).data, dataset, []) == ["user-cold"]
    assert choose_splits(config_from_dict({"data": data}).data, dataset, ["train"]) == ["train"]


def size(num_bytes: int) -> list[str]:
    """As the tables show it."""
    return [str(num_bytes), "B"] if num_bytes < 1024 else [f"{num_bytes / 1024:.1f}", "KiB"]
