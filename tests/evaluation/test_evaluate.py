"""A plain run that is fine-tuned stays the model that it was trained as."""

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

import gmeta.evaluation.evaluate
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.train_config import TrainConfig, config_from_dict
from gmeta.evaluation.fine_tuning import adapt_with
from gmeta.learner import MetaLearner
from gmeta.runs.build import build
from gmeta.runs.checkpoints.lineage import TrainedIncrement
from metaio.format.dataset import Dataset
from metaio.read.batch import TaskBatch
from metaio.read.compose import compose
from tests.metaio.prepare.test_events import log, prepared, schema

CONFIG: dict[str, Any] = {
    "model": {"name": "melu", "embedding_dim": 4, "hidden": [8]},
    "outer": {"loss": "huber", "huber_delta": 0.1},
    "algorithm": {"name": "none"},
    "support_features": {"task": True, "label_prior": [0.5, 0.5]},
    "item_features": {"columns": ["item"]},
}


def batch_of(dataset: Dataset, split: str) -> TaskBatch:
    block = dataset.read_block(split, 0)
    return compose(dataset.features, [(block, np.arange(min(block.num_episodes, 9)))])


def predicted(learner: MetaLearner, batch: TaskBatch) -> torch.Tensor:
    """Outputs after adapting, tables of fixed random rows."""
    rows_UD = torch.randn(len(batch.unique_ids_U), 4, generator=torch.Generator().manual_seed(1))
    return learner.predict(rows_UD, learner.collate_to_predict(batch)).after_N


def with_values(config: TrainConfig) -> tuple[Dataset, MetaLearner]:
    dataset, learner = build(config)
    assert learner.items is not None
    sums = learner.items.empty_sums()
    learner.items.add(sums, batch_of(dataset, config.data.train_split))
    learner.items.set_from_sums(sums)
    return dataset, learner


@pytest.mark.parametrize(
    ("section", "other"),
    [
        ("outer", {"loss": "huber", "huber_delta": 1.0}),
        ("support_features", {"task": True, "label_prior": [0.1, 0.9]}),
        ("item_features", {"columns": ["item"], "shrinkage": 50.0}),
    ],
)
def test_fine_tuning_keeps_inputs_and_loss_of_the_run(
    click_logs: Path, section: str, other: dict[str, Any]
) -> None:
    raw = {**CONFIG, "data": {"path": str(click_logs)}}
    config = config_from_dict(raw)
    dataset, plain = with_values(config)
    batch = batch_of(dataset, config.data.train_split)
    tuned = AlgorithmConfig("maml", inner_lr=0.3, inner_steps=4)
    as_none = replace(tuned, name="none")
    held = SimpleNamespace(local=SimpleNamespace(learner=plain))
    adapt_with(as_none, cast("Any", held))
    found = predicted(held.local.learner, batch)
    # The same layers, built to adapt so from the start.
    _, expected = with_values(replace(config, algorithm=tuned))
    expected.load_state_dict(plain.state_dict())
    torch.testing.assert_close(found, predicted(expected, batch), rtol=0, atol=1e-6)
    # Each of them matters here: with another value the same layers predict otherwise.
    _, changed = with_values(config_from_dict({**raw, section: other}))
    changed.model.load_state_dict(plain.model.state_dict())
    held = SimpleNamespace(local=SimpleNamespace(learner=changed))
    adapt_with(as_none, cast("Any", held))
    assert float((predicted(held.local.learner, batch) - found).abs().max()) > 1e-4


@pytest.mark.parametrize("encoder", ["sasrec", "sim"])
def test_fine_tuning_keeps_the_events_of_the_run(tmp_path: Path, encoder: str) -> None:
    raw = {
        "data": {"path": prepared(tmp_path, log(), schema())},
        "model": {"name": "melu", "embedding_dim": 4, "hidden": [8], "events": encoder},
        "algorithm": {"name": "none"},
    }
    config = config_from_dict(raw)
    dataset, plain = build(config)
    batch = batch_of(dataset, config.data.train_split)
    held = SimpleNamespace(local=SimpleNamespace(learner=plain))
    tuned = AlgorithmConfig("maml", inner_lr=0.3, inner_steps=4)
    adapt_with(replace(tuned, name="none"), cast("Any", held))
    found = predicted(held.local.learner, batch)
    _, expected = build(replace(config, algorithm=tuned))
    expected.load_state_dict(plain.state_dict())
    torch.testing.assert_close(found, predicted(expected, batch), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["encoder_maml", "metaemb"])
def test_what_is_learned_beside_the_model_stays_on_its_device(click_logs: Path, name: str) -> None:
    """On meta, as on a GPU: what is made anew on the CPU could not be multiplied there."""
    algorithm = {"name": name}
    if name == "metaemb":
        algorithm |= {"adapt_embeddings": ["item"], "options": {"content": ["genre"]}}
    config = config_from_dict({"data": {"path": str(click_logs)}, "algorithm": algorithm})
    _, learner = build(config)
    held = SimpleNamespace(local=SimpleNamespace(learner=learner.to("meta")))
    adapt_with(replace(config.algorithm, inner_lr=0.3), cast("Any", held))
    assert {each.device.type for each in held.local.learner.parameters()} == {"meta"}


def test_an_increment_trained_on_before_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = [TrainedIncrement("s", number, f"print {number}", 5) for number in (1, 2)]
    about = {"lineage": [asdict(one) for one in trained]}
    monkeypatch.setattr(gmeta.evaluation.evaluate, "checkpoint_of", lambda folder: Path())
    monkeypatch.setattr(gmeta.evaluation.evaluate, "read_about", lambda path: about)
    config = config_from_dict({"data": {"path": "s", "valid_split": "gate"}})
    folder: Any = SimpleNamespace(read_config=lambda: config)
    splits = ("train", "gate", "rest")

    def told(number: int) -> list[str]:
        own, scored = (
            SimpleNamespace(fingerprint=f"print {one}", splits=dict.fromkeys(splits))
            for one in (2, number)
        )
        return gmeta.evaluation.evaluate.describe_trained_splits(
            "day-2", folder, own, scored, splits
        )  # type: ignore[arg-type]

    rest = "on rows of it, so its figures there flatter and say little of unseen tasks"
    seen = [f"train: day-2 was trained {rest}", f"gate: day-2 was chosen {rest}"]
    assert [told(number) for number in (1, 2, 3)] == [seen, seen, []]
