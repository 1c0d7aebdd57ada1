"""EmbeddedService lives while its owner does, comes back when killed, and says why it cannot."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gmeta.access.errors import AntdtError
from gmeta.antdt import DatasetSpec, ShardClient
from gmeta.antdt.service import embedded
from gmeta.antdt.service.embedded import EmbeddedService
from gmeta.antdt.storage.committer import Committer
from gmeta.antdt.storage.store_urls import open_store
from tests.support.refusals import catch_message
from tests.support.waiting import wait_until


def service_pid(folder: Path) -> int:
    return int((folder / "shards.db.lock").read_text())


def test_a_killed_service_is_back_on_its_port_with_all_it_knew(tmp_path: Path) -> None:
    with EmbeddedService(tmp_path) as service, ShardClient(service.address, "rank0") as client:
        assert (tmp_path / "address").read_text() == service.address + "\n"
        client.register_dataset(DatasetSpec("d", 10, 4))
        (lease,) = client.lease("d", 0)
        lease.advance(4)
        client.flush()
        (tmp_path / "service.log").unlink()  # as somebody does whose disk is full
        os.kill(service_pid(tmp_path), signal.SIGKILL)
        (entry,) = client.prepare_checkpoint("after", 1).datasets
        assert entry.num_done == 1
        assert client.service_epoch == 2
        last = service_pid(tmp_path)
    assert not Path(f"/proc/{last}").exists()
    assert not (tmp_path / "address").exists()


def test_it_ends_with_its_owner_and_the_next_owner_takes_the_store_over(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; "
        "from gmeta.antdt.service.embedded import EmbeddedService; "
        "service = EmbeddedService(Path(sys.argv[1])); print('up', flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"up\n"
    orphan = service_pid(tmp_path)
    owner.kill()
    with EmbeddedService(tmp_path):  # waits for the store
        assert service_pid(tmp_path) != orphan
        wait_until(lambda: not Path(f"/proc/{orphan}").exists())
    owner.wait()
    owner.stdout.close()


def test_nobody_is_given_the_port_of_a_service_that_is_not_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(service: EmbeddedService) -> None:
        host, port = service.address.split(":")
        with socket.socket() as other, pytest.raises(OSError, match="already in use"):
            other.bind((host, int(port)))
        raise AntdtError("not today")

    monkeypatch.setattr(EmbeddedService, "_start", start)
    with pytest.raises(AntdtError, match="not today"):
        EmbeddedService(tmp_path)


def test_a_service_never_serving_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def spawn(service: EmbeddedService) -> "subprocess.Popen[bytes]":
        (tmp_path / "service.log").write_text("reading the store\n")
        started.append(subprocess.Popen(["sleep", "600"]))
        return started[-1]

    monkeypatch.setattr(EmbeddedService, "_spawn", spawn)
    monkeypatch.setattr(embedded, "READY_TIMEOUT_S", 0.0)
    assert catch_message(AntdtError, EmbeddedService, tmp_path) == (
        "the shard service of this job did not serve within 0 s: reading the store. Look at the "
        f"disk of {tmp_path}, or set data.service to one that runs"
    )
    assert started[0].wait() == -signal.SIGKILL


def test_a_service_that_cannot_start_is_told_with_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "shards.db").mkdir()
    message = catch_message(AntdtError, EmbeddedService, tmp_path)
    assert message.startswith(
        "the shard service of this job ended with exit code 2 before it served: error: the store "
        f"{tmp_path}/shards.db is a folder; it must be a file. "
    )
    assert message.endswith(
        f" Its log is {tmp_path}/service.log; mend that, or set data.service to one that runs"
    )


def test_a_store_that_cannot_be_read_ends_the_start(tmp_path: Path) -> None:
    """It is read once the service has its port: who could connect was not served yet."""
    store = open_store(f"sqlite:///{tmp_path}/shards.db")
    Committer(store, time.monotonic, "another").commit([])
    store.close()
    assert catch_message(AntdtError, EmbeddedService, tmp_path).startswith(
        "the shard service of this job ended with exit code 1 before it served: error: the store "
        "belongs to job 'another', this service is for 'default'. "
    )


def test_what_a_service_said_that_ends_again_and_again_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with EmbeddedService(tmp_path):
        pid = service_pid(tmp_path)
        store = tmp_path / "shards.db"
        os.kill(pid, signal.SIGSTOP)
        store.rename(tmp_path / "away")
        store.mkdir()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: "is a folder; it must be a file" in caplog.text, "its words are told")


def test_a_log_that_has_become_long_is_put_aside_when_a_job_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "service.log"
    log.write_text("of jobs before\n")
    EmbeddedService(tmp_path).close()
    kept = log.read_text()
    assert kept.startswith("of jobs before\n")
    monkeypatch.setattr(embedded, "MAX_LOG_BYTES", len(kept) - 1)
    EmbeddedService(tmp_path).close()
    assert (tmp_path / "service.log.1").read_text() == kept
    assert log.read_text().startswith('{"time"')
