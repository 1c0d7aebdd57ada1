"""A toy synchronous job under torchrun: its weights count how often each unit was trained.

torchrun ... toy_job.py SERVICE FOLDER NUM_UNITS MAX_STEPS

It does what a trainer does: restore, lease, train, flush, prepare, save, rename, commit, stop in
step."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from gmeta.antdt.client.client import ShardClient
from gmeta.antdt.client.lease import EndOfEpoch, Lease, WaitFor
from gmeta.antdt.manifests.shard_manifest import load_manifest
from gmeta.antdt.model import DatasetSpec

UNITS_A_STEP = 3
CHECKPOINT_EVERY_STEPS = 4
STEP_S = 0.02


def latest(folder: Path) -> Path | None:
    found = sorted(folder.glob("step-*"))
    return found[-1] if found else None


def connect(
    address: str, folder: Path, rank: int, weights: torch.Tensor
) -> tuple[ShardClient, int]:
    """Rank 0 rolls the service to the newest checkpoint; the others join the next generation."""
    checkpoint = latest(folder)
    step = 0
    if checkpoint is not None:
        weights.copy_(torch.load(checkpoint / "weights.pt"))
        step = int(checkpoint.name.removeprefix("step-"))
    if rank != 0:
        weights.zero_()  # each rank's share of the sum; rank 0 carries the checkpoint's
        dist.barrier()
        return ShardClient(address, f"rank{rank}"), step
    client = ShardClient(address, "rank0")
    client.register_dataset(DatasetSpec("toy", weights.numel(), 4, seed=3))
    client.restore(load_manifest(checkpoint) if checkpoint else None)
    dist.barrier()
    return client, step


def save(client: ShardClient, folder: Path, rank: int, step: int, weights: torch.Tensor) -> None:
    """All ranks have flushed; the rename is the one commit point."""
    total = weights.clone()
    dist.all_reduce(total)
    if rank != 0:
        return
    manifest = client.prepare_checkpoint(f"step-{step:06d}", step)
    temporary = folder / f"tmp-{os.getpid()}-{step}"
    temporary.mkdir()
    torch.save(total, temporary / "weights.pt")
    manifest.save(temporary)
    temporary.rename(folder / f"step-{step:06d}")
    client.commit_checkpoint(manifest)


def train_some(client: ShardClient, held: list[Lease], weights: torch.Tensor) -> bool:
    """One step's worth of units; returns whether this rank has seen the end."""
    held[:] = [lease for lease in held if not lease.finished]
    if not held:
        answer = client.lease("toy", 0, 2)
        if isinstance(answer, EndOfEpoch):
            return True
        if not isinstance(answer, WaitFor):
            held.extend(answer)
    for lease in held[:1]:
        number = min(UNITS_A_STEP, lease.num_units - lease.units_done)
        first = lease.start_unit + lease.units_done
        weights[first : first + number] += 1
        lease.advance(number)
    return False


def main() -> None:
    address, folder, num_units, max_steps = (
        sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]),
    )  # fmt: skip
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    weights = torch.zeros(num_units)
    client, step = connect(address, folder, rank, weights)
    first_step, held = step, []
    while True:
        ended = torch.tensor([int(train_some(client, held, weights))])
        time.sleep(STEP_S)
        client.flush()
        step += 1
        dist.all_reduce(ended)
        all_ended = int(ended) == dist.get_world_size()
        out_of_steps = step - first_step >= max_steps
        if step % CHECKPOINT_EVERY_STEPS == 0 or all_ended or out_of_steps:
            dist.barrier()  # every rank has flushed
            save(client, folder, rank, step, weights)
            dist.barrier()  # nobody moves on before the manifest is taken
        if all_ended or out_of_steps:
            break
    client.close()
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a normal exit


if __name__ == "__main__":
    main()
