"""Versions of a small model whose tables, vocabularies and layers change as by training."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.inputs import NeighboursConfig, SupportFeaturesConfig
from gmeta.config.losses import Loss
from gmeta.runs.build import build_learner, build_statistics
from gmeta.serving.export import write_model
from gmeta.serving.exported_folder import ExportedColumns, ExportedConfig
from gmeta.serving.table_format import TableFormat
from gmeta_models import ModelConfig
from metaio.format.features import Features, FeatureSpec, TableSpec

WIDTH = 4


@dataclass
class Model:
    """What a version holds; `change` is a step of training."""

    tables: dict[str, torch.Tensor]
    values: dict[str, list[str | None]] = field(default_factory=dict)
    seed: int = 0
    neighbours_of: str = ""  # a column; its rows' change with the table's

    @classmethod
    def of(cls, rows: dict[str, int], seed: int = 0) -> "Model":
        drawn = torch.Generator().manual_seed(seed)
        tables = {name: torch.randn(size, WIDTH, generator=drawn) for name, size in rows.items()}
        return cls(tables, {}, seed)

    def changed(self, rng: np.random.Generator, share: float = 0.02, grown: int = 0) -> "Model":
        tables = {}
        for name, table in self.tables.items():
            new = torch.cat([table, torch.from_numpy(rng.normal(size=(grown, WIDTH))).float()])
            new[rng.random(len(new)) < share] += 0.25
            tables[name] = new
        return replace(self, tables=tables, seed=int(rng.integers(1 << 30)))

    def write(
        self, folder: Path, table_format: TableFormat = "float32", stream: str = "",
        steps: int = 2, loss: Loss = "bce", positive_rating: float = 0.0,
    ) -> Path:  # fmt: skip
        features = Features(
            tables=tuple(TableSpec(name, len(table)) for name, table in self.tables.items()),
            single=tuple(FeatureSpec(name, name) for name in self.tables),
            multi=(),
            dense=("price",),
        )
        config = ExportedConfig(
            model=ModelConfig(embedding_dim=WIDTH, hidden=(16,), options={"bottom": (8,)}),
            algorithm=AlgorithmConfig(inner_steps=max(steps, 1), inner_lr=0.3 * min(steps, 1)),
            loss=loss, positive_rating=positive_rating, features=features,
            columns=ExportedColumns("user", "click", None, {}), table_format=table_format,
            source={"stream": stream}, files={}, neighbours=NeighboursConfig(self.neighbours_of, 2),
            support_features=SupportFeaturesConfig(label_prior=(0.0, 1.0)),
        )  # fmt: skip
        folder.mkdir(parents=True)
        for name, values in self.values.items():
            (folder / "vocabulary").mkdir(exist_ok=True)
            table = pa.table({"value": pa.array(values, pa.string())})
            pq.write_table(table, folder / "vocabulary" / f"{name}.parquet", store_schema=False)
        torch.manual_seed(self.seed)
        statistics = build_statistics(
            config.support_features, features, config.item_features, config.neighbours
        )
        learner = build_learner(
            features, config.model, config.algorithm, loss, statistics=statistics,
            neighbours=config.neighbours,
        )  # fmt: skip
        if learner.neighbours is not None:
            values_R22 = self.tables[self.neighbours_of].reshape(-1, 2, 2)
            ids_RH, weights_RH2 = learner.neighbours.buffers()
            ids_RH.copy_(values_R22[:, :, 0].abs() * 100)
            weights_RH2.copy_(values_R22)
        write_model(folder, config, learner.state_dict(), self.tables.__getitem__)
        return folder


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by its path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
