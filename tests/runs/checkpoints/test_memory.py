"""Checkpoints in memory: what a log keeps, and runs that go on from it after kills, to the bit."""

import os
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gmeta.runs.checkpoints.index import IndexedReader
from gmeta.runs.checkpoints.memory import memory_log
from gmeta.runs.checkpoints.memory.memory_log import EntryHead, MemoryLog, frame_entry
from gmeta.runs.run_folder import list_checkpoints
from tests.antdt.faults.service_process import free_port
from tests.support.commands import SMALL_MODEL, environment, metrics, write_config
from tests.support.forked import Task, forked
from tests.support.waiting import PATIENCE_S, wait_until

RUN = b"r" * 16


def entry(step: int, needs_from: int, covers_from: int = 0, size: int = 5000) -> np.ndarray:
    body = np.full(size, step % 256, np.uint8)
    return frame_entry(EntryHead(RUN, 0, step, needs_from, covers_from, 0, 0), [body])


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "log").touch()
    return str(tmp_path / "log")


def steps_of(path: str) -> list[int]:
    return [place.head.step for place in MemoryLog(path).places]


def test_entries_outlive_their_writer_and_lead_on_from_what_they_cover(path: str) -> None:
    log = MemoryLog(path)
    for step in (2, 4, 6):
        log.append(entry(step, 2))
    again = MemoryLog(path)
    assert [head.step for head in again.heads_for(RUN, 0)] == [2, 4, 6]
    assert [head.step for head in again.heads_for(RUN, 4)] == [6]
    assert again.heads_for(b"s" * 16, 0) == []
    assert np.array_equal(again.read_chain(4), np.concatenate([entry(2, 2), entry(4, 2)]))


def test_entries_that_the_one_before_does_not_need_are_dropped(path: str) -> None:
    log = MemoryLog(path)
    for step, needs_from in ((2, 2), (4, 2), (6, 6), (8, 6)):
        log.append(entry(step, needs_from))
        kept = {2: [2], 4: [2, 4], 6: [2, 4, 6], 8: [6, 8]}[step]
        assert steps_of(path) == kept
    for step in range(10, 400, 2):  # memory is given back: on a page of its own or not
        log.append(entry(step, step))
    assert os.stat(path).st_blocks * 512 < 8 * 5000
    log.drop_after(-1)
    log.append(entry(9, 9))
    assert steps_of(path) == [9]


@pytest.mark.parametrize("at", [0, 20, 60, 4000])
def test_an_entry_with_a_wrong_byte_is_not_there(path: str, at: int) -> None:
    log = MemoryLog(path)
    log.append(entry(2, 2))
    begin = log.places[-1].end
    log.append(entry(4, 2))
    with open(path, "r+b") as file:
        file.seek(begin + at)
        wrong = bytes([file.read(1)[0] ^ 1])
        file.seek(begin + at)
        file.write(wrong)
    assert 4 not in [head.step for head in MemoryLog(path).heads_for(RUN, 0)]
    assert 2 in steps_of(path)


def test_an_entry_that_was_not_finished_is_not_there(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = MemoryLog(path)
    log.append(entry(2, 2))
    monkeypatch.setattr(log, "_set_ends", lambda begin, end: 1 / 0)  # killed before that
    with pytest.raises(ZeroDivisionError):
        log.append(entry(4, 2))
    assert steps_of(path) == [2]


STEPS = 30
KILLED_AT = 17
ALWAYS = [f"run.max_steps={STEPS}", "run.epochs=9", "run.checkpoint_every_steps=10"]
ALWAYS += ["run.loggers=[]", "data.valid_split=", "run.memory_checkpoint_every_steps=1"]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_a_step(rank: int) -> None:
    """Have a rank die in the step behind KILLED_AT, in its first life."""
    from gmeta.training import TrainingRun

    take = TrainingRun._step

    def step(run: Any, *arguments: Any) -> Any:
        if run._progress.step == KILLED_AT and is_first_life(rank):
            die()
        return take(run, *arguments)

    TrainingRun._step = step  # type: ignore[method-assign]


def die_while_writing(rank: int) -> None:
    """Have a rank die in the middle of the entry of step KILLED_AT, in its first life."""
    write = os.pwrite

    def write_half(file: int, data: memoryview, offset: int) -> int:
        if offset and is_first_life(rank):
            step = int.from_bytes(bytes(data[24:32]), "little")
            if step == KILLED_AT:
                write(file, data[: len(data) // 2], offset)
                die()
        return write(file, data, offset)

    memory_log.os.pwrite = write_half  # type: ignore[attr-defined]


def is_first_life(rank: int) -> bool:
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    return os.environ.get("RANK") == str(rank) and life == "0"


def train(
    folder: Path, data: Path, num_ranks: int, *more: str, first: Callable[[], None] | None = None
) -> str:
    """Train STEPS steps; return what was said."""
    folder.mkdir()
    config = write_config(folder / "t.toml", data, folder / "run")
    arguments = [
        "train",
        str(config),
        *SMALL_MODEL,
        *ALWAYS,
        f"--nproc-per-node={num_ranks}",
        *more,
    ]
    task = Task("gmeta", tuple(arguments), environment(), folder, first=first)
    with forked(task) as running:
        code = running.wait(2 * PATIENCE_S)
    assert code == 0, running.stderr
    return running.stderr


def tensors_of(run: Path) -> dict[str, torch.Tensor]:
    """All of the newest checkpoint, from its files."""
    from torch.distributed.checkpoint.state_dict_loader import load

    newest = list_checkpoints(run / "checkpoints")[-1]
    reader = IndexedReader(newest)
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.index.state_dict_metadata.items()
    }
    load(state, storage_reader=reader, no_dist=True)
    return state


def check_memory_was_used(said: str) -> None:
    # The others may learn that a rank is gone before they have kept its last step.
    found = re.search(r"goes on from step (\d+), kept in memory", said)
    assert found is not None, said
    assert int(found[1]) in (KILLED_AT - 1, KILLED_AT)


def check_equal(run: Path, other: Path) -> None:
    mine, theirs = tensors_of(run), tensors_of(other)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name
    assert [line["step"] for line in metrics(run)] == list(range(1, STEPS + 1))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("num_ranks", "outer"),
    [
        (2, ["outer.sparse_optimizer=adam", "model.admission=[2,5]"]),
        (4, ["outer.dense_optimizer=sgd"]),
    ],
)
def test_after_a_kill_a_run_goes_on_from_memory_to_the_bits_of_an_unbroken_one(
    tmp_path: Path, click_logs: Path, num_ranks: int, outer: list[str]
) -> None:
    train(tmp_path / "whole", click_logs, num_ranks, *outer)
    for at, first in enumerate((partial(die_in_a_step, 1), partial(die_while_writing, 0))):
        folder = tmp_path / f"killed{at}"
        said = train(folder, click_logs, num_ranks, *outer, "--max-restarts=1", first=first)
        check_memory_was_used(said)
        check_equal(folder / "run", tmp_path / "whole/run")


def node(
    rank: int, folder: Path, port: int, config: Path, first: Callable[[], None] | None = None
) -> Task:
    """One of two launchers, as deploy/docker/train-node starts it."""
    folder.mkdir()
    conf = f"is_host={1 - rank},last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    words = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=test"]
    words += [f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={conf},join_timeout=600"]
    words += ["--local-addr=127.0.0.1", "--max-restarts=5", "--monitor-interval=0.2"]
    words += ["-m", "gmeta", "train", str(config), *SMALL_MODEL, *ALWAYS, "--resume"]
    env = {**environment(), "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return Task("gmeta.cli.node", tuple(words), env, folder, first=first)


def die_with_the_node() -> None:
    """Have rank 1's node die in its first life, launcher and rank."""
    from gmeta.distributed.forked_ranks import MEMORY_VARIABLE
    from gmeta.training import TrainingRun

    take = TrainingRun._step

    def step(run: Any, *arguments: Any) -> Any:
        if run._progress.step == KILLED_AT and is_first_life(1):
            launcher = os.environ[MEMORY_VARIABLE].split("/")[2]
            os.kill(int(launcher), signal.SIGKILL)
            die()
        return take(run, *arguments)

    TrainingRun._step = step  # type: ignore[method-assign]


@pytest.mark.distributed
def test_a_node_that_is_lost_is_replaced_and_its_part_comes_from_the_other_nodes_memory(
    tmp_path: Path, click_logs: Path
) -> None:
    train(tmp_path / "whole", click_logs, 2)
    config, port = write_config(tmp_path / "t.toml", click_logs, tmp_path / "run"), free_port()
    tasks = [
        node(rank, tmp_path / f"node{rank}", port, config, die_with_the_node) for rank in (0, 1)
    ]
    with forked(tasks[0]) as staying, forked(tasks[1]) as leaving:
        wait_until(lambda: leaving.poll() is not None, "the end of a node", 0.1)
        coming = node(1, tmp_path / "node2", port, config)
        with forked(coming) as replacing:
            codes = [each.wait(2 * PATIENCE_S) for each in (staying, replacing)]
            said = [each.stderr for each in (staying, replacing)]
    assert codes == [0, 0], said
    check_memory_was_used("".join(said))
    check_equal(tmp_path / "run", tmp_path / "whole/run")
