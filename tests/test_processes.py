"""The suite's processes start wherever TMPDIR is."""

import multiprocessing
import shutil
import tempfile
from multiprocessing import util
from multiprocessing.connection import Listener
from pathlib import Path

import pytest

from tests.processes import (
    LONGEST_SOCKET_NAME,
    LONGEST_SOCKET_PATH,
    keep_socket_paths_short,
)


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
        keep_socket_paths_short()
        with Listener(family="AF_UNIX") as listener:
            assert str(listener.address).startswith(str(folder)) != too_long
        assert tempfile.gettempdir() == str(folder)
        shutil.rmtree(util.get_temp_dir())
