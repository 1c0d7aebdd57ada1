"""Two ranks of `gmeta train` for gpu.py: NCCL carries rows and gradients between them. Their losses
stand beside those of two ranks of the CPU.

Each rank has a GPU of its own; where there is only one they share it, which NCCL allows from 2.30
on (NCCL_MULTI_RANK_GPU_ENABLE). An older torch takes a newer NCCL by LD_PRELOAD."""

import os
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from _common import available_cores
from _gpu_train import SMALL, compared, finish_train, readings_of, start_train

from metaio.recipes.synthetic import SyntheticConfig, prepare_synthetic

RANKS = 2
RUNS: dict[str, list[str]] = {
    "maml": [],
    "maml, graphs": ["run.cuda_graphs=on"],
    "plain": ["algorithm.name=none"],
    "embeddings adapt, graphs": ["algorithm.adapt_embeddings=true", "run.cuda_graphs=on"],
    "clipped, micro-batches": ["outer.clip_norm=0.1", "outer.accumulate_steps=2"],
    "adam on tables, graphs": ["outer.sparse_optimizer=adam", "run.cuda_graphs=on"],
    "bf16 on the wire": ["sharding.wire_dtype=bfloat16"],
    "bf16, graphs": ["run.precision=bf16", "run.cuda_graphs=on"],
}


def ranks_agree(device: str, quick: bool) -> dict[str, Any]:
    """Train on two ranks of each device; return how far the losses are from each other, by run, and
    which of them are too far."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        prepare_synthetic(str(data), SyntheticConfig(num_tasks=400, num_items=60))
        names = list(RUNS)[:: 4 if quick else 1]

        def readings(name: str, is_expected: bool) -> list[float]:
            on = "cpu" if is_expected else device
            # What is CUDA's alone makes no difference to what is computed.
            keys = [key for key in RUNS[name] if not is_expected or "cuda_graphs" not in key]
            run = Path(folder, "runs", f"{name}-{is_expected}")
            _train(run, data, on, keys)
            return readings_of(run)

        # Those of the CPU beside the others, of which two at a time would wait for one GPU.
        with ThreadPoolExecutor(max(1, len(available_cores()) // 4)) as pool:
            of_cpu = {name: pool.submit(readings, name, True) for name in names}
            far, wrong = compared(
                "two ranks", names, lambda name: (of_cpu[name].result(), readings(name, False))
            )
    return {"far": far, "wrong": wrong, "gpus": torch.cuda.device_count()}


def _train(run: Path, data: Path, device: str, keys: list[str]) -> None:
    """Run `gmeta train` on all ranks, as torchrun would start them."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    gpus = max(torch.cuda.device_count(), 1)
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if gpus < RANKS else {}
    ranks = []
    for rank in range(RANKS):
        where = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank % gpus, "MASTER_PORT": port}
        environment = {name: str(value) for name, value in where.items()} | shared
        environment |= {"MASTER_ADDR": "localhost", "OMP_NUM_THREADS": "2"}
        ranks.append(start_train(run, data, device, [*SMALL, *keys], os.environ | environment))
    try:
        for process in ranks:
            finish_train(process)
    finally:
        for process in ranks:
            process.kill()
