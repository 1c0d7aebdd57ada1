"""What the heartbeats of a large job cost the data-shard service: monitor and controller included.

python benchmarks/antdt_heartbeats.py [--quick] [--workers 1000] [--every 5.0]

A service process with the policy nd; simulated workers register and then report every 5 s, spread
evenly, one in fifty of them four times slower. The last line is JSON: core_share is the processor
time of the service over the time on the clock (all its threads, gRPC and the governor included),
p99_ms how long a heartbeat takes its caller, audits_p99_ms the same while a checkpoint of 10^7
shards is audited over and over, audit_ms one such audit. offline_audit_s is `gmeta shards audit` of
a manifest of 10^8 shards, the start of Python included.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import grpc
from _common import environment, finish, make_parser
from antdt_service import free_port, wait_until_serving

from gmeta.antdt.manifests.shard_manifest import DatasetManifest, Exceptional, ShardManifest
from gmeta.antdt.model import DatasetSpec
from gmeta_protos.antdt.v1 import shard_service_pb2 as pb
from gmeta_protos.antdt.v1 import shard_service_pb2_grpc as pb_grpc

NUM_THREADS = 8
TASK_MS = 10.0
TASKS_PER_S = 100


def cpu_s(pid: int) -> float:
    """Processor seconds of a process so far, of all its threads, in user and kernel mode."""
    # Behind the last bracket: the name of the command may hold brackets and spaces itself.
    # utime and stime are the 14th and 15th field of the line, in clock ticks.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def register_all(stub: Any, num_workers: int, rdzv_round: int = 0) -> list[Any]:
    """Registers w0, w1, ...; what each says of itself in every later call."""
    callers = []
    for number in range(num_workers):
        name = f"w{number}"
        request = pb.RegisterRequest(worker_id=name, incarnation="p", rdzv_round=rdzv_round)
        answer = stub.Register(request)
        callers.append(
            pb.Caller(
                worker_id=name,
                incarnation="p",
                service_epoch=answer.service_epoch,
                run_generation=answer.run_generation,
            )
        )
    return callers


def beat(stub: Any, callers: list[Any], first: int, every_s: float, until_s: float) -> list[float]:
    """One thread's workers, each once in `every_s`; returns the latencies in ms."""
    mine = list(range(first, len(callers), NUM_THREADS))
    began_s, latencies_ms = time.monotonic(), []
    # By the time on the clock, not by pauses: a late answer must not thin out what follows.
    for turn in range(10**9):
        due_s = began_s + turn * every_s / len(mine)
        if due_s > until_s:
            return latencies_ms
        time.sleep(max(0.0, due_s - time.monotonic()))
        number = mine[turn % len(mine)]
        # Totals since the start, as a worker counts them; the service takes the differences.
        tasks = int(TASKS_PER_S * (turn // len(mine) + 1) * every_s)
        slow = 4.0 if number % 50 == 0 else 1.0
        report = pb.WorkerReport(
            step=tasks // 8, tasks_done=tasks, compute_ms=tasks * TASK_MS * slow, share=8
        )
        sent_s = time.perf_counter()
        stub.Heartbeat(pb.HeartbeatRequest(caller=callers[number], report=report))
        latencies_ms.append((time.perf_counter() - sent_s) * 1000)
    return latencies_ms


def run_beats(stub: Any, callers: list[Any], every_s: float, seconds: float) -> list[float]:
    """Beats for all workers in threads; returns all latencies in ms, ascending."""
    found: list[list[float]] = []
    until_s = time.monotonic() + seconds
    threads = [
        threading.Thread(
            target=lambda first=first: found.append(beat(stub, callers, first, every_s, until_s))
        )
        for first in range(NUM_THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(ms for each in found for ms in each)


def manifest_of(num_shards: int) -> ShardManifest:
    """A checkpoint with all but the last thousand shards done; a hundredth of those in part."""
    spec = DatasetSpec("data", 10 * num_shards, 10)
    end = num_shards - 1000
    partial = tuple(Exceptional(p, 3, 1, "", "w0") for p in range(end, num_shards, 100))
    entry = DatasetManifest(spec, 0, ((0, end),), partial)
    return ShardManifest("default", "big", 1, 1, "", 1, "00", (entry,))


def restore_all(stub: Any, callers: list[Any], manifest: ShardManifest) -> list[Any]:
    """Puts the manifest into the service and prepares the checkpoint `big`; returns the callers of
    the next round."""
    text = manifest.to_json().encode()
    stub.Restore(pb.RestoreRequest(caller=callers[0], manifest_json=text, restore_id="r"))
    callers = register_all(stub, len(callers), rdzv_round=1)
    request = pb.PrepareCheckpointRequest(caller=callers[0], checkpoint_id="big", step=1)
    stub.PrepareCheckpoint(request)
    return callers


def audit_until(stub: Any, stop: threading.Event, audits_ms: list[float]) -> None:
    """Audits the checkpoint `big`, one after the other."""
    while not stop.is_set():
        began_s = time.perf_counter()
        stub.Audit(pb.AuditRequest(checkpoint_id="big"))
        audits_ms.append((time.perf_counter() - began_s) * 1000)


def offline_audit_s(folder: Path, num_shards: int) -> float:
    """Seconds of the command on a manifest of so many shards."""
    path = manifest_of(num_shards).save(folder)
    began_s = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "gmeta", "shards", "audit", path], check=True, capture_output=True
    )
    return time.perf_counter() - began_s


def p99(latencies_ms: list[float]) -> float:
    """Of ascending values."""
    return round(latencies_ms[int(0.99 * len(latencies_ms))], 2)


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two heartbeats")
    arguments = parser.parse_args()
    seconds = 20.0 if arguments.quick else 60.0
    with tempfile.TemporaryDirectory() as name:
        config = Path(name) / "antdt.toml"
        config.write_text('[controller]\npolicy = "nd"\n')
        port = free_port()
        command = [sys.executable, "-m", "gmeta", "shard-service", "--insecure"]
        command += ["--listen", f"127.0.0.1:{port}"]
        command += ["--store", f"sqlite:///{name}/shards.db", "--log-level", "WARNING"]
        service = subprocess.Popen([*command, "--antdt-config", str(config)])
        try:
            wait_until_serving(port)
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = pb_grpc.ShardServiceStub(channel)
                callers = register_all(stub, arguments.workers)
                before_s, began_s = cpu_s(service.pid), time.monotonic()
                latencies_ms = run_beats(stub, callers, arguments.every, seconds)
                share = (cpu_s(service.pid) - before_s) / (time.monotonic() - began_s)
                callers = restore_all(stub, callers, manifest_of(10**7))
                audits_ms: list[float] = []
                stop = threading.Event()
                auditor = threading.Thread(target=audit_until, args=(stub, stop, audits_ms))
                auditor.start()
                beside_ms = run_beats(stub, callers, arguments.every, seconds / 2)
                stop.set()
                auditor.join()
        finally:
            service.send_signal(signal.SIGTERM)
            service.wait()
        audit_s = offline_audit_s(Path(name), 10**8)
    finish(
        "antdt_heartbeats",
        {
            "workers": arguments.workers,
            "every_s": arguments.every,
            "heartbeats": len(latencies_ms),
            "core_share": round(share, 4),
            "p99_ms": p99(latencies_ms),
            "audits_p99_ms": p99(beside_ms),
            "audit_ms": round(sorted(audits_ms)[len(audits_ms) // 2], 2),
            "offline_audit_s": round(audit_s, 2),
            **environment(("grpcio",)),
        },
    )


if __name__ == "__main__":
    main()
