"""What stands beside the learner's step in gpu.py: MAML of one step on even tasks as torch.func and
JAX take it, and a step's products of matrices alone."""

import os
from collections.abc import Callable
from typing import Any

import torch
from _common import seconds_of
from _learner import Step
from maml_step import INNER_LR, NUM_FEATURES, WIDTH, model_of
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from gmeta.platform.numerics import autocast
from metaio.read.batch import TaskBatch

ROWS, HIDDEN = 10, (512, 256)  # of each side of a task; of the layers
STEPS = 10  # that follow one another, of each measurement
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot"}


def vmap_step(device: torch.device, batch: TaskBatch, precision: str = "float32") -> Step:
    """MAML of one step on even tasks, by torch.func: every task its own copy of the weights."""
    model = model_of(HIDDEN).decision.to(device)
    parameters = dict(model.named_parameters())
    position_V = batch.positions_NF.flatten().long().to(device)
    label_TR = batch.label_N.view(-1, 2 * ROWS).to(device)
    rows_UD = (torch.randn(batch.unique_ids_U.numel(), WIDTH) * 0.1).to(device).requires_grad_()

    def loss_of(weights: Any, x_SI: torch.Tensor, label_S: torch.Tensor) -> torch.Tensor:
        output_S = functional_call(model, weights, (x_SI,)).squeeze(-1)
        return binary_cross_entropy_with_logits(output_S, label_S)

    def adapted_loss(weights: Any, x_RI: torch.Tensor, label_R: torch.Tensor) -> torch.Tensor:
        grads = grad(loss_of)(weights, x_RI[:ROWS], label_R[:ROWS])
        moved = {name: w - INNER_LR * grads[name] for name, w in weights.items()}
        return loss_of(moved, x_RI[ROWS:], label_R[ROWS:])

    def step() -> torch.Tensor:
        rows_UD.grad = None
        model.zero_grad()
        inputs_TRI = rows_UD.index_select(0, position_V).view(*label_TR.shape, -1)
        with autocast(precision, device):
            loss: torch.Tensor = vmap(adapted_loss, in_dims=(None, 0, 0))(
                parameters, inputs_TRI, label_TR
            ).mean()
        loss.backward()
        return loss.detach()

    return step


def jax_on(device: torch.device) -> Any:
    """Return JAX, where it is installed and computes on such a device, in float32; else say so."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory too
    try:
        import jax
    except ImportError:
        print("JAX is not installed: no figure of it")
        return None
    if device.type == "cuda" and jax.default_backend() != "gpu":
        print(f"JAX is installed for {jax.default_backend()}, not for a GPU: no figure of it")
        return None
    # Its default on a GPU is TF32, and it stands beside float32 alone.
    jax.config.update("jax_default_matmul_precision", "float32")
    return jax


def jax_seconds(jax: Any, batch: TaskBatch) -> Callable[[], float]:
    """Return what times the step of vmap_step in JAX: compiled whole, its arrays on the device."""
    layers = [
        (one.weight.detach().numpy().T, one.bias.detach().numpy())
        for one in model_of(HIDDEN).decision
        if isinstance(one, torch.nn.Linear)
    ]
    position_TRF = batch.positions_NF.long().view(-1, 2 * ROWS, NUM_FEATURES).numpy()
    label_TR = batch.label_N.view(-1, 2 * ROWS).numpy()
    rows_UD = torch.randn(batch.unique_ids_U.numel(), WIDTH).numpy() * 0.1

    def loss_of(layers: Any, x_SI: Any, label_S: Any) -> Any:
        for number, (weight, bias) in enumerate(layers):
            x_SI = (jax.nn.relu(x_SI) if number else x_SI) @ weight + bias
        x_S = x_SI[:, 0]
        return (jax.nn.softplus(x_S) - label_S * x_S).mean()

    def adapted_loss(layers: Any, x_RI: Any, label_R: Any) -> Any:
        grads = jax.grad(loss_of)(layers, x_RI[:ROWS], label_R[:ROWS])
        moved = jax.tree.map(lambda w, g: w - INNER_LR * g, layers, grads)
        return loss_of(moved, x_RI[ROWS:], label_R[ROWS:])

    def loss(layers: Any, rows_UD: Any, position_TRF: Any, label_TR: Any) -> Any:
        inputs_TRI = rows_UD[position_TRF].reshape(*label_TR.shape, -1)
        return jax.vmap(adapted_loss, (None, 0, 0))(layers, inputs_TRI, label_TR).mean()

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    given = jax.device_put((layers, rows_UD, position_TRF, label_TR))

    def seconds() -> float:
        # Its step returns before it has computed.
        return (
            seconds_of(lambda: jax.block_until_ready([step(*given) for _ in range(STEPS)])) / STEPS
        )

    return seconds


class _Products(TorchDispatchMode):
    """Inside, each product of matrices is noted as a call with matrices of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name.removeprefix("aten::").removesuffix("_") in PRODUCTS:
            own = tree_map_only(Tensor, _random_like, args)
            self.calls.append(lambda: func(*own, **kwargs))
        return func(*args, **kwargs)


def _random_like(matrix: Tensor) -> Tensor:
    like = torch.empty_strided(
        matrix.shape, matrix.stride(), dtype=matrix.dtype, device=matrix.device
    )
    return like.normal_(std=0.01)


def products_alone(step: Step) -> Callable[[], object]:
    """Return what does a step's products of matrices again and nothing else, as one CUDA graph:
    the least that a step takes with this library for products, whose kernels are far from the
    card's best where matrices are small."""
    with _Products() as noted:
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in noted.calls:
            call()

    def again(_held: object = noted.calls) -> None:  # a graph does not hold what it reads
        graph.replay()

    return again
