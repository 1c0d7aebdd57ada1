"""Programs of models that read events: the support rows in time, as the exported model has them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from gmeta.serving.formats.program_events import TIMES
from gmeta.serving.formats.program_examples import draw_alone, draw_rows
from gmeta.serving.formats.program_modules import AdaptAndPredict, UnadaptedForward
from gmeta.serving.formats.program_rows import SUPPORT
from gmeta.serving.formats.torch_onnx_export import export_adapted, write_onnx
from gmeta.serving.served_model import ServedModel
from metaio.format.features import FeatureSpec
from tests.serving.formats.models import MODELS_BY_CASE, model_of
from tests.serving.formats.test_programs import adapted
from tests.support.exported import FEATURES

EVENTS = replace(
    FEATURES, events=(FeatureSpec("events.item", "item"), FeatureSpec("events.city", "city")),
    event_dense=("price",), event_delay=2.0, event_longest=6,
)  # fmt: skip
# One of two blocks, as recording takes a second a block.
ENCODERS: dict[str, dict[str, Any]] = {
    "sasrec": {"events": "sasrec"},
    "sasrec linear": {"events": "sasrec", "event_options": {"attention": "linear", "blocks": 1}},
    "hstu": {"events": "hstu", "event_options": {"blocks": 1}},
    "din": {"events": "din"},
    "sim": {"events": "sim", "event_options": {"newest": 3}},
    "sim hash": {"events": "sim", "event_options": {"search": "hash", "newest": 4}},
}
SUPPORT_ROWS = 1, 5, 40  # of which about two thirds are events


def served_of(
    folder: Path, encoder: str, model: str = "melu", without: tuple[str, ...] = (), **more: Any
) -> ServedModel:
    with pytest.MonkeyPatch.context() as patch:
        config = {"name": model, "without": without, **ENCODERS[encoder]}
        patch.setitem(MODELS_BY_CASE, model, config)
        return model_of(folder, model, features=EVENTS, **more)


@pytest.mark.parametrize("without", [(), ("item",)])
@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize(("model", "algorithm"), [("melu", "maml"), ("cbml", "fomaml")])
def test_the_modules_predict_what_the_model_does(
    encoder: str, model: str, algorithm: str, without: tuple[str, ...], tmp_path: Path
) -> None:
    served = served_of(tmp_path / "model", encoder, model, without, algorithm=algorithm)
    alone, adapting = UnadaptedForward(served), AdaptAndPredict(served)
    for support in SUPPORT_ROWS:
        example, expected = draw_alone(served, 7, 3, support, seed=1)
        torch.testing.assert_close(alone(example), expected, rtol=0, atol=1e-6)
        # Events that never were change what is predicted.
        example[SUPPORT + TIMES][:, 1] = 0.0
        assert (float((alone(example) - expected).abs().max()) > 1e-4) == (support > 1)
        example, expected = adapted(served, support, 9, 2)
        torch.testing.assert_close(adapting(example), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("encoder", ENCODERS)
def test_a_program_takes_any_number_of_events(encoder: str, tmp_path: Path) -> None:
    served = served_of(tmp_path / "model", encoder)
    alone = write_onnx(served, tmp_path / "model.onnx").module()
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    shapes = {each.name: each.shape for each in session.get_inputs()}
    assert shapes["support.event_times"] == ["support_rows", 2]
    for support in SUPPORT_ROWS:
        example, expected = draw_alone(served, 7, 3, support, seed=1)
        torch.testing.assert_close(alone(example), expected, rtol=0, atol=1e-6)
        feeds = {name: value.numpy() for name, value in example.items()}
        (found,) = session.run(["prediction"], feeds)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


# Each apart, as recording takes long: of one inner step, as test_programs.py records two.
@pytest.mark.parametrize("encoder", ENCODERS)
def test_a_program_adapts_by_any_number_of_events(encoder: str, tmp_path: Path) -> None:
    served = served_of(tmp_path / "model", encoder, inner_steps=1)
    adapting = export_adapted(served).module()
    for support in SUPPORT_ROWS:
        example, expected = adapted(served, support, 9, 2)
        torch.testing.assert_close(adapting(example), expected, rtol=0, atol=1e-6)


def test_a_task_without_events_is_predicted_as_one_of_which_nothing_is_known(
    tmp_path: Path,
) -> None:
    served = served_of(tmp_path / "model", "sim")
    example, rows = draw_rows(served, 7, 3)
    support, _ = draw_rows(served, 2, 1, SUPPORT)
    support[SUPPORT + TIMES][:, 1] = 0.0
    expected = served.predict_encoded([served.unadapted], rows, [7])
    found = UnadaptedForward(served)({**example, **support})
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_what_is_no_time_or_no_id_is_no_prediction(tmp_path: Path) -> None:
    served = served_of(tmp_path / "model", "sasrec")
    alone, adapting = UnadaptedForward(served), AdaptAndPredict(served)
    for name, column, wrong in ((TIMES, 0, np.nan), (TIMES, 0, np.inf), ("ids", 1, 8)):
        for module, (example, _) in (
            (alone, draw_alone(served, 4, 2)), (adapting, adapted(served, 4, 3, 2))
        ):  # fmt: skip
            example[SUPPORT + name][-1, column] = wrong
            with torch.no_grad(), pytest.raises(IndexError, match="index out of range"):
                module(example)
