"""A run goes on from the copy that its mirror has, and from no half of one."""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest

from gmeta.config.train_config import TrainConfig, config_from_dict
from gmeta.distributed.ranks import Ranks
from gmeta.errors import GMetaError, UserError
from gmeta.runs.checkpoints.progress_file import PROGRESS_FILE, format_progress
from gmeta.runs.checkpoints.run_mirror import RunMirror, check_new_mirror, fetch_run
from gmeta.runs.run_folder import CONFIG_FILE, RunFolder, list_checkpoints, parse_checkpoint_step
from gmeta.runs.run_progress import RunProgress
from gmeta.training import train
from tests.distributed.harness import on_ranks
from tests.support.commands import metrics
from tests.support.full_disk import files_of_at_most
from tests.support.refusals import catch_message

URL = "memory://bucket/run"
UNREACHABLE = f"run.mirror = {URL!r} cannot be reached: {{}}. Look at the place and the credentials"


@pytest.fixture
def store() -> Iterator[Any]:
    store = fsspec.filesystem("memory")
    yield store
    if store.exists("/bucket"):
        store.rm("/bucket", recursive=True)


def run_at(root: Path, *steps: int) -> Path:
    """A run folder with checkpoints of these steps, of three files each."""
    for step in steps:
        folder = root / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        for name in ("__0_0.distcp", "tables", PROGRESS_FILE):
            (folder / name).write_text(f"{name} of {step}")
    (root / CONFIG_FILE).write_text("{}")
    return root


def away(*_: Any, **__: Any) -> list[str]:
    raise OSError("no such bucket")


def put(root: Path, url: str = URL) -> RunMirror:
    mirror = RunMirror(url, root)
    mirror.upload(list_checkpoints(RunFolder(root).checkpoints)[-1])
    return mirror


def test_the_newest_checkpoint_comes_back_as_it_was(store: Any, tmp_path: Path) -> None:
    root = run_at(tmp_path / "run", 10)
    put(root)
    run_at(root, 20)
    put(root)
    fetch_run(URL, tmp_path / "other")
    there = sorted((root / "checkpoints" / "step-00000020").iterdir())
    here = sorted((tmp_path / "other" / "checkpoints" / "step-00000020").iterdir())
    assert [(p.name, p.read_bytes()) for p in there] == [(p.name, p.read_bytes()) for p in here]
    assert (tmp_path / "other" / CONFIG_FILE).exists()


def test_the_mirror_keeps_what_the_run_keeps(store: Any, tmp_path: Path) -> None:
    root = run_at(tmp_path / "run", 10)
    put(root)
    shutil.rmtree(root / "checkpoints" / "step-00000010")
    run_at(root, 20, 30)
    mirror = put(root)
    assert mirror.checkpoints() == ["step-00000020", "step-00000030"]
    assert not store.exists("/bucket/run/checkpoints/step-00000010")


def test_the_best_checkpoint_survives_the_loss_of_a_disk(store: Any, tmp_path: Path) -> None:
    root = run_at(tmp_path / "run", 10, 20, 30)
    for path in list_checkpoints(root / "checkpoints"):
        progress = RunProgress(
            parse_checkpoint_step(path), 0, parse_checkpoint_step(path), best_step=10
        )
        (path / PROGRESS_FILE).write_text(format_progress(progress, {}, {}))
        RunMirror(URL, root).upload(path)
    other = tmp_path / "other"
    fetch_run(URL, other)
    found = [parse_checkpoint_step(path) for path in list_checkpoints(other / "checkpoints")]
    assert found == [10, 30]
    mirror = put(run_at(other, 40))
    assert mirror.checkpoints() == ["step-00000010", "step-00000030", "step-00000040"]


def test_a_checkpoint_that_was_late_arrives_with_the_next(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The best one, say, which stays when it is no longer the newest."""
    root = run_at(tmp_path / "run", 5, 10)
    mirror = RunMirror(URL, root)
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "glob", away)
        mirror.upload(root / "checkpoints" / "step-00000005")
        shutil.rmtree(root / "checkpoints" / "step-00000005")  # which the run keeps no longer
        mirror.upload(root / "checkpoints" / "step-00000010")
    assert caplog.messages == [
        f"step-{step:08} is not copied yet: {UNREACHABLE.format('no such bucket')}"
        for step in (5, 10)
    ]
    run_at(root, 20)
    mirror.upload(root / "checkpoints" / "step-00000020")
    assert mirror.checkpoints() == ["step-00000010", "step-00000020"]


def test_a_checkpoint_that_was_late_arrives_with_the_next_of_another_process(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = run_at(tmp_path / "run", 10)
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "glob", away)
        put(root)
    run_at(root, 20)
    assert put(root).checkpoints() == ["step-00000010", "step-00000020"]


@pytest.mark.parametrize("name", ["__0_0.distcp", "tables", PROGRESS_FILE])
def test_an_upload_that_breaks_off_leaves_the_checkpoint_before(
    store: Any, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = run_at(tmp_path / "run", 10)
    mirror = put(root)
    run_at(root, 20)
    upload = type(store).put_file

    def broken(self: Any, lpath: str, rpath: str, **rest: Any) -> None:
        if lpath.endswith(name):
            raise OSError("no route to host")
        upload(self, lpath, rpath, **rest)

    monkeypatch.setattr(type(store), "put_file", broken)
    mirror.upload(root / "checkpoints" / "step-00000020")
    assert mirror.checkpoints() == ["step-00000010"]
    assert catch_message(GMetaError, mirror.finish) == UNREACHABLE.format("no route to host")
    monkeypatch.undo()
    mirror.finish()
    assert mirror.checkpoints() == ["step-00000010", "step-00000020"]


def test_a_full_disk_of_the_mirror_keeps_nothing_half(tmp_path: Path) -> None:
    root, there = run_at(tmp_path / "run", 10), tmp_path / "mirror" / "checkpoints"
    url = f"file://{there.parent}"
    put(root, url)
    for step in (20, 30):
        run_at(root, step)
        with files_of_at_most(5):
            put(root, url)
        assert [path.name for path in there.iterdir()] == ["step-00000010"]
    for killed in (".step-00000020.partial", ".step-00000010.1.old"):
        (there / killed).mkdir()
    mirror = put(root, url)
    assert mirror.checkpoints() == ["step-00000010", "step-00000020", "step-00000030"]
    assert len(list(there.iterdir())) == 3


class ClientError(Exception):
    """As botocore raises: no OSError."""


def test_a_client_with_errors_of_its_own_holds_up_no_training(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def throttled(*_: Any, **__: Any) -> list[str]:
        raise ClientError("SlowDown: reduce\nyour request rate")

    root = run_at(tmp_path / "run", 10)
    monkeypatch.setattr(type(store), "glob", throttled)
    mirror = put(root)
    with pytest.raises(GMetaError) as caught:
        mirror.finish()
    assert str(caught.value) == UNREACHABLE.format("SlowDown: reduce your request rate")
    monkeypatch.undo()
    mirror.finish()
    assert mirror.checkpoints() == ["step-00000010"]


class Killed(BaseException):
    """Ends a process as kill -9 does: nothing catches it."""


def texts_of(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def put_until(root: Path, store: Any, done: int) -> int:
    """Put the newest checkpoint, killed behind so many writes and removals; return how many."""
    calls = 0

    def counted(real: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            nonlocal calls
            if calls == done:
                raise Killed
            calls += 1
            return real(*given, **named)

        return call

    with pytest.MonkeyPatch.context() as patch, suppress(Killed):
        for name in ("put_file", "rm_file", "rm"):
            patch.setattr(type(store), name, counted(getattr(type(store), name)))
        put(root)
    return calls


def test_a_step_that_is_there_already_is_never_away(store: Any, tmp_path: Path) -> None:
    """Killed before any write or removal at the store, the old files or the new come back."""
    root = run_at(tmp_path / "run", 20)
    here = root / "checkpoints" / "step-00000020"
    put(root)
    killed_at = 0
    while True:
        old = texts_of(here)
        for path in here.iterdir():
            path.write_text(f"{path.name}, trained again, {killed_at}")
        is_whole = put_until(root, store, killed_at) < killed_at
        other = tmp_path / f"other-{killed_at}"
        fetch_run(URL, other)
        assert texts_of(other / "checkpoints" / "step-00000020") in (old, texts_of(here))
        put(root)  # the next attempt clears up
        assert RunMirror(URL, root).checkpoints() == ["step-00000020"]
        assert len(store.ls("/bucket/run/checkpoints", detail=False)) == 1
        if is_whole:
            break
        killed_at += 1
    assert killed_at > 6  # three files, the config, and what goes: it was killed at each
    assert texts_of(other / "checkpoints" / "step-00000020") == texts_of(here)


def test_a_new_run_finds_no_other_at_its_mirror(store: Any, tmp_path: Path) -> None:
    check_new_mirror(URL, tmp_path / "new")
    put(run_at(tmp_path / "run", 10))
    with pytest.raises(UserError, match="holds a run already, up to step-00000010"):
        check_new_mirror(URL, tmp_path / "new")


def config_of(root: Path, data: Path, steps: int, **run: Any) -> TrainConfig:
    return config_from_dict(
        {
            "data": {"path": str(data), "tasks_per_step": 16},
            "model": {"hidden": [8], "embedding_dim": 4},
            "run": {
                "dir": str(root), "max_steps": steps, "checkpoint_every_steps": 2, "mirror": URL,
                **run,
            },
        }
    )  # fmt: skip


def lost_and_found(ranks: Ranks, root: Path, data: Path) -> list[str]:
    """Train, lose the folder and train on, in one process: the store lives in its memory."""
    train(config_of(root, data, 4), ranks)
    shutil.rmtree(root)
    train(config_of(root, data, 6), ranks)
    return RunMirror(URL, root).checkpoints()


@pytest.mark.distributed
def test_a_machine_that_lost_its_disk_trains_the_same_run(tmp_path: Path, click_logs: Path) -> None:
    root = tmp_path / "run"
    ((*_, newest),) = on_ranks(1, lost_and_found, root, click_logs)
    assert newest == "step-00000006"
    # The log came along, up to the checkpoint.
    assert [line["step"] for line in metrics(root) if "loss" in line][-2:] == [4, 6]


def never_reached(ranks: Ranks, root: Path, data: Path) -> list[tuple[str, list[str]]]:
    """What a run says whose mirror is away, and what is left: in the background and without."""
    told = []
    for in_background in (True, False):
        folder = root / str(in_background)

        def away(*_: Any, folder: Path = folder, **__: Any) -> list[str]:
            if list_checkpoints(folder / "checkpoints"):
                raise ClientError("no such bucket")
            return []

        config = config_of(folder, data, 4, checkpoint_in_background=in_background)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(fsspec.filesystem("memory")), "glob", away)
            message = catch_message(GMetaError, train, config, ranks)
        kept = [path.name for path in list_checkpoints(folder / "checkpoints")]
        told.append((message, kept))
    return told


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_whose_mirror_stays_away_trains_to_its_end_and_ends_with_an_error(
    tmp_path: Path, click_logs: Path, world_size: int
) -> None:
    expected = (UNREACHABLE.format("no such bucket"), ["step-00000002", "step-00000004"])
    told = on_ranks(world_size, never_reached, tmp_path, click_logs)
    assert told == [[expected] * 2] * world_size
