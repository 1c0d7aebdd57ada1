"""Processes forked from one that has imported what they need, and Ctrl-C."""

import gc
import os
import signal
import subprocess
import sys
from importlib import reload
from pathlib import Path

import pytest

from gmeta.pipeline import preload_last as looked_up
from gmeta.platform import no_garbage
from gmeta.platform.forking import _hold_interrupt
from tests.support.commands import environment

# In a process of its own: in the tests' multiprocessing has started its helpers before.
INTERRUPTED = """
import os, signal, time
from multiprocessing import forkserver, util
from pathlib import Path
from gmeta.cli.main import _exit_now
from gmeta.platform.forking import forking_context, start

context = forking_context(["json"])
server = Path(f"/proc/{forkserver._forkserver._forkserver_pid}")
status = (server / "status").read_text()
print(next(line for line in status.splitlines() if line.startswith("SigBlk")).split()[1])

ask_for_one = forkserver.connect_to_new_process

def interrupted(fds):
    made = ask_for_one(fds)
    signal.raise_signal(signal.SIGINT)  # the new process waits to hear what it is for
    return made

forkserver.connect_to_new_process = interrupted
process = context.Process(target=time.sleep, args=(600,))
try:
    start(process)
except KeyboardInterrupt:
    process.join()
    print(process.exitcode)
print(b"PYTORCH_NVML_BASED_CUDA_CHECK=1" in (server / "environ").read_bytes())
print(util.get_temp_dir())
_exit_now(0)  # as every command ends
"""


def test_a_process_does_not_hear_ctrl_c_and_is_ended_whole_if_it_was_just_starting() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, env=environment()
    )
    assert ran.stderr == ""
    blocked, exit_code, forks_may_use_gpus, sockets = ran.stdout.split()
    assert not Path(sockets).exists()
    assert forks_may_use_gpus == "True"
    for number in (signal.SIGINT, signal.SIGTERM):
        assert int(blocked, 16) >> (number - 1) & 1
    assert int(exit_code) == -signal.SIGTERM


SERVED = """
from gmeta.cli.main import main
from gmeta.platform.forking import forking_context, start

main(lambda: start(forking_context(["doomed"]).Process(target=print)))
"""


@pytest.mark.parametrize(
    ("end", "folder", "line"),
    [
        ("raise OSError('no driver')", ".", "ended with exit code 1: mend what it wrote above"),
        ("import os; os.kill(os.getpid(), 9)", ".", "was ended by SIGKILL: if memory ran out, run"),
        ("", "x" * 120, "no process can be forked: AF_UNIX path too long. Its socket lies below "),
    ],
)
def test_a_server_that_does_not_run_is_named_with_its_cause(
    tmp_path: Path, end: str, folder: str, line: str
) -> None:
    (tmp_path / "doomed.py").write_text(end)
    (tmp_path / folder).mkdir(exist_ok=True)
    env = environment() | {"TMPDIR": str(tmp_path / folder)}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path])
    ran = subprocess.run([sys.executable, "-c", SERVED], capture_output=True, text=True, env=env)
    said = ran.stderr.splitlines()[-1]
    assert (ran.returncode, said[:7]) == (1, "error: ")
    assert line in said


def test_a_server_imports_without_a_look_for_garbage_and_its_stages_look_again() -> None:
    try:
        reload(no_garbage)
        assert not gc.isenabled()
        reload(looked_up)
        assert gc.isenabled()
    finally:
        gc.enable()


def test_a_process_that_ignores_ctrl_c_starts_others_through_it() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with _hold_interrupt() as is_heard:
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not is_heard
