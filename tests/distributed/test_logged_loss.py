"""The training loss that is logged is the mean over the tasks that have one: their query rows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gmeta.config.train_config import config_from_dict
from gmeta.distributed.ranks import Ranks
from gmeta.training import train
from metaio import Provenance, Rows, write_dataset
from tests.distributed.harness import on_ranks
from tests.metaio.conftest import FEATURES, make_rows


def trained(ranks: Ranks, described: dict[str, Any]) -> list[dict[str, Any]]:
    return train(config_from_dict(described), ranks).read_metrics()


def written(path: Path, rows: Rows) -> str:
    with write_dataset(str(path), FEATURES, Provenance(task="user", label="click")) as writer:
        writer.split("train").write(rows)
    return str(path)


def some_rows() -> Rows:
    """40 tasks: of some all rows are support, of some all are query."""
    rows = make_rows(40, seed=1)
    assert 2 < np.count_nonzero(rows.support_lengths_T == rows.row_lengths_T) < 20
    assert 2 < np.count_nonzero(rows.support_lengths_T == 0) < 20
    return rows


def with_query_rows(rows: Rows) -> Rows:
    """The tasks that have such."""
    chosen_T = rows.support_lengths_T < rows.row_lengths_T
    chosen_N = np.repeat(chosen_T, rows.row_lengths_T)
    chosen_V = np.repeat(chosen_N, rows.multi_lengths_NM.sum(axis=1))
    chosen = {"T": chosen_T, "N": chosen_N, "V": chosen_V}
    stored = {name: array for name, array in vars(rows).items() if len(array)}  # no row ids
    arrays = {name: array[chosen[name.split("_")[-1][0]]] for name, array in stored.items()}
    return replace(rows, **arrays)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("algorithm", "world_size", "parts"),
    [("reptile", 1, 1), ("reptile", 1, 3), ("reptile", 2, 1), ("maml", 2, 1)],
)
def test_tasks_without_query_rows_are_no_part_of_the_loss(
    tmp_path: Path, algorithm: str, world_size: int, parts: int
) -> None:
    found = []
    for name, rows in (("every", some_rows()), ("scored", with_query_rows(some_rows()))):
        described = {
            "data": {"path": written(tmp_path / name, rows), "tasks_per_step": 100},
            "model": {"name": "melu", "hidden": [4], "embedding_dim": 4},
            "algorithm": {"name": algorithm, "inner_lr": 0.1},
            "outer": {"accumulate_steps": parts},
            "run": {"dir": str(tmp_path / f"run-{name}"), "device": "cpu", "max_steps": 1},
        }
        (line,) = on_ranks(world_size, trained, described)[0]
        found.append(line["loss"])
    # The step's one loss is of the weights at the beginning, which are the same.
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.distributed
def test_without_a_query_row_there_is_no_loss_to_log(tmp_path: Path) -> None:
    rows = make_rows(12)
    path = written(tmp_path / "data", replace(rows, support_lengths_T=rows.row_lengths_T))
    described = {
        "data": {"path": path, "tasks_per_step": 4},
        "model": {"name": "melu", "hidden": [4], "embedding_dim": 4},
        "algorithm": {"name": "reptile"},
        "run": {"dir": str(tmp_path / "run"), "device": "cpu", "max_steps": 2},
    }
    (line,) = on_ranks(1, trained, described)[0]
    assert line["step"] == 2
    assert line["loss"] is None
