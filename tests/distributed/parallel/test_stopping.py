"""What a rank does when whoever started it is gone."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gmeta.distributed.forked_ranks import AGENT_PID_VARIABLE
from gmeta.distributed.stopping import AGENT_SERVES_VARIABLE
from tests.support.waiting import PATIENCE_S

# Says that it was asked to stop, if it was; ends in any case.
RANK = """
import os, sys, time
from pathlib import Path
from gmeta.distributed.stopping import end_with_agent, stop_on_sigterm
end_with_agent()
with stop_on_sigterm() as stop:
    print(os.getpid(), flush=True)
    until_s = time.monotonic() + float(sys.argv[2])
    while not stop.is_requested and time.monotonic() < until_s:
        time.sleep(0.01)
Path(sys.argv[1]).write_text("asked" if stop.is_requested else "left alone")
"""
AGENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent")
@pytest.mark.parametrize("served", [False, True])
def test_a_rank_ends_with_its_agent_and_without_a_word_if_the_service_does_too(
    tmp_path: Path, served: bool
) -> None:
    told = tmp_path / "told"
    command = [sys.executable, "-c", AGENT, RANK, str(told), str(PATIENCE_S)]
    env = {**os.environ, "TORCHELASTIC_RUN_ID": "job"}
    if served:
        env[AGENT_SERVES_VARIABLE] = "1"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as agent:
        assert agent.stdout is not None
        rank = os.pidfd_open(int(agent.stdout.readline()))
        agent.kill()
        has_ended, _, _ = select.select([rank], [], [], PATIENCE_S)
        os.close(rank)
    assert has_ended
    assert (told.read_text() if told.exists() else "") == ("" if served else "asked")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent")
@pytest.mark.parametrize("served", [False, True])
def test_a_rank_whose_agent_is_gone_before_the_rank_looks_ends_at_once(
    tmp_path: Path, served: bool
) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    env = {**os.environ, "TORCHELASTIC_RUN_ID": "job", AGENT_PID_VARIABLE: str(gone.pid)}
    if served:
        env[AGENT_SERVES_VARIABLE] = "1"
    command = [sys.executable, "-c", RANK, str(tmp_path / "told"), str(PATIENCE_S)]
    rank = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=False)
    assert rank.returncode == -(signal.SIGKILL if served else signal.SIGTERM)
    assert rank.stdout == b""
