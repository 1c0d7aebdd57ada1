"""Method: real torchrun with kill -9 of ranks and of the service, and another world size after it.
The weights of the toy job count how often each unit was trained; in the last checkpoint every count
is one."""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gmeta.antdt.manifests.audit import audit_manifest, check_descends
from gmeta.antdt.manifests.shard_manifest import load_manifest
from tests.antdt.faults.service_process import ServiceProcess, free_port, running
from tests.antdt.faults.toy_job import __file__ as TOY_JOB
from tests.antdt.trained import trained_ranges
from tests.support.waiting import PATIENCE_S, wait_until

torch = pytest.importorskip("torch", reason="the toy job needs torch")
pytestmark = pytest.mark.skipif(
    "ANTDT_JOB_KILLS" not in os.environ,
    reason="test_training_job.py does the same to the trainer; make antdt-faults runs both",
)

NUM_UNITS = 900
ROOT = Path(__file__).parents[3]


@contextmanager
def torchrun(
    address: str, folder: Path, num_ranks: int, max_steps: int
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    command += ["--max-restarts=8", "--monitor-interval=0.2"]
    command += [TOY_JOB, address, str(folder), str(NUM_UNITS), str(max_steps)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        # Without it a restart waits for keys of the round before (docs/antdt.md, torchrun).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with subprocess.Popen(command, env=environment) as job:
        try:
            yield job
        finally:
            job.terminate()  # torchrun ends its ranks with itself


def wait_for_checkpoints(folder: Path, number: int, job: subprocess.Popen[bytes]) -> None:
    def reached() -> bool:
        assert job.poll() is None, "the job ended before its time"
        return len(list(folder.glob("step-*"))) >= number

    wait_until(reached, f"{number} checkpoints")


def kill_rank(folder: Path, rank: int) -> None:
    os.kill(int((folder / f"pid-{rank}").read_text()), signal.SIGKILL)


def kill_service(service: ServiceProcess) -> None:
    service.kill()
    service.start()


@pytest.mark.timeout(1800)
def test_killed_ranks_and_services_train_each_unit_of_a_lineage_once(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    with running(tmp_path / "s.db") as service:
        with torchrun(service.address, folder, num_ranks=2, max_steps=60) as job:
            wait_for_checkpoints(folder, 2, job)
            kill_service(service)
            wait_for_checkpoints(folder, 4, job)
            kill_rank(folder, 1)
            wait_for_checkpoints(folder, 7, job)
            assert job.wait(PATIENCE_S) == 0
        # The manifest rebuilds a service whose database is gone, for another number of ranks.
        service.kill()
        for file in tmp_path.glob("s.db*"):
            file.unlink()
        service.start()
        with torchrun(service.address, folder, num_ranks=3, max_steps=100_000) as job:
            wait_for_checkpoints(folder, len(list(folder.glob("step-*"))) + 2, job)
            kill_rank(folder, 0)
            assert job.wait(PATIENCE_S) == 0
    last = max(folder.glob("step-*"))
    assert torch.equal(torch.load(last / "weights.pt"), torch.ones(NUM_UNITS))
    expected = ("  epoch finished", "OK: no unit is in the model twice")
    assert audit_manifest(load_manifest(last)).lines[-2:] == expected
    for folder_of_step in folder.glob("step-*"):
        manifest = load_manifest(folder_of_step)
        (entry,) = manifest.datasets
        counted = torch.zeros(NUM_UNITS)
        for start, end in trained_ranges(entry):
            counted[start:end] += 1
        assert torch.equal(torch.load(folder_of_step / "weights.pt"), counted), folder_of_step
    ordered = [load_manifest(each) for each in sorted(folder.glob("step-*"))]
    for older, newer in itertools.pairwise(ordered):
        check_descends(newer, older)
