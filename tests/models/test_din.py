"""DIN against its equation row by row, and the refusals of a history without a target."""

import pytest
import torch

from gmeta_models import InputSizes, ModelConfig, RowInputs, SparseColumn, build_model
from gmeta_models.din import DIN
from tests.models.inputs import named_sizes, row, some_inputs
from tests.support.refusals import catch_message


def din(sizes: InputSizes, history: str = "m0") -> DIN:
    config = ModelConfig(
        name="din", embedding_dim=4, hidden=(6,), options={"attention": (5,), "history": history}
    )
    model = build_model(config, sizes)
    assert isinstance(model, DIN)
    return model


def entries(inputs: RowInputs, feature: int) -> list[torch.Tensor]:
    """The history of the only row."""
    return list(inputs.bag_values_VD[inputs.bag_index_V == feature])


@pytest.mark.parametrize("history", [0, 1])
def test_the_history_counts_by_what_the_target_makes_of_each_entry(history: int) -> None:
    sizes = named_sizes(3, 2, 1)
    multi = [SparseColumn("m0", "m0"), SparseColumn("m1", "m1")]
    multi[history] = SparseColumn("seen", "s1")
    sizes = InputSizes(3, 2, 1, sizes.single, tuple(multi))
    model = din(sizes, "seen").double()
    inputs = some_inputs(6, sizes, 4)
    for index in range(6):
        alone = row(inputs, index)
        target = alone.single_NFD[0, 1]
        interest = torch.zeros(4, dtype=torch.float64)
        for entry in entries(alone, history):
            seen = torch.cat([entry, target, entry - target, entry * target])
            interest = interest + model.attention(seen) * entry
        other = entries(alone, 1 - history)
        pooled = torch.stack(other).mean(0) if other else torch.zeros_like(interest)
        parts = [alone.single_NFD.flatten(), interest, pooled, alone.dense_NK.flatten()]
        expected = model.decision(torch.cat(parts))
        torch.testing.assert_close(model(inputs)[index : index + 1], expected)


def test_the_order_of_the_history_does_not_matter() -> None:
    sizes = named_sizes(1, 1, 0)
    values_VD = torch.randn(3, 4)

    def score(order: list[int]) -> float:
        inputs = RowInputs(
            torch.ones(1, 1, 4), values_VD[order], torch.zeros(3).long(), 1, torch.zeros(1, 0)
        )
        torch.manual_seed(0)
        return float(din(sizes)(inputs).detach())

    assert score([0, 1, 2]) == pytest.approx(score([2, 0, 1]), rel=1e-5)


@pytest.mark.parametrize(
    ("history", "single_tables", "message"),
    [
        (
            "seen",
            ["s0"],
            "model.options.history = 'seen' is no multi-id column: this dataset has m0. "
            "Name the one that holds the behaviour history",
        ),
        (
            "m0",
            ["user"],
            "model.options.history = 'm0' has table 's0', which 0 single-id columns share (none): "
            "DIN takes exactly 1, the target item. "
            "Give that column table = 's0' in the schema, and no other, and prepare again",
        ),
    ],
)
def test_a_history_needs_one_target(history: str, single_tables: list[str], message: str) -> None:
    single = tuple(SparseColumn(f"c{i}", table) for i, table in enumerate(single_tables))
    sizes = InputSizes(len(single), 1, 0, single, named_sizes(1, 1, 0).multi)
    assert catch_message(ValueError, din, sizes, history) == message
