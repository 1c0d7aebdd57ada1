"""Mutants of streams and their delivery: each spoils what a test is there to hold, and that very
test must fail. Rows that are not reset: tests/distributed/test_growth.py; a task that is trained
though it is the gate's: also tests/distributed/test_continuing.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gmeta.serving import exported_folder as serving_folder
from gmeta.serving.channel.model_version import ParentVersion
from metaio.prepare.episodes import splits
from tests.metaio.stream import test_extend
from tests.serving.channel import test_channel


def pointer_before_fsync(patch: pytest.MonkeyPatch) -> None:
    """The pointer names files that a power cut could still take."""
    patch.setattr(serving_folder, "flush_to_disk", lambda paths: None)


def parent_check_skipped(patch: pytest.MonkeyPatch) -> None:
    """A delta is laid over whatever serves."""
    patch.setattr(ParentVersion, "__eq__", lambda self, other: True)


def gate_tasks_trained(patch: pytest.MonkeyPatch) -> None:
    """The gate is drawn anew for each increment: one's gate tasks are another's training tasks."""
    append, salt = test_extend.append, splits._SPLIT_SALT
    number = 0

    def salted(*args: Any, **options: Any) -> Any:
        nonlocal number
        number += 1
        patch.setattr(splits, "_SPLIT_SALT", salt ^ np.uint64(number))
        return append(*args, **options)

    patch.setattr(test_extend, "append", salted)


CAUGHT_BY: dict[Callable[[pytest.MonkeyPatch], None], Callable[..., None]] = {
    pointer_before_fsync: test_channel.test_the_pointer_is_written_once_the_version_is_on_the_disk,
    parent_check_skipped: test_channel.test_a_delta_that_does_not_follow_is_refused_by_name,
    gate_tasks_trained: (
        test_extend.test_support_is_the_newest_rows_before_the_window_the_gate_untrained
    ),
}


@pytest.mark.parametrize("mutant", CAUGHT_BY, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_caught(
    mutant: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = CAUGHT_BY[mutant]
    wanted = {"tmp_path": tmp_path, "monkeypatch": monkeypatch}
    names = test.__code__.co_varnames[: test.__code__.co_argcount]
    with monkeypatch.context() as patched:
        mutant(patched)
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            test(**{name: wanted[name] for name in names})
