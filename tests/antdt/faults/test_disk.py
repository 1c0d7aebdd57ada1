"""Method: what a disk can do: run full, lose the end of the WAL, be slower than a reply."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gmeta.access.errors import RefusedError
from gmeta.antdt.client.client import ShardClient
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.model import Caller, DatasetSpec
from gmeta.antdt.storage.committer import Committer
from gmeta.antdt.storage.sqlite_store import SqliteStore
from tests.antdt.driver import FakeClock
from tests.support.waiting import PATIENCE_S

TINY_DISK = """
import sys, time
from pathlib import Path
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.storage.committer import Committer
from gmeta.antdt.errors import RefusedError
from gmeta.antdt.model import Caller, DatasetSpec
from gmeta.antdt.storage.sqlite_store import SqliteStore

folder = Path(sys.argv[1])
committer = Committer(SqliteStore(folder / "s.db"), time.monotonic)
committer.commit([cmd.RegisterDataset(DatasetSpec("d", 100_000, 1)), cmd.Register("a", "p", None)])
caller, seq = Caller("a", "p", 1, 1), 0
ballast = folder / "ballast"
completed = 0
full = 0
while completed < 3000:
    (granted,) = committer.commit([cmd.LeaseShards(caller, seq + 1, "d", 0, 100)])
    if isinstance(granted, RefusedError):
        assert (granted.code, granted.reason) == ("RESOURCE_EXHAUSTED", "STORE_FULL"), granted
        full += 1
        ballast.unlink(missing_ok=True)
        continue
    tokens = tuple(grant.token for grant in granted.grants)
    (done,) = committer.commit([cmd.Complete(caller, seq + 2, tokens)])
    while isinstance(done, RefusedError):
        assert done.reason == "STORE_FULL", done
        full += 1
        ballast.unlink(missing_ok=True)
        (done,) = committer.commit([cmd.Complete(caller, seq + 2, tokens)])
    assert set(done.outcomes) == {1}
    seq += 2
    completed += len(tokens)
assert full > 0, "the disk never ran full"
print(committer.ledger.state.tables["d"].counts[2])
"""


def mount_tmpfs(folder: Path, size: str) -> bool:
    """Whether a small file system could be mounted (root only)."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0


def test_a_disk_that_runs_full_refuses_calls_and_loses_none(tmp_path: Path) -> None:
    if not mount_tmpfs(tmp_path, "1m"):
        pytest.skip(
            "mounting a small file system needs root; test_store.py runs SQLite full without it"
        )
    try:
        (tmp_path / "ballast").write_bytes(b"x" * 700_000)
        done = subprocess.run(
            [sys.executable, "-c", TINY_DISK, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert (done.returncode, done.stdout.strip()) == (0, "3000"), done.stderr
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def complete_some(store: SqliteStore, number: int) -> None:
    committer = Committer(store, FakeClock(), snapshot_every_events=40)
    committer.commit([cmd.RegisterDataset(DatasetSpec("d", 1000, 1)), cmd.Register("a", "p", None)])
    caller = Caller("a", "p", committer.service_epoch, 1)
    for step in range(number):
        (granted,) = committer.commit([cmd.LeaseShards(caller, 2 * step + 1, "d", 0, 1)])
        committer.commit([cmd.Complete(caller, 2 * step + 2, (granted.grants[0].token,))])


def test_a_wal_cut_anywhere_gives_an_earlier_true_state_under_new_tokens(tmp_path: Path) -> None:
    """As a power cut leaves it on a disk that lied about its fsync."""
    live = SqliteStore(tmp_path / "s.db")
    complete_some(live, 60)
    wal = (tmp_path / "s.db-wal").read_bytes()
    database = (tmp_path / "s.db").read_bytes()
    counts = []
    for cut in range(0, len(wal), max(1, len(wal) // 23)):
        folder = tmp_path / f"cut{cut}"
        folder.mkdir()
        (folder / "s.db").write_bytes(database)
        (folder / "s.db-wal").write_bytes(wal[:cut])
        store = SqliteStore(folder / "s.db")
        committer = Committer(store, FakeClock())
        table = committer.ledger.state.tables.get("d")
        counts.append(table.counts[2] if table else 0)
        if table:
            assert [table.states.count(bytes([n])) for n in range(5)] == table.counts
            (stale,) = committer.commit([cmd.Complete(Caller("a", "p", 1, 1), 121, (1,))])
            assert isinstance(stale, RefusedError)
        store.close()
    live.close()
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]


def test_every_acknowledged_completion_was_fsynced(tmp_path: Path) -> None:
    """kill -9 cannot tell a synced reply from another: count the service's fdatasync calls."""
    try:
        subprocess.run(["strace", "-o", "/dev/null", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no strace here, or it may trace nothing")
    from tests.antdt.faults.service_process import free_port

    port, trace = free_port(), tmp_path / "trace"
    code = (
        "from gmeta.antdt.service.shard_server import *; "
        f"serve_until_signal(ServiceConfig('127.0.0.1:{port}', 'sqlite:///{tmp_path}/s.db'))"
    )
    command = [
        "strace", "-f", "-e", "trace=fdatasync", "-o", str(trace), sys.executable, "-c", code,
    ]  # fmt: skip
    with subprocess.Popen(command) as traced:
        try:
            with ShardClient(f"127.0.0.1:{port}", "a", outage_budget_s=PATIENCE_S) as client:
                client.register_dataset(DatasetSpec("d", 100, 1))
                time.sleep(0.2)
                before = trace.read_text().count("fdatasync(")
                num_flushes = 0
                for lease in client.shards("d"):
                    num_flushes += 1
                    if lease.shard_index == 0:
                        break
                after = trace.read_text().count("fdatasync(")
        finally:
            # strace holds a signal back; its child is the service.
            children = Path(f"/proc/{traced.pid}/task/{traced.pid}/children").read_text().split()
            os.kill(int(children[0]), signal.SIGTERM)
    assert after - before >= num_flushes - 1
