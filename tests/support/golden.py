"""The golden numbers that stand beside the repository, as models, batches and named parameters. See
../shared/oracle/README.md for what each key holds; everything is float64."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gmeta_models.dlrm import DLRM
from gmeta_models.melu import MeLU
from gmeta_models.model_config import InputSizes, ModelConfig
from gmeta_models.options import DlrmOptions
from metaio.read.batch import TaskBatch

GOLDEN = Path(__file__).resolve().parents[3] / "shared" / "oracle" / "golden.npz"
TABLES = ("emb_user", "emb_item", "emb_tag")
# Our layer names for the golden file's.
LAYERS = {
    "A": {"fc1": "decision.0", "fc2": "decision.2", "out": "decision.4"},
    "B": {"bot": "bottom.0", "top1": "top.0", "out": "top.2"},
}
DECISION = {"A": ("*",), "B": ("top.*",)}


def load() -> dict[str, np.ndarray]:
    if not GOLDEN.exists():
        pytest.skip("the golden numbers (../shared/oracle/golden.npz) are not here")
    with np.load(GOLDEN) as arrays:
        return {key: arrays[key] for key in arrays.files}


def build(case: str, golden: dict[str, np.ndarray]) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """The case's model and its tables at their initial values."""
    sizes = InputSizes(num_single=2, num_multi=1, num_dense=0 if case[0] == "A" else 2)
    if case[0] == "A":
        model: nn.Module = MeLU(ModelConfig(embedding_dim=3, hidden=(4, 3), pooling="mean"), sizes)
    else:
        model = DLRM(
            ModelConfig(embedding_dim=3, hidden=(4,), pooling="sum"), sizes, DlrmOptions(bottom=())
        )
    model.to(torch.float64)
    for theirs, parameter in layer_parameters(case, model):
        parameter.data.copy_(torch.from_numpy(golden[f"{case}/init/{theirs}"]))
    tables = {
        table: nn.Parameter(torch.from_numpy(golden[f"{case}/init/{table}"]).clone())
        for table in TABLES
    }
    return model, tables


def layer_parameters(case: str, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Their name and our parameter, for every layer of the model."""
    parameters = dict(model.named_parameters())
    for theirs, ours in LAYERS[case[0]].items():
        yield f"{theirs}_w", parameters[f"{ours}.weight"]
        yield f"{theirs}_b", parameters[f"{ours}.bias"]


def batch(case: str, golden: dict[str, np.ndarray]) -> TaskBatch:
    """The three tasks as one batch; every row of every table counts as fetched."""
    table_rows = [golden[f"{case}/init/{table}"].shape[0] for table in TABLES]
    first_item, first_tag = table_rows[0], table_rows[0] + table_rows[1]
    label = "y" if case.endswith("bce") else "rating"
    sides = [[f"data/task{task}/{side}" for side in "sq"] for task in range(3)]
    keys = [key for pair in sides for key in pair]
    positions = [
        np.stack([golden[f"{key}/user"], golden[f"{key}/item"] + first_item], axis=1)
        for key in keys
    ]
    rows = [sum(golden[f"{key}/user"].size for key in pair) for pair in sides]

    def joined(values: list[np.ndarray], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(values)).to(dtype)

    return TaskBatch(
        task_T=torch.arange(3),
        row_offsets_T1=torch.tensor([0, *np.cumsum(rows)]),
        support_lengths_T=torch.tensor([golden[f"{pair[0]}/user"].size for pair in sides]),
        label_N=joined([golden[f"{key}/{label}"] for key in keys], torch.float64),
        dense_NK=joined(
            [golden[f"{key}/dense"][:, : 0 if case[0] == "A" else 2] for key in keys], torch.float64
        ),
        unique_ids_U=torch.cat([torch.arange(size) for size in table_rows]),
        unique_lengths_B=torch.tensor(table_rows),
        positions_NF=joined(positions, torch.int32),
        multi_positions_V=joined(
            [golden[f"{key}/tag_idx"] + first_tag for key in keys], torch.int32
        ),
        multi_lengths_NM=joined(
            [np.diff(golden[f"{key}/tag_off"]) for key in keys], torch.int32
        ).unsqueeze(1),
    )
