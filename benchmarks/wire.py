"""Bytes on the wire of a training step, by kind, beside the least possible and a naive scheme.

Counted by the kernel: the bytes that TCP received on the sockets of every process group, the
headers of gloo's messages included, summed over all ranks. The bound is what a step of this data
must move if it moves each row once: deduplicated rows x width x bytes x (N-1)/N out and their
gradients back, and 2 K (N-1)/N values a rank for the AllReduce of K layer weights. In first order
(fomaml) only rows that query rows use have a gradient to send back. It counts no ids, numbers of
ids or totals. The batches name every row once, as those of one block or bundle do; of several, an
id travels once for each. The naive scheme looks up support and query rows apart, an id for
every row and feature, in 8 bytes each and float32, and gathers the layers' gradients at one rank,
which sends the sums back.

N ranks, K weights of the layers.
"""

import os
import socket
import tempfile
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import environment, finish, make_parser, print_table
from _synthetic import even_sizes, random_batch, single_id_features

from gmeta.adaptation.config import AlgorithmConfig
from gmeta.config import TrainConfig
from gmeta.learner import MetaLearner
from gmeta.outer.optimizers import build_optimizer
from gmeta.parallel.ranks import start_ranks
from gmeta.parallel.sharding import shard_learner
from gmeta.parallel.steps import in_step
from gmeta.parallel.together import no_tasks
from gmeta.tables.sharding import ShardingConfig
from gmeta_models import InputSizes, ModelConfig, build_model

WIDTH, TASKS, ROWS = 32, 128, 10
# Tables of a click log: from the hour of the day to the item.
ROWS_OF_TABLES = [round(24 * 10 ** (index * 3.6 / 25)) for index in range(26)]
SKEW = 2.0
STEPS = 3
PROBE_BYTES = 100_000  # to every peer: tells a group's sockets from those of the others
FLOAT_BYTES, ID_BYTES = 4, 8
# struct tcp_info, u64 tcpi_bytes_received: linux/tcp.h. (Acknowledgements come late.)
TCP_INFO_BYTES, RECEIVED_AT = 192, 128


def received_bytes() -> dict[int, int]:
    """Bytes received on each TCP socket of this process, by file descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            one = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # no socket, or the directory's own descriptor
        with one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
                found[int(name)] = int.from_bytes(info[RECEIVED_AT : RECEIVED_AT + 8], "little")
    return found


class WireCount:
    """Sums over all ranks of what arrives through each process group."""

    def __init__(self, groups: dict[str, dist.ProcessGroup]) -> None:
        self._control = groups["control"]
        self._group_of_socket: dict[int, str] = {}
        for name, group in groups.items():
            before = self._settled()
            probe = torch.zeros(group.size() * PROBE_BYTES // FLOAT_BYTES)
            dist.all_to_all_single(torch.empty_like(probe), probe, group=group)
            for fd, count in self._settled().items():
                if count - before.get(fd, 0) >= PROBE_BYTES:
                    self._group_of_socket[fd] = name

    def _settled(self) -> dict[int, int]:
        """Counts once everybody has all that was sent."""
        dist.barrier(group=self._control)
        return received_bytes()

    def of(self, work: Callable[[], object]) -> dict[str, int]:
        """Bytes by group that all ranks receive while every one of them does `work`."""
        before = self._settled()
        work()
        after = self._settled()
        received = dict.fromkeys(dict.fromkeys(self._group_of_socket.values()), 0)
        for fd, name in self._group_of_socket.items():
            received[name] += after[fd] - before[fd]
        total = torch.tensor(list(received.values()))
        dist.all_reduce(total, group=self._control)
        return dict(zip(received, total.tolist(), strict=True))


class TensorCount:
    """Bytes of the tensors given to AlltoAll, without a rank's own part, by kind."""

    def __init__(self) -> None:
        self.bytes = {"ids": 0, "rows": 0, "gradients": 0}
        self._swap = dist.all_to_all_single
        # No step looks up its rows before the one before it has sent its gradients.
        self._kinds = cycle(("rows", "gradients"))

    def of(self, work: Callable[[], object]) -> None:
        """Count these steps."""
        dist.all_to_all_single = self._counted
        try:
            work()
        finally:
            dist.all_to_all_single = self._swap

    def _counted(self, taken: torch.Tensor, given: torch.Tensor, *rest: Any, **named: Any) -> Any:
        kind = next(self._kinds) if given.is_floating_point() else "ids"
        self.bytes[kind] += given.numel() * given.element_size()
        return self._swap(taken, given, *rest, **named)


def naive_step(batch: Any, num_layer_weights: int, ranks: Any) -> None:
    """Support and query apart, an id for each row and feature, gradients gathered at rank 0."""
    # Rows of a rank, rounded up: tables are split into equal ranges of ids.
    block_F = -(-torch.tensor(ROWS_OF_TABLES) // ranks.world_size)
    owner_NF = batch.unique_ids_U[batch.positions_NF.long()] // block_F
    for side in (owner_NF[::2], owner_NF[1::2]):  # half of the rows each
        given = torch.bincount(side.reshape(-1), minlength=ranks.world_size)
        # What a rank keeps does not go over the wire.
        given[ranks.rank] = 0
        taken = torch.empty_like(given)
        dist.all_to_all_single(taken, given, group=ranks.rows)
        asked, answered = given.tolist(), taken.tolist()
        ids = torch.empty(sum(answered), dtype=torch.int64)
        dist.all_to_all_single(
            ids, torch.zeros(sum(asked), dtype=torch.int64), answered, asked, group=ranks.rows
        )
        rows, held = torch.zeros(sum(asked), WIDTH), torch.zeros(sum(answered), WIDTH)
        dist.all_to_all_single(rows, held, asked, answered, group=ranks.rows)
        dist.all_to_all_single(held, rows, answered, asked, group=ranks.rows)
    layers = torch.zeros(num_layer_weights)
    at_first = [torch.empty_like(layers) for _ in range(ranks.world_size)]
    dist.gather(layers, at_first if ranks.rank == 0 else None, dst=0)
    dist.broadcast(layers, src=0)


def count_on_rank(rank: int, world_size: int, folder: str, wire_dtype: str, algorithm: str) -> None:
    """One rank; rank 0 saves mean bytes a step of all ranks together."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    ranks = start_ranks("cpu", 300, store, shared_memory=False)  # as between hosts
    features = single_id_features(len(ROWS_OF_TABLES), ROWS_OF_TABLES)
    model = ModelConfig(
        name="dlrm", embedding_dim=WIDTH, hidden=(256, 128), options={"interaction": "cat"}
    )
    config = TrainConfig(
        model=model,
        algorithm=AlgorithmConfig(name=algorithm),
        sharding=ShardingConfig(wire_dtype=wire_dtype),
    )
    learner = MetaLearner(
        build_model(model, InputSizes(len(ROWS_OF_TABLES), 0, 0)), config.algorithm, "bce"
    )
    num_weights = sum(parameter.numel() for parameter in learner.parameters())
    sharded = shard_learner(learner, features, config, ranks)
    optimizer = build_optimizer(sharded, config.outer)
    share = even_sizes(TASKS // world_size, ROWS)
    batches = [
        random_batch(features, share, share, seed=100 * rank + i, skew=SKEW) for i in range(STEPS)
    ]

    def train() -> None:
        """The steps, as `gmeta train` runs them."""
        arranged, idle = map(learner.arrange, batches), learner.arrange(no_tasks(features))
        steps = in_step(arranged, idle, ranks, sharded=sharded)
        for episodes, totals in steps:
            sharded(episodes, world_size / totals.num_terms).backward()
            optimizer.step()

    # Warm-up: connections are opened, and their first bytes are not a step's.
    train()
    wire = WireCount({"control": ranks.control, "rows": ranks.rows, "dense": dist.group.WORLD})
    tensors = TensorCount()
    tensors.of(train)
    counted = torch.tensor(list(tensors.bytes.values()))
    dist.all_reduce(counted, group=ranks.control)
    by_kind = dict(zip(tensors.bytes, counted.tolist(), strict=True))
    ours = wire.of(train)
    naive = wire.of(lambda: [naive_step(batch, num_weights, ranks) for batch in batches])
    fetched = sum(batch.unique_ids_U.numel() for batch in batches)
    moved = torch.tensor([2 * fetched])  # rows out, gradients back
    dist.all_reduce(moved, group=ranks.control)
    remote = (world_size - 1) / world_size
    bytes_of = {"float32": FLOAT_BYTES}.get(wire_dtype, FLOAT_BYTES // 2)
    if rank == 0:
        bound_rows = moved.item() * WIDTH * bytes_of * remote
        # A ring: the sums go around once, and the results once.
        bound_dense = STEPS * world_size * 2 * num_weights * bytes_of * remote
        result = {
            **by_kind,
            "dense": ours["dense"],
            "rest": sum(ours.values()) - ours["dense"] - sum(by_kind.values()),
            "total": sum(ours.values()),
            "bound": bound_rows + bound_dense,
            "naive": sum(naive.values()),
        }
        torch.save({kind: n / STEPS for kind, n in result.items()}, os.path.join(folder, "out.pt"))
    # A rank that left would close the connections of those that still count.
    dist.barrier(group=ranks.control)
    # gloo's threads may abort an interpreter that ends in order.
    os._exit(0)


def count(world_size: int, wire_dtype: str, algorithm: str) -> dict[str, float]:
    """Mean bytes a step of all ranks together, by kind."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(count_on_rank, (world_size, folder, wire_dtype, algorithm), nprocs=world_size)
        result: dict[str, float] = torch.load(Path(folder) / "out.pt")
        return result


def main() -> None:
    options = make_parser(__doc__).parse_args()
    sizes, half_sizes = ([2, 4], [2]) if options.quick else ([2, 4, 8], [2, 4, 8])
    print(
        f"{len(ROWS_OF_TABLES)} tables of {ROWS_OF_TABLES[0]} to {ROWS_OF_TABLES[-1]:,} rows "
        f"x {WIDTH}, {TASKS} tasks of {ROWS} + {ROWS} rows a step; KB a step, all ranks together"
    )
    kinds = ["ids", "rows", "gradients", "dense", "rest", "total", "bound", "naive"]
    cases = [(n, "float32", "maml") for n in sizes]
    cases += [(n, "float32", "fomaml") for n in half_sizes]
    cases += [(n, "bfloat16", "maml") for n in half_sizes]
    found = {case: count(*case) for case in cases}
    lines = []
    for (n, *how), kb in found.items():
        ratios = [f"{kb['total'] / kb['bound']:.3f}", f"{kb['naive'] / kb['total']:.2f}"]
        name = " ".join([str(n), *how])
        lines.append([name, *(f"{kb[kind] / 1e3:,.0f}" for kind in kinds), *ratios])
    print_table(["ranks", *kinds, "to bound", "naive to ours"], lines)
    exact = [kb for (_, dtype, _), kb in found.items() if dtype == "float32"]
    finish(
        "wire",
        {
            "ratio_to_bound": max(kb["total"] / kb["bound"] for kb in exact),
            "naive_to_bound": min(kb["naive"] / kb["bound"] for kb in exact),
            "bytes_a_step": {" ".join(map(str, case)): kb for case, kb in found.items()},
            "environment": environment(("torch", "torchrec")),
        },
    )


if __name__ == "__main__":
    main()
