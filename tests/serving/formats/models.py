"""Models of every kind, exported, for the tests of programs."""

import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

import gmeta
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.runs.build import build_learner
from gmeta.serving.export import write_model
from gmeta.serving.exported_folder import ExportedColumns, ExportedConfig
from gmeta.serving.served_model import ServedModel
from gmeta_models import ModelConfig
from metaio import Dataset
from metaio.prepare.schema.schema_file import parse_schema
from tests.support.exported import write_random_model

SMALL = {"embedding_dim": 4, "hidden": (8,)}
OPTIONS = {"bottom": (6,), "experts": 2}
MODELS_BY_CASE: dict[str, dict[str, Any]] = {
    "dlrm": {}, "dlrm cat": {"name": "dlrm", "pooling": "sum", "options": {"interaction": "cat"}},
    "melu": {"name": "melu"}, "cbml": {"name": "cbml"},
    "din": {"name": "din", "options": {"history": "seen"}}, "deepfm": {"name": "deepfm"},
    "dcnv2": {"name": "dcnv2"},
    "dcnv2 parallel": {"name": "dcnv2", "options": {"structure": "parallel", "cross_rank": 2}},
    "mmoe": {"name": "mmoe"}, "narrow tables": {"embedding_dim": 8, "widths": ("item=4", "city=4")},
    "rare rows": {"embedding_dim": 8, "widths": ("item=4",), "admission": (2, 0)},
    "a table left out": {"embedding_dim": 8, "without": ("tag",), "dropout": 0.5},
    "ple": {"name": "ple", "options": {"expert": (8,), "own_experts": 1}},
}  # fmt: skip
ALGORITHMS_BY_CASE: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in ("maml", "fomaml", "anil", "reptile", "metasgd", "none")},
    "some tables": {"name": "maml", "adapt_embeddings": ("item",)},
    "encoder": {"name": "encoder"},
    "encoder_maml": {"name": "encoder_maml", "options": {"encoder_pooling": "attention"}},
    "ridge": {"name": "ridge"},
    "metaemb": {
        "name": "metaemb",
        "adapt_embeddings": ("city",),
        "options": {"content": ("tags",)},
    },
}


def model_of(
    folder: Path, model: str = "dlrm", algorithm: str = "maml", inner_steps: int = 2, **more: Any
) -> ServedModel:
    """An exported model of random values."""
    chosen = MODELS_BY_CASE[model]
    options = {**OPTIONS, **chosen.get("options", {})}
    write_random_model(
        folder,
        model=ModelConfig(**{**SMALL, **chosen, "options": options}),
        algorithm=AlgorithmConfig(
            inner_steps=inner_steps, inner_lr=0.3, **ALGORITHMS_BY_CASE[algorithm]
        ),
        **more,
    )
    return gmeta.load(folder)


def write_schema_model(folder: Path, dataset: Dataset) -> None:
    """An exported model of random values for a dataset that was prepared by a schema."""
    recipe, features = dataset.manifest.recipe, dataset.features
    moments = {name: tuple(pair) for name, pair in recipe.get("moments", {}).items()}
    schema = parse_schema(recipe["schema"])
    model, algorithm = ModelConfig(**SMALL, options=OPTIONS), AlgorithmConfig(inner_lr=0.3)
    config = ExportedConfig(
        model=model, algorithm=algorithm, loss="bce", features=features,
        columns=ExportedColumns(dataset.task, dataset.label, schema, moments, recipe["kinds"]),
        table_format="float32", source={}, files={},
    )  # fmt: skip
    shutil.copytree(Path(dataset.url) / "vocabulary", folder / "vocabulary")
    torch.manual_seed(0)
    layers = build_learner(features, model, algorithm, "bce").state_dict()
    tables = {table.name: torch.randn(table.num_rows, 4) for table in features.tables}
    write_model(folder, config, layers, tables.__getitem__)


def column_of(path: Path) -> list[Any]:
    """The values of a vocabulary."""
    values: list[Any] = pq.read_table(path)["value"].to_pylist()
    return values
