"""MAML of one step on even tasks, as torch.func and JAX take it: beside the learner's in gpu.py."""

import os
from collections.abc import Callable
from typing import Any

import torch
from _common import seconds_of
from _learner import Step
from maml_step import INNER_LR, NUM_FEATURES, WIDTH, model_of
from torch.func import functional_call, grad, vmap
from torch.nn.functional import binary_cross_entropy_with_logits

from metaio.read.batch import TaskBatch

ROWS, HIDDEN = 10, (512, 256)  # of each side of a task; of the layers
STEPS = 10  # that follow one another, of each measurement


def vmap_step(device: torch.device, batch: TaskBatch) -> Step:
    """MAML of one step on even tasks, by torch.func: every task its own copy of the weights."""
    model = model_of(HIDDEN).decision.to(device)
    parameters = dict(model.named_parameters())
    position_TRF = batch.positions_NF.long().view(-1, 2 * ROWS, NUM_FEATURES).to(device)
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
        inputs_TRI = rows_UD[position_TRF].flatten(2)
        loss: torch.Tensor = vmap(adapted_loss, in_dims=(None, 0, 0))(
            parameters, inputs_TRI, label_TR
        ).mean()
        loss.backward()
        return loss.detach()

    return step


def jax_on(device: torch.device) -> Any:
    """Return JAX, where it is installed and computes on such a device; else say so."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory too
    try:
        import jax
    except ImportError:
        print("JAX is not installed: no figure of it")
        return None
    if device.type == "cuda" and jax.default_backend() != "gpu":
        print(f"JAX is installed for {jax.default_backend()}, not for a GPU: no figure of it")
        return None
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
