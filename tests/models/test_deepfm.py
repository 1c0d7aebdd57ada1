"""DeepFM against its sum over fields and pairs of fields, row by row."""

import itertools

import pytest
import torch

from gmeta_models import InputSizes, ModelConfig, build_model
from gmeta_models.deepfm import DeepFM
from tests.models.inputs import row, some_inputs


def fields(model: DeepFM, features_FD: torch.Tensor, dense: list[float]) -> list[torch.Tensor]:
    """Weight and factors of each field of a row, times its value."""
    found = list(features_FD)
    for index, value in enumerate(dense):
        assert model.dense_weights is not None
        assert model.dense_factors_KJ is not None
        weight = model.dense_weights.weight[:, index]
        found.append(torch.cat([weight, model.dense_factors_KJ[index]]) * value)
    return found


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("columns", [(2, 1, 2), (3, 0, 0), (1, 0, 1)])
def test_each_field_and_each_pair_counts_once(columns: tuple[int, int, int], outputs: int) -> None:
    sizes = InputSizes(*columns, outputs=outputs)
    model = build_model(ModelConfig(name="deepfm", embedding_dim=4, hidden=(5,)), sizes).double()
    assert isinstance(model, DeepFM)
    inputs = some_inputs(6, sizes, 4)
    found = model(inputs).detach()
    assert found.shape == ((6,) if outputs == 1 else (6, 3))
    for index in range(6):
        alone = row(inputs, index)
        features_FD = alone.features_NFD("mean")[0]
        vectors = fields(model, features_FD, alone.dense_NK[0].tolist())
        pairs = itertools.combinations(vectors, 2)
        both = sum(vector[0] for vector in vectors) + sum((a[1:] @ b[1:]) for a, b in pairs)
        seen = torch.cat([features_FD[:, 1:].flatten(), alone.dense_NK[0]])
        torch.testing.assert_close(found[index].view(-1), (both + model.deep(seen)).detach())
