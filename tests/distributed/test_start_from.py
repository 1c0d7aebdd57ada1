"""A run that starts from another takes its weights and nothing else, and says whose."""

import io
import shutil
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gmeta.config.train_config import TrainConfig, config_from_dict
from gmeta.distributed.ranks import Ranks
from gmeta.runs.checkpoints.checkpoint_summary import summarise_checkpoint
from gmeta.runs.checkpoints.selected_checkpoint import checkpoint_to_use
from gmeta.runs.run_folder import RunFolder, list_checkpoints
from gmeta.serving.export import CheckpointReader, export_run
from gmeta.serving.model_loader import load
from gmeta.training import train
from metaio import open_dataset
from tests.distributed.harness import on_ranks
from tests.support.exported import rows_of_split


def begin_and_begin_anew(ranks: Ranks, config: TrainConfig, anew: TrainConfig | None = None) -> str:
    """What the second run, if there is one, says on the screen."""
    train(config, ranks)
    if anew is None:
        return ""
    screen = io.StringIO()
    with redirect_stderr(screen):
        train(anew, ranks)
    return screen.getvalue()


def small(path: Path, dataset: Path, **algorithm: Any) -> TrainConfig:
    """Three steps of a small model in a run of this folder."""
    return config_from_dict(
        {
            "data": {"path": str(dataset), "tasks_per_step": 16},
            "model": {"name": "melu", "hidden": [4], "embedding_dim": 4},
            "algorithm": algorithm,
            "run": {"dir": str(path), "device": "cpu", "max_steps": 3},
        }
    )


@pytest.mark.distributed
def test_a_frozen_base_stays_that_of_its_run_while_a_generator_learns_goes_on_and_is_served(
    tmp_path: Path, click_logs: Path
) -> None:
    columns = open_dataset(str(click_logs)).features
    item, *content = (feature.name for feature in columns.single)
    plain = small(tmp_path / "plain", click_logs, name="none")
    chosen = {"adapt_embeddings": [item], "options": {"content": content, "train_base": False}}
    generated = small(tmp_path / "generated", click_logs, name="metaemb", **chosen)
    run = replace(generated.run, start_from=plain.run.dir, max_steps=2)
    generated = replace(generated, run=run)
    on_ranks(2, begin_and_begin_anew, plain, generated)
    # Frozen layers have no state of an optimizer that a resumed run would miss.
    on_ranks(1, begin_and_begin_anew, replace(generated, run=replace(run, max_steps=4)))
    *_, first = list_checkpoints(RunFolder(tmp_path / "plain").checkpoints)
    *_, last = list_checkpoints(RunFolder(tmp_path / "generated").checkpoints)
    assert last.name == "step-00000004"
    summary = summarise_checkpoint(last)
    parts = [layer.name for layer in summary.layers if layer.name.startswith("generator.")]
    assert parts == ["generator.generate.weight", "generator.scale"]
    names = [f"model.learner.{layer.name}" for layer in summary.layers if layer.name not in parts]
    names += [f"model.tables.embeddings.{table.name}.weight" for table in summary.tables]
    trained = CheckpointReader(last).read(names)
    for name, values in CheckpointReader(first).read(names).items():
        assert torch.equal(values, trained[name]), name
    export_run(tmp_path / "generated", tmp_path / "served")
    served = load(tmp_path / "served")
    support, query = rows_of_split(click_logs, "valid")
    assert bool(served.predict(query).isfinite().all())
    assert served.predict_tasks(support, query).support_rows_N.min() > 0


@pytest.mark.distributed
def test_a_run_starts_with_the_weights_of_another_at_step_0_with_any_optimizer(
    tmp_path: Path, click_logs: Path
) -> None:
    config = config_from_dict(
        {
            "data": {"path": str(click_logs), "tasks_per_step": 16},
            "model": {"name": "melu", "hidden": [4], "embedding_dim": 4},
            "run": {"dir": str(tmp_path / "first"), "device": "cpu", "max_steps": 3},
        }
    )
    # Without rates the weights stay what they are at the beginning.
    outer = replace(
        config.outer, dense_optimizer="sgd", dense_lr=0.0, sparse_optimizer="adagrad",
        sparse_lr=0.0,
    )  # fmt: skip
    run = replace(config.run, dir=str(tmp_path / "second"), start_from=config.run.dir, max_steps=1)
    # Another seed would draw other weights, if any were drawn.
    anew = replace(config, outer=outer, run=replace(run, seed=7))
    said, silence = on_ranks(2, begin_and_begin_anew, config, anew)
    (first,) = list_checkpoints(RunFolder(tmp_path / "first").checkpoints)
    (second,) = list_checkpoints(RunFolder(tmp_path / "second").checkpoints)
    assert second.name == "step-00000001"
    assert f"begins with the weights of {first}\n" in said
    assert "begins with" not in silence
    before, after = CheckpointReader(first), CheckpointReader(second)
    summary = summarise_checkpoint(second)
    names = [f"model.learner.{layer.name}" for layer in summary.layers]
    names += [f"model.tables.embeddings.{table.name}.weight" for table in summary.tables]
    weights = after.read(names)
    for name, values in before.read(names).items():
        assert torch.equal(values, weights[name]), name


@pytest.mark.distributed
def test_weights_that_training_makes_no_better_stay_the_best_and_the_run_says_so(
    tmp_path: Path, click_logs: Path
) -> None:
    plain = small(tmp_path / "plain", click_logs, name="none")
    adapted = small(tmp_path / "adapted", click_logs, inner_lr=0.1)
    run = replace(
        adapted.run, start_from=plain.run.dir, epochs=9, max_steps=0, early_stop_patience=2
    )
    # Without rates every validation scores as the first.
    outer = replace(adapted.outer, dense_lr=0.0, sparse_lr=0.0)
    adapted = replace(
        adapted, outer=outer, run=run, data=replace(adapted.data, valid_split="valid")
    )
    said, _ = on_ranks(2, begin_and_begin_anew, plain, adapted)
    folder = RunFolder(tmp_path / "adapted")
    assert [one["epoch"] for one in folder.read_metrics() if "valid" in one] == [0, 0, 1]
    assert checkpoint_to_use(folder.checkpoints, run) == list_checkpoints(folder.checkpoints)[0]
    assert list_checkpoints(folder.checkpoints)[0].name == "step-00000000"
    assert (
        f"the best auc is that of {plain.run.dir}, with whose weights this run began: maml made "
        "nothing better\n"
    ) in said
    # Only these weights are left: the run begins again with them.
    for later in list_checkpoints(folder.checkpoints)[1:]:
        shutil.rmtree(later)
    on_ranks(1, begin_and_begin_anew, adapted)
    assert [one["epoch"] for one in folder.read_metrics() if "valid" in one] == [0, 0, 1]
