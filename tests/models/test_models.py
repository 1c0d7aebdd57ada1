"""Every registered model: its shape, independence of row order, its parts by arithmetic."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import gmeta_models
from gmeta_models import MODELS, InputSizes, ModelConfig, RowInputs, build_model
from tests.models.inputs import named_sizes, row, some_inputs
from tests.support.refusals import catch_message


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("columns", [(3, 2, 2), (2, 0, 0), (0, 2, 1), (1, 1, 0)])
@pytest.mark.parametrize("interaction", ["dot", "cat"])
def test_a_row_scores_the_same_alone_and_among_others(
    name: str, columns: tuple[int, int, int], interaction: str
) -> None:
    if name == "din" and not (columns[0] and columns[1]):
        pytest.skip("DIN needs a history and its target")
    sizes = named_sizes(*columns)
    config = ModelConfig(
        name=name,
        embedding_dim=4,
        hidden=(6, 5),
        options={"bottom": (3,), "interaction": interaction, "history": "m0"},
    )
    model = build_model(config, sizes).double()
    inputs = some_inputs(5, sizes, 4)
    together = model(inputs)
    assert together.shape == (5,)
    for index in range(5):
        torch.testing.assert_close(model(row(inputs, index)), together[index : index + 1])


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_output_bias_lifts_every_output(name: str) -> None:
    sizes = named_sizes(2, 2, 1)
    inputs = some_inputs(5, sizes, 4)
    outputs = []
    for bias in (0.0, 3.5):
        torch.manual_seed(0)
        config = ModelConfig(
            name=name, embedding_dim=4, hidden=(6,), options={"history": "m0"}, output_bias=bias
        )
        outputs.append(build_model(config, sizes).double()(inputs))
    torch.testing.assert_close(outputs[1] - outputs[0], torch.full_like(outputs[0], 3.5))


class Unbiased(nn.Module):
    """One layer, without a bias."""

    def __init__(self, config: ModelConfig, sizes: InputSizes) -> None:
        super().__init__()
        self.layer = nn.Linear(sizes.num_single * config.embedding_dim, 1, bias=False)


def test_a_last_layer_without_a_bias_takes_no_output_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "unbiased", Unbiased)
    config, sizes = ModelConfig(name="unbiased", embedding_dim=4), InputSizes(1, 0, 0)
    assert build_model(config, sizes).layer.bias is None
    assert catch_message(ValueError, build_model, replace(config, output_bias=-2.5), sizes) == (
        "model.output_bias = -2.5, but layer, the last layer, has no bias. Give it one, or leave "
        "output_bias at 0"
    )


@pytest.mark.parametrize("mode", ["mean", "sum"])
def test_pooling_counts_repeats_and_gives_zero_for_an_empty_bag(mode: str) -> None:
    inputs = RowInputs(
        single_NFD=torch.zeros(2, 0, 2),
        bag_values_VD=torch.tensor([[1.0, 2.0], [1.0, 2.0], [4.0, 5.0]]),
        bag_index_V=torch.tensor([0, 0, 3]),
        num_multi=2,
        dense_NK=torch.zeros(2, 0),
    )
    first = [2.0, 4.0] if mode == "sum" else [1.0, 2.0]
    expected = torch.tensor([[first, [0.0, 0.0]], [[0.0, 0.0], [4.0, 5.0]]])
    torch.testing.assert_close(inputs.pooled_NMD(mode), expected)


def test_a_padded_bag_holds_its_ids_in_order_and_zeros_behind() -> None:
    inputs = RowInputs(
        single_NFD=torch.zeros(3, 0, 1),
        bag_values_VD=torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0]]),
        bag_index_V=torch.tensor([0, 1, 1, 4, 5]),
        num_multi=2,
        dense_NK=torch.zeros(3, 0),
    )
    for feature, padded in enumerate([[[1.0], [0.0], [4.0]], [[2.0, 3.0], [0.0, 0.0], [5.0, 0.0]]]):
        # Where the longest bags are known, nobody looks for them.
        for longest_M in (None, (1, 2)):
            values_NHD, there_NH = replace(inputs, longest_M=longest_M).bags_NHD(feature)
            assert values_NHD.squeeze(2).tolist() == padded
            assert there_NH.tolist() == [[value > 0 for value in bag] for bag in padded]


def test_bags_of_no_rows_and_bags_without_ids_are_padded_to_nothing() -> None:
    inputs = some_inputs(3, InputSizes(1, 2, 0), 4)
    assert inputs.no_rows().bags_NHD(1)[0].shape == (0, 0, 4)
    empty = replace(inputs, bag_values_VD=torch.zeros(0, 4), bag_index_V=torch.zeros(0).long())
    assert empty.bags_NHD(1)[0].shape == (3, 0, 4)


def test_dlrm_takes_the_dot_products_of_all_pairs_in_the_papers_order() -> None:
    sizes = InputSizes(2, 1, 0)
    model = build_model(ModelConfig(name="dlrm", embedding_dim=4, hidden=()), sizes).double()
    inputs = some_inputs(3, sizes, 4)
    vectors = inputs.features_NFD("mean")
    pairs = [(1, 0), (2, 0), (2, 1)]
    dots = torch.stack([(vectors[:, i] * vectors[:, j]).sum(1) for i, j in pairs], dim=1)
    torch.testing.assert_close(model(inputs), model.top(dots).squeeze(1))


def test_the_package_has_what_it_names_and_nothing_else() -> None:
    assert [name for name in gmeta_models.__all__ if not hasattr(gmeta_models, name)] == []
    with pytest.raises(AttributeError) as caught:
        gmeta_models.DLRN  # noqa: B018
    assert str(caught.value) == "module 'gmeta_models' has no attribute 'DLRN'"


def test_an_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(ValueError) as caught:
        build_model(ModelConfig(name="dlmr"), InputSizes(1, 0, 0))
    assert str(caught.value) == (
        f"model.name = 'dlmr' is unknown: known are {', '.join(sorted([*MODELS, 'dot']))}. Did you "
        "mean 'dlrm'? Choose one of them, or name yours as package.module:Name (docs/extending.md)"
    )


def test_dlrm_refuses_dot_products_of_a_single_column() -> None:
    """All that its top MLP saw would be nothing: a model of one number."""
    config = ModelConfig(name="dlrm", embedding_dim=4)
    assert catch_message(ValueError, build_model, config, InputSizes(1, 0, 0)) == (
        'model.options.interaction = "dot" takes the dot products of pairs of columns: this '
        "dataset has 1 column, so no row would differ from another. "
        'Set model.options.interaction = "cat", or add a column to the schema and prepare again'
    )
    build_model(config, InputSizes(1, 0, 1))
    build_model(
        replace(config, options={**config.options, "interaction": "cat"}), InputSizes(1, 0, 0)
    )


def test_a_dataset_without_sparse_columns_is_refused() -> None:
    assert catch_message(ValueError, build_model, ModelConfig(), InputSizes(0, 0, 3)) == (
        "the dataset has 0 sparse columns: a model needs at least one. "
        "Add a [[single]] or [[multi]] column to the schema and prepare again"
    )
