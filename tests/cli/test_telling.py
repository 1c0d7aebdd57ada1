"""Which rank tells an error, and when: what others end by is told by none of them."""

import errno
from pathlib import Path

import pytest

from gmeta.cli.commands import error_messages as telling
from gmeta.cli.commands.work import training_rank as work
from gmeta.config.train_config import RunConfig, TrainConfig
from gmeta.errors import GMetaError, UserError
from metaio.errors import DataError


def waited_turns(monkeypatch: pytest.MonkeyPatch, error: Exception, **environment: str) -> float:
    for name in ("TORCHELASTIC_RUN_ID", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    waited: list[float] = []
    monkeypatch.setattr(telling.time, "sleep", waited.append)
    telling.wait_for_other_ranks(error)
    return sum(waited) / telling.TURN_S


def lost_contact() -> GMetaError:
    error = GMetaError("lost contact with the other ranks")
    error.__cause__ = RuntimeError("gloo: connection closed by peer")
    return error


def test_a_process_of_its_own_tells_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waited_turns(monkeypatch, UserError("no such file")) == 0
    # Ranks of a starter that ends none of them.
    assert waited_turns(monkeypatch, UserError("no such file"), LOCAL_RANK="3") == 0


def test_of_the_ranks_of_a_machine_the_first_tells_while_the_others_wait_to_be_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = UserError("no such file")
    assert waited_turns(monkeypatch, wrong, TORCHELASTIC_RUN_ID="a", LOCAL_RANK="0") == 0
    assert waited_turns(monkeypatch, wrong, TORCHELASTIC_RUN_ID="a", LOCAL_RANK="5") == 1


def test_a_rank_that_lost_contact_lets_another_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = lost_contact()
    assert waited_turns(monkeypatch, lost, TORCHELASTIC_RUN_ID="a", LOCAL_RANK="0") == 1
    assert waited_turns(monkeypatch, lost, TORCHELASTIC_RUN_ID="a", LOCAL_RANK="5") == 2


def test_a_full_disk_is_told_with_the_file_and_what_to_do() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/data/tmp-clicks/00000.parquet")
    assert telling.format_error(full) == (
        "no space left on device: /data/tmp-clicks/00000.parquet. Free some and run again; nothing "
        "half-written was kept",
        1,
    )
    full.add_note("met by rank 1")
    assert telling.format_error(full)[0].endswith("nothing half-written was kept (met by rank 1)")
    for kind in (DataError, UserError):
        with pytest.raises(kind) as caught:
            raise kind("clicks could not be written") from full
        assert telling.format_error(caught.value) == ("clicks could not be written", 1)
    assert telling.format_error(OSError(errno.EROFS, "Read-only file system", "clicks/.lock")) == (
        "read-only file system: clicks/.lock. Name a place that can be written, or mount it so",
        2,
    )
    assert telling.format_error(OSError(errno.EIO, "Input/output error", "a")) == (
        "Input/output error: a. The disk, or what leads to it, fails: look into the system's log",
        1,
    )


def test_a_run_on_a_full_disk_may_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its folder is no new one any more, so the same command again would be refused."""
    config = TrainConfig(run=RunConfig(dir=str(tmp_path)))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(work, "train", full)
    monkeypatch.setattr(work, "run_as_rank", lambda *given, **_: given[3](None))
    with pytest.raises(OSError) as caught:
        work.train_on_rank(config, is_new=False)
    assert telling.format_error(caught.value)[0].endswith("was kept")  # no run has begun
    (tmp_path / "config.json").touch()
    with pytest.raises(OSError) as caught:
        work.train_on_rank(config, is_new=False)
    assert telling.format_error(caught.value)[0].endswith("was kept (go on with --resume)")
