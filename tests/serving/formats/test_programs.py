"""Programs of other runtimes predict what the exported model does, whatever the sizes."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
from torch import Tensor
from torch.onnx._internal._lazy_import import onnxscript_apis

import gmeta
from gmeta.adaptation.algorithms.registry import ALGORITHMS
from gmeta.config.inputs import ItemFeaturesConfig, NeighboursConfig, SupportFeaturesConfig
from gmeta.errors import GMetaError, UserError
from gmeta.losses import objectives
from gmeta.serving.formats import torch_onnx_export as programs
from gmeta.serving.formats.program_examples import Example, draw_both_sides, draw_rows
from gmeta.serving.formats.program_modules import AdaptAndPredict, UnadaptedForward
from gmeta.serving.formats.program_rows import QUERY, SUPPORT
from gmeta.serving.formats.torch_onnx_export import export_adapted, export_forward, write_onnx
from gmeta.serving.served_model import ServedModel
from gmeta_models import MODELS
from gmeta_models.inputs import RowInputs
from gmeta_models.melu import MeLU
from metaio.format.features import Features, FeatureSpec
from tests.serving.formats.models import ALGORITHMS_BY_CASE, MODELS_BY_CASE, model_of
from tests.support.exported import FEATURES, random_rows
from tests.support.refusals import catch_message

SIZES = ((1, 1), (7, 3), (30, 5))  # rows and longest list
# Labels and weights; as many columns of a kind as an example would have rows, or ids in a list.
WITH_LABELS = replace(
    FEATURES, single=(*FEATURES.single, FeatureSpec("town", "city")), dense=tuple("abcd"),
    labels=("click", "buy"), weight="seconds",
)  # fmt: skip
STATISTICS = SupportFeaturesConfig(task=True, columns=("*",), label_prior=(0.5, 0.5))


def unadapted(served: ServedModel, num_rows: int, longest: int) -> tuple[Example, Tensor]:
    """Rows, and what the model predicts of them without adaptation."""
    example, rows = draw_rows(served, num_rows, longest, seed=1)
    return example, served.predict_encoded([served.unadapted], rows, [num_rows])


def adapted(served: ServedModel, support: int, query: int, longest: int) -> tuple[Example, Tensor]:
    """Rows of both sides, and what the model predicts of the query rows after adaptation."""
    sizes = (support, longest), (query, longest)
    example, support_rows, query_rows = draw_both_sides(served, *sizes, seed=1)
    task = served.adapt_encoded(support_rows, [support])
    return example, served.predict_encoded(task, query_rows, [query])


def wrongly(example: Example, side: str = "") -> Iterator[Example]:
    """The same rows, each with one id or length in the last row that is out of its range."""
    for name, sizes in (("ids", (50, 8)), ("lists", (12, 50)), ("list_lengths", None)):
        longest = example[side + "lists"].shape[2]
        for column, wrong in enumerate(sizes or (longest + 1, longest + 1)):
            values = example[side + name].clone()
            values[-1, column] = -1
            yield {**example, side + name: values}
            values = values.clone()
            values[-1, column] = wrong
            yield {**example, side + name: values}


def test_what_is_out_of_range_is_no_prediction(tmp_path: Path) -> None:
    """Keys of all tables are numbers of one: an id behind its table is a row of the next."""
    served = model_of(tmp_path / "model")
    with torch.no_grad():
        for example in wrongly(unadapted(served, 7, 3)[0]):
            with pytest.raises(IndexError, match="index out of range"):
                UnadaptedForward(served)(example)
        task = adapted(served, 5, 7, 3)[0]
        for example in itertools.chain(wrongly(task, SUPPORT), wrongly(task, QUERY)):
            with pytest.raises(IndexError, match="index out of range"):
                AdaptAndPredict(served)(example)


@pytest.fixture(scope="module")
def _operators_read_once() -> Iterator[None]:
    """For each export torch has onnxscript read all of its operators anew, 0.3 s."""
    with pytest.MonkeyPatch.context() as patched:
        read_once = cache(onnxscript_apis.get_torchlib_ops)
        patched.setattr(onnxscript_apis, "get_torchlib_ops", read_once, raising=False)
        yield


def test_the_cases_are_of_every_model_and_algorithm() -> None:
    assert {case.get("name", "dlrm") for case in MODELS_BY_CASE.values()} == set(MODELS)
    names = {case["name"] for case in ALGORITHMS_BY_CASE.values()}
    assert names == {*ALGORITHMS, "none"}


# Each model, and each kind of part that an algorithm adds.
@pytest.mark.usefixtures("_operators_read_once")
@pytest.mark.parametrize(
    ("model", "algorithm"),
    [
        ("dlrm", "maml"), ("melu", "metaemb"), ("cbml", "encoder_maml"), ("din", "metasgd"),
        ("deepfm", "maml"), ("dcnv2", "maml"), ("ple", "maml"),
    ],
)  # fmt: skip
def test_onnxruntime_agrees_with_the_model(model: str, algorithm: str, tmp_path: Path) -> None:
    served = model_of(tmp_path / "model", model, algorithm)
    write_onnx(served, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    shapes = {each.name: each.shape for each in session.get_inputs()}
    assert shapes == {
        "ids": ["rows", 2], "dense": ["rows", 1],
        "lists": ["rows", 2, "longest"], "list_lengths": ["rows", 2],
    }  # fmt: skip
    for num_rows, longest in SIZES:
        example, expected = unadapted(served, num_rows, longest)
        feeds = {name: value.numpy() for name, value in example.items()}
        (found,) = session.run(["prediction"], feeds)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
        for wrong in wrongly(example):
            with pytest.raises(InvalidArgument, match="out of data bounds"):
                session.run(["prediction"], {name: value.numpy() for name, value in wrong.items()})
    assert str(Path.cwd()).encode() not in (tmp_path / "model.onnx").read_bytes()


@pytest.mark.parametrize(
    ("model", "algorithm"),
    # What makes the embeddings of rare ids is refused beside what has them share one.
    sorted({*itertools.product(MODELS_BY_CASE, ALGORITHMS_BY_CASE)} - {("rare rows", "metaemb")}),
)
def test_the_modules_that_programs_record_predict_what_the_model_does(
    model: str, algorithm: str, tmp_path: Path
) -> None:
    served = model_of(tmp_path / "model", model, algorithm)
    example, expected = unadapted(served, 9, 3)
    torch.testing.assert_close(UnadaptedForward(served)(example), expected, rtol=0, atol=1e-6)
    example, after = adapted(served, 6, 9, 4)
    torch.testing.assert_close(AdaptAndPredict(served)(example), after, rtol=0, atol=1e-6)


# Two, as recording takes seconds; the test before this holds all pairs against the model.
@pytest.mark.parametrize(
    ("model", "algorithm", "features"),
    [
        pytest.param("melu", "maml", WITH_LABELS, id="melu-maml-labels"),
        pytest.param("cbml", "encoder", FEATURES, id="cbml-encoder"),
    ],
)
def test_a_program_adapts_to_a_task_of_any_size(
    model: str, algorithm: str, features: Features, tmp_path: Path
) -> None:
    served = model_of(tmp_path / "model", model, algorithm, features=features)
    objectives._tensor.cache_clear()  # as in a process that has predicted nothing before
    torch.export.save(export_adapted(served), tmp_path / "adapt.pt2")
    program = torch.export.load(tmp_path / "adapt.pt2").module()
    assert str(Path.cwd()).encode() not in (tmp_path / "adapt.pt2").read_bytes()
    for support, query, longest in ((1, 1, 1), (5, 7, 3), (30, 2, 5)):
        example, expected = adapted(served, support, query, longest)
        with torch.inference_mode():
            torch.testing.assert_close(program(example), expected, rtol=0, atol=1e-6)
    assert bool(example["support.label"].isnan().any()) == bool(features.labels)


# Not every algorithm takes several labels, or such as are not known.
@pytest.mark.parametrize(
    ("algorithm", "labels"),
    [
        ("maml", ()), ("maml", ("click",)), ("maml", ("click", "buy")), ("encoder", ()),
        ("ridge", ()), ("ridge", ("click",)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("weight", ["", "seconds"])
def test_a_program_adapts_by_weights_and_by_the_labels_that_are_known(
    algorithm: str, labels: tuple[str, ...], weight: str, tmp_path: Path
) -> None:
    features = replace(FEATURES, labels=labels, weight=weight)
    served = model_of(tmp_path / "model", "melu", algorithm, features=features)
    example, expected = adapted(served, 20, 9, 4)
    assert bool(example["support.label"].isnan().any()) == bool(labels)
    torch.testing.assert_close(AdaptAndPredict(served)(example), expected, rtol=0, atol=1e-6)


def test_statistics_of_support_rows_are_those_of_none_without_adaptation(tmp_path: Path) -> None:
    served = model_of(tmp_path / "model", support_features=STATISTICS)
    program = export_forward(served).module()
    for size in SIZES:
        example, expected = unadapted(served, *size)
        torch.testing.assert_close(program(example), expected, rtol=0, atol=1e-6)
    assert catch_message(UserError, export_adapted, served) == (
        "adaptation cannot become a program of torch: support_features are counted from the rows "
        "outside the model. Train without them, or adapt by gmeta.load or gmeta serve"
    )


@pytest.mark.parametrize("columns", [("*",), ("tags",), ("item", "tags")])
def test_programs_hold_what_rows_say_of_items(columns: tuple[str, ...], tmp_path: Path) -> None:
    served = model_of(tmp_path / "model", item_features=ItemFeaturesConfig(columns=columns))
    for size in SIZES:
        example, expected = unadapted(served, *size)
        torch.testing.assert_close(UnadaptedForward(served)(example), expected, rtol=0, atol=1e-6)
        example, after = adapted(served, 6, *size)
        torch.testing.assert_close(AdaptAndPredict(served)(example), after, rtol=0, atol=1e-6)
    if columns == ("*",):
        example, expected = unadapted(served, 7, 3)
        program = export_forward(served).module()
        torch.testing.assert_close(program(example), expected, rtol=0, atol=1e-6)


def test_a_program_knows_no_support_row_that_a_neighbour_could_be_in(tmp_path: Path) -> None:
    inputs = SupportFeaturesConfig(label_prior=(0.3, 0.5)), NeighboursConfig("item", 3)
    served = model_of(tmp_path / "model", support_features=inputs[0], neighbours=inputs[1])
    example, expected = unadapted(served, 9, 3)
    torch.testing.assert_close(UnadaptedForward(served)(example), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("table_format", ["float16", "int8"])
def test_small_tables_stay_small_in_a_program(table_format: str, tmp_path: Path) -> None:
    served = model_of(tmp_path / "model", table_format=table_format, loss="mse")
    module = UnadaptedForward(served)
    assert str(module.tables.values_RD.dtype) == f"torch.{table_format}"
    example, expected = unadapted(served, 9, 3)
    torch.testing.assert_close(module(example), expected, rtol=0, atol=1e-6)
    assert float(expected.min()) < 0.0  # a rating, not a probability


def test_a_model_without_some_kinds_of_columns_has_fewer_inputs(tmp_path: Path) -> None:
    features = replace(FEATURES, single=(), dense=())
    served = model_of(tmp_path / "model", "melu", features=features)
    example, expected = unadapted(served, 9, 3)
    assert sorted(example) == ["list_lengths", "lists"]
    torch.testing.assert_close(UnadaptedForward(served)(example), expected, rtol=0, atol=1e-6)


class ReadsBags(MeLU):
    """Reads lists in a way that padding cannot give."""

    def forward(self, inputs: RowInputs) -> Tensor:
        output: Tensor = super().forward(inputs) + inputs.bag_values_VD.sum()
        return output


def test_a_program_that_predicts_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "melu", ReadsBags)
    served = model_of(tmp_path / "model", "melu", loss="mse")
    told = catch_message(GMetaError, export_forward, served)
    assert told.startswith(
        "the program's predictions without adaptation differ from the model's by"
    )
    assert told.endswith(
        "; at most 1e-05 is allowed. The model reads its lists other than by pooled_NMD and "
        "bags_NHD, or does not treat each row on its own: serve it by gmeta serve"
    )
    assert gmeta.load(tmp_path / "model").predict(random_rows(2)).shape == (2,)


def test_what_torch_could_not_export_is_told_by_its_cause() -> None:
    with pytest.raises(GMetaError) as caught, programs._translate_errors("an ONNX model"):
        raise RuntimeError("step 3/3 failed") from ValueError("no 3D attention.\nSee ...")
    assert str(caught.value) == (
        "an ONNX model cannot be exported from this model: ValueError: no 3D attention. "
        "Serve it by gmeta serve or --format triton, which run the model itself"
    )
