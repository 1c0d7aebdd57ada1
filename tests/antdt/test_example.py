"""examples/shard_client_loop.py does what it says, also when it is killed."""

from pathlib import Path

import pytest

from gmeta.antdt.manifests.audit import audit_manifest
from gmeta.antdt.manifests.shard_manifest import load_manifest
from tests.antdt.faults.service_process import running
from tests.support.commands import environment
from tests.support.forked import Task, forked, run_forked
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]


def test_the_plain_loop_goes_on_behind_its_checkpoint_after_a_kill(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the example trains with torch")
    runs = tmp_path / "runs"
    with running(tmp_path / "s.db") as service:
        told = tmp_path / "told"
        told.mkdir()
        command, arguments = str(ROOT / "examples/shard_client_loop.py"), (service.address, runs)
        with forked(Task(command, tuple(map(str, arguments)), environment(), told)) as killed:
            wait_until(lambda: len(list(runs.glob("step-*"))) >= 2, "two checkpoints")
            killed.kill()
        done = run_forked(command, *arguments, env=environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("trained 4000 rows, last loss ")
    report = audit_manifest(load_manifest(max(runs.glob("step-*"))))
    assert "  4000 units in the model exactly once (16 whole shards, 0 in part)" in report.lines
