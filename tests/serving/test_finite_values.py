"""No value that is not finite leaves a model without a word."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import gmeta
from gmeta.cli.main import app
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.errors import NotFiniteError
from gmeta.serving.exported_folder import LAYERS_FILE, table_file
from gmeta.serving.offline.states import adapt_tasks
from gmeta.serving.served_model import ServedModel
from gmeta.serving.server.compute import answer_all
from gmeta.serving.server.inference_protocol import InferenceAnswer, InferenceRequest
from gmeta.serving.server.request_errors import RequestError
from gmeta.serving.server.request_rows import RequestRows
from gmeta.serving.server.task_cache import TaskCache
from tests.support.exported import random_rows, write_random_model

CAUSE = " support rows, with labels 1 to 100, it becomes a model whose values are not finite; "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finite") / "model"
    # So many steps that an error of 100 grows without bound where one of 5 shrinks.
    algorithm = AlgorithmConfig(inner_steps=60, inner_lr=0.01)
    write_random_model(folder, loss="mse", algorithm=algorithm)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> ServedModel:
    return gmeta.load(folder)


def ratings(rows: pa.Table, wrong_task: int) -> pa.Table:
    """Labels 1 and 2, and 100 once in a task."""
    label_N = rows["click"].to_numpy() + 1
    label_N[np.flatnonzero(rows["user"].to_numpy() == wrong_task)[0]] = 100
    return rows.set_column(rows.schema.get_field_index("click"), "click", pa.array(label_N))


@pytest.fixture(scope="module")
def rows() -> pa.Table:
    """Labels 1 and 2 in three tasks, and 100 once in task 1."""
    rows = random_rows(60, seed=1, num_tasks=3)
    label_N = rows["click"].to_numpy() + 1
    label_N[np.flatnonzero(rows["user"].to_numpy() == 1)[0]] = 100
    return rows.set_column(rows.schema.get_field_index("click"), "click", pa.array(label_N))


def of_task(rows: pa.Table, task: int) -> pa.Table:
    return rows.filter(pa.compute.equal(rows["user"], task))


def told(work: Callable[[], object]) -> str:
    with pytest.raises(NotFiniteError) as caught:
        work()
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_a_label_far_outside_is_told_wherever_tasks_adapt(
    model: ServedModel, rows: pa.Table
) -> None:
    assert model.adapt(of_task(rows, 0)).predict(rows).isfinite().all()
    line = told(lambda: model.adapt(of_task(rows, 1)))
    assert line.startswith("the task cannot be adapted to: by its 15" + CAUSE), line
    assert "unadapted, it predicts -0.1130" in line, line
    assert told(lambda: adapt_tasks(model, rows)).startswith(
        "task 1 cannot be adapted to: by its 15"
    )
    first = rows["user"].to_pylist().index(1)
    line = told(lambda: model.predict_tasks(rows, rows))
    assert line.startswith(f"the task of query row {first} cannot be adapted to: by its 15" + CAUSE)


@pytest.mark.parametrize("command", ["predict", "adapt"])
def test_a_command_writes_nothing_that_is_not_finite(
    folder: Path, rows: pa.Table, tmp_path: Path, command: str
) -> None:
    pq.write_table(rows, tmp_path / "rows.parquet")
    file = str(tmp_path / "rows.parquet")
    inputs = [file, file] if command == "predict" else [file]
    out = tmp_path / "out.parquet"
    result = CliRunner().invoke(app, [command, str(folder), *inputs, "--out", str(out)])
    assert isinstance(result.exception, NotFiniteError), result.output
    assert CAUSE in str(result.exception)
    assert not out.exists()


def test_a_server_keeps_no_task_that_is_not_finite(model: ServedModel, rows: pa.Table) -> None:
    cache = TaskCache(1 << 20, 3600.0)
    requests = [
        InferenceRequest(RequestRows.of(of_task(rows, task)), None, str(task)) for task in range(3)
    ]
    wrong = answer_all(model, "1", cache, requests, lambda _stage, _seconds: None)
    assert [type(one) for one in wrong] == [InferenceAnswer, RequestError, InferenceAnswer]
    assert str(wrong[1]).startswith("the adaptation to these rows is not finite: ")
    assert [cache.get(str(task)) is None for task in range(3)] == [False, True, False]


def test_layers_that_are_not_finite_are_not_loaded(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "model")
    layers = load_file(other / LAYERS_FILE)
    name = next(iter(layers))
    layers[name].flat[0] = np.nan
    save_file(layers, other / LAYERS_FILE)
    line = told(lambda: gmeta.load(other, verify=False))
    assert line.startswith(f"layer {name} holds values that are not finite: the run diverged. ")


def test_a_table_row_that_is_not_finite_is_told_where_it_is_used(
    folder: Path, tmp_path: Path, rows: pa.Table
) -> None:
    other = shutil.copytree(folder, tmp_path / "model")
    values = load_file(other / table_file(1))
    values["values"][3] = np.nan
    save_file(values, other / table_file(1), {"table": "city"})
    model, city = gmeta.load(other, verify=False), rows["city"].to_pylist()
    assert model.predict(rows.filter(pa.compute.not_equal(rows["city"], 3))).isfinite().all()
    assert f"the prediction of query row {city.index(3)} is" in told(lambda: model.predict(rows))
    assert f"of query row {city.index(3)} is" in told(lambda: model.predict_tasks(rows, rows))
