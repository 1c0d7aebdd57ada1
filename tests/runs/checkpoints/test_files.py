"""What is told of a damaged checkpoint, in the words of whoever could not read it."""

import errno
import pickle
from pathlib import Path
from traceback import StackSummary
from unittest.mock import Mock

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from gmeta.cli.commands.inspect_run import inspect_checkpoint
from gmeta.errors import DISK_FAILS, GMetaError
from gmeta.runs.checkpoints import progress_file
from gmeta.runs.checkpoints.integrity import translate_damage
from gmeta.runs.checkpoints.progress_file import read_about
from tests.support.sealed import seal


def test_the_reason_of_a_damaged_index_is_one_sentence_of_the_line() -> None:
    """An older release wrote no checksums: it is pickle that finds the damage."""
    with pytest.raises(GMetaError) as caught, translate_damage(Path(), remedy="Take another"):
        pickle.loads(b"x")
    assert str(caught.value) == ("checkpoint . cannot be read: invalid load key, 'x'. Take another")


def test_damage_that_has_no_words_is_told_by_its_kind() -> None:
    with pytest.raises(GMetaError) as caught, translate_damage(Path(), remedy="Take another"):
        raise EOFError
    assert str(caught.value) == "checkpoint . cannot be read: EOFError. Take another"


def test_what_its_run_removed_meanwhile_is_gone_and_not_damaged(tmp_path: Path) -> None:
    path, told = tmp_path / "step-00000004", []
    with pytest.raises(GMetaError) as caught:
        read_about(path)
    told.append(str(caught.value))
    with pytest.raises(GMetaError) as caught, translate_damage(path):
        (path / ".metadata").read_bytes()
    told.append(str(caught.value))
    assert told == 2 * [
        f"checkpoint {path} is gone: a run that trains keeps the newest alone, as many as "
        "run.keep_last says. Give the command again, which takes a newer one"
    ]


def test_what_a_failing_disk_does_not_give_is_not_to_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing, told = OSError(errno.EIO, "Input/output error"), []
    monkeypatch.setattr(progress_file, "read_json", Mock(side_effect=failing))
    with pytest.raises(GMetaError) as caught:
        read_about(tmp_path)
    told.append(str(caught.value))
    for met in (failing, CheckpointException("", {0: (failing, StackSummary())})):
        with pytest.raises(GMetaError) as caught, translate_damage(tmp_path):
            raise met
        told.append(str(caught.value))
    assert [one.endswith(f". {DISK_FAILS}") for one in told] == [True] * 3, told


@pytest.mark.parametrize("name", ["/etc/passwd", "../" * 12 + "etc/passwd", "../config.json", ""])
def test_a_progress_file_lists_no_file_of_another_folder(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    entry = {"num_bytes": 1, "xxh3": "0" * 16}
    seal(checkpoint / "progress.json", lambda about: about["files"].update({name: entry}))
    with pytest.raises(GMetaError) as caught:
        inspect_checkpoint(checkpoint, verify=True)
    assert f"it lists {name!r:.80}, which is no file below its folder" in str(caught.value)
    assert not capsys.readouterr().out
