"""DCN-V2 against its equations with explicit matrices, and as a polynomial of its inputs."""

import pytest
import torch
from torch import nn

from gmeta_models import InputSizes, ModelConfig, build_model
from gmeta_models.dcnv2 import CrossLayers
from tests.models.inputs import some_inputs


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("structure", ["stacked", "parallel"])
def test_the_layers_cross_as_the_paper_says(structure: str, rank: int, outputs: int) -> None:
    sizes = InputSizes(2, 1, 2, outputs=outputs)
    config = ModelConfig(
        "dcnv2", 4, (5,), options={"cross_layers": 2, "cross_rank": rank, "structure": structure}
    )
    model = build_model(config, sizes).double()
    named = dict(model.named_parameters())
    inputs = some_inputs(6, sizes, 4)
    first = torch.cat([inputs.features_NFD("mean").flatten(1), inputs.dense_NK], dim=1)
    crossed = first
    for layer in range(2):
        place = f"cross.layers.{layer}."
        if rank:
            matrix = named[f"{place}1.weight"] @ named[f"{place}0.weight"]
            bias = named[f"{place}1.bias"]
            assert torch.linalg.matrix_rank(matrix) == rank
        else:
            matrix, bias = named[f"{place}weight"], named[f"{place}bias"]
        crossed = first * (crossed @ matrix.T + bias) + crossed
    below = crossed if structure == "stacked" else first
    hidden = torch.relu(below @ named["deep.0.weight"].T + named["deep.0.bias"])
    if structure == "stacked":
        expected = hidden @ named["deep.2.weight"].T + named["deep.2.bias"]
    else:
        both = torch.cat([crossed, hidden], dim=1)
        expected = both @ named["output.weight"].T + named["output.bias"]
    torch.testing.assert_close(model(inputs), expected.squeeze(1) if outputs == 1 else expected)


def test_each_cross_layer_adds_a_degree() -> None:
    """Without biases: x_L of t x is a polynomial in t, of the degree L + 1 and no less."""
    cross = CrossLayers(3, layers=3, rank=0).double()
    for layer in cross.layers:
        assert isinstance(layer, nn.Linear)
        nn.init.zeros_(layer.bias)
    first_NX = torch.randn(1, 3, dtype=torch.float64)
    at = torch.arange(6, dtype=torch.float64)
    values = torch.stack([cross(first_NX * t)[0, 0] for t in at])
    differences = values
    for _ in range(4):
        differences = differences.diff()
    assert float(differences[0].abs().detach()) > 1e-6
    torch.testing.assert_close(differences.diff(), torch.zeros(1, dtype=torch.float64))
