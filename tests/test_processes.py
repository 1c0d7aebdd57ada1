"""The suite's processes start wherever TMPDIR is; where none may start, their tests are skipped."""

import errno
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
from multiprocessing import util
from multiprocessing.connection import Listener
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest

from benchmarks._socket_paths import (
    LONGEST_SOCKET_NAME,
    LONGEST_SOCKET_PATH,
    keep_socket_paths_short,
)
from tests.support.processes import remove_sockets, skipping_what_may_not_start, with_imports_ready


@pytest.mark.parametrize("too_long", [False, True])
def test_sockets_are_made_where_their_paths_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, too_long: bool
) -> None:
    room = LONGEST_SOCKET_PATH - LONGEST_SOCKET_NAME - len("/tmp/") + too_long
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        folder = Path(short, "x" * (room - len(Path(short).name) - 1))
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        # As in a process that has made no socket yet.
        config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
        monkeypatch.setattr(
            multiprocessing.current_process(), "_config", {**config, "tempdir": None}
        )
        # What it would remove at its end is removed here.
        monkeypatch.setattr(util, "_finalizer_registry", {})
        keep_socket_paths_short()
        with Listener(family="AF_UNIX") as listener:
            assert str(listener.address).startswith(str(folder)) != too_long
        assert tempfile.gettempdir() == str(folder)
        shutil.rmtree(util.get_temp_dir())


def test_the_suite_leaves_no_folder_of_sockets_but_that_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**multiprocessing.current_process()._config, "tempdir": str(tmp_path)}  # type: ignore[attr-defined]
    monkeypatch.setattr(multiprocessing.current_process(), "_config", config)
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    remove_sockets()
    assert tmp_path.exists()
    monkeypatch.undo()
    monkeypatch.setattr(multiprocessing.current_process(), "_config", config)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    remove_sockets()
    assert not tmp_path.exists()


def test_a_test_that_may_not_start_the_interpreter_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbidden = tmp_path / "bin" / "python"
    forbidden.parent.mkdir()
    forbidden.write_text("#!/bin/sh\n")
    forbidden.chmod(0o644)  # nobody may start it, root included
    monkeypatch.setattr(sys, "executable", str(forbidden))
    with pytest.raises(pytest.skip.Exception) as skipped, skipping_what_may_not_start():
        subprocess.run([sys.executable], check=True)
    expected = f"this user may not start {forbidden}: give them a Python that they may"
    assert skipped.value.msg == expected
    # Any other program, and one that may be started, is the test's own matter.
    for program, mode in ((tmp_path / "other", 0o644), (forbidden.with_name("tool"), 0o755)):
        program.touch()
        forbidden.chmod(mode)
        with pytest.raises(PermissionError), skipping_what_may_not_start():
            raise PermissionError(errno.EACCES, "Permission denied", str(program))


def answer_what_is_imported(names: tuple[str, ...], answers: SimpleQueue) -> None:
    answers.put([name for name in names if name in sys.modules])


def test_a_forked_process_has_the_imports_ready() -> None:
    """multiprocessing says nothing where one fails: each process would import for itself."""
    context = with_imports_ready()
    answers, names = (
        context.SimpleQueue(),
        ("gmeta.training", "gmeta.serving.server.server_worker", "tests.support.forked"),
    )
    process = context.Process(target=answer_what_is_imported, args=(names, answers))
    process.start()
    assert answers.get() == list(names)
    process.join()
