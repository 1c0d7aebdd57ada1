"""The data-shard service under load, with its clients on the same machine.

python benchmarks/antdt_service.py [--quick] [--store-folder DIR]

Real processes: one service (SQLite, fsync before each reply), 16 ShardClients in 4 processes, each
with a stream of its own, in a closed loop of lease, advance, flush. The last line is JSON:
durable_rpc_per_s and p99_ms (Lease + Complete, one shard a call; an RPC counts when the client has
the answer), unary_rpc_per_s and unary_p99_ms (the same, each RPC a gRPC call by itself, as other
clients make them), durable_transitions_per_s (32 shards a call, each shard TODO -> DOING -> DONE
counts two), recovery_s_at_1e6 (kill -9 to the first answered call, half of a million shards done),
rss_mb_at_1e6. fsync_ms says what the disk under the store can do: no durable service is faster."""

import argparse
import multiprocessing as mp
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from _common import environment, finish

from gmeta.antdt.client.client import ShardClient
from gmeta.antdt.errors import StoreError
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.model import Caller, DatasetSpec
from gmeta.antdt.storage.committer import Committer
from gmeta.antdt.storage.sqlite_store import SqliteStore

NUM_CLIENTS = 16
NUM_CLIENT_PROCESSES = 4


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    # Closed again, so another process may take it; on a machine of its own none does.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_service(store: Path, port: int) -> subprocess.Popen[bytes]:
    """The service as a user starts it, in a process of its own."""
    command = [sys.executable, "-m", "gmeta", "shard-service", "--insecure"]
    command += ["--listen", f"127.0.0.1:{port}"]
    command += ["--store", f"sqlite:///{store}", "--log-level", "WARNING"]
    return subprocess.Popen(command)


class Load(NamedTuple):
    """What each client does."""

    port: int
    max_shards: int
    seconds: float
    streams: bool = True


def one_client(load: Load, name: str, start: Any, latencies_s: list[float]) -> None:
    """One client's closed loop; adds the seconds of each Lease and Complete to the list."""
    with ShardClient(f"127.0.0.1:{load.port}", name) as client:
        client._session.connection._has_streams = load.streams
        start.wait()  # all together: nobody is measured beside processes that still import
        until_s = time.monotonic() + load.seconds
        while time.monotonic() < until_s:
            began_s = time.perf_counter()
            leases: Any = client.lease("bench", 0, load.max_shards)
            leased_s = time.perf_counter()
            for lease in leases:
                lease.advance(lease.num_units)
            flushed_s = time.perf_counter()
            client.flush()
            latencies_s += [leased_s - began_s, time.perf_counter() - flushed_s]


def client_process(load: Load, number: int, start: Any, out: Any) -> None:
    """A fourth of the clients, a thread each; puts all their seconds into `out`."""
    latencies: list[list[float]] = [[] for _ in range(NUM_CLIENTS // NUM_CLIENT_PROCESSES)]
    threads = [
        threading.Thread(
            target=one_client, args=(load, f"w{number}-{i}-{uuid4().hex}", start, mine)
        )
        for i, mine in enumerate(latencies)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    out.put([value for mine in latencies for value in mine])


def run(load: Load) -> tuple[float, float]:
    """(RPC/s, p99 latency in ms) of 16 clients that lease and complete in a closed loop."""
    spawn = mp.get_context("spawn")  # forking after a gRPC call breaks the children
    out: Any = spawn.Queue()
    start = spawn.Barrier(NUM_CLIENTS)
    processes = [
        spawn.Process(target=client_process, args=(load, number, start, out))
        for number in range(NUM_CLIENT_PROCESSES)
    ]
    for process in processes:
        process.start()
    # Taken before the join: a process ends only once its queue is empty.
    latencies_s = sorted(value for _ in processes for value in out.get())
    for process in processes:
        process.join()
    return len(latencies_s) / load.seconds, latencies_s[int(0.99 * len(latencies_s))] * 1000


def fsync_ms(folder: Path) -> float:
    """Median milliseconds to make a block of 4 KiB durable in the folder."""
    fd = os.open(folder / "fsync-probe", os.O_CREAT | os.O_WRONLY)
    times = []
    for number in range(50):
        os.pwrite(fd, b"x" * 4096, 4096 * number)
        began_s = time.perf_counter()
        os.fdatasync(fd)
        times.append((time.perf_counter() - began_s) * 1000)
    os.close(fd)
    return statistics.median(times)


def half_done_store(path: Path, num_shards: int) -> None:
    """A store as a crash leaves it: half of the shards done, 64 leases live, a tail of events
    after the snapshot."""
    store = SqliteStore(path)
    committer = Committer(store, time.monotonic)
    committer.commit(
        [cmd.RegisterDataset(DatasetSpec("bench", 8 * num_shards, 8)), cmd.Register("w", "p", None)]
    )
    caller = Caller("w", "p", committer.service_epoch, 1)
    seq = 0
    for _ in range(num_shards // 2 // 256):
        requests: list[Any] = []
        seq += 1
        (granted,) = committer.commit([cmd.LeaseShards(caller, seq, "bench", 0, 256)])
        seq += 1
        requests.append(cmd.Complete(caller, seq, tuple(g.token for g in granted.grants)))
        committer.commit(requests)
    committer.snapshot()
    for _ in range(64):
        seq += 1
        committer.commit([cmd.LeaseShards(caller, seq, "bench", 0, 1)])
    store.close()


def wait_until_serving(port: int) -> None:
    """Returns once the service answers; raises where it does not within a minute."""
    ShardClient(f"127.0.0.1:{port}", "probe", outage_budget_s=60.0).close()


def rss_mb(pid: int) -> float:
    """Resident MiB of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise StoreError(f"process {pid} reports no VmRSS; this benchmark needs Linux.")


def measure_recovery(folder: Path, num_shards: int) -> tuple[float, float]:
    """(seconds from kill -9 to the first answered call, resident MB) with `num_shards` shards."""
    path, port = folder / f"recovery-{num_shards}.db", free_port()
    half_done_store(path, num_shards)
    service = start_service(path, port)
    wait_until_serving(port)
    service.kill()
    # From the kill on: clients see the outage from there, the start of Python included.
    began_s = time.perf_counter()
    service.wait()
    service = start_service(path, port)
    wait_until_serving(port)
    recovery_s = time.perf_counter() - began_s
    resident_mb = rss_mb(service.pid)
    service.send_signal(signal.SIGTERM)
    service.wait()
    return recovery_s, resident_mb


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="shorter runs, within a minute")
    parser.add_argument(
        "--store-folder", type=Path, help="where the store lies; default: a temporary folder"
    )
    arguments = parser.parse_args()
    seconds = 4.0 if arguments.quick else 20.0
    with tempfile.TemporaryDirectory(dir=arguments.store_folder) as name:
        folder = Path(name)
        figures: dict[str, float] = {"fsync_ms": fsync_ms(folder)}
        path, port = folder / "load.db", free_port()
        service = start_service(path, port)
        wait_until_serving(port)
        with ShardClient(f"127.0.0.1:{port}", "setup") as client:
            client.register_dataset(DatasetSpec("bench", 80_000_000, 8))
        one = Load(port, 1, seconds)
        figures["durable_rpc_per_s"], figures["p99_ms"] = run(one)
        alone = run(one._replace(streams=False))
        figures["unary_rpc_per_s"], figures["unary_p99_ms"] = alone
        batched_rpc_per_s, figures["batched_p99_ms"] = run(one._replace(max_shards=32))
        figures["durable_transitions_per_s"] = batched_rpc_per_s * 32
        service.send_signal(signal.SIGTERM)
        service.wait()
        figures["recovery_s_at_1e6"], figures["rss_mb_at_1e6"] = measure_recovery(folder, 1_000_000)
        if not arguments.quick:
            figures["recovery_s_at_1e7"], figures["rss_mb_at_1e7"] = measure_recovery(
                folder, 10_000_000
            )
    rounded = {key: round(value, 2) for key, value in figures.items()}
    finish("antdt_service", {**rounded, **environment(("grpcio",))})


if __name__ == "__main__":
    main()
