"""Checkpoints appear whole or not at all, beside training, say why when they cannot, and go on at
any number of ranks."""

import copyreg
import errno
import json
import random
import threading
from contextlib import nullcontext
from dataclasses import replace
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.sharding import DefaultKind, ShardingConfig
from gmeta.config.train_config import OuterConfig, RunConfig, TrainConfig
from gmeta.distributed.optim.optimizers import OuterOptimizer, build_optimizer
from gmeta.distributed.ranks import Ranks, barrier
from gmeta.distributed.sharded_learner import DistributedLearner
from gmeta.distributed.sharding import shard_learner, table_shards
from gmeta.errors import GMetaError, UserError
from gmeta.learner import MetaLearner
from gmeta.platform.files.checksums import FileChecksum, describe_file
from gmeta.platform.internals import table_kernels
from gmeta.runs.build import build_learner
from gmeta.runs.checkpoints.checkpoint_summary import summarise_checkpoint
from gmeta.runs.checkpoints.checkpoint_writer import CheckpointWriter
from gmeta.runs.checkpoints.loader import load_checkpoint
from gmeta.runs.checkpoints.progress_file import read_about
from gmeta.runs.run_folder import list_checkpoints
from gmeta.runs.run_progress import RunProgress
from gmeta.serving.export import CheckpointReader
from gmeta_models import ModelConfig
from metaio.format.features import Features
from tests.distributed.harness import on_ranks, steps_of
from tests.support import reference

FEATURES = reference.some_features(2, 0, 0)
MODEL = ModelConfig(name="melu", embedding_dim=4, hidden=(3,))
CONFIG = TrainConfig(
    model=MODEL,
    outer=OuterConfig(dense_optimizer="adam", dense_lr=0.05, sparse_lr=0.2),
    run=RunConfig(seed=1),
)


def fresh(ranks: Ranks) -> tuple[MetaLearner, DistributedLearner, OuterOptimizer]:
    torch.manual_seed(0)
    learner = build_learner(FEATURES, MODEL, AlgorithmConfig(inner_lr=0.1), "bce")
    sharded = shard_learner(learner, FEATURES, CONFIG, ranks)
    return learner, sharded, build_optimizer(sharded, CONFIG.outer)


def message_of(work: Any) -> str:
    try:
        work()
    except GMetaError as error:
        return str(error)
    return "no error"


def write_and_break(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Saves steps 1 to 3 keeping two, fails at steps 4 and 5, loads what is broken."""
    _, sharded, optimizer = fresh(ranks)
    (folder / "tmp-step-00000009").mkdir()  # of a process that was killed while it wrote
    told: list[tuple[str, int]] = []
    writer = CheckpointWriter(
        folder, sharded, optimizer, CONFIG, ranks,
        lambda checkpoint: told.append((checkpoint.name, len(list_checkpoints(folder)))),
    )  # fmt: skip
    for step in (1, 2, 3):
        writer.save(RunProgress(step=step))
    writer.finish()

    def disk_full(state: Any, *, storage_writer: Any, process_group: Any) -> None:
        (storage_writer.path / "half.distcp").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch("gmeta.runs.checkpoints.checkpoint_writer.save_shards", disk_full):
        writer.save(RunProgress(step=4))
        writer._thread.join()  # as a later step finds it
        messages = [message_of(writer.poll)]

    def unforeseen(state: Any, *, storage_writer: Any, process_group: Any) -> None:
        raise AttributeError("a thread may die of anything")

    with mock.patch("gmeta.runs.checkpoints.checkpoint_writer.save_shards", unforeseen):
        writer.save(RunProgress(step=5))
        messages.append(message_of(writer.finish))
    newest = list_checkpoints(folder)[-1]
    (newest / ".metadata").write_bytes(b"")
    messages.append(message_of(lambda: load_checkpoint(newest, sharded, optimizer, ranks)))
    left = sorted(path.name for path in folder.iterdir())
    return {"messages": messages, "left": left, "told": told}


def save_while_training(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Changes the tables while a checkpoint of them is being written, then asks for another."""
    _, sharded, optimizer = fresh(ranks)
    (table,) = list(table_shards(sharded).values())[:1]
    rows = table.local_shards()[0].tensor
    go_on, seen = threading.Event(), []

    def slow(state: Any, **named: Any) -> None:
        go_on.wait(timeout=30)
        seen.append(len(list_checkpoints(folder)))
        save_shards(state, **named)

    values = []
    with (
        mock.patch("gmeta.runs.checkpoints.checkpoint_writer.save_shards", slow),
        CheckpointWriter(folder, sharded, optimizer, CONFIG, ranks) as writer,
    ):
        for step in (1, 2):
            rows.fill_(step)
            writer.save(RunProgress(step=step))
            rows.fill_(-1.0)
            writer.poll()  # it is still being written: nothing to tell
            values.append(len(list_checkpoints(folder)))
            if step == 1:
                threading.Timer(0.2, go_on.set).start()
    loaded = []
    for path in list_checkpoints(folder):
        load_checkpoint(path, sharded, None, ranks)
        loaded.append(rows.unique().tolist())
    return {"loaded": loaded, "complete_while_writing": values, "seen": seen}


def everything_on_one_rank(ranks: Ranks, folder: Path) -> dict[str, Any]:
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    return {
        "break": write_and_break(ranks, folder / "a"),
        "race": save_while_training(ranks, folder / "b"),
    }


@pytest.mark.distributed
def test_a_checkpoint_is_of_its_step_whole_or_not_at_all_and_says_why(tmp_path: Path) -> None:
    (result,) = on_ranks(1, everything_on_one_rank, tmp_path)
    broken, race = result["break"], result["race"]
    assert broken["left"] == ["step-00000002", "step-00000003", "tmp-step-00000005"]
    names = [f"step-{step:08d}" for step in (1, 2, 3)]
    assert broken["told"] == [*zip(names, (1, 2, 2), strict=True)]
    written, died, read = broken["messages"]
    # What was not committed is not told as such, whatever ended its thread.
    assert died == (
        f"checkpoint {tmp_path}/a/step-00000005 cannot be written: what the traceback above says "
        "ended the writing. Go on from the checkpoint before with --resume"
    )
    assert written.startswith(
        f"checkpoint {tmp_path}/a/step-00000004 cannot be written: "
        "[Errno 28] No space left on device; "
    )
    assert written.endswith(
        " GB were free there. Free some, then go on from the checkpoint before with --resume"
    )
    newest = tmp_path / "a" / "step-00000003"
    num_bytes = read_about(newest)["files"][".metadata"]["num_bytes"]
    assert read == (
        f"checkpoint {newest} cannot be read: {newest}/.metadata has 0 bytes, progress.json says "
        f"{num_bytes:,}: it was cut short or rewritten. Remove it to fall back to the one before"
    )
    # What training did after `save` returned is in neither; the second waited for the first.
    assert race["loaded"] == [[1.0], [2.0]]
    assert race["complete_while_writing"][0] == 0
    assert race["seen"] == [0, 1]


STEPS_BEFORE, STEPS_AFTER = 2, 3


def train_and_save(ranks: Ranks, folder: Path) -> list[float]:
    """Losses of the steps after the checkpoint, without a stop."""
    learner, sharded, optimizer = fresh(ranks)
    writer = CheckpointWriter(folder, sharded, optimizer, CONFIG, ranks)
    losses = train_steps(ranks, learner, sharded, optimizer, range(STEPS_BEFORE))
    writer.save(RunProgress(step=STEPS_BEFORE))
    losses = train_steps(
        ranks, learner, sharded, optimizer, range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER)
    )
    writer.finish()
    return losses


def load_and_train(ranks: Ranks, folder: Path) -> list[float]:
    learner, sharded, optimizer = fresh(ranks)
    progress = load_checkpoint(list_checkpoints(folder)[-1], sharded, optimizer, ranks)
    steps = range(progress.step, progress.step + STEPS_AFTER)
    return train_steps(ranks, learner, sharded, optimizer, steps)


def train_steps(
    ranks: Ranks, learner: MetaLearner, sharded: DistributedLearner, optimizer: OuterOptimizer,
    steps: range,
) -> list[float]:  # fmt: skip
    """This rank's losses; a step's tasks depend on its number alone."""

    def tasks(step: int) -> list[reference.Task]:
        rng = random.Random(step)
        return [reference.random_task(FEATURES, 3, 2, rng) for _ in range(5)]

    batches = (
        reference.batch_of(tasks(step)[ranks.rank :: ranks.world_size], FEATURES) for step in steps
    )
    losses = []
    for episodes, totals in steps_of(batches, learner.collate, FEATURES, ranks):
        optimizer.begin_step(0, 1)
        loss = sharded(episodes, ranks.world_size / totals.num_terms)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.distributed
def test_four_ranks_go_on_from_what_two_saved_as_if_never_stopped(tmp_path: Path) -> None:
    def mean(of_ranks: list[list[float]]) -> torch.Tensor:
        return torch.tensor(of_ranks, dtype=torch.float64).mean(dim=0)

    whole = mean(on_ranks(2, train_and_save, tmp_path))
    resumed = mean(on_ranks(4, load_and_train, tmp_path))
    torch.testing.assert_close(resumed, whole, rtol=0, atol=1e-6)


def save_and_load_little(ranks: Ranks, folder: Path) -> list[tuple[int, int, list[float]]]:
    """Rank 1 holds no table, and SGD keeps no state for its layers; then a row, of which Adam keeps
    one number; then half of the only row. Of each the step, the tables held and what came back of
    such numbers."""
    found, model = [], replace(MODEL, embedding_dim=8)
    features = reference.some_features(1, 0, 0)
    of_one_row = replace(
        features, tables=tuple(replace(table, num_rows=1) for table in features.tables)
    )
    cases: tuple[tuple[DefaultKind, str, Features], ...] = (
        ("table_wise", "rowwise_adagrad", features),
        ("row_wise", "partial_rowwise_adam", features),
        ("column_wise", "partial_rowwise_adam", of_one_row),
    )
    for kind, of_tables, features in cases:
        outer = OuterConfig(dense_optimizer="sgd", sparse_optimizer=of_tables)
        plan = ShardingConfig(default=kind)
        config = TrainConfig(model=model, outer=outer, run=CONFIG.run, sharding=plan)
        learner = build_learner(features, model, AlgorithmConfig(), "bce")
        sharded = shard_learner(learner, features, config, ranks)
        optimizer = build_optimizer(sharded, outer)
        states = [one.group.state for one in table_kernels(sharded)]
        kept = [state["exp_avg_sq"] for state in states if "exp_avg_sq" in state]
        for state in kept:
            state.copy_(torch.arange(len(state)).unsqueeze(1) + 10.0 * ranks.rank)
        with CheckpointWriter(folder / kind, sharded, optimizer, config, ranks) as writer:
            writer.save(RunProgress(step=7))
        (path,) = list_checkpoints(folder / kind)
        for state in kept:
            state.zero_()
        # Of a run that trains, each rank may find another the newest: all load the first's.
        found_last = path.with_name(f"step-0000000{7 - ranks.rank}")
        loaded = load_checkpoint(found_last, sharded, optimizer, ranks)
        held = sum(len(table.local_shards()) for table in table_shards(sharded).values())
        found.append((loaded.step, held, [one for each in kept for one in each.flatten().tolist()]))
    return found


@pytest.mark.distributed
def test_a_rank_that_keeps_no_optimizer_state_or_one_number_saves_and_loads(tmp_path: Path) -> None:
    assert on_ranks(2, save_and_load_little, tmp_path) == [
        [(7, 1, []), (7, 1, [0.0, 1.0]), (7, 1, [0.0])],
        [(7, 0, []), (7, 1, [10.0]), (7, 1, [10.0])],
    ]


def without_checksums(checkpoint: Path) -> None:
    """Make it one that an older release wrote."""
    about = read_about(checkpoint)
    del about["files"]
    (checkpoint / "progress.json").write_text(json.dumps(about))


def damages(data: bytes, rng: random.Random) -> list[bytes | None]:
    """What a disk may give back for a file: nothing, a part of it, one bit of it wrong."""
    found: list[bytes | None] = [None, data[: rng.randrange(len(data))], data + b"\0"]
    for _ in range(12):
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        found.append(bytes(flipped))
    return found


def damage_and_load(ranks: Ranks, folder: Path) -> dict[str, list[str]]:
    """What loading, exporting and inspecting say of each damage; then without checksums."""
    learner, sharded, optimizer = fresh(ranks)
    train_steps(ranks, learner, sharded, optimizer, range(1))
    with CheckpointWriter(folder, sharded, optimizer, CONFIG, ranks) as writer:
        writer.save(RunProgress(step=1), {"shards.json": "{}"})
    (path,) = list_checkpoints(folder)
    ways: dict[str, Any] = {
        "load": lambda: load_checkpoint(path, sharded, optimizer, ranks),
        "export": lambda: CheckpointReader(path),
        "inspect": lambda: inspected(path),
    }
    said: dict[str, list[str]] = {name: [message_of(way)] for name, way in ways.items()}
    rng = random.Random(0)
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        for damaged in damages(data, rng):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            for name, way in ways.items():
                said[name].append(message_of(way))
        file.write_bytes(data)
    without_checksums(path)
    said["old"] = [message_of(ways["load"])]
    index = path / ".metadata"
    data = index.read_bytes()
    for damaged in damages(data, rng)[1:]:
        index.write_bytes(damaged or b"")
        said["old"].append(message_of(ways["load"]))
    return said


def inspected(path: Path) -> None:
    for problem in summarise_checkpoint(path, verify=True).problems:
        raise GMetaError(problem)


@pytest.mark.distributed
def test_no_wrong_bit_is_loaded_exported_or_inspected_in_silence(tmp_path: Path) -> None:
    (said,) = on_ranks(1, damage_and_load, tmp_path)
    old = said.pop("old")
    for messages in said.values():
        assert messages[0] == "no error"
        assert len(messages) == 1 + 4 * 15  # tables and layers, index, manifest, progress.json
        assert "no error" not in messages[1:]
        assert all(len(message.splitlines()) == 1 for message in messages)
    # Without checksums some damage shows in nothing, and what shows is one line.
    assert old[0] == "no error"
    for message in old[1:]:
        assert message == "no error" or message.endswith("Remove it to fall back to the one before")
        assert len(message.splitlines()) == 1


def refuse_together(ranks: Ranks, folder: Path) -> list[str]:
    """A file of rank 1 it cannot read, an index nothing of ours can read, a flipped bit."""
    learner, sharded, optimizer = fresh(ranks)
    train_steps(ranks, learner, sharded, optimizer, range(1))
    writer = CheckpointWriter(folder, sharded, optimizer, CONFIG, ranks)

    def failing(path: Path) -> FileChecksum:
        raise OSError(errno.EIO, "Input/output error", str(path))

    patched = mock.patch("gmeta.runs.checkpoints.checkpoint_writer.describe_file", failing)
    with patched if ranks.rank == 1 else nullcontext():
        writer.save(RunProgress(step=1))
        said = [message_of(writer.finish)]

    def other_form(member: Enum) -> tuple[Any, ...]:
        return attrgetter(member.name), (type(member),)

    with mock.patch.dict(copyreg.dispatch_table, {_MEM_FORMAT_ENCODING: other_form}):
        writer.save(RunProgress(step=1))
        said.append(message_of(writer.finish))
    writer.save(RunProgress(step=2))
    writer.finish()
    (path,) = list_checkpoints(folder)
    if ranks.rank == 0:
        (name, *_) = (name for name in read_about(path)["files"] if name.startswith("__1_"))
        data = bytearray((path / name).read_bytes())
        data[len(data) // 2] ^= 1
        (path / name).write_bytes(data)
    barrier(ranks)
    said.append(message_of(lambda: load_checkpoint(path, sharded, optimizer, ranks)))
    return said


@pytest.mark.distributed
def test_all_ranks_refuse_what_one_of_them_finds(tmp_path: Path) -> None:
    temporary, checkpoint = tmp_path / "tmp-step-00000001", tmp_path / "step-00000002"
    for written, read_back, loaded in on_ranks(2, refuse_together, tmp_path):
        assert written.startswith(
            f"checkpoint {tmp_path}/step-00000001 cannot be written: [Errno 5] Input/output error: "
            f"'{temporary}/__1_0.distcp'; "
        )
        assert read_back == (
            f"checkpoint {temporary} cannot be read: its index names operator.attrgetter, as none "
            "of ours does. Use a Python and torch of docs/install.md, and --resume"
        )
        assert loaded == (
            f"checkpoint {checkpoint} cannot be read: {checkpoint}/__1_0.distcp differs from the "
            "checksum in progress.json: it was altered. Remove it to fall back to the one before"
        )


# As torch 2.13 tells of a rank that was killed.
GLOOS = (
    "[/__w/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:27363: Connection reset by peer"
)


def lose_the_others(ranks: Ranks, folder: Path) -> list[str]:
    """What is said where another rank is gone while a checkpoint is written, and read."""
    _, sharded, optimizer = fresh(ranks)
    writer = CheckpointWriter(folder, sharded, optimizer, CONFIG, ranks)
    writer.save(RunProgress(step=1))
    writer.finish()
    (path,) = list_checkpoints(folder)
    gone = RuntimeError(GLOOS)
    with (
        mock.patch("gmeta.runs.checkpoints.checkpoint_writer.save_shards", side_effect=gone),
        mock.patch("gmeta.runs.checkpoints.loader.load_shards", side_effect=gone),
    ):
        writer.save(RunProgress(step=2))
        said = [message_of(writer.finish)]
        said.append(message_of(lambda: load_checkpoint(path, sharded, optimizer, ranks)))
    return [*said, *(left.name for left in folder.iterdir())]


@pytest.mark.distributed
def test_a_lost_rank_is_no_fault_of_the_disk_or_the_config(tmp_path: Path) -> None:
    (found,) = on_ranks(1, lose_the_others, tmp_path)
    told = (
        f"lost contact with the other ranks: {GLOOS}. See what the first rank that failed said; "
        "--resume goes on from the newest checkpoint"
    )
    assert found == [told, told, "step-00000001"]


def load_into_a_wider_model(ranks: Ranks, folder: Path) -> str:
    save_once(ranks, folder)
    (path,) = list_checkpoints(folder)
    model = replace(MODEL, embedding_dim=8)
    learner = build_learner(FEATURES, model, AlgorithmConfig(), "bce")
    wider = shard_learner(learner, FEATURES, replace(CONFIG, model=model), ranks)
    try:
        load_checkpoint(path, wider, None, ranks)
    except UserError as error:
        return str(error)
    return "loaded"


@pytest.mark.distributed
def test_another_models_whole_checkpoint_is_the_configs_matter(tmp_path: Path) -> None:
    for told in on_ranks(2, load_into_a_wider_model, tmp_path):
        assert told.startswith(
            f"checkpoint {tmp_path}/step-00000001 does not fit the config: Size mismatch between "
        )
        assert told.endswith(". Set model and algorithm as they were in the run that wrote it")


def save_once(ranks: Ranks, folder: Path) -> None:
    _, sharded, optimizer = fresh(ranks)
    with CheckpointWriter(folder, sharded, optimizer, CONFIG, ranks) as writer:
        writer.save(RunProgress(step=1), {"shards.json": "{}"})


@pytest.mark.distributed
def test_a_checkpoint_lists_every_other_file_whoever_wrote_it(tmp_path: Path) -> None:
    on_ranks(2, save_once, tmp_path)
    (path,) = list_checkpoints(tmp_path)
    listed = read_about(path)["files"]
    assert listed == {
        file.name: vars(describe_file(file))
        for file in path.iterdir()
        if file.name != "progress.json"
    }
    assert {".metadata", "shards.json"} < set(listed)
