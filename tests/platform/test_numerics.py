"""bfloat16 products: close to float32 in loss and gradient, for every algorithm and model; threads
for large steps only; memory that is kept."""

import ctypes
import random
import resource
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.errors import ConfigError
from gmeta.learner import MetaLearner
from gmeta.platform.numerics import M_MMAP_THRESHOLD, autocast, choose_products, keep_freed_memory
from gmeta.runs.build import build_learner
from gmeta_models import ModelConfig
from tests.support import reference
from tests.support.processes import with_imports_ready
from tests.support.refusals import catch_message

FEATURES = reference.some_features(3, 1, 2)
CPU = torch.device("cpu")
PR_SET_THP_DISABLE = 41  # <linux/prctl.h>


def loss_and_gradient(learner: MetaLearner, precision: str) -> tuple[float, torch.Tensor]:
    rng = random.Random(7)
    tasks = [reference.random_task(FEATURES, 6, 5, rng) for _ in range(24)]
    episodes = learner.collate(reference.batch_of(tasks, FEATURES).map(single))
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(episodes.unique_ids_U.numel(), 8, generator=generator).requires_grad_()
    with autocast(precision, CPU):
        loss = learner(rows, episodes, 1.0 / episodes.num_terms)
    grads = torch.autograd.grad(loss, [rows, *learner.parameters()], allow_unused=True)
    return loss.item(), torch.cat([grad.flatten() for grad in grads if grad is not None])


def single(values: torch.Tensor) -> torch.Tensor:
    return values.float() if values.is_floating_point() else values


@pytest.mark.parametrize("model", ["dlrm", "melu", "cbml"])
@pytest.mark.parametrize("algorithm", ["maml", "fomaml", "anil", "reptile", "metasgd", "none"])
@pytest.mark.parametrize("general", [False, True])
def test_bf16_is_close_to_float32(general: bool, algorithm: str, model: str) -> None:
    torch.manual_seed(0)
    learner = build_learner(
        FEATURES,
        ModelConfig(name=model, embedding_dim=8, hidden=(32, 16), options={"bottom": (16,)}),
        AlgorithmConfig(name=algorithm, inner_lr=0.1, inner_steps=2),
        "bce",
    )
    if general:
        learner.use_general_loop()
    loss, gradient = loss_and_gradient(learner, "float32")
    loss_16, gradient_16 = loss_and_gradient(learner, "bf16")
    assert gradient_16.dtype == torch.float32
    assert loss_16 != loss  # it does something
    # bfloat16 keeps 8 bits, 0.4 % a product; errors of many rows cancel in a loss of float32.
    assert loss_16 == pytest.approx(loss, rel=0.001)
    assert loss_16 != torch.tensor(loss_16).bfloat16().item()
    assert torch.cosine_similarity(gradient, gradient_16, dim=0) > 0.995


def test_tf32_is_chosen_on_cuda_and_left_again() -> None:
    products = torch.backends.cuda.matmul
    choose_products("tf32", torch.device("cuda"))
    assert products.fp32_precision == "tf32"
    choose_products("bf16", CPU)
    assert products.fp32_precision == "ieee"


def test_tf32_on_a_cpu_is_refused() -> None:
    assert catch_message(ConfigError, choose_products, "tf32", CPU) == (
        'run.precision = "tf32" needs CUDA, and this run computes on the cpu: only Nvidia GPUs '
        'multiply in it. Set "float32" or "bf16", or run.device = "cuda"'
    )


def faults_a_round(kept: int) -> float:
    """Page faults of a round of allocated, written and freed blocks, in a new process."""
    with ProcessPoolExecutor(1, with_imports_ready()) as pool:
        return pool.submit(faults_here, kept).result()


def faults_here(kept: int) -> float:
    # As glibc begins: it gives such blocks back to the system. Left to itself it learns not to, by
    # what a process happened to free before.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 << 10)
    # One fault would stand for hundreds where the system gives out huge pages unasked.
    ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
    if kept:
        assert keep_freed_memory(kept)
    for round_number in range(30):
        if round_number == 20:  # the heap has found its size
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [torch.ones(500_000 + 100_000 * i) for i in range(4)]
        del blocks
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10


def test_freed_memory_is_used_again_without_page_faults() -> None:
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        assert not keep_freed_memory()
        pytest.skip("this C library is not glibc")
    for_runs, for_servers = faults_a_round(2**31 - 1), faults_a_round(256 << 20)
    assert max(for_runs, for_servers) < faults_a_round(0) / 10
