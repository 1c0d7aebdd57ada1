"""A data-shard service for one job on one machine: a process of its own, started, watched and ended
by the process that needs it. Store, log and address lie in one folder."""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import final

from gmeta.access.errors import AntdtError
from gmeta.antdt.storage.sqlite_store import TAKEN

STORE_FILE = "shards.db"
LOG_FILE = "service.log"
MAX_LOG_BYTES = 32 << 20  # at a job's start; a larger log replaces the one put aside before
ADDRESS_FILE = "address"

# The service of an owner that was killed ends within a second or two; then its store is free.
TAKEN_TIMEOUT_S = 20.0
READY_TIMEOUT_S = 300.0  # a long history takes seconds to read; a mount may hang
END_TIMEOUT_S = 15.0
LAST_BYTES = 64 << 10  # of its log, to look for the last line in
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0  # before another start, doubled each time
STEADY_S = 10.0  # a service that lived this long did not fail to start

_SERVING = b'"event": "serving"'  # what the service logs once it answers

_log = logging.getLogger("gmeta.antdt.embedded")


@final
class EmbeddedService:
    """Serves from construction to `close`; a killed service is started again."""

    def __init__(self, folder: Path) -> None:
        """Start the service; return when it can be called. Raise AntdtError."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        if self._log_bytes() > MAX_LOG_BYTES:
            self._log.replace(folder / f"{LOG_FILE}.1")
        # Bound, but never listened on, as long as this lives: nobody else gets the port by chance,
        # even while the service starts or is started again. SO_REUSEADDR lets the service have it.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._reserved.getsockname()[1]}"
        # The kernel closes this end of the pipe however its holder ends, and the service ends with
        # its standard input: it never outlives the job.
        self._stdin, self._owner_lives = os.pipe()
        self._closing = threading.Event()
        self._process = self._start()
        # Written only now that it serves: whoever finds the file may call.
        (folder / ADDRESS_FILE).write_text(self.address + "\n")
        self._watcher = threading.Thread(target=self._watch, name="antdt-watcher", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """End the service once it has answered the calls under way and stored a snapshot."""
        self._closing.set()
        # The service ends when its standard input does.
        os.close(self._owner_lives)
        self._watcher.join(END_TIMEOUT_S)
        if self._watcher.is_alive():
            self._process.kill()
            self._watcher.join()
        os.close(self._stdin)
        self._reserved.close()
        (self._folder / ADDRESS_FILE).unlink(missing_ok=True)

    def __enter__(self) -> "EmbeddedService":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _spawn(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "gmeta", "shard-service", "--ends-with-stdin"]
        command += ["--insecure", "--listen", self.address]
        command += ["--store", f"sqlite:///{(self._folder / STORE_FILE).resolve()}"]
        with self._log.open("ab") as log:
            # A session of its own: the terminal's Ctrl-C ends the job, and then the job ends it.
            return subprocess.Popen(
                command, stdin=self._stdin, stdout=log, stderr=log, start_new_session=True
            )

    def _start(self) -> "subprocess.Popen[bytes]":
        until_s = time.monotonic() + TAKEN_TIMEOUT_S
        while True:
            before, began_s = self._log_bytes(), time.monotonic()
            process = self._spawn()
            while process.poll() is None:
                # Listening is not enough: it reads its store after that, and may refuse it.
                if _SERVING in self._logged_since(before):
                    return process
                if time.monotonic() > began_s + READY_TIMEOUT_S:
                    process.kill()
                    raise AntdtError(
                        f"the shard service of this job did not serve within {READY_TIMEOUT_S:g} "
                        f"s: {self._last_line() or 'it said nothing'}. Look at the disk of "
                        f"{self._folder}, or set data.service to one that runs"
                    )
                time.sleep(0.02)
            last_line = self._last_line()
            # The service of an owner that was just killed may hold the store for a moment.
            if TAKEN not in last_line or time.monotonic() > until_s:
                raise AntdtError(
                    f"the shard service of this job ended with exit code {process.returncode} "
                    f"before it served: {last_line or 'it said nothing'}. Its log is "
                    f"{self._log}; mend that, or set data.service to one that runs"
                )
            time.sleep(0.1)

    @property
    def _log(self) -> Path:
        return self._folder / LOG_FILE

    def _log_bytes(self) -> int:
        return self._log.stat().st_size if self._log.exists() else 0

    def _logged_since(self, before: int) -> bytes:
        with self._log.open("a+b") as log:  # made anew where somebody removed it
            log.seek(before)
            return log.read()

    def _last_line(self) -> str:
        tail = self._logged_since(max(0, self._log_bytes() - LAST_BYTES))
        return tail.decode(errors="replace").strip().rpartition("\n")[2]

    def _watch(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            began_s = time.monotonic()
            code = self._process.wait()
            if self._closing.is_set():
                return
            pause_s = FIRST_PAUSE_S if time.monotonic() - began_s > STEADY_S else pause_s
            _log.warning(
                "the shard service ended with exit code %d and is started again; the last line of "
                "its log was %r; that is %s",
                code,
                self._last_line(),
                self._log,
            )
            if self._closing.wait(pause_s):
                return
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            # Nobody waits until it listens: its clients try again by themselves. Where there is no
            # memory or descriptor for it now, the next round tries again.
            with suppress(OSError):
                # On the same port and store, so its clients find it by themselves.
                self._process = self._spawn()
