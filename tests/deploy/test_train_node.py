"""The trainer image's entry point as a process: SIGTERM, as Kubernetes sends it, costs no step."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gmeta.cli import node
from gmeta.errors import UserError
from gmeta.runs.run_folder import list_checkpoints
from tests.antdt.faults.service_process import free_port
from tests.deploy.rendering import ROOT
from tests.support.commands import SMALL_MODEL, environment, metrics, write_config
from tests.support.waiting import PATIENCE_S, wait_until


@pytest.mark.distributed
def test_sigterm_leaves_a_checkpoint_of_a_nodes_last_step(tmp_path: Path, click_logs: Path) -> None:
    run = tmp_path / "run"
    config = write_config(tmp_path / "train.toml", click_logs, run)
    endless = ["run.epochs=1000", "run.max_steps=0", "run.checkpoint_every_steps=1000000"]
    log = tmp_path / "log"
    with log.open("w") as file:
        node = subprocess.Popen(
            [
                ROOT / "deploy/docker/train-node",
                "train",
                config,
                *SMALL_MODEL,
                *endless,
                "--resume",
            ],
            env={
                **environment(),
                "PYTHON": sys.executable,
                "RDZV_ENDPOINT": f"127.0.0.1:{free_port()}",
            },
            stderr=file,
            start_new_session=True,
        )

    def trains() -> bool:
        assert node.poll() is None, log.read_text()
        return (run / "metrics.jsonl").exists() and len(metrics(run)) >= 3

    wait_until(trains, "three steps")
    # As dumb-init does: it reaches the server that the rank was forked from, too.
    os.killpg(node.pid, signal.SIGTERM)
    node.wait(PATIENCE_S)
    # Read at once: a pod ends here, with all that still runs in it.
    said = log.read_text()
    # Not 0: the Job must start it again.
    assert node.returncode == 128 + signal.SIGTERM, said
    assert "Traceback" not in said
    last = metrics(run)[-1]["step"]
    assert f"stopped by SIGTERM behind step {last}, and nothing of it is lost" in said
    assert [c.name for c in list_checkpoints(run / "checkpoints")] == [f"step-{last:08d}"]


def test_a_mistake_in_the_config_starts_no_rank(tmp_path: Path, click_logs: Path) -> None:
    config = write_config(tmp_path / "train.toml", click_logs, tmp_path / "run")
    node = subprocess.run(
        [
            *(ROOT / "deploy/docker/train-node", "train", config, *SMALL_MODEL),
            *("outer.dense_lrr=0.1", "--resume"),
        ],
        env={**environment(), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert node.returncode == 2
    assert node.stderr == "error: outer.dense_lrr is unknown; did you mean outer.dense_lr?\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("words", "lacking"), [([], "a command"), (["train", "-q"], "a config")])
def test_a_node_that_is_not_told_enough_starts_no_rank(words: list[str], lacking: str) -> None:
    with pytest.raises(UserError, match=f"needs {lacking}: name"):
        node.run_node(words)
