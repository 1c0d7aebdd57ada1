"""What is told of a damaged checkpoint, in the words of whoever could not read it."""

import pickle
from pathlib import Path

import pytest

from gmeta.checkpoints.files import damage_told
from gmeta.commands.inspect_run import inspect_checkpoint
from gmeta.errors import GMetaError
from tests.sealed import seal


def test_the_reason_of_a_damaged_index_is_one_sentence_of_the_line() -> None:
    """An older release wrote no checksums: it is pickle that finds the damage."""
    with pytest.raises(GMetaError) as caught, damage_told(Path("c"), remedy="Take another"):
        pickle.loads(b"x")
    assert str(caught.value) == ("checkpoint c cannot be read: invalid load key, 'x'. Take another")


def test_damage_that_has_no_words_is_told_by_its_kind() -> None:
    with pytest.raises(GMetaError) as caught, damage_told(Path("c"), remedy="Take another"):
        raise EOFError
    assert str(caught.value) == "checkpoint c cannot be read: EOFError. Take another"


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
