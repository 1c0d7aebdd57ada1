"""Train, break off, resume and evaluate through the command line, as processes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gmeta.antdt.manifests.audit import audit_manifest
from gmeta.antdt.manifests.shard_manifest import load_manifest
from gmeta.runs.run_folder import list_checkpoints
from tests.antdt.faults.test_training_job import process_of
from tests.support.commands import (
    SMALL_MODEL,
    environment,
    evaluate,
    losses,
    metrics,
    succeed,
    write_config,
)
from tests.support.forked import ForkedProcess, Task, forked, run_forked
from tests.support.waiting import PATIENCE_S, wait_until


@pytest.fixture
def config(tmp_path: Path, click_logs: Path) -> Path:
    return write_config(tmp_path / "train.toml", click_logs, tmp_path / "run")


def train(config: Path, *arguments: str) -> Path:
    """Train to the end; the run folder."""
    run = next((Path(a[8:]) for a in arguments if a.startswith("run.dir=")), config.parent / "run")
    succeed("train", config, *SMALL_MODEL, *arguments)
    return run


@pytest.mark.distributed
def test_two_ranks_train_and_evaluate_to_a_report(config: Path) -> None:
    valid = "data.valid_split=valid"
    run = train(config, valid, "--nproc-per-node=2")
    plain = train(config, valid, "algorithm.name=none", f"run.dir={config.parent / 'plain'}")
    assert {path.name for path in run.iterdir()} == {
        "config.json", "environment.json", "plan.json", "metrics.jsonl", "tensorboard",
        "checkpoints",
    }  # fmt: skip
    plan = json.loads((run / "plan.json").read_text())
    assert {s["rank"] for table in plan["tables"].values() for s in table["shards"]} == {0, 1}
    assert [line["step"] for line in metrics(run)] == [*range(1, 9), 8]
    assert set(metrics(run)[0]) == {
        *("step", "epoch", "loss", "samples_per_s", "data_wait_share"),
        *("dense_lr", "sparse_lr", "dense_grad_norm"),
    }
    assert "auc" in metrics(run)[-1]["valid"]
    assert json.loads((run / "environment.json").read_text())["world_size"] == 2

    result = evaluate(run, "--against", plain, "--no-trees", "--nproc-per-node", "2")
    assert result.returncode == 0, result.stderr
    assert "user-item-cold" in result.stdout
    assert str(run / "evaluation" / "report.html") in result.stdout
    assert (run / "evaluation" / "report.html").read_text().startswith("<!doctype html>")
    evaluation = json.loads((run / "evaluation" / "evaluation.json").read_text())
    assert evaluation["schema"] == "gmeta.evaluation/1"


@pytest.mark.distributed
def test_the_same_seed_gives_the_same_losses_however_the_ranks_are_started(config: Path) -> None:
    checked = ["run.deterministic=true", f"run.dir={config.parent / 'ours'}"]
    ours = losses(train(config, "--nproc-per-node=2", *checked))
    command = ("--nproc-per-node=2", "-m", "gmeta", "train", config, *SMALL_MODEL)
    result = run_forked("torch.distributed.run", *command, env=environment())
    assert result.returncode == 0, result.stderr
    # Two ranks twice: to the last bit. One rank sums in another order: to rounding.
    assert losses(config.parent / "run") == ours
    one = losses(train(config, f"run.dir={config.parent / 'one'}"))
    assert one == pytest.approx(ours, rel=1e-5)
    assert losses(train(config, "run.seed=1", f"run.dir={config.parent / 'other'}")) != one


@pytest.mark.distributed
def test_a_resumed_run_on_other_ranks_goes_on_as_if_never_stopped(config: Path) -> None:
    whole = train(config, "run.epochs=2", "run.max_steps=20", f"run.dir={config.parent / 'whole'}")
    run = train(config, "run.epochs=2", "run.max_steps=15", "--nproc-per-node=2")
    train(config, "run.epochs=2", "run.max_steps=20", "--resume")
    assert [line["step"] for line in metrics(run)] == list(range(1, 21))
    assert [line["epoch"] for line in metrics(run)] == [0] * 13 + [1] * 7
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)


@contextmanager
def training(config: Path, *arguments: str) -> Iterator[ForkedProcess]:
    """A run on two ranks in the background."""
    command = ("train", str(config), *SMALL_MODEL, "--nproc-per-node=2", *arguments)
    told = config.parent / "told"
    told.mkdir()
    with forked(Task("gmeta", command, environment(), told)) as job:
        yield job


def wait_for_checkpoint(config: Path, has_ended: Callable[[], bool]) -> None:
    """Until the run has written one; it must not end before."""

    def reached() -> bool:
        if list_checkpoints(config.parent / "run" / "checkpoints"):
            return True
        assert not has_ended()
        return False

    wait_until(reached, "a checkpoint", pause_s=0.05)


ENDLESS = ["run.epochs=1000", "run.max_steps=0"]


@pytest.mark.distributed
def test_a_killed_rank_ends_the_job_in_one_line_and_resume_finishes_it(config: Path) -> None:
    # Fresh interpreters: whoever starts a job in a shell has those.
    command = [sys.executable, "-m", "gmeta", "train", str(config), *SMALL_MODEL, *ENDLESS]
    command += ["run.checkpoint_every_steps=5", "--nproc-per-node=2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as job:
        wait_for_checkpoint(config, lambda: job.poll() is not None)
        os.kill(process_of(job.pid, "train", 1), signal.SIGKILL)
        _, stderr = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 1
    last_line = stderr.strip().splitlines()[-1]
    assert last_line.startswith("error: rank ")
    assert last_line.endswith(
        "was ended by signal 9: the other ranks were stopped. "
        "Run the same command with --resume: it goes on from the newest checkpoint"
    )
    assert "Traceback" not in stderr
    newest = list_checkpoints(config.parent / "run" / "checkpoints")[-1]
    last = int(newest.name.removeprefix("step-")) + 7
    ends = ["run.epochs=1000", f"run.max_steps={last}", "run.checkpoint_every_steps=5"]
    run = train(config, *ends, "--resume", "--nproc-per-node=2")
    assert [line["step"] for line in metrics(run)] == list(range(1, last + 1))


@pytest.mark.distributed
def test_a_killed_rank_is_restarted_when_restarts_are_allowed(config: Path) -> None:
    long = ["run.epochs=1000", "run.max_steps=200", "run.checkpoint_every_steps=20"]
    with training(config, *long, "--max-restarts=1") as job:
        wait_for_checkpoint(config, lambda: job.poll() is not None)
        killed = job.pid_of(0)
        os.kill(killed, signal.SIGKILL)
        assert job.wait(PATIENCE_S) == 0, job.stderr
        assert job.pid_of(0) != killed
    assert [line["step"] for line in metrics(config.parent / "run")] == list(range(1, 201))


def stop_by_sigterm(
    config: Path, arguments: list[str], whom: Callable[[ForkedProcess], int]
) -> int:
    """Start a run on two ranks, end it by SIGTERM after some steps; the steps that it kept."""
    run = config.parent / "run"

    def trains() -> bool:
        assert job.poll() is None, job.stderr
        return (run / "metrics.jsonl").exists() and len(metrics(run)) > 2

    with training(config, *arguments, "run.checkpoint_every_steps=100000") as job:
        wait_until(trains, "three steps", pause_s=0.05)
        os.kill(whom(job), signal.SIGTERM)
        assert job.wait(PATIENCE_S) == 143, job.stderr
    done = int(metrics(run)[-1]["step"])
    told = (
        f"stopped by SIGTERM behind step {done}, and nothing of it is lost. "
        "Run the same command with --resume to go on"
    )
    assert f"error on rank 0: {told}\n" in job.stderr
    assert "Traceback" not in job.stderr
    assert [c.name for c in list_checkpoints(run / "checkpoints")] == [f"step-{done:08d}"]
    return done


@pytest.mark.distributed
def test_sigterm_to_the_job_loses_no_step(config: Path) -> None:
    done = stop_by_sigterm(config, ENDLESS, lambda job: job.pid)
    until = ["run.epochs=1000", f"run.max_steps={done + 3}"]
    run = train(config, *until, "--resume")
    assert [line["step"] for line in metrics(run)] == list(range(1, done + 4))
    whole = train(config, *until, f"run.dir={config.parent / 'whole'}")
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)


@pytest.mark.distributed
def test_sigterm_to_one_rank_of_a_leased_epoch_loses_no_episode(config: Path) -> None:
    leased = ["data.source=service", "data.tasks_per_step=2"]
    stop_by_sigterm(config, [*leased, *ENDLESS], lambda job: job.pid_of(1))
    num_epochs = metrics(config.parent / "run")[-1]["epoch"] + 1
    ends = ["run.max_steps=0", f"run.epochs={num_epochs + 1}"]
    run = train(config, *leased, *ends, "--resume")
    newest = list_checkpoints(run / "checkpoints")[-1]
    report = audit_manifest(load_manifest(newest))
    assert report.ok
    assert "  epoch finished" in report.lines


def test_a_profile_of_some_steps_in_bf16_is_a_trace_and_a_table(config: Path) -> None:
    run = train(config, "run.profile_steps=2", "run.precision=bf16", "outer.accumulate_steps=2")
    trace = json.loads((run / "profile" / "trace.json").read_text())
    steps = {e["name"] for e in trace["traceEvents"] if e["name"].startswith("ProfilerStep")}
    assert steps == {"ProfilerStep#3", "ProfilerStep#4"}
    summary = (run / "profile" / "summary.txt").read_text()
    assert "Self CPU time total" in summary
    assert "aten::addmm" in summary or "aten::linear" in summary
    assert {path.name for path in (run / "profile").iterdir()} == {"trace.json", "summary.txt"}
