"""What a server tells of what it is asked: counted from the rows themselves."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from gmeta.serving.served_model import ServedModel
from gmeta.serving.server import traffic
from gmeta.serving.server.inference_service import InferenceService
from tests.serving.server.serving import post, request_of, service_of, values
from tests.support.exported import random_rows


@pytest.fixture(autouse=True)
def _every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "EVERY_BATCHES", 1)


def told(service: InferenceService, name: str, **labels: str) -> float:
    found = service.metrics.registry.get_sample_value(name, labels)
    return 0.0 if found is None else found


def test_predictions_tasks_and_calibration_are_those_of_the_rows(
    exported: Path, model: ServedModel
) -> None:
    support, query = random_rows(7, seed=1), random_rows(5, seed=2)
    with service_of(exported) as service:
        answers = [
            values(post(service, request_of(query))),
            values(post(service, request_of(query, support))),
            values(post(service, request_of(query, support, key="a"))),
            values(post(service, request_of(query, key="a"))),
        ]
        post(service, {"inputs": []})  # wrong: counted nowhere here
        count = told(service, "gmeta_serve_prediction_count", label="")
        total = told(service, "gmeta_serve_prediction_sum", label="")
        known = [told(service, "gmeta_serve_tasks_total", support=of) for of in
                 ("rows", "state", "none")]  # fmt: skip
        scored = [
            told(service, f"gmeta_serve_scored_{of}_{what}", label="")
            for of in ("prediction", "label") for what in ("count", "sum")
        ]  # fmt: skip
    assert count == 20
    assert total == pytest.approx(float(np.concatenate(answers).sum()), rel=1e-5)
    assert known == [2, 1, 1]
    before = model.predict(support.drop_columns(["click"])).numpy()
    labels = support["click"].to_numpy()
    expected = [14, 2 * before.sum(), 14, 2 * labels.sum()]
    assert scored == pytest.approx(expected, rel=1e-5)


def test_ids_that_the_model_has_no_row_for_are_counted(exported: Path, model: ServedModel) -> None:
    rows = random_rows(6, seed=3)
    single = model.config.features.single[0].name
    zeros = [0, 0, *rows[single].to_pylist()[2:]]
    rows = rows.set_column(rows.column_names.index(single), single, pa.array(zeros))
    with service_of(exported) as service:
        post(service, request_of(rows))
        found = {
            (column.name, known): told(service, "gmeta_serve_ids_total", column=column.name,
                                       known=known)
            for column in model.config.features.sparse for known in ("yes", "no")
        }  # fmt: skip
    for column in model.config.features.sparse:
        cells = rows[column.name].to_pylist()
        ids = [one for cell in cells for one in (cell if isinstance(cell, list) else [cell])]
        assert found[column.name, "no"] == ids.count(0)
        assert found[column.name, "yes"] == len(ids) - ids.count(0)
