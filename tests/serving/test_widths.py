"""A model of narrow tables serves what one of wide tables does that holds their projections."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import gmeta
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.serving.export import write_model
from gmeta.serving.exported_folder import LAYERS_FILE, read_config, table_file
from gmeta.serving.table_format import TableFormat
from gmeta_models import ModelConfig
from tests.support.exported import FEATURES, metaemb_rate, random_rows, write_random_model

MODEL = ModelConfig("melu", 8, hidden=(8,))
NARROW = ModelConfig("melu", 8, hidden=(8,), widths=("item=4", "tag=4"))
METAEMB = AlgorithmConfig(
    "metaemb", inner_steps=2, inner_lr=metaemb_rate("melu"), adapt_embeddings=("city",),
    options={"content": ("tags",)},
)  # fmt: skip


@pytest.mark.parametrize("algorithm", [AlgorithmConfig(inner_steps=2, inner_lr=0.3), METAEMB])
@pytest.mark.parametrize("table_format", ["float32", "int8"])
def test_narrow_tables_serve_what_their_projections_would(
    tmp_path: Path, table_format: TableFormat, algorithm: AlgorithmConfig
) -> None:
    narrow, wide = tmp_path / "narrow", tmp_path / "wide"
    write_random_model(narrow, table_format=table_format, algorithm=algorithm, model=NARROW)
    layers = load_file(narrow / LAYERS_FILE)
    projections = {
        name: layers.pop(f"projections.layers.{name}.weight").T for name in ("item", "tag")
    }
    tables = {}
    for index, table in enumerate(FEATURES.tables):
        stored = load_file(narrow / table_file(index))
        assert stored["values"].shape[1] == (4 if table.name in projections else 8)
        rows = stored["values"].float() * stored.get("scale", torch.ones(())).unsqueeze(-1)
        tables[table.name] = rows @ projections.get(table.name, torch.eye(8))
    wide.mkdir()
    config = replace(read_config(narrow), model=MODEL, table_format="float32", files={})
    write_model(wide, config, layers, tables.__getitem__)
    mine, other = gmeta.load(narrow), gmeta.load(wide)
    support, query = random_rows(9, seed=1), random_rows(7, seed=2)
    torch.testing.assert_close(mine.predict(query), other.predict(query), rtol=0, atol=1e-5)
    after = mine.adapt(support).predict(query)
    torch.testing.assert_close(after, other.adapt(support).predict(query), rtol=0, atol=1e-5)
    assert float((after - mine.predict(query)).abs().max()) > 1e-4
    # As of files, and where a version is judged.
    of_tasks = mine.predict_tasks(support, query)
    torch.testing.assert_close(of_tasks.after_N, after, rtol=0, atol=1e-5)
    torch.testing.assert_close(of_tasks.before_N, mine.predict(query), rtol=0, atol=1e-5)
