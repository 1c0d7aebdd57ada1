"""Two hosts with a slow link between them: tables sharded over all ranks against a copy on each.

Two network namespaces with two ranks each, and between them cables whose speed `tc` limits. The
same steps in turns: tables sharded over all four ranks; a copy in each host's group of two, which
every step updates alike (exact); one that groups average every ten steps, at once, and beside the
next ten. The bytes are those that the kernel counts on a host's interface, with all headers.
`bytes_over_bound` compares them, in the exact steps, with what must cross at least: the distinct
rows that a group touches, once each. The layers' AllReduce, the same whatever the tables do, is
taken off by arithmetic. `speedup`, `speedup_every_10` and `speedup_beside` are the time of a step
over all ranks by that of the others, round by round; an average beside the steps that follow costs
no time here. Processors matter little: ranks wait for the link."""

import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import REPOSITORY, environment, finish, make_parser, print_table
from _synthetic import even_sizes, random_batch, single_id_features
from scaling import FLOAT32, LARGE, Rank, Workload, compacted, replace

sys.path.insert(0, str(REPOSITORY))

from gmeta.config.sharding import ShardingConfig
from gmeta.config.train_config import OuterConfig
from gmeta.distributed.cluster_spec import Cluster, Speeds
from gmeta.distributed.groups.costs import TouchedCounts, with_groups
from gmeta.distributed.ranks import barrier, start_ranks
from gmeta.distributed.sharding_estimate import LAYERS, NETWORK, StepWork, estimate
from gmeta.distributed.sharding_plan import describe_plan, merge_plans, plan_on
from gmeta.distributed.steps import batch_without_tasks, iterate_steps
from gmeta.distributed.unsharded import make_unsharded_tables
from gmeta_models import ModelConfig
from tests.deploy.network import INTERFACE, Host, NoNamespacesError, hosts

HOSTS, RANKS_OF_HOST = 2, 2
WORLD = HOSTS * RANKS_OF_HOST
STEPS = 10  # of a turn: one average of the groups that go by themselves
WAYS = {
    "over all ranks": {},
    "a copy a host, exact": {"groups": HOSTS},
    "a copy a host, every 10 steps": {"groups": HOSTS, "sync_every": STEPS},
    "the same, beside steps": {"groups": HOSTS, "sync_every": STEPS, "overlap_sync": True},
}
FLAT, EXACT, LOCAL, BESIDE = WAYS
WORK = replace(LARGE, rows_of_tables=(20_000,) * 8)
SKEW = 2.0  # the tenth of the ids that is most frequent has a third of the rows
RATE = "50mbit"


class Turn(NamedTuple):
    """What a rank saw of a turn; sums over its steps."""

    step_s: float
    host_bytes: float  # that its host sent, a step
    row_bytes: float  # of the distinct rows that its group touched in its shard, a step
    losses: list[float]


class Way:
    """One way to hold the tables, on one rank."""

    def __init__(self, work: Workload, ranks: Any, sharding: dict[str, int]) -> None:
        self.rank = Rank(work, ranks, FLOAT32, **sharding)
        support, query = (even_sizes(work.tasks, rows) for rows in work.rows)
        features = self.rank.features
        self.rank.batches = [
            random_batch(features, support, query, seed, SKEW) for seed in range(STEPS)
        ]
        self.shares = self.rank.shares(ranks.rank, WORLD)
        self.steps, self.touched = 0, 0
        exchange: Any = self.rank.sharded.local.exchange
        if (copies := exchange.copies) is not None:
            heard = copies.touch

            def touch(rows_G: Any) -> Any:
                self.touched += sum(
                    rows.size * group.width * 4
                    for rows, group in zip(rows_G, exchange.groups, strict=True)
                )
                return heard(rows_G)

            copies.touch = touch

    def run(self) -> Turn:
        """Take every step once."""
        rank, losses = self.rank, []
        self.touched = 0
        barrier(rank.ranks)
        before, began = sent_bytes(), time.perf_counter()
        steps = iterate_steps(
            map(rank.learner.collate, self.shares),
            rank.learner.collate(batch_without_tasks(rank.features)),
            rank.ranks,
            sharded=rank.sharded,
            begin=lambda: rank.optimizer.begin_step(self.steps, 10**6),
        )
        for episodes, totals in steps:
            loss = rank.sharded(episodes, WORLD / totals.num_terms)
            loss.backward()
            rank.optimizer.step()
            self.steps += 1
            losses.append(loss.item())
        barrier(rank.ranks)
        elapsed = time.perf_counter() - began
        # An average that would go on beside the next steps: its bytes are of this turn.
        rank.optimizer.sync()
        barrier(rank.ranks)
        sent = sent_bytes() - before
        return Turn(elapsed / STEPS, sent / STEPS, self.touched / STEPS, losses)


def estimated_bytes(work: Workload, num_weights: int) -> dict[str, float]:
    """What a host sends in a step of each way as `gmeta plan` has it, from counted ids."""
    features = single_id_features(len(work.rows_of_tables), work.rows_of_tables)
    support, query = (even_sizes(work.tasks, rows) for rows in work.rows)
    batches = [random_batch(features, support, query, seed, SKEW) for seed in range(STEPS)]
    names = [table.name for table in features.tables]

    def distinct(part: int, parts: int, steps: int) -> dict[str, float]:
        """Distinct ids of each table in one part of so many steps in a row, on average."""
        share = slice(work.tasks * part // parts, work.tasks * (part + 1) // parts)
        shares = [compacted(one.tasks(share.start, share.stop)) for one in batches]
        counts = []
        for first in range(0, STEPS, steps):
            ids_B = [
                torch.split(one.unique_ids_U, one.unique_lengths_B.tolist())
                for one in shares[first : first + steps]
            ]
            counts.append([torch.cat(ids).unique().numel() for ids in zip(*ids_B, strict=True)])
        return dict(zip(names, np.mean(counts, axis=0).tolist(), strict=True))

    outer, cluster = OuterConfig(), Cluster(WORLD, RANKS_OF_HOST, "cpu")
    rows = sum(work.rows) * work.tasks / WORLD
    step = StepWork(work.tasks / WORLD, rows, distinct(0, WORLD, 1), 0.0, num_weights)
    model = ModelConfig(embedding_dim=work.width)
    sizes = {table.name: (table.num_rows, work.width) for table in features.tables}
    speeds, found = Speeds(1.0, 1.0, 1.0, 1.0, 1.0), {}
    for name, keys in WAYS.items():
        sharding = ShardingConfig(**keys)
        group = cluster.group_of(sharding.groups)
        tables = make_unsharded_tables(features, model, outer)
        placed = merge_plans(plan_on(tables, sharding, work.tasks, group))
        plan = describe_plan(placed, group.world_size, sharding)
        told = estimate(plan, sizes, sharding, outer, step, group, speeds)
        if sharding.groups > 1:
            every = sharding.sync_every
            touched = TouchedCounts(distinct(0, HOSTS, every), distinct(0, 1, every))
            told = with_groups(told, touched, sizes, sharding, outer, step, cluster, speeds)
        far = {part: sent for part, (sent, _) in told.parts.items() if part.endswith(NETWORK)}
        # Of a ring over all ranks one of a host's sends beyond it, of an AlltoAll each.
        found[name] = sum(
            sent * (1 if part.startswith(LAYERS) else RANKS_OF_HOST) for part, sent in far.items()
        )
    return found


def sent_bytes() -> int:
    """Bytes that this namespace's interface has sent."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    raise SystemExit(f"no interface {INTERFACE} in this namespace")


def work_on_rank(
    rank: int, folder: str, work: Workload, rounds: int, machines: tuple[Host, ...]
) -> None:
    """Take turns, and leave what was found in the folder."""
    machines[rank // RANKS_OF_HOST].enter()
    torch.set_num_threads(1)
    of_job = {"RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_RANK": rank % RANKS_OF_HOST}
    os.environ.update({name: str(value) for name, value in of_job.items()})
    os.environ.update(LOCAL_WORLD_SIZE=str(RANKS_OF_HOST), GLOO_SOCKET_IFNAME=INTERFACE)
    ranks = start_ranks("cpu", 300, dist.FileStore(os.path.join(folder, "store"), WORLD))
    ways = {name: Way(work, ranks, sharding) for name, sharding in WAYS.items()}
    found: dict[str, list[Turn]] = {name: [] for name in ways}
    for _ in range(rounds + 1):  # the first warms up
        for name, way in ways.items():
            found[name].append(way.run())
    layers = sum(weight.numel() for weight in ways[FLAT].rank.learner.parameters())
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps((found, layers)))
    os._exit(0)  # gloo's threads may abort an interpreter that ends in order


def measure(work: Workload, rounds: int, rate: str) -> dict[str, Any]:
    """Bytes and seconds of all ways over links of this speed."""
    with hosts(HOSTS + 1) as machines, tempfile.TemporaryDirectory() as folder:
        ends = tuple(machines[1:])  # the first is the hub
        for host in ends:
            shaper = ("tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", rate)
            burst = ("burst", "128kb", "latency", "1000ms")
            subprocess.run(host.command(*shaper, *burst), check=True)
        mp.spawn(work_on_rank, (folder, work, rounds, ends), nprocs=WORLD)
        pickled = [Path(folder, f"{rank}.pickle").read_bytes() for rank in range(WORLD)]
    found, layers = zip(*map(pickle.loads, pickled), strict=True)
    return {**compared(found, layers[0]), "estimated_bytes": estimated_bytes(work, layers[0])}


def compared(found: tuple[dict[str, list[Turn]], ...], num_weights: int) -> dict[str, Any]:
    """Figures of all turns but the first."""
    step_s = {
        name: np.max([[t.step_s for t in one[name][1:]] for one in found], axis=0).tolist()
        for name in WAYS
    }
    # The ranks of a host see the same interface.
    host_bytes = {
        name: statistics.mean(t.host_bytes for one in found for t in one[name][1:]) for name in WAYS
    }
    # A ring over all ranks leaves each host once; what is not the tables' is the same everywhere.
    layer_bytes = 2 * num_weights * 4 * (WORLD - 1) / WORLD
    rows = RANKS_OF_HOST * statistics.mean(t.row_bytes for one in found for t in one[EXACT][1:])
    losses = {
        name: np.mean([[t.losses for t in one[name]] for one in found], axis=0) for name in WAYS
    }
    return {
        "step_ms": {name: 1e3 * statistics.median(times) for name, times in step_s.items()},
        "host_bytes": host_bytes,
        "layer_bytes": layer_bytes,
        "bound_bytes": rows,
        "bytes_over_bound": (host_bytes[EXACT] - layer_bytes) / rows,
        "bytes_over_all_ranks": host_bytes[FLAT] / host_bytes[EXACT],
        "bytes_every_10": host_bytes[FLAT] / host_bytes[LOCAL],
        "speedup": ratio(step_s[FLAT], step_s[EXACT]),
        "speedup_every_10": ratio(step_s[FLAT], step_s[LOCAL]),
        "speedup_beside": ratio(step_s[FLAT], step_s[BESIDE]),
        "loss_difference": float(np.abs(losses[FLAT] - losses[EXACT]).max()),
    }


def ratio(above: list[float], below: list[float]) -> float:
    """Round by round, so that both sides are of the same minute."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rate", default=RATE, help="of a cable, as tc writes it: 200mbit")
    options = parser.parse_args()
    rounds = options.rounds or (2 if options.quick else 7)
    try:
        found = measure(WORK, rounds, options.rate)
    except (NoNamespacesError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"groups needs network namespaces and tc's tbf, as root: {error}"
        ) from error
    print(f"{HOSTS} hosts of {RANKS_OF_HOST} ranks, {options.rate} between them")
    lines = [
        [
            name,
            f"{found['step_ms'][name]:.0f}",
            f"{found['host_bytes'][name] / 1e6:.2f}",
            f"{found['estimated_bytes'][name] / 1e6:.2f}",
        ]
        for name in WAYS
    ]
    print_table(["tables", "ms a step", "MB a host and step", "as gmeta plan says"], lines)
    finish("groups", {**environment(), "rounds": rounds, "rate": options.rate, **found})


if __name__ == "__main__":
    main()
