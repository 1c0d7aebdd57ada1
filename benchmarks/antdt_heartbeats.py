"""What the heartbeats of a large job cost the data-shard service: monitor and controller included.

python benchmarks/antdt_heartbeats.py [--quick] [--workers 1000] [--every 5.0]

A service process with the policy nd; simulated workers register and then report every 5 s, spread
evenly, one in fifty of them four times slower. The last line is JSON: core_share is the processor
time of the service over the time on the clock (all its threads, gRPC and the governor included),
p99_ms how long a heartbeat takes its caller.
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

from protos.antdt.v1 import shard_service_pb2 as pb
from protos.antdt.v1 import shard_service_pb2_grpc as pb_grpc

NUM_THREADS = 8
TASK_MS = 10.0
TASKS_PER_S = 100


def cpu_s(pid: int) -> float:
    """Processor seconds of a process so far, of all its threads, in user and kernel mode."""
    # Behind the last bracket: the name of the command may hold brackets and spaces itself.
    # utime and stime are the 14th and 15th field of the line, in clock ticks.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def register_all(stub: Any, num_workers: int) -> list[Any]:
    """Registers w0, w1, ...; what each says of itself in every later call."""
    callers = []
    for number in range(num_workers):
        name = f"w{number}"
        answer = stub.Register(pb.RegisterRequest(worker_id=name, incarnation="p"))
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
                found: list[list[float]] = []
                until_s = time.monotonic() + seconds
                threads = [
                    threading.Thread(
                        target=lambda first=first: found.append(
                            beat(stub, callers, first, arguments.every, until_s)
                        )
                    )
                    for first in range(NUM_THREADS)
                ]
                before_s, began_s = cpu_s(service.pid), time.monotonic()
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                share = (cpu_s(service.pid) - before_s) / (time.monotonic() - began_s)
        finally:
            service.send_signal(signal.SIGTERM)
            service.wait()
    latencies_ms = sorted(ms for each in found for ms in each)
    finish(
        "antdt_heartbeats",
        {
            "workers": arguments.workers,
            "every_s": arguments.every,
            "heartbeats": len(latencies_ms),
            "core_share": round(share, 4),
            "p99_ms": round(latencies_ms[int(0.99 * len(latencies_ms))], 2),
            **environment(("grpcio",)),
        },
    )


if __name__ == "__main__":
    main()
