"""The processes of a study's trials."""

import signal
import subprocess
import sys

from tests.commands import environment

STARTED = """
from multiprocessing import forkserver
from pathlib import Path
from gmeta.tuning.trials import trial_processes

with trial_processes(1, "json"):
    status = Path(f"/proc/{forkserver._forkserver._forkserver_pid}/status").read_text()
    print(next(line for line in status.splitlines() if line.startswith("SigBlk")).split()[1])
"""


def test_ctrl_c_does_not_reach_what_trials_are_forked_from() -> None:
    # In a process of its own: in this one multiprocessing has started its helpers before.
    blocked = subprocess.check_output([sys.executable, "-c", STARTED], text=True, env=environment())
    assert int(blocked, 16) >> (signal.SIGINT - 1) & 1
