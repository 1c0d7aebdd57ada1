"""A saved batch, and what is in it, whatever loop was to train it."""

import pickle
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.data.collate import collate_in_parts
from gmeta.runs.build import build_learner
from gmeta.runs.guards import load_batch, named_tensors, save_batch
from gmeta_models import ModelConfig
from tests.support import reference

FEATURES = reference.some_features(2, 1, 1)


@pytest.mark.parametrize(
    ("algorithm", "rows"),
    [
        (AlgorithmConfig(name="reptile"), "TaskGroups"),
        (AlgorithmConfig(name="maml"), "PaddedTasks"),
        (AlgorithmConfig(name="maml", adapt_embeddings=False), "PaddedTasks"),
        (AlgorithmConfig(name="none"), "Side"),
    ],
)
@pytest.mark.parametrize("num_parts", [1, 2])
def test_the_tensors_of_a_saved_batch_are_found_by_name(
    tmp_path: Path, algorithm: AlgorithmConfig, rows: str, num_parts: int
) -> None:
    model = ModelConfig(name="melu", embedding_dim=4, hidden=(5,))
    learner = build_learner(FEATURES, model, algorithm, "bce")
    rng = random.Random(0)
    tasks = [reference.random_task(FEATURES, 1, 2, rng) for _ in range(3)]
    batch = reference.batch_of(tasks, FEATURES)
    batch = replace(batch, dense_NK=batch.dense_NK.float())
    batch.dense_NK[0, 0] = torch.nan  # of the first task
    save_batch(tmp_path / "bad.pt", collate_in_parts(learner.collate, num_parts)(batch))
    parts = load_batch(tmp_path / "bad.pt")
    assert type(parts[0].rows).__name__ == rows
    found = [dict(named_tensors(part)) for part in parts]
    assert torch.cat([part["task_T"] for part in found]).tolist() == [0, 1, 2]
    bad = [{name for name, values in part.items() if not values.isfinite().all()} for part in found]
    assert [name.endswith("dense_NK") for name in bad[0]] == [True]
    assert not any(bad[1:])
    assert any(name.endswith("label_N") for name in found[0])


def test_a_file_that_is_no_saved_batch_runs_no_code(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[object, ...]:
            return (tmp_path / "mark").write_text, ("it ran",)

    torch.save([Hostile()], tmp_path / "bad.pt")
    with pytest.raises(pickle.UnpicklingError):
        load_batch(tmp_path / "bad.pt")
    assert not (tmp_path / "mark").exists()
