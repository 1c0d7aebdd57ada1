"""train() on the CPU and on the pretended GPU: its losses, and what each of its steps asked for."""

import json
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import gmeta.training as training
from gmeta.config.train_config import load_config
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.transport.transport import Transport
from tests.pretended.device import CUDA, HOST, Counts, PretendedDevice, counting, without_gpu
from tests.pretended.learner_steps import HEADS
from tests.pretended.mutants import MUTANTS
from tests.pretended.tables import stand_in

CONFIG = """
[data]
path = "{data}"
valid_split = "valid"
tasks_per_step = 40
processes = 0
[model]
name = "{model}"
embedding_dim = 8
hidden = [16, 8]
[algorithm]
name = "maml"
adapt_layers = ["{layers}"]
adapt_embeddings = false
[outer]
loss = "bce"
[run]
dir = "{run}"
epochs = 1
log_every_steps = 1
valid_every_steps = 3
checkpoint_every_steps = 2
cuda_graphs = "off"
"""

ONLY_ON_GPU = "data.processes", "sharding.placement"
PATIENCE = timedelta(seconds=60)  # of ranks that wait for each other


def ranks_on(device: torch.device) -> Ranks:
    """This process among those of its environment; gloo carries what NCCL would."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if not dist.is_initialized():
        folder = os.environ.get("PRETENDED_STORE")
        store = dist.FileStore(folder, world_size) if folder else dist.HashStore()
        dist.init_process_group(
            "gloo", timeout=PATIENCE, store=store, rank=rank, world_size=world_size
        )
    control, rows = dist.new_group(timeout=PATIENCE), dist.new_group(timeout=PATIENCE)
    return Ranks(rank, world_size, device, control, rows, Transport(rows, control))


def trained(
    folder: str, data: str, runs: dict[str, list[str]], mutant: str = ""
) -> dict[str, dict[str, Any]]:
    """Do these runs, each with keys of its own, on both; return what each shows, by its name: the
    readings of either, and the counts of every step on the GPU.

    A run with the key run.max_steps is done again without it, and so goes on from its checkpoint.
    On the CPU a run makes its batches itself: they are the same, and processes start for seconds.
    Under the mutant's name stand the counts of the last of them with it."""
    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))
    stand_in()
    found = {}
    for name, overrides in runs.items():
        cpu, cuda = Path(folder) / name / "cpu", Path(folder) / name / "cuda"
        rest = [one for one in overrides if not one.startswith("run.max_steps")]
        for part in [overrides, rest] if rest != overrides else [overrides]:
            alone = [
                one for one in part if not one.startswith(("data.processes", "sharding.placem"))
            ]
            of_cpu, _ = _run(HOST, cpu, data, alone)
            of_gpu, steps = _run(CUDA, cuda, data, part)
        found[name] = {"cpu": of_cpu, "cuda": of_gpu, "steps": _as_json(steps)}
    if mutant:
        with MUTANTS[mutant]():
            of_gpu, steps = _run(CUDA, Path(folder) / mutant, data, overrides)
        found[mutant] = {"cpu": [], "cuda": of_gpu, "steps": _as_json(steps)}
    return found


def everything(
    folder: str, data: str, runs: dict[str, list[str]], on_ranks: dict[str, list[str]],
    mutant: str,
) -> dict[str, Any]:  # fmt: skip
    """Return what `trained` does of some runs on one rank and, first, of others on two."""
    two = trained_on_ranks(f"{folder}/ranks", 2, data, on_ranks, mutant)
    return {"ranks": two, **trained(folder, data, runs)}


def trained_on_ranks(folder: str, world_size: int, *rest: Any) -> list[dict[str, Any]]:
    """Return what `trained` does on every rank."""
    Path(folder).mkdir()
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=_rank, args=(rank, world_size, folder, rest))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if codes := [rank.exitcode for rank in ranks if rank.exitcode]:
        raise RuntimeError(f"ranks ended with {codes}")
    return [json.loads(_told(folder, rank).read_text()) for rank in range(world_size)]


def _rank(rank: int, world_size: int, folder: str, rest: tuple[Any, ...]) -> None:
    place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {**place, "PRETENDED_STORE": f"{folder}/store"}
    _told(folder, rank).write_text(json.dumps(trained(folder, *rest)))
    os._exit(0)  # torch would free what it believes to be memory of a GPU


def _told(folder: str, rank: int) -> Path:
    return Path(folder, f"rank-{rank}.json")


def _as_json(steps: list[Counts]) -> list[dict[str, Any]]:
    return [
        asdict(one) | {"launches": one.num_launches, "graphs": one.launches["a graph"]}
        for one in steps
    ]


def _run(
    device: torch.device, run: Path, data: str, overrides: list[str]
) -> tuple[list[Any], list[Counts]]:
    run.parent.mkdir(parents=True, exist_ok=True)
    path = run.parent / f"{run.name}-{os.environ.get('RANK', '0')}.toml"
    named = {key: value for key, _, value in (one.partition("=") for one in overrides)}
    model = named.get("model.name", "melu")
    layers = HEADS.get(model, "decision.*")
    path.write_text(CONFIG.format(data=data, run=run, model=model, layers=layers))
    config = load_config(path, overrides)
    steps: list[Counts] = []
    with PretendedDevice() if device == CUDA else without_gpu(), _counting_steps(steps):
        training.train(config, ranks_on(device))
    metrics = run / "metrics.jsonl"
    readings = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [_of_model(one) for one in readings], steps


@contextmanager
def _counting_steps(steps: list[Counts]) -> Iterator[None]:
    """Add each step's counts: of its batch two steps ahead and of itself, not between steps."""
    in_step, step = training.iterate_steps, training.TrainingRun._step

    def batches(*rest: Any) -> Iterator[Any]:
        upcoming = in_step(*rest)
        while True:
            with counting(Counts(with_work=False)) as counts:
                item = next(upcoming, None)
            if item is None:
                return
            steps.append(counts)
            yield item

    def counted(self: Any, *rest: Any) -> Any:
        with counting(steps[-1]):
            return step(self, *rest)

    with (
        patch.object(training, "iterate_steps", batches),
        patch.object(training.TrainingRun, "_step", counted),
    ):
        yield


def _of_model(reading: dict[str, Any]) -> dict[str, Any]:
    """What of a reading the model decides, and not the clock."""
    if "valid" in reading:
        return {"step": reading["step"], "auc": reading["valid"]["auc"]}
    return {"step": reading["step"], "loss": reading["loss"]}
