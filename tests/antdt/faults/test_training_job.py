"""Method: a real `gmeta train` on leased shards, killed rank by rank and service by service. What
was trained is counted beside the weights (counting.py) and held against the shard manifest of every
checkpoint. ANTDT_JOB_KILLS sets how often each phase is struck."""

import itertools
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from gmeta.antdt.manifests.audit import audit_manifest, check_descends
from gmeta.antdt.manifests.shard_manifest import load_manifest
from tests.antdt.faults.counting import count_tasks
from tests.antdt.trained import trained_ranges
from tests.runs.checkpoints.test_memory import die_in_a_step
from tests.support.commands import SMALL_MODEL, environment, write_config
from tests.support.forked import ForkedProcess, Task, forked
from tests.support.waiting import PATIENCE_S, wait_until

NUM_KILLS = int(os.environ.get("ANTDT_JOB_KILLS", "1"))
NUM_TASKS = 200
ALWAYS = ["data.source=service", "run.max_steps=0", "run.checkpoint_every_steps=4"]


def checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*"))


@contextmanager
def job(folder: Path, program: str, *arguments: str) -> Iterator[ForkedProcess]:
    """A training job; whatever is left of it is killed."""
    folder.mkdir()
    env = {**environment(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with forked(Task(program, arguments, env, folder, first=count_tasks)) as started:
        try:
            yield started
        finally:
            for pid in descendants(started.pid):
                kill(pid)


def descendants(pid: int) -> list[int]:
    """Also those that another thread than the first started."""
    children: list[str] = []
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):
            children += (thread / "children").read_text().split()
    return [found for child in map(int, children) for found in (child, *descendants(child))]


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def process_of(job_pid: int, sign: str, rank: int | None = None) -> int:
    """The process of the job whose command line names `sign` (and that has this rank). A forked
    rank of the tests is no child of the job: see `ForkedProcess.pid_of`."""
    for pid in descendants(job_pid):
        try:
            if Path(f"/proc/{pid}/comm").read_text() == f"gmeta-rank-{rank}\n":
                return pid
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if sign.encode() in command and (rank is None or f"RANK={rank}".encode() in variables):
            return pid
    raise AssertionError(f"the job has no process {sign} of rank {rank}")


def wait_for_steps(run: Path, number: int, running: ForkedProcess) -> None:
    """Until the newest checkpoint is `number` checkpoints further, after a moment more."""

    def newest_step() -> int:
        return int(checkpoints(run)[-1].name.removeprefix("step-")) if checkpoints(run) else 0

    def reached() -> bool:
        assert running.poll() is None, running.stderr[-3000:]
        return newest_step() >= goal

    goal = newest_step() + 4 * number
    wait_until(reached, f"step {goal} of {run}")
    time.sleep(random.uniform(0.0, 0.2))


def check_lineage(run: Path) -> int:
    """Every checkpoint left holds each task as often as its manifest says; the epochs finished."""
    manifests = []
    for folder in checkpoints(run):
        manifest = load_manifest(folder)
        (entry,) = manifest.datasets
        assert audit_manifest(manifest).ok
        counts = json.loads((folder / "counts.json").read_text())
        in_epoch = sum(end - start for start, end in trained_ranges(entry))
        assert set(counts.values()) <= {entry.epoch, entry.epoch + 1}, folder
        assert sum(counts.values()) == entry.epoch * NUM_TASKS + in_epoch, folder
        manifests.append(manifest)
    for older, newer in itertools.pairwise(manifests):
        check_descends(newer, older)
    return entry.epoch + (in_epoch == NUM_TASKS)


@pytest.mark.distributed
@pytest.mark.timeout(900 + 900 * NUM_KILLS)
def test_ranks_and_services_may_be_killed_and_every_task_is_trained_once_an_epoch(
    tmp_path: Path, click_logs: Path
) -> None:
    run = tmp_path / "run"
    config = str(write_config(tmp_path / "train.toml", click_logs, run))
    train = ["train", config, *SMALL_MODEL, *ALWAYS]
    restarts = f"--max-restarts={2 * NUM_KILLS}"
    # The launcher owns the service: it lives on while the ranks are restarted.
    endless = [*train, "run.epochs=1000", "--nproc-per-node=2", restarts]
    endless += ["run.memory_checkpoint_every_steps=1"]  # the service goes back with the memory
    with job(tmp_path / "two", "gmeta", *endless) as running:
        wait_for_steps(run, 2, running)
        for number in range(NUM_KILLS):
            kill(running.pid_of((number + 1) % 2))
            wait_for_steps(run, 2, running)
            kill(process_of(running.pid, "shard-service"))
            wait_for_steps(run, 2, running)
    epochs_done = check_lineage(run)
    assert epochs_done < 1000

    # Another number of ranks, no launcher of ours, and a store that somebody deleted.
    for file in (run / "shards").glob("shards.db*"):
        file.unlink()
    torchrun = ["--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    torchrun += [restarts, "--monitor-interval=0.2", "-m", "gmeta"]
    whole = [f"run.epochs={epochs_done + 2 + NUM_KILLS}", "--resume"]
    with job(tmp_path / "one", "torch.distributed.run", *torchrun, *train, *whole) as running:
        wait_for_steps(run, 1, running)
        # Rank 0 owns the service here: both die, and the next rank 0 takes over the store.
        for _ in range(NUM_KILLS):
            kill(running.pid_of(0))
            wait_for_steps(run, 1, running)
        assert running.wait(PATIENCE_S) == 0, running.stderr[-3000:]
    assert check_lineage(run) == epochs_done + 2 + NUM_KILLS
    counts = json.loads((checkpoints(run)[-1] / "counts.json").read_text())
    assert list(counts.values()) == [epochs_done + 2 + NUM_KILLS] * NUM_TASKS


def count_tasks_and_die() -> None:
    """Count, and have rank 1 die in the middle of the second epoch, in its first life."""
    count_tasks()
    die_in_a_step(1)


@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_a_job_that_goes_on_from_memory_trains_every_task_once_an_epoch(
    tmp_path: Path, click_logs: Path
) -> None:
    run, folder = tmp_path / "run", tmp_path / "job"
    folder.mkdir()
    config = str(write_config(tmp_path / "train.toml", click_logs, run))
    words = ["train", config, *SMALL_MODEL, "data.source=service", "run.max_steps=0"]
    words += [
        "run.epochs=2",
        "run.checkpoint_every_steps=10",
        "run.memory_checkpoint_every_steps=1",
    ]
    words += ["--nproc-per-node=2", "--max-restarts=1"]
    task = Task("gmeta", tuple(words), environment(), folder, first=count_tasks_and_die)
    with forked(task) as running:
        assert running.wait(4 * PATIENCE_S) == 0, running.stderr
        assert ", kept in memory" in running.stderr
    assert check_lineage(run) == 2
    counts = json.loads((checkpoints(run)[-1] / "counts.json").read_text())
    assert list(counts.values()) == [2] * NUM_TASKS
