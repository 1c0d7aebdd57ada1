"""Vectors of a loaded and of a served model: as so many dense columns would be."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import gmeta
from metaio.errors import DataError
from metaio.prepare.schema.schema import Schema
from tests.metaio.prepare.test_local import BASE, changed, prepared
from tests.metaio.prepare.test_vectors import VECTORS, WIDTH, with_vectors
from tests.serving.formats.models import write_schema_model
from tests.serving.server.serving import post, service_of, tensor, values
from tests.support.refusals import catch_message

WIDE = changed(
    dense=[
        *BASE["dense"],
        *({"column": f"text{i}"} for i in range(WIDTH)),
        *({"column": f"image{i}", "fill": 0.5} for i in range(2)),
    ],
    row_id=VECTORS["row_id"],
)


def in_columns(raw: pa.Table) -> pa.Table:
    """The same rows with a column for each number."""
    for name, width in (("text", WIDTH), ("image", 2)):
        rows = [row or [None] * width for row in raw[name].to_pylist()]
        for i in range(width):
            numbers = pa.array([row[i] for row in rows], pa.float64())
            raw = raw.append_column(f"{name}{i}", numbers)
    return raw.drop_columns(["text", "image"])


def exported(folder: Path, raw: pa.Table, schema: Schema) -> Path:
    folder.mkdir()
    write_schema_model(folder / "model", prepared(folder, raw, schema))
    return folder / "model"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model of vectors, and the same of a dense column for each number."""
    folder, raw = tmp_path_factory.mktemp("models"), with_vectors()
    return (
        exported(folder / "vectors", raw, changed(**VECTORS)),
        exported(folder / "wide", in_columns(raw), WIDE),
    )


def test_a_loaded_model_takes_vectors_as_prepare_did(models: tuple[Path, Path]) -> None:
    vectors, wide = (gmeta.load(folder) for folder in models)
    raw = with_vectors().slice(0, 40)
    found = vectors.predict(raw)
    torch.testing.assert_close(found, wide.predict(in_columns(raw)), rtol=0, atol=0)
    assert found.unique().numel() > 20
    support = raw.filter(pa.compute.equal(raw["user"], raw["user"][0]))
    mine, other = vectors.adapt(support), wide.adapt(in_columns(support))
    torch.testing.assert_close(mine.predict(raw), other.predict(in_columns(raw)), rtol=0, atol=0)
    short = raw.set_column(raw.schema.get_field_index("text"), "text", pa.array([[1.0]] * 40))
    assert catch_message(DataError, vectors.predict, short) == (
        "vector column text holds 1 number in a row, and its width is 64. Replace those values, or "
        "correct width in the schema"
    )


def inputs_of(raw: pa.Table) -> list[dict[str, Any]]:
    """A request's inputs: vectors as [N, width]."""
    kinds = {"item": "INT64", "shop": "INT64", "city": "BYTES", "tags": "BYTES"}
    kinds |= {"price": "FP32", "age": "FP32"}
    found = [tensor(name, kind, raw[name].to_pylist()) for name, kind in kinds.items()]
    for name in ("text", "image"):
        rows = np.array(raw[name].to_pylist(), np.float32)
        shape = {"shape": [*rows.shape], "data": rows.ravel().tolist()}
        found.append({**tensor(name, "FP32", []), **shape})
    return found


def test_a_served_model_takes_vectors_as_rows_of_numbers(models: tuple[Path, Path]) -> None:
    folder, _ = models
    raw = with_vectors()
    known = pa.compute.invert(pa.compute.is_null(raw["image"]))
    for name in ("tags", "age"):
        known = pa.compute.and_(known, pa.compute.is_valid(raw[name]))
    raw = raw.filter(known).slice(0, 7)
    inputs = inputs_of(raw)
    with service_of(folder) as service:
        found = values(post(service, {"inputs": inputs}))
        (text,) = (each for each in inputs if each["name"] == "text")
        text |= {"shape": [7, 2], "data": text["data"][:14]}
        refused = post(service, {"inputs": inputs})
    np.testing.assert_allclose(found, gmeta.load(folder).predict(raw).numpy(), rtol=0, atol=1e-6)
    assert refused.status_code == 400
    assert refused.json()["error"].startswith(
        "query rows: vector column text holds 2 numbers in a row"
    )
