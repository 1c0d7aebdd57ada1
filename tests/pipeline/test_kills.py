"""Killed at any change that a stage makes to the disk, a loop loses nothing and doubles nothing.
With LOOP_KILLS=2000 (make kills) what a kill leaves is tried for every change, and what a power cut
leaves twice, and so many kills are made; else a kill for every second change, a power cut for three
of a stage, and two kills a stage are at those between."""

import json
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gmeta.pipeline.stage_outcome import STAGES as ALL_STAGES
from gmeta.runs.checkpoints.progress_file import read_about
from gmeta.runs.run_folder import list_checkpoints
from gmeta.serving.channel.channel import Channel
from gmeta.serving.channel.current_version import current_at
from gmeta.serving.channel.model_version import check_version
from gmeta.serving.channel.version_cache import CACHE_VARIABLE
from gmeta.serving.export import CheckpointReader
from metaio.format.inspection import find_damage
from metaio.stream.chain import open_stream
from tests.pipeline.days import write_loop
from tests.pipeline.following import loop_of, run_stage, stages_of
from tests.pipeline.kills import cut_power, killed_at, left_at_each_change, restored, taken_up
from tests.serving.channel.models import content

# A loop of files fetches nothing; test_kafka.py kills what does. A challenge is `judge` and
# `promote` once more, against another channel.
STAGES = tuple(stage for stage in ALL_STAGES if stage not in ("fetch", "challenge"))
KILLS = int(os.environ.get("LOOP_KILLS", "0"))
# Of 200; there are 150 changes.
SHARES = {
    **{"prepare": 33, "train": 29, "export": 22, "judge": 18, "promote": 60},
    **{"publish": 20, "score": 18},
}


@dataclass(frozen=True)
class Steps:
    """The second day of a loop: what its folder held before each stage, and what came of it."""

    root: Path
    before: dict[str, Path]
    arguments: dict[str, list[str]]
    outcome: dict[str, Any]


@pytest.fixture(scope="session")
def steps(followed: Path, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    kept = tmp_path_factory.mktemp("steps")
    root = kept / "w"
    root.mkdir()
    config = write_loop(root, margin=9)
    text = config.read_text().replace(f"{root}/logs", f"{followed}/logs")
    config.write_text(text.replace("[follow]", f'[follow]\nmirror = "{mirror_of(root)}"'))
    found = Steps(root, {}, {}, {})
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(CACHE_VARIABLE, str(root / "cache"))

        def noted(arguments: list[str], log: Path) -> int:
            stage = arguments[0]
            found.arguments[stage] = arguments
            found.before[stage] = kept / f"before-{stage}"
            shutil.rmtree(found.before[stage], ignore_errors=True)
            shutil.copytree(root, found.before[stage])
            return run_stage(arguments, log)

        loop = loop_of(config, noted)
        while (done := loop.step()) is not None:  # what is kept is the second day's
            found.outcome[done.stage] = OUTCOMES[done.stage](root)
    assert set(found.before) == set(STAGES)
    return found


def prepared(root: Path) -> object:
    stream = open_stream(str(root / "stream"))
    assert all(find_damage(stream.dataset(number)) == [] for number in stream.numbers)
    return [record.fingerprint for record in stream.records]


def trained(root: Path) -> object:
    found = list_checkpoints(root / "runs/000002/run/checkpoints")
    if not found:
        return None  # the first day's
    about, reader = read_about(found[-1]), CheckpointReader(found[-1])
    names = [
        name
        for name, entry in reader._reader.index.state_dict_metadata.items()
        if hasattr(entry, "size")
    ]
    tensors = {name: one.numpy().tobytes() for name, one in reader.read(names).items()}
    return [one["increment"] for one in about["lineage"]], about["step"], tensors


def exported(root: Path) -> object:
    folder = root / "runs/000002/model"
    # config.json holds the time of the export.
    found = content(folder) if folder.exists() else {}
    return {name: data for name, data in found.items() if name != "config.json"}


def judged(root: Path) -> object:
    path = root / "runs/000002/verdict.json"
    verdict = json.loads(path.read_text()) if path.exists() else {}
    return {key: value for key, value in verdict.items() if key not in ("model", "checksum")}


def promoted(root: Path) -> object:
    channel = Channel(root / "channel")
    moves = [(one["action"], one["number"]) for one in channel.promotions()]
    return moves, channel.numbers(), channel.require_current().number, whole(channel)


def whole(channel: Channel) -> bool:
    """What is served, checked file by file as a follower does before it takes it."""
    current = channel.current()
    if current is not None:
        chain = channel.chain(current.number)
        for version in (chain.base, *chain.deltas):
            check_version(version)
    return True


def mirror_of(root: Path) -> str:
    return f"file://{root}/mirror"


def published(root: Path) -> object:
    there = Channel(root / "mirror")
    return there.numbers(), current_at(mirror_of(root)).number, whole(there)


def scored(root: Path) -> object:
    found = json.loads((root / "runs/000002/frozen.json").read_text())
    return {key: value for key, value in found.items() if key != "model"}


OUTCOMES: dict[str, Callable[[Path], object]] = {
    "prepare": prepared, "train": trained, "export": exported, "judge": judged,
    "promote": promoted, "publish": published, "score": scored,
}  # fmt: skip


@pytest.mark.distributed
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_killed_at_any_change_of_the_disk_is_taken_up(
    stage: str, steps: Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(steps.root / "cache"))
    drawn = random.Random(os.environ.get("LOOP_SEED", stage))
    arguments = steps.arguments[stage]
    restored(steps.before[stage], steps.root)
    *left, ended = left_at_each_change(arguments, steps.root, tmp_path)
    assert OUTCOMES[stage](steps.root) == steps.outcome[stage]
    assert len(left) >= 3
    for point in [*range(1, len(left) + 1)] if KILLS else drawn.sample(range(1, len(left) + 1), 2):
        for keeps_length in (False, True) if KILLS else (drawn.random() < 0.5,):
            cut_power(left[point - 1], steps.root, keeps_length)
            check_taken_up(stage, steps, point)
    cut_power(ended, steps.root, keeps_length=False)
    check_taken_up(stage, steps, len(left) + 1)
    # The first and the last, which begins the stage and which ends it, in any case.
    tried = [point for point in range(1, len(left) + 1) if KILLS or point % 2 or point == len(left)]
    for point in tried:
        shutil.rmtree(steps.root)
        left[point - 1].folder.rename(steps.root)
        check_taken_up(stage, steps, point)
    kills = max(2, KILLS * SHARES[stage] // sum(SHARES.values()))
    # Every change in its turn, in another order each time round.
    points: list[int] = []
    others = [point for point in range(1, len(left) + 1) if KILLS or point not in tried]
    while len(points) < kills:
        points += drawn.sample(others, len(others))
    for point in points[:kills]:
        restored(steps.before[stage], steps.root)
        assert killed_at(arguments, steps.root, point) == -9
        check_taken_up(stage, steps, point)


def check_taken_up(stage: str, steps: Steps, point: int) -> None:
    """From what is there the stage comes to what it would have come to."""
    # Whoever reads meanwhile has what was there before, or what is there now.
    whole(Channel(steps.root / "channel"))
    whole(Channel(steps.root / "mirror"))
    prepared(steps.root)
    loop = loop_of(steps.root / "stream.toml", up_to(stage))
    with suppress(BeyondError):
        stages_of(loop)
    assert OUTCOMES[stage](steps.root) == steps.outcome[stage], point


class BeyondError(Exception):
    """The loop is to run a stage that is not asked for."""


def up_to(last: str) -> Callable[[list[str], Path], int]:
    """What runs stages, and none behind this one."""

    def run(arguments: list[str], log: Path) -> int:
        # A loop that begins publishes: it does not know what is there.
        is_beyond = STAGES.index(arguments[0]) > STAGES.index(last)
        if is_beyond and arguments[0] != "publish":
            raise BeyondError
        return taken_up(arguments, log)

    return run
