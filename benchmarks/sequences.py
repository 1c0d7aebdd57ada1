"""What behaviour sequences cost.

`memory_ratio_2_ranks`: the memory of one training step of a causal transformer over one task of
10,000 events, forward, backward and update: of the rank that needs more of two, each with half of
the sequence, against a single process. Of each the highest resident memory of the step above that
of the idle process, which has imported all, joined the group and taken a step of 64 events; freed
memory goes back to the system at once, while a run's malloc keeps it. Without `--quick` the ring
too, and four ranks.

`bytes_ratio`: bytes of a split whose tasks have 30 rows and 200 events before them, over those of
the same rows with a list of the last 200 in each. `step_speedup`: a training step over `sasrec`
that encodes the events once a task, against the same encoder run for every row. `search_speedup`:
`sim` by category against attention to all of 10,000 events. `append_speedup`: one event appended to
the states of 999, against encoding 1,000. `served_append_speedup`, `served_append_bytes_ratio`: a
request to `gmeta serve` that appends one event to a kept task, against one that sends 1,000 anew,
by time and bytes. With `--next-item DIR`, which has S3-Rec's files of
Beauty and LastFM and of their items' attributes: `beauty_hr10`, `beauty_ndcg10`, `lastfm_hr10`,
`lastfm_ndcg10` over the whole catalogue by examples/next-item.toml, means over the seeds."""

import ctypes
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import environment, finish, make_parser, print_table
from _sequence_figures import measure_all
from _sequence_next_item import measure_next_item
from _served_events import measure_served_append
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, gelu

from gmeta.config.sharding import SequenceKind
from gmeta.distributed.ranks import Ranks, add_over_ranks, barrier, start_ranks
from gmeta.distributed.sequence.encode import Slices, encode_over_ranks
from gmeta.distributed.sequence.sharding import shard_sequences
from gmeta.platform.numerics import M_MMAP_THRESHOLD

EVENTS, WIDTH, HEADS, BLOCKS, ROWS = 10_000, 128, 4, 2, 30


class Block(nn.Module):
    """A pre-norm block: attention to what was before, then a layer at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, states: Tensor, slices: Slices) -> Tensor:
        parts = self.inputs(self.norms[0](states)).unflatten(2, (3, HEADS, -1))
        attended = slices.softmax(*parts.permute(2, 0, 3, 1, 4))
        states = states + self.output(attended.transpose(1, 2).flatten(2))
        return states + self.narrow(gelu(self.wide(self.norms[1](states))))


def train_step(
    blocks: nn.ModuleList, head: nn.Linear, events: int, kind: SequenceKind, ranks: Ranks
) -> None:
    """One step of SGD. Rank 0 has the task, and rows that know of more and more of its events; the
    others have neither. The events' embedding rows have a gradient, as those of a step have."""
    sharding = shard_sequences(kind, HEADS, ranks)
    num_tasks = int(ranks.rank == 0)
    fetched = torch.randn(num_tasks * events, WIDTH, requires_grad=True)
    lengths = torch.full((num_tasks,), events)
    inputs = fetched.view(num_tasks, events, WIDTH)
    states = encode_over_ranks([*blocks], inputs, lengths, sharding, ranks)
    logits = head(states[:, torch.linspace(0, events - 1, ROWS).long()]).flatten()
    label = (torch.arange(len(logits)) % 2).float()
    loss = binary_cross_entropy_with_logits(logits, label, reduction="sum")
    del states
    loss.backward()
    for weight in [*blocks.parameters(), *head.parameters()]:
        grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        add_over_ranks(grad, ranks)
        weight.data.sub_(grad, alpha=1e-3)
        weight.grad = None


def resident_bytes(field: str) -> int:
    """VmRSS: now; VmHWM: the most since the last reset."""
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if field in s)
    return int(line.split()[1]) * 1024


def _measure(rank: int, world_size: int, kind: SequenceKind, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    ranks = start_ranks("cpu", timeout_s=300, store=store)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    torch.manual_seed(0)
    blocks, head = nn.ModuleList(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 1)
    train_step(blocks, head, 64, kind, ranks)  # buffers of libraries, connections
    barrier(ranks)
    idle = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    train_step(blocks, head, EVENTS, kind, ranks)
    Path(folder, str(rank)).write_text(str(resident_bytes("VmHWM") - idle))
    barrier(ranks)
    os._exit(0)  # gloo's threads may abort the interpreter at exit


def measure_memory(world_size: int, kind: SequenceKind) -> float:
    """Peak memory of the step on the rank that needs most of so many, in MB."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_measure, (world_size, kind, folder), world_size)
        return max(int(Path(folder, str(rank)).read_text()) for rank in range(world_size)) / 2**20


def measure_memory_ratio(quick: bool = True) -> dict[str, float]:
    """Memory of the step on one process, and of the largest rank of several relative to it."""
    alone = measure_memory(1, "none")
    figures = {"memory_mb": alone, "memory_ratio_2_ranks": measure_memory(2, "both") / alone}
    if not quick:
        figures["memory_ratio_2_ranks_ring"] = measure_memory(2, "ring") / alone
        figures["memory_ratio_4_ranks"] = measure_memory(4, "both") / alone
        figures["memory_ratio_4_ranks_ring"] = measure_memory(4, "ring") / alone
    return figures


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--next-item", type=Path, metavar="DIR", help="folder of beauty and lastfm")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each log")
    options = parser.parse_args()
    figures = measure_memory_ratio(options.quick) | measure_all(options.quick)
    figures |= measure_served_append(20 if options.quick else 100)
    if options.next_item is not None:
        figures |= measure_next_item(options.next_item, options.seeds)
    print_table(["figure", "value"], [[name, f"{value:.3g}"] for name, value in figures.items()])
    finish("sequences", {**figures, "quick": options.quick, "environment": environment()})


if __name__ == "__main__":
    main()
