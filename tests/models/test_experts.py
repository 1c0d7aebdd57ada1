"""MMoE and PLE against their equations, expert by expert and row by row."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from gmeta_models import InputSizes, ModelConfig, RowInputs, build_model
from gmeta_models.gated import head_layers
from gmeta_models.mmoe import MMoE
from gmeta_models.ple import PLE
from tests.models.inputs import row, some_inputs


def seen_of(inputs: RowInputs, index: int) -> Tensor:
    """What the experts of the first level see of a row."""
    alone = row(inputs, index)
    return torch.cat([alone.features_NFD("mean").flatten(), alone.dense_NK.flatten()])


def mixture(gate: nn.Module, seen: Tensor, experts: Sequence[Tensor]) -> Tensor:
    """The experts' outputs by the softmax of the gate's scores, one after another."""
    scores = [float(score) for score in torch.exp(gate(seen)).detach()]
    total = torch.zeros_like(experts[0])
    for score, made in zip(scores, experts, strict=True):
        total = total + score / sum(scores) * made
    return total


@pytest.mark.parametrize("outputs", [1, 3])
def test_mmoe_mixes_the_shared_experts_for_each_output(outputs: int) -> None:
    sizes = InputSizes(2, 1, 2, outputs=outputs)
    config = ModelConfig("mmoe", 4, (5,), options={"experts": 3, "expert": (7, 6)})
    model = build_model(config, sizes).double()
    assert isinstance(model, MMoE)
    inputs = some_inputs(5, sizes, 4)
    found_NO = model(inputs).view(5, outputs)
    for index in range(5):
        seen = seen_of(inputs, index)
        experts = [expert(seen) for expert in model.experts]
        assert [made.shape for made in experts] == [(6,)] * 3
        for output in range(outputs):
            mixed = mixture(model.gates[output], seen, experts)
            torch.testing.assert_close(
                found_NO[index, output], model.towers[output](mixed).squeeze()
            )


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_ple_extracts_level_by_level(levels: int, outputs: int) -> None:
    sizes = InputSizes(2, 1, 2, outputs=outputs)
    config = ModelConfig(
        "ple", 4, (5,), options={"experts": 2, "own_experts": 3, "expert": (6,), "levels": levels}
    )
    model = build_model(config, sizes).double()
    assert isinstance(model, PLE)
    inputs = some_inputs(4, sizes, 4)
    found_NO = model(inputs).view(4, outputs)
    for index in range(4):
        own_seen, shared_seen = [seen_of(inputs, index)] * outputs, seen_of(inputs, index)
        for level in model.levels:
            shared = [expert(shared_seen) for expert in level.shared]
            own = [[expert(own_seen[o]) for expert in level.own[o]] for o in range(outputs)]
            mixed = [
                mixture(level.gates[o], own_seen[o], [*own[o], *shared]) for o in range(outputs)
            ]
            if level.shared_gate is not None:
                every = [made for mine in own for made in mine] + shared
                shared_seen = mixture(level.shared_gate, shared_seen, every)
            own_seen = mixed
        for output in range(outputs):
            made = model.towers[output](own_seen[output]).squeeze()
            torch.testing.assert_close(found_NO[index, output], made)
    # Raises where a parameter does not reach the outputs: what nothing would read is not there.
    torch.autograd.grad(found_NO.sum(), [*model.parameters()])


@pytest.mark.parametrize("name", ["mmoe", "ple"])
def test_the_heads_are_the_last_layers_of_all_towers_and_take_the_output_bias(name: str) -> None:
    config = ModelConfig(name, 4, hidden=(5,), options={"experts": 2, "expert": (6,)})
    sizes = InputSizes(2, 0, 0, outputs=2)
    torch.manual_seed(0)
    plain = build_model(config, sizes)
    assert list(head_layers(plain)) == ["towers.0.2", "towers.1.2"]
    torch.manual_seed(0)
    lifted = build_model(ModelConfig(**{**vars(config), "output_bias": 2.5}), sizes)
    inputs = some_inputs(3, sizes, 4)
    difference = lifted.double()(inputs) - plain.double()(inputs)
    torch.testing.assert_close(difference, torch.full_like(difference, 2.5))
