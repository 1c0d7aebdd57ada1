"""The layers' optimizers: each moves its parameters as torch's own does, to the last bit."""

import pytest
import torch
from torch import nn

from gmeta.config.train_config import OuterConfig
from gmeta.distributed.optim.optimizers import DENSE_OPTIMIZERS


def layers() -> list[nn.Parameter]:
    """A matrix, a vector and one that never gets a gradient."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 3), (5,), (2,))]


def give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step + 1)
    for parameter in parameters[:2]:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("name", "stock"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)]
)
def test_adam_is_torchs_at_any_rate_and_goes_on_from_a_state_dict(
    name: str, stock: type[torch.optim.Optimizer], weight_decay: float
) -> None:
    mine, theirs = layers(), layers()
    make = DENSE_OPTIMIZERS[name](OuterConfig())
    ours = make(mine, lr=0.1, weight_decay=weight_decay)
    torchs = stock(theirs, lr=0.1, weight_decay=weight_decay, fused=True)  # type: ignore[call-arg]
    for step in range(6):
        if step == 3:
            state = ours.state_dict()
            assert state.keys() == torchs.state_dict().keys()
            assert state["param_groups"] == torchs.state_dict()["param_groups"]
            ours = make(mine, lr=0.1, weight_decay=weight_decay)
            ours.load_state_dict(state)
        for optimizer in (ours, torchs):
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        give_gradients(mine, step)
        give_gradients(theirs, step)
        ours.step()
        torchs.step()
        for parameter, expected in zip(mine, theirs, strict=True):
            assert torch.equal(parameter, expected)
        for index, found in ours.state_dict()["state"].items():
            for key, value in torchs.state_dict()["state"][index].items():
                assert torch.equal(found[key], value)


def test_a_step_without_any_gradient_changes_nothing() -> None:
    parameters = layers()
    DENSE_OPTIMIZERS["adam"](OuterConfig())(parameters, lr=0.1).step()
    for parameter, expected in zip(parameters, layers(), strict=True):
        assert torch.equal(parameter, expected)
