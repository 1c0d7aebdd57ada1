"""A plain PyTorch loop that leases its data from the shard service: every row is trained exactly
once, whatever is killed.

    gmeta shard-service --insecure --store sqlite:///shards.db &
    python examples/shard_client_loop.py 127.0.0.1:7070 runs/loop

Kill it (-9) at any moment and start it again: it resumes from the last checkpoint, and no row is
trained twice. With several ranks only rank 0 calls restore, prepare_checkpoint and
commit_checkpoint (docs/antdt.md).
"""

import sys
from pathlib import Path

import torch

from gmeta.antdt import DatasetSpec, ShardClient, load_manifest

NUM_ROWS = 4_000


def row(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features and target of a row; stands in for your dataset."""
    features = torch.randn(8, generator=torch.Generator().manual_seed(number))
    return features, features.sum()


def main(address: str, folder: Path, worker_id: str = "rank0") -> None:
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = max(folder.glob("step-*"), default=None)
    if checkpoint is not None:
        model.load_state_dict(torch.load(checkpoint / "model.pt"))
    with ShardClient(address, worker_id) as client:
        client.register_dataset(DatasetSpec("rows", NUM_ROWS, units_per_shard=256, seed=1))
        client.restore(load_manifest(checkpoint) if checkpoint else None)
        step = int(checkpoint.name.removeprefix("step-")) if checkpoint else 0
        loss = torch.tensor(torch.nan)  # stays so if the checkpoint holds the whole epoch
        for lease in client.shards("rows"):
            for number in lease.units():
                features, target = row(number)
                loss = (model(features) - target).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                lease.advance(1)  # this row is in the model now
                step += 1
                if step % 500 == 0:
                    save(client, model, folder, step)
        save(client, model, folder, step)
    print(f"trained {step} rows, last loss {loss.item():.6f}")


def save(client: ShardClient, model: torch.nn.Module, folder: Path, step: int) -> None:
    """Save model and manifest under one rename, so that they agree whenever a crash comes."""
    client.flush()
    manifest = client.prepare_checkpoint(f"step-{step:08d}", step)
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    torch.save(model.state_dict(), temporary / "model.pt")
    manifest.save(temporary)
    target = folder / f"step-{step:08d}"
    if not target.exists():
        temporary.rename(target)
    client.commit_checkpoint(manifest)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
