"""What a rank does when whoever started it is gone."""

import os
import subprocess
import sys
from pathlib import Path

from tests.waiting import PATIENCE_S, wait_until

# It notices by itself, or ends without a word.
RANK = """
import sys, time
from pathlib import Path
from gmeta.stopping import sigterm_when_agent_dies, stop_on_sigterm
sigterm_when_agent_dies()
with stop_on_sigterm() as stop:
    print("ready", flush=True)
    until_s = time.monotonic() + float(sys.argv[2])
    while not stop.asked and time.monotonic() < until_s:
        time.sleep(0.01)
if stop.asked:
    Path(sys.argv[1]).touch()
"""
AGENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


def test_ranks_whose_agent_was_killed_are_asked_to_stop(tmp_path: Path) -> None:
    told = tmp_path / "told"
    command = [sys.executable, "-c", AGENT, RANK, str(told), str(PATIENCE_S)]
    env = {**os.environ, "TORCHELASTIC_RUN_ID": "job"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == "ready\n"
        agent.kill()
        wait_until(told.exists, "the rank's last word")
