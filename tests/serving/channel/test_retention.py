"""Old versions go; what is served, what it builds on and what a rollback goes back to stay."""

import os
import socket
from pathlib import Path

import numpy as np
import pytest

import gmeta
from gmeta.cli.commands.work import channel_changes as delivery
from gmeta.errors import GMetaError
from gmeta.serving.channel import version_retention as retention
from gmeta.serving.channel.channel import Channel
from gmeta.serving.channel.follower import follow
from gmeta.serving.channel.materialize import materialize_version
from gmeta.serving.channel.version_packing import pack
from gmeta.serving.channel.version_retention import kept_versions, prune
from tests.serving.channel.models import Model, content
from tests.serving.channel.test_channel import SIZES
from tests.support.commands import succeed
from tests.support.refusals import catch_message


def channel_of(tmp_path: Path, kinds: str) -> Channel:
    """A channel whose versions are full (f) or deltas (d)."""
    rng, channel, model = np.random.default_rng(3), Channel(tmp_path / "channel"), Model.of(SIZES)
    for number, kind in enumerate(kinds, start=1):
        packed = tmp_path / f"packed-{number}"
        longest = 16 if kind == "d" else 0
        model.write(tmp_path / f"m{number}-copy")
        pack(channel, model.write(tmp_path / f"m{number}"), packed, False, longest)
        assert channel.promote(packed).number == number
        assert channel.version(number).kind[0] == kind
        model = model.changed(rng)
    return channel


@pytest.mark.parametrize(
    ("kinds", "keep", "served", "left"),
    [
        ("fffff", 2, 5, [4, 5]),
        ("fffff", 1, 5, [4, 5]),  # 4 is what a rollback goes back to
        ("fffff", 1, 2, [1, 2, 5]),  # rolled back: the newest stays, so do these
        ("ffddfdd", 1, 7, [5, 6, 7]),
        ("ffddfdd", 3, 7, [5, 6, 7]),
        ("ffddfdd", 1, 5, [2, 3, 4, 5, 6, 7]),  # 4 builds on 2 and 3
        ("fdddd", 1, 5, [1, 2, 3, 4, 5]),
        ("fffff", 9, 5, [1, 2, 3, 4, 5]),
    ],
)
def test_the_newest_the_served_one_its_rollback_and_their_chains_stay(
    tmp_path: Path, kinds: str, keep: int, served: int, left: list[int]
) -> None:
    channel = channel_of(tmp_path, kinds)
    if served != len(kinds):
        channel.rollback(served)
    before = {number: content(channel.folder_of(number)) for number in channel.numbers()}
    gone = prune(channel, keep)
    assert (channel.numbers(), gone) == (left, [n for n in sorted(before)[::-1] if n not in left])
    found = {number: content(channel.folder_of(number)) for number in left}
    assert found == {number: before[number] for number in left}
    assert kept_versions(channel, keep) <= set(left)
    assert prune(channel, keep) == []
    for number in left:
        materialize_version(channel, number)
    if served > 1:
        assert channel.rollback().number == served - 1
    # Numbers are never given twice, and what was told of those that are gone still is.
    assert channel.promote(Model.of(SIZES, seed=9).write(tmp_path / "m")).number == len(kinds) + 1
    assert {entry["number"] for entry in channel.promotions()} == set(range(1, len(kinds) + 2))


def test_a_model_whose_version_goes_while_it_serves_answers_on(tmp_path: Path) -> None:
    channel, query = channel_of(tmp_path, "f"), {"item": list(range(3_000)), "price": [0.5] * 3_000}
    with follow(channel.root, every_s=0) as follower:
        old = follower.model
        for seed in (5, 6):
            channel.promote(Model.of(SIZES, seed=seed).write(tmp_path / f"s{seed}"))
        assert prune(channel, 1) == [1]
        # Every row of the mapped table, of which none was read before.
        found = old.predict(query).tolist()
        assert found == gmeta.load(tmp_path / "m1-copy").predict(query).tolist()
        assert follower.check()
        assert follower.served.number == 3


def test_pruning_that_is_killed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = channel_of(tmp_path, "fddfff")
    with monkeypatch.context() as patched:
        patched.setattr(retention, "flush_to_disk", _killed)
        with pytest.raises(KeyboardInterrupt):
            prune(channel, 1)
    assert channel.numbers() == [5, 6]
    assert list((channel.root / "versions").glob(".*"))
    assert prune(channel, 1) == []
    assert not list((channel.root / "versions").glob(".*"))


def _killed(_: object) -> None:
    raise KeyboardInterrupt


def test_nothing_goes_while_a_version_that_stays_is_damaged(tmp_path: Path) -> None:
    channel = channel_of(tmp_path, "ffdd")
    (channel.folder_of(3) / "delta.json").unlink()
    assert str(channel.folder_of(3)) in catch_message(GMetaError, prune, channel, 1)
    assert channel.numbers() == [1, 2, 3, 4]


def test_the_command_promotes_and_removes_older_versions(tmp_path: Path) -> None:
    channel = channel_of(tmp_path, "fff")
    model = Model.of(SIZES, seed=9).write(tmp_path / "m")
    done = succeed("channel", "promote", model, channel.root, "--keep", "1")
    assert "removed: version 1, 2\n" in done.stderr
    assert channel.numbers() == [3, 4]


def test_a_promotion_beside_another_process_removes_nothing_and_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = channel_of(tmp_path, "fff")
    model = Model.of(SIZES, seed=9).write(tmp_path / "m")

    def pruned(channel: Channel, keep: int) -> list[int]:
        with Channel(channel.root).lock_for_change():  # another began in between
            return prune(channel, keep)

    monkeypatch.setattr(delivery, "prune", pruned)
    delivery.promote_candidate(model, channel.root, "float32", None, None, keep=1)
    told = f"process {os.getpid()} on {socket.gethostname()} is writing {channel.root}. Wait for it"
    assert f"nothing is removed: {told}\n" in capsys.readouterr().err
    assert channel.numbers() == [1, 2, 3, 4]
