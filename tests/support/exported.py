"""Exported models and rows for the tests of export and serving."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.inputs import ItemFeaturesConfig, NeighboursConfig, SupportFeaturesConfig
from gmeta.config.table_widths import widths_of_tables
from gmeta.distributed.ranks import Ranks
from gmeta.evaluation.evaluate import evaluate_run
from gmeta.runs.build import build_learner, build_statistics
from gmeta.serving.export import write_model
from gmeta.serving.exported_folder import ExportedColumns, ExportedConfig
from gmeta.serving.table_format import TableFormat
from gmeta_models import ModelConfig
from metaio import open_dataset
from metaio.format.block import Block
from metaio.format.features import Features, FeatureSpec, TableSpec
from metaio.ragged import offsets
from tests.distributed.harness import on_ranks

FEATURES = Features(
    tables=(TableSpec("item", 50), TableSpec("city", 8), TableSpec("tag", 12)),
    single=(FeatureSpec("item", "item"), FeatureSpec("city", "city")),
    multi=(FeatureSpec("tags", "tag"), FeatureSpec("seen", "item")),
    dense=("price",),
)


def metaemb_rate(model: str) -> float:
    """An inner rate at which one table's moving embeddings show in what is predicted."""
    return {"mmoe": 300.0, "ple": 3000.0}.get(model, 3.0)


def write_random_model(
    folder: Path, features: Features = FEATURES, table_format: TableFormat = "float32",
    loss: str = "bce", algorithm: AlgorithmConfig | None = None, model: ModelConfig | None = None,
    support_features: SupportFeaturesConfig | None = None,
    item_features: ItemFeaturesConfig | None = None, neighbours: NeighboursConfig | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """An exported model of random values in `folder`; returns its float32 tables by name."""
    config = ExportedConfig(
        model=model or ModelConfig(embedding_dim=4, hidden=(16,), options={"bottom": (8,)}),
        algorithm=algorithm or AlgorithmConfig(inner_steps=2, inner_lr=0.3), loss=loss,
        features=features, columns=ExportedColumns("user", "click", None, {}),
        table_format=table_format, source={}, files={},
        support_features=support_features or SupportFeaturesConfig(),
        item_features=item_features or ItemFeaturesConfig(),
        neighbours=neighbours or NeighboursConfig(),
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    inputs = config.support_features, features, config.item_features, config.neighbours
    learner = build_learner(
        features, config.model, config.algorithm, loss, 1.0, build_statistics(*inputs),
        config.item_features, neighbours=config.neighbours,
    )  # fmt: skip
    if learner.neighbours is not None:
        ids_RH, weights_RH2 = learner.neighbours.buffers()
        ids_RH[1:] = torch.randint(1, len(ids_RH), ids_RH[1:].shape)
        weights_RH2[1:] = torch.rand(weights_RH2[1:].shape)
    if learner.items is not None:
        for values_V2 in learner.items.buffers():
            values_V2[1:] = torch.randn(len(values_V2) - 1, 2)  # row 0 is of unknown values
    layers = learner.state_dict()
    widths = widths_of_tables(features, config.model)
    tables = {t.name: torch.randn(t.num_rows, widths[t.name]) for t in features.tables}
    if (shared_BD := learner.projections.shared_BD) is not None:
        torch.nn.init.normal_(shared_BD)
        for rows in tables.values():
            rows[::3] = 0.0  # rare ones
    write_model(folder, config, layers, tables.__getitem__)
    return tables


def random_rows(num_rows: int, seed: int = 0, num_tasks: int = 1) -> pa.Table:
    """Labelled rows of FEATURES by table ids, tasks in no order."""
    rng = np.random.default_rng(seed)

    def lists(num_ids: int) -> pa.Array:
        sizes = rng.integers(0, 4, num_rows)
        drawn = [rng.integers(0, num_ids, size).tolist() for size in sizes]
        return pa.array(drawn, pa.list_(pa.int64()))

    return pa.table(
        {
            "user": rng.integers(0, num_tasks, num_rows), "item": rng.integers(0, 50, num_rows),
            "city": rng.integers(0, 8, num_rows), "tags": lists(12), "seen": lists(50),
            "price": rng.standard_normal(num_rows), "click": rng.integers(0, 2, num_rows),
        }
    )  # fmt: skip


def rows_of_split(dataset: Path, split: str) -> tuple[pa.Table, pa.Table]:
    """Support and query rows of a prepared split as columns of table ids, in stored order."""
    opened = open_dataset(str(dataset))
    blocks = [opened.read_block(split, b) for b in range(opened.split(split).num_blocks)]
    sides = [_sides(opened.features, opened.task, opened.label, block) for block in blocks]
    return pa.concat_tables([s for s, _ in sides]), pa.concat_tables([q for _, q in sides])


def _sides(features: Features, task: str, label: str, block: Block) -> tuple[pa.Table, pa.Table]:
    rows_T = np.diff(block.row_offsets_T1)
    within_N = np.arange(block.num_rows) - np.repeat(block.row_offsets_T1[:-1], rows_T)
    ids_NF = block.unique_ids_U[block.positions_NF]
    values_V = block.unique_ids_U[block.multi_positions_V].tolist()
    ends_NM = offsets(block.multi_lengths_NM.ravel())[1:].reshape(block.multi_lengths_NM.shape)
    columns = {task: np.repeat(block.task_T, rows_T), label: block.label_N}
    columns |= {feature.name: ids_NF[:, i] for i, feature in enumerate(features.single)}
    columns |= {name: block.dense_NK[:, i] for i, name in enumerate(features.dense)}
    table = pa.table(columns)
    for index, feature in enumerate(features.multi):
        ends, lengths = ends_NM[:, index], block.multi_lengths_NM[:, index]
        lists = [values_V[end - size : end] for end, size in zip(ends, lengths, strict=True)]
        table = table.append_column(feature.name, pa.array(lists, pa.list_(pa.int64())))
    is_support_N = pa.array(within_N < np.repeat(block.support_lengths_T, rows_T))
    return table.filter(is_support_N), table.filter(pa.compute.invert(is_support_N))


def evaluated(run: Path, split: str) -> pa.Table:
    """What `gmeta evaluate` predicts on a split, on a rank of its own, through TorchRec."""
    (predictions,) = on_ranks(1, _evaluated, run, split)
    return predictions


def _evaluated(ranks: Ranks, run: Path, split: str) -> pa.Table:
    return evaluate_run(run, "run", [split], ranks).predictions
