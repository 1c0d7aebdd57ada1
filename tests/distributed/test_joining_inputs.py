"""Inputs that join a stream: the next run's model predicts as before, and learns from them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

from gmeta.config.train_config import TrainConfig, config_from_dict
from gmeta.distributed.ranks import Ranks
from gmeta.errors import UserError
from gmeta.runs.run_folder import RunFolder, list_checkpoints
from gmeta.serving.channel.gate_predictions import find_columns
from gmeta.serving.export import CheckpointReader, export_run
from gmeta.serving.model_loader import load
from gmeta.training import train
from metaio.prepare.schema.schema_file import parse_schema
from metaio.read.reader import EpisodeRange, read_ranges
from metaio.stream.chain import open_stream
from tests.distributed.harness import on_ranks
from tests.metaio.stream.changing import with_columns, with_inputs
from tests.metaio.stream.logs import DAY, append, changed, log, schema

# Plain training predicts without adapting; the encoder reads all inputs of support rows.
MODELS: dict[str, dict[str, Any]] = {
    "dlrm": {}, "dlrm-cat": {"options": {"interaction": "cat"}}, "melu": {}, "cbml": {},
    "dcnv2": {},
    "din": {"options": {"history": "tags"}}, "mmoe": {}, "ple": {},
    "melu-shares": {"admission": [2, 0]},
}  # fmt: skip


@pytest.fixture(scope="module", params=[False, True], ids=["behind", "before"])
def stream(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two increments; the inputs that join the second stand before or behind the others."""
    root = tmp_path_factory.mktemp("joined")
    body = schema().to_json()
    # DIN wants one single-id column with the table of its history.
    body["multi"][0]["table"] = "tag"
    body["single"][1] = {"column": "tag", "vocabulary": 1}
    tags = [f"{n}" for n in np.random.default_rng(1).integers(0, 12, 400)]
    body["single"][0]["vocabulary"] = 1  # the second day has no new ids
    first = log(0).append_column("tag", pa.array(tags))
    later = {
        "time": pc.add(first["time"], DAY).combine_chunks(),
        "row": pc.add(first["row"], 10_000).combine_chunks(),
    }
    second = changed(changed(first, "time", later["time"]), "row", later["row"])
    own = parse_schema(body)
    append(root / "s", first, "0.parquet", schema=own)
    wide = with_inputs(own, request.param)
    append(root / "s", with_columns(second, known=True), "1.parquet", schema=wide)
    return root / "s"


def config_of(
    stream: Path, folder: Path, number: int, before: Path | None = None, **more: Any
) -> TrainConfig:
    raw: dict[str, Any] = {
        "data": {"path": str(stream), "increment": str(number), "tasks_per_step": 8},
        "model": {"name": "melu", "hidden": [8], "embedding_dim": 4},
        "algorithm": {"name": "none"},
        "outer": {"sparse_lr": 0.2, "dense_lr": 0.005},
        "run": {"dir": str(folder), "device": "cpu", "prequential": False},
    }
    if before is not None:
        raw["run"]["continue_from"] = str(before)
    for name, keys in more.items():
        raw[name] = raw.get(name, {}) | keys
    return config_from_dict(raw)


def train_each(ranks: Ranks, configs: list[TrainConfig]) -> None:
    for config in configs:
        train(config, ranks)


def predictions(run: Path, stream: Path, place: Path) -> torch.Tensor:
    """What a run predicts of the second increment before it adapts."""
    export_run(run, place, overwrite=True)
    served, dataset = load(place), open_stream(str(stream)).dataset(2)
    columns = find_columns(place, served.config, dataset)
    every = [EpisodeRange("gate", 0, dataset.splits["gate"].num_episodes)]
    (batch,) = read_ranges(dataset, every, tasks_per_batch=256)
    return served.predict_batch(columns.select(batch)).before_N


STILL = {"outer": {"sparse_lr": 0.0, "dense_lr": 0.0}}


@pytest.mark.distributed
def test_the_next_model_predicts_as_before_the_inputs_joined(tmp_path: Path, stream: Path) -> None:
    configs, runs = [], {}
    for name, keys in MODELS.items():
        model = {"model": {"name": name.split("-")[0], "hidden": [8], "embedding_dim": 4} | keys}
        one, two = runs[name] = tmp_path / f"{name}-1", tmp_path / f"{name}-2"
        configs += [
            config_of(stream, one, 1, **model),
            config_of(stream, two, 2, one, **model, **STILL),
        ]
    on_ranks(1, train_each, configs)
    for name, (one, two) in runs.items():
        before, after = (predictions(run, stream, tmp_path / "model") for run in (one, two))
        assert before.std() > 1e-3, name
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.distributed
@pytest.mark.parametrize("algorithm", ["maml", "metasgd", "encoder"])
def test_inputs_that_joined_are_learnt_on_any_number_of_ranks(
    tmp_path: Path, stream: Path, algorithm: str
) -> None:
    more = {"algorithm": {"name": algorithm}, "outer": {"dense_optimizer": "adam"}}
    one, runs = tmp_path / "one", {n: tmp_path / f"on-{n}" for n in (1, 2)}
    on_ranks(1, train_each, [config_of(stream, one, 1, **more)])
    for number, run in runs.items():
        on_ranks(number, train_each, [config_of(stream, run, 2, one, **more)])
    # Stopped behind its second step it goes on from its own checkpoint: nothing joins again.
    run = runs[0] = tmp_path / "stopped"
    stopped = config_of(stream, run, 2, one, **more, run={"max_steps": 2})
    whole = replace(stopped, run=replace(stopped.run, max_steps=0))
    on_ranks(1, train_each, [stopped, whole])
    name, table = "model.learner.model.decision.0.weight", "model.tables.embeddings.shop.weight"
    found = []
    for run in runs.values():
        reader = CheckpointReader(list_checkpoints(RunFolder(run).checkpoints)[-1])
        found.append(reader.read([name, table]))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[0], found[2], rtol=0, atol=0)
    # Three single columns, a list, a number and a vector of two joined.
    old = CheckpointReader(list_checkpoints(RunFolder(one).checkpoints)[-1]).read([name])[name]
    assert found[0][name].shape[1] - old.shape[1] == 4 * 4 + 3
    # Some units may never have been active.
    assert (found[0][name][:, 12 + 4 :] != 0).any(dim=1).sum() > 2


@pytest.mark.distributed
def test_a_model_that_cannot_take_more_inputs_says_so(tmp_path: Path, stream: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    model = {"model": {"name": "deepfm", "hidden": [8], "embedding_dim": 4}}
    on_ranks(1, train_each, [config_of(stream, one, 1, **model)])
    with pytest.raises(Exception, match="joined the stream") as error:
        on_ranks(1, train_each, [config_of(stream, two, 2, one, **model)])
    assert "and model.name = 'deepfm' of this run cannot take more inputs: " in str(error.value)
    assert UserError.__name__ in str(error.value)
    assert "Begin a new model: a run without run.continue_from" in str(error.value)
