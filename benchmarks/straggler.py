"""Four ranks of unequal speed: a static split against AntDT-ND and AntDT-DD, with real processes.

python benchmarks/straggler.py [--quick]

Service, leases, agents, gloo and the meta-learner are the trainer's own. Four ranks do not fit on
the two cores of a small machine, so the work of a task is stood in for by 20 ms of short sleeps
between forward and backward: a rank's speed is then its own, whatever the others do. Rank 3 is made
four times slower, once by SIGSTOP for 30 of every 40 ms, once by storage that takes, behind the
computation's back, four times as long over a task as a healthy rank.

The last line is JSON, for each cause: speedup_vs_static (tasks/s once the new shares are in force),
speedup_with_detection (over the whole run), verdict, final losses, audit, and what the simulator
predicts. ideal is s (N - 1 + 1/s) / N = 3.25.

With --quick the stopped rank alone. Without it also `dd`: two ranks of hardware that is three
times as slow, micro-batches of at most 8 tasks. dd_of_best is DD's tasks/s, once its shares are in
force, over those of the same job under a policy that knows the best shares (24, 24, 8, 8) and
posts them at once; split_of_best is the time of the best split's slowest share over that of DD's,
without noise.
"""

import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import environment, finish, make_parser
from _socket_paths import keep_socket_paths_short

from gmeta.adaptation.config import AlgorithmConfig
from gmeta.antdt.manifests.audit import audit_manifest
from gmeta.antdt.manifests.manifest import parse_manifest
from gmeta.antdt.policies.interface import ControllerConfig, Decision, Snapshot
from gmeta.antdt.reports import STRAGGLERS, MonitorConfig
from gmeta.antdt.service.server import ServiceConfig, ShardServer
from gmeta.antdt.simulation.config import JobConfig, Outcome
from gmeta.antdt.simulation.job import run_antdt, run_static
from gmeta.antdt.simulation.traces import Change, Trace
from gmeta.antdt.stragglers.settings import StragglerConfig
from gmeta.build import build_learner
from gmeta.config import DataConfig, OuterConfig, RunConfig, TrainConfig
from gmeta.feeds.agent import ServiceAgent
from gmeta.feeds.asked import BatchSettings
from gmeta.feeds.leased import ServiceFeed
from gmeta.outer.optimizers import build_optimizer
from gmeta.parallel.ranks import start_ranks, stop_ranks
from gmeta.parallel.sharding import shard_learner
from gmeta.parallel.steps import in_step
from gmeta.parallel.stopping import Stop
from gmeta.parallel.together import no_tasks
from gmeta_models import ModelConfig
from metaio import open_dataset
from metaio.recipes.synthetic import SyntheticConfig, prepare_synthetic

RANKS, SLOW_RANK, SLOWDOWN = 4, 3, 4.0
TASKS_PER_RANK = 16
TASK_S = 0.020
NAP_S = 0.001  # short, so that a stopped process loses no more than one
STOP_S, RUN_S = 0.030, 0.010
SLOW_FROM = 2  # steps or batches are as fast as the others' before
MODEL = ModelConfig(name="dlrm", embedding_dim=4, hidden=(8,), options={"bottom": (8,)})
# Two generations of hardware, by rank, and the split whose slowest rank ends first.
HARDWARE, BEST_SHARES, MICRO_BATCH = (1.0, 1.0, 3.0, 3.0), (24, 24, 8, 8), 8


@dataclass(frozen=True)
class Job:
    """What a job's ranks are like. `read_task_s`: of the slow rank's storage."""

    data: Path
    task_s: float
    policy: str = "none"
    is_stopped: bool = False
    read_task_s: float = 0.0
    hardware: tuple[float, ...] = (1.0,) * RANKS
    max_steps: int = 10**9


def know_best(snapshot: Snapshot, config: ControllerConfig) -> Sequence[Decision]:
    """A policy that has been told the best shares, in DD's micro-batches."""
    now = {w.health.worker_id: float(w.tasks_per_step) for w in snapshot.active}
    best = {f"rank{rank}": float(share) for rank, share in enumerate(BEST_SHARES)}
    if now.keys() != best.keys() or now == best:
        return []
    micro = {f"micro:{name}": share // MICRO_BATCH for name, share in best.items()}
    return [Decision("ADJUST_BS", "", {**best, **micro}, "known beforehand")]


def work(num_tasks: int, task_s: float) -> None:
    """Stands in for so many tasks' computation, at a rate that no other rank can change."""
    left_s = num_tasks * task_s
    while left_s > 0:
        began_s = time.monotonic()
        time.sleep(NAP_S)
        # Sleeps are late, by up to half of themselves; what is stopped does no work.
        left_s -= min(time.monotonic() - began_s, 1.5 * NAP_S)


def slow_down_reading(feed: ServiceFeed, read_task_s: float, ended: threading.Event) -> None:
    """Storage that takes its time over every task from the third batch on, as the stopped rank is
    stopped from its third step on, in the thread that reads ahead. Once a task: what a change of
    the shares puts back is in memory. Nobody waits for what is read after the last step."""
    pipeline = feed._reader._pipeline
    compose = pipeline._compose
    read: set[tuple[int, int]] = set()  # (block, episode)
    num_batches = 0

    def slowly(loading: Any) -> Any:
        """As `compose`, and then as late as the storage would have been."""
        nonlocal num_batches
        batch = compose(loading)
        num_batches += 1
        with pipeline._clock:
            tasks = {(part.block, int(episode)) for _, part in loading for episode in part.episodes}
            if num_batches > SLOW_FROM:
                ended.wait(read_task_s * len(tasks - read))
            read.update(tasks)
        return batch

    pipeline._compose = slowly  # type: ignore[method-assign]


def train_on_rank(rank: int, folder: str, config: TrainConfig, job: Job) -> None:
    """One rank: trains, and saves each step's time, tasks and loss, and the last manifest."""
    torch.set_num_threads(1)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ.update(zip(names, map(str, (rank, rank, RANKS, RANKS)), strict=True))
    ranks = start_ranks("cpu", 120, dist.FileStore(f"{folder}/store", RANKS))
    dataset = open_dataset(config.data.path)
    torch.manual_seed(0)
    learner = build_learner(dataset.features, MODEL, AlgorithmConfig(name="maml"), "bce")
    sharded = shard_learner(learner, dataset.features, config, ranks)
    optimizer = build_optimizer(sharded, config.outer)
    steps: list[tuple[float, int, float]] = []  # (time, tasks of the rank, its part of the loss)
    agent_s, ended = 0.0, threading.Event()
    with ServiceFeed(BatchSettings.of(config, dataset), dataset, ranks, None) as feed:
        if job.read_task_s and rank == SLOW_RANK:
            slow_down_reading(feed, job.read_task_s, ended)
        agent = ServiceAgent(config.outer.accumulate_steps, feed, sharded, ranks, Stop())
        for episodes, totals in in_step(
            agent.arranged(feed.batches(0, 0), learner.arrange),
            learner.arrange(no_tasks(dataset.features)),
            ranks,
            None,
            sharded,
            agent.take_replanned,
        ):
            # So long a run that no schedule of the rate moves it.
            optimizer.begin_step(len(steps), 10**9)
            loss = sharded(episodes, weight=RANKS / max(totals.num_terms, 1))
            num_tasks = episodes.task_T.numel()
            work(num_tasks, job.task_s * job.hardware[rank])
            loss.backward()
            optimizer.step()
            feed.trained(num_tasks)
            began_s = time.thread_time()
            agent.stepped(num_tasks)
            agent_s += time.thread_time() - began_s
            steps.append((time.monotonic(), num_tasks, loss.item()))
            if len(steps) == job.max_steps:
                break
        ended.set()
        manifest = feed.checkpoint_files(len(steps)).get("shards.json", "")
    torch.save(
        {"steps": steps, "agent_ms": 1000 * agent_s / len(steps), "manifest": manifest},
        f"{folder}/{rank}.pt",
    )
    stop_ranks()
    # gloo's threads may abort an interpreter that ends in order.
    os._exit(0)


def duty_cycle(pid: int, ended: threading.Event) -> None:
    """The process runs for a quarter of the time."""
    try:
        while not ended.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(STOP_S)
            os.kill(pid, signal.SIGCONT)
            time.sleep(RUN_S)
    except ProcessLookupError:
        pass


def run(job: Job) -> dict[str, Any]:
    """One job, to its end."""
    watched = StragglerConfig(
        MonitorConfig(window_s=1.0),
        ControllerConfig(policy=job.policy, cooldown_s=2.0, max_micro_batch=MICRO_BATCH),
    )
    # In this process, which looks into it; the ranks call it through gRPC all the same.
    server = ShardServer(ServiceConfig("127.0.0.1:0", stragglers=watched))
    config = TrainConfig(
        model=MODEL,
        data=DataConfig(
            path=str(job.data),
            source="service",
            service=server.address,
            tasks_per_step=RANKS * TASKS_PER_RANK,
        ),
        outer=OuterConfig(dense_lr=0.003),
        run=RunConfig(seed=1),
    )
    verdicts: dict[str, tuple[str, str]] = {}
    ended = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            train_on_rank,
            (folder, config, job),
            RANKS,
            join=False,
            start_method="forkserver",
        )
        # Started below, once the ranks have got so far: a stopped start-up would be no straggler.
        stopper = threading.Thread(target=duty_cycle, args=(context.pids()[SLOW_RANK], ended))
        while not context.join(timeout=0.2):
            step = max((w.report.step for w in server.edge.read_status().workers), default=0)
            if job.is_stopped and step >= SLOW_FROM and stopper.ident is None:
                stopper.start()
            for name, health in server.governor.health.items():
                if health.verdict in STRAGGLERS:
                    verdicts[name] = (health.verdict, health.cause)
        ended.set()
        found = [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(RANKS)]
    server.stop(0.0)
    # Rank 0's clock: every rank leaves a step at the same AllReduce.
    times_s = [time_s for time_s, _, _ in found[0]["steps"]]
    tasks = np.array([[n for _, n, _ in one["steps"]] for one in found])
    audit = audit_manifest(parse_manifest(found[0]["manifest"]))
    trained = f"{tasks.sum()} units in the model exactly once"
    return {
        "times_s": np.array(times_s),
        "tasks_RS": tasks,
        "loss": np.mean([[loss for _, _, loss in one["steps"]] for one in found], axis=0),
        "agent_ms": max(one["agent_ms"] for one in found),
        "verdicts": verdicts,
        "audit_ok": audit.ok and any(trained in line for line in audit.lines),
    }


def full_steps(job: dict[str, Any]) -> Any:
    """All but the last ones, which have the tasks that were left."""
    per_step = job["tasks_RS"].sum(axis=0)
    return np.flatnonzero(per_step == per_step.max())


def late_losses(static: dict[str, Any], antdt: dict[str, Any]) -> tuple[Any, Any]:
    """Of the second half of the full steps that both took."""
    num_steps = min(len(full_steps(static)), len(full_steps(antdt)))
    return static["loss"][num_steps // 2 : num_steps], antdt["loss"][num_steps // 2 : num_steps]


def rate(job: dict[str, Any], first: int = 5) -> float:
    """Tasks per second between the step `first` and the last full one."""
    per_step, full = job["tasks_RS"].sum(axis=0), full_steps(job)
    full = full[full >= first]
    seconds = job["times_s"][full[-1]] - job["times_s"][full[0]]
    return float(per_step[full[0] + 1 : full[-1] + 1].sum() / seconds)


def balanced_from(job: dict[str, Any]) -> int:
    """The first step at which the last rank's share is what it is at the end."""
    shares, full = job["tasks_RS"][SLOW_RANK], full_steps(job)
    last = shares[full[-1]]
    return int(next(step for step in full if abs(int(shares[step]) - int(last)) <= 1))


def predicted(
    cause: str, task_s: float, step_ms: float, slow_factor: float, num_steps: int
) -> float:
    """What the simulator says of the same job: speed-up once the shares are in force."""
    job = JobConfig(
        num_workers=RANKS,
        tasks_per_worker=TASKS_PER_RANK,
        num_steps=10 * num_steps,
        task_ms=1000 * task_s,
        read_ms=step_ms / TASKS_PER_RANK if cause == "reader" else 0.0,
        overhead_ms=max(0.0, step_ms - 1000 * task_s * TASKS_PER_RANK),
        jitter=0.02,
        steps_per_shard=1,
        heartbeat_s=1.0,
        restart_stops_job=True,
        monitor=MonitorConfig(window_s=1.0),
    )
    part: Literal["moment", "reader"] = "reader" if cause == "reader" else "moment"

    def slow() -> Trace:
        """From the first moment, and without end."""
        return Trace(np.ones(RANKS), [Change(0.0, SLOW_RANK, slow_factor, part)], 0.0, 0)

    static: Outcome = run_static(job, slow())
    return static.completion_s / run_antdt("nd", job, slow()).completion_s


def compare(
    healthy: Job, cause: str, healthy_step_ms: float, static_steps: int, antdt_steps: int
) -> dict[str, Any]:
    """A static split and ND with one slow rank: speeds, verdicts, losses, prediction."""
    read_task_s = SLOWDOWN * healthy_step_ms / TASKS_PER_RANK / 1000
    slow = replace(healthy, is_stopped=True)
    if cause == "reader":
        slow = replace(healthy, read_task_s=read_task_s)
    static = run(replace(slow, max_steps=static_steps))
    antdt = run(replace(slow, policy="nd", max_steps=antdt_steps))
    steady, whole = rate(antdt, balanced_from(antdt)), rate(antdt)
    static_step_ms = 1000 * RANKS * TASKS_PER_RANK / rate(static)
    slow_factor = static_step_ms / healthy_step_ms
    simulated = predicted(
        cause, healthy.task_s, healthy_step_ms, slow_factor, len(antdt["times_s"])
    )
    static_losses, antdt_losses = late_losses(static, antdt)
    # Standard error of the mean: more than a few of it apart would be no chance.
    noise = float(static_losses.std() / np.sqrt(len(static_losses)))
    return {
        "speedup_vs_static": round(steady / rate(static), 2),
        "speedup_with_detection": round(whole / rate(static), 2),
        "simulator_predicts": round(simulated, 2),
        "slow_factor_measured": round(slow_factor, 2),
        "verdicts": {name: " ".join(said) for name, said in antdt["verdicts"].items()},
        "final_share_of_slow_rank": int(antdt["tasks_RS"][SLOW_RANK][balanced_from(antdt)]),
        "loss_static": round(float(static_losses.mean()), 4),
        "loss_antdt": round(float(antdt_losses.mean()), 4),
        "loss_noise": round(noise, 4),
        "audit_ok": static["audit_ok"] and antdt["audit_ok"],
        "agent_ms_per_step": round(antdt["agent_ms"], 3),
    }


def compare_hardware(healthy: Job) -> dict[str, Any]:
    """A static split, the best one and DD on two generations of hardware."""
    job = replace(healthy, hardware=HARDWARE, max_steps=10**9)
    static = run(replace(job, max_steps=10))
    best = run(replace(job, policy=f"{Path(__file__).resolve()}:know_best"))
    dd = run(replace(job, policy="dd"))
    steady = {name: rate(one, balanced_from(one)) for name, one in (("dd", dd), ("best", best))}
    shares = dd["tasks_RS"][:, full_steps(dd)[-1]]
    slowest = max(np.multiply(shares, HARDWARE))
    return {
        "split_of_best": round(float(max(np.multiply(BEST_SHARES, HARDWARE)) / slowest), 3),
        "dd_of_best": round(steady["dd"] / steady["best"], 3),
        "speedup_vs_static": round(steady["dd"] / rate(static), 2),
        "shares": shares.tolist(),
        "shares_of_best": best["tasks_RS"][:, full_steps(best)[-1]].tolist(),
        "audit_ok": dd["audit_ok"] and best["audit_ok"],
    }


def main() -> None:
    keep_socket_paths_short()
    # The imports cost seconds a rank: once is enough.
    multiprocessing.set_forkserver_preload(["gmeta.feeds.agent", "gmeta.build"])
    forkserver.ensure_running()  # beside the preparation of the data
    arguments = make_parser(__doc__ or "").parse_args()
    num_tasks = 1536 if arguments.quick else 2560
    # With --quick no job reaches the end of the data, where some ranks have nothing left to do.
    static_steps, antdt_steps = (10, 20) if arguments.quick else (10**9, 10**9)
    causes = ["compute"] if arguments.quick else ["compute", "reader"]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "clicks"
        made = SyntheticConfig(num_tasks=num_tasks, num_items=200, min_rows=12, max_rows=16)
        prepare_synthetic(str(data), made)
        job = Job(data, TASK_S, max_steps=10 if arguments.quick else 20)
        # The median: one hiccup in so few steps would spoil what the simulator is told.
        healthy_step_ms = 1000 * float(np.median(np.diff(run(job)["times_s"])))
        figures = {
            cause: compare(job, cause, healthy_step_ms, static_steps, antdt_steps)
            for cause in causes
        }
        hardware = {} if arguments.quick else {"dd": compare_hardware(job)}
    agent_ms = max(one["agent_ms_per_step"] for one in figures.values())
    finish(
        "straggler",
        {
            "speedup_vs_static": figures["compute"]["speedup_vs_static"],
            "ideal": round(SLOWDOWN * (RANKS - 1 + 1 / SLOWDOWN) / RANKS, 2),
            "healthy_step_ms": round(healthy_step_ms, 1),
            "agent_share_of_a_50_ms_step": round(agent_ms / 50, 4),
            **figures,
            **hardware,
            **environment(("torch", "torchrec")),
        },
    )


if __name__ == "__main__":
    main()
