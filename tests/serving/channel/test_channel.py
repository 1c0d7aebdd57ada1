"""Channels: who is served, in which order versions may come, and what a kill leaves."""

import json
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gmeta.cli.commands.work import channel_changes as delivery
from gmeta.config.labels import LabelsConfig
from gmeta.errors import GMetaError, UserError
from gmeta.serving.channel import channel as channel_module
from gmeta.serving.channel.channel import Channel
from gmeta.serving.channel.follower import load_current
from gmeta.serving.channel.materialize import materialize_version
from gmeta.serving.channel.version_packing import pack
from gmeta.serving.channel.version_retention import kept_versions
from gmeta.serving.exported_folder import read_config, write_config
from metaio.errors import DataError
from metaio.format.manifest import add_checksum
from tests.serving.channel.models import Model, content
from tests.support.commands import gmeta, succeed
from tests.support.refusals import catch_message

SIZES = {"item": 3_000}


def versions(tmp_path: Path, count: int) -> tuple[Channel, list[Path]]:
    """A channel that serves the last of `count` versions, and the packed folders by number."""
    rng, channel, model = np.random.default_rng(3), Channel(tmp_path / "channel"), Model.of(SIZES)
    packed = [tmp_path]
    for number in range(1, count + 1):
        packed.append(tmp_path / f"packed-{number}")
        pack(channel, model.write(tmp_path / f"m{number}"), packed[-1], overwrite=False)
        channel.promote(packed[-1], {"verdict": "promote", "loss": 0.5})
        model = model.changed(rng)
    return channel, packed


def message(caught: pytest.ExceptionInfo[BaseException]) -> str:
    return str(caught.value)


def test_the_log_tells_every_promotion_with_its_verdict(tmp_path: Path) -> None:
    channel, packed = versions(tmp_path, 3)
    assert channel.require_current().number == 3
    assert channel.promote(packed[3]).number == 3  # once more: nothing happens
    channel.record({"verdict": "refuse"})
    channel.rollback()
    channel.rollback(3)
    told = [(one["action"], one["number"]) for one in channel.promotions()]
    assert told == [
        ("promoted", 1), ("promoted", 2), ("promoted", 3), ("refused", None), ("rolled back", 2),
        ("rolled back", 3),
    ]  # fmt: skip
    assert channel.promotions()[0]["verdict"] == {"verdict": "promote", "loss": 0.5}


def test_a_delta_that_does_not_follow_is_refused_by_name(tmp_path: Path) -> None:
    channel, packed = versions(tmp_path, 3)
    first, second = channel.version(1), channel.version(2)
    assert catch_message(UserError, channel.promote, packed[2]) == (
        f"{packed[2]} is version 2 of {channel.root} already, and a version is promoted once. To "
        f"serve it again: gmeta channel rollback {channel.root} --to 2"
    )
    with pytest.raises(UserError, match=r"^runs/7/model is version 2 of "):
        channel.promote(packed[2], named_in_messages=Path("runs/7/model"))
    rng = np.random.default_rng(9)
    late, other = tmp_path / "late", Channel(tmp_path / "other")
    channel.rollback(1)
    pack(channel, Model.of(SIZES).changed(rng).write(tmp_path / "l"), late, overwrite=False)
    channel.rollback(2)
    assert catch_message(UserError, channel.promote, late) == (
        f"{late} is a delta over version {first.name}, but {channel.root} serves {second.name}: it "
        "is out of order. Export it again with --since"
    )
    assert catch_message(UserError, other.promote, late) == (
        f"{late} is a delta over version {first.name}, but {other.root} serves none yet. Promote a "
        "full export first"
    )
    other.promote(Model.of(SIZES, seed=5).write(tmp_path / "o"))
    assert catch_message(UserError, other.promote, late) == (
        f"{late} is a delta over version {first.name}, but {other.root} serves "
        f"{other.version(1).name}: {other.root} never had that version. Export it again with "
        "--since"
    )
    assert other.require_current().number == 1


def test_a_chain_with_a_missing_or_foreign_parent_is_refused_by_name(tmp_path: Path) -> None:
    channel, _ = versions(tmp_path, 3)
    moved = tmp_path / "moved"
    channel.folder_of(2).rename(moved)
    assert catch_message(GMetaError, channel.chain, 3) == (
        f"version 2 of {channel.root} is missing: there is no {channel.folder_of(2)}. Bring it "
        "back from a copy, or promote a full export"
    )
    shutil.copytree(channel.folder_of(1), channel.folder_of(2))
    with pytest.raises(GMetaError) as caught:
        materialize_version(channel, 3)
    third = channel.version(3)
    assert third.delta is not None
    assert message(caught) == (
        f"version {third.name} of {channel.root} is a delta over "
        f"2-{third.delta.parent.checksum[:12]}, but 2-{channel.version(1).checksum[:12]} stands "
        "there. Promote a full export"
    )
    shutil.rmtree(channel.folder_of(1))
    third.folder.rename(channel.folder_of(1))
    with pytest.raises(GMetaError, match="which comes after it: they are out of order"):
        channel.chain(1)


def test_a_promotion_killed_anywhere_is_taken_up_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(Exception):
        pass

    def killed(*_: object) -> None:
        raise KilledError

    channel, _ = versions(tmp_path, 2)
    model = Model.of(SIZES, seed=4).write(tmp_path / "m")
    for step in ("write_checked_json", "Channel._log"):
        owner = Channel if "." in step else channel_module
        with monkeypatch.context() as patched:
            patched.setattr(owner, step.rpartition(".")[2], killed)
            with pytest.raises(KilledError):
                channel.promote(model)
        # Killed before the pointer the old version serves, behind it the new one does.
        assert channel.require_current().number == (2 if step == "write_checked_json" else 3)
        if step == "write_checked_json":
            assert channel.numbers() == [1, 2, 3]
    assert channel.promote(model).number == 3
    assert [one["number"] for one in channel.promotions()] == [1, 2, 3]
    assert channel.numbers() == [1, 2, 3]


def test_the_pointer_is_written_once_the_version_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, _ = versions(tmp_path, 1)
    model = Model.of(SIZES, seed=4).write(tmp_path / "m")
    seen: list[dict[str, bytes]] = []
    flushed: set[int] = set()  # inodes
    not_flushed: list[Path] = []
    write, fsync = channel_module.write_checked_json, os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        flushed.add(os.fstat(descriptor).st_ino)

    def looked(path: Path, *rest: object) -> None:
        folder = channel.folder_of(2)
        seen.append(content(folder))
        paths = (folder.parent, folder, *folder.rglob("*"))
        not_flushed.extend(one for one in paths if one.stat().st_ino not in flushed)
        write(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(channel_module, "write_checked_json", looked)
    channel.promote(model)
    assert seen == [content(model)]
    assert not_flushed == []
    assert (channel.root / "current.json").stat().st_ino in flushed


def test_a_model_that_takes_other_requests_is_not_promoted(tmp_path: Path) -> None:
    channel, _ = versions(tmp_path, 1)
    with pytest.raises(UserError) as caught:
        channel.promote(Model.of({"shop": 10}).write(tmp_path / "m"))
    assert message(caught) == (
        f"the candidate has another columns than the model that {channel.root} serves: requests of "
        "its callers would fail or mean something else. Promote it to a channel of its own"
    ).replace("another columns", "other columns")


def test_a_label_with_another_loss_is_another_request(tmp_path: Path) -> None:
    one = read_config(Model.of(SIZES).write(tmp_path / "m"))
    features = replace(one.features, labels=("click", "price"))
    labels = LabelsConfig(loss={"price": "mse"})
    before = replace(one, features=features, labels=labels, label_kinds=())
    after = replace(before, labels=LabelsConfig(loss={"price": "mae"}))
    channel_module._check_requests(before, before, tmp_path)
    with pytest.raises(UserError, match="the candidate has another loss than the model"):
        channel_module._check_requests(before, after, tmp_path)
    judged = replace(before, labels=LabelsConfig(loss={"price": "mse"}, judged="price"))
    assert (before.judged_loss, judged.judged_loss) == ("bce", "mse")


def test_a_damaged_pointer_is_named(tmp_path: Path) -> None:
    channel, _ = versions(tmp_path, 1)
    path = channel.root / "current.json"
    body = json.loads(path.read_text())
    path.write_text(json.dumps({**body, "number": 7}))
    assert catch_message(GMetaError, channel.current) == (
        f"{path} does not match its own checksum: it was edited. Run: gmeta channel rollback "
        f"{channel.root} --to N"
    )


def damaged(channel: Channel, number: int, damage: str) -> Path:
    """What is lacking once a version was damaged so."""
    folder = channel.folder_of(number)
    if damage == "removed":
        shutil.rmtree(folder)
        return folder
    (folder / "delta.json").unlink(missing_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    return folder / "config.json"


@pytest.mark.parametrize("damage", ["removed", "without a description"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_full_export_mends_a_channel_that_lost_a_version(
    tmp_path: Path, cache: Path, number: int, damage: str
) -> None:
    channel, _ = versions(tmp_path, 3)
    model = Model.of(SIZES, seed=4).write(tmp_path / "model")
    lacking = damaged(channel, number, damage)
    shutil.rmtree(cache)
    assert catch_message(GMetaError, load_current, channel.root) == (
        f"version {number} of {channel.root} is missing: there is no {lacking}. Bring it back from "
        "a copy, or promote a full export"
    )
    done = succeed("channel", "promote", model, channel.root, "--keep", "2")
    assert f"the next version of {channel.root} is whole: version 3, which is se" in done.stderr
    # Its own number is used once, also where a copy of the channel has that version still.
    assert channel.require_current().number == 4
    assert content(materialize_version(channel, 4)) == content(model)
    # What lost its parent stays until it is none of the newest.
    assert ("nothing is removed: " in done.stderr) == (number < 3 or damage != "removed")
    succeed("channel", "promote", Model.of(SIZES, seed=5).write(tmp_path / "next"), channel.root)
    assert channel.require_current().number == 5


def test_a_rollback_mends_a_pointer(tmp_path: Path) -> None:
    channel, packed = versions(tmp_path, 2)
    channel.rollback(1)
    pointer = channel.root / "current.json"
    pointer.write_bytes(pointer.read_bytes()[:-9])
    told = f"{pointer} is not JSON: it was cut short or edited. Run: gmeta channel "
    told += f"rollback {channel.root} "
    for arguments in (("promote", packed[2], channel.root), ("rollback", channel.root)):
        done = gmeta("channel", *arguments)
        assert (done.returncode, done.stderr) == (1, f"error: {told}--to N\n")
    succeed("channel", "rollback", channel.root, "--to", "2")
    assert channel.require_current().number == 2


def test_a_rollback_goes_to_what_served_before_and_not_to_what_was_left(tmp_path: Path) -> None:
    channel, _ = versions(tmp_path, 3)
    channel.rollback()  # from 3, which was wrong
    Model.of(SIZES, seed=9).write(tmp_path / "next")
    assert channel.promote(tmp_path / "next").number == 4
    assert kept_versions(channel, 1) == {2, 4}
    assert channel.rollback().number == 2
    assert channel.rollback(3).number == 3
    assert channel.rollback().number == 2
    assert channel.rollback().number == 1


def test_a_version_that_was_replaced_by_another_is_not_served_as_it(tmp_path: Path) -> None:
    channel, _ = versions(tmp_path, 1)
    named = channel.require_current()
    shutil.rmtree(channel.folder_of(1))
    other = Model.of(SIZES, seed=8).write(channel.folder_of(1))
    with pytest.raises(GMetaError) as caught:
        load_current(channel.root)
    stands = channel.version(1).checksum[:12]
    assert message(caught) == (
        f"version 1 of {channel.root} is served as 1-{named.checksum[:12]}, but 1-{stands} stands "
        "there: it was replaced. Promote a full export, or roll back"
    )
    # No delta over it could be made whole elsewhere: the next one is whole.
    again = Model.of(SIZES, seed=8).changed(np.random.default_rng(1)).write(tmp_path / "next")
    delivery.promote_candidate(again, channel.root, "float32", None, None)
    assert channel.version(2).kind == "full"
    assert load_current(channel.root).number == 2
    assert content(other) == content(channel.folder_of(1))


def test_a_version_is_a_copy_of_what_an_export_lists_and_of_nothing_else(tmp_path: Path) -> None:
    """What its owner does to an export later, or a stranger has laid beside its files, such as a
    link to a file of whoever promotes it, must not reach a channel, nor where that is published."""
    secret = tmp_path / "credentials"
    secret.write_text("key")
    channel, model = Channel(tmp_path / "channel"), Model.of(SIZES).write(tmp_path / "export")
    listed = content(model)
    (model / "notes").symlink_to(secret)
    (model / "endless").symlink_to("/dev/zero")
    store = tmp_path / "store"
    (model / "layers.safetensors").rename(store)
    (model / "layers.safetensors").symlink_to("../store")  # as caches of a hub lay them out
    delivery.promote_candidate(model, channel.root, "float32", None, None)
    assert content(channel.folder_of(1)) == listed
    for path in (store, model / "table-00000.safetensors"):
        path.write_bytes(b"")  # in place
    assert content(channel.folder_of(1)) == listed
    assert content(materialize_version(channel, 1)) == listed


def test_what_cannot_be_rolled_back_to_is_said(tmp_path: Path) -> None:
    channel, _ = versions(tmp_path, 1)
    assert catch_message(UserError, channel.rollback) == (
        f"{channel.root} has no version before 1: there is nothing to roll back to. Promote "
        "another model"
    )
    with pytest.raises(UserError) as caught:
        channel.rollback(8)
    assert message(caught) == f"{channel.root} has no version 8: it has 1. Choose one of them"


def test_what_is_no_channel_is_left_as_it_is(tmp_path: Path) -> None:
    channel, _ = versions(tmp_path, 1)
    model, other, none = channel.folder_of(1), tmp_path / "other", tmp_path / "none"
    (other / "increments").mkdir(parents=True)
    told = f"error: {other} is no channel: there is no current.json, but something else. Give the "
    told += "folder of a channel, or one that does not exist yet\n"
    for arguments, expected in (
        (("promote", model, other), told),
        (("judge", model, "--champion", other), told),
        (
            ("rollback", none),
            f"error: {none} is no channel: there is no current.json. Give a folder that `gmeta "
            "channel promote` wrote\n",
        ),
    ):
        done = gmeta("channel", *arguments)
        assert (done.returncode, done.stderr) == (2, expected)
    assert [path.name for path in other.iterdir()] == ["increments"]
    assert not none.exists()
    with pytest.raises(UserError, match="json is a file: the folder of a channel is needed"):
        Channel(model / "config.json").current()


def test_a_model_that_was_exported_again_is_served_already(tmp_path: Path) -> None:
    channel, _ = versions(tmp_path, 1)
    again = shutil.copytree(channel.folder_of(1), tmp_path / "again")
    config = read_config(again)
    write_config(again, replace(config, source={**config.source, "exported_at": "later"}))
    before = channel.require_current()
    assert channel.promote(again) == before
    # What was promoted without its verdict is told once that is there.
    told = channel.promote(again, {"model": "of a run"})
    assert (told.number, told.verdict) == (1, {"model": "of a run"})
    assert (
        channel.promote(again, told.verdict)
        == channel.promote(again)
        == channel.require_current()
        == told
    )
    moves = [(one["number"], one["verdict"]) for one in channel.promotions()]
    assert moves == [(1, before.verdict), (1, told.verdict)]
    write_config(again, replace(config, source={**config.source, "step": 7}))
    assert channel.promote(again).number == 2


def test_two_promotions_at_once_are_one_and_a_refusal(tmp_path: Path) -> None:
    channel, _ = versions(tmp_path, 2)
    with channel.lock_for_change(), pytest.raises(DataError, match="is writing"):
        channel.rollback()
    assert channel.require_current().number == 2


def test_a_promotion_waits_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, say, beside the loop's: each would remove what the other packs."""
    channel, _ = versions(tmp_path, 1)
    first, second = (Model.of(SIZES, seed=n).write(tmp_path / f"by-{n}") for n in (7, 8))
    refused = []

    def packed(*arguments: Any, **more: Any) -> Any:
        with pytest.raises(DataError) as caught:
            delivery.promote_candidate(second, channel.root, "float32", None, None)
        refused.append(message(caught))
        return pack(*arguments, **more)

    monkeypatch.setattr(delivery, "pack", packed)
    delivery.promote_candidate(first, channel.root, "float32", None, None)
    assert content(materialize_version(channel, 2)) == content(first)
    told = f"process {os.getpid()} on {socket.gethostname()} is writing {channel.root}. Wait for it"
    assert refused == [told]
    monkeypatch.undo()
    delivery.promote_candidate(second, channel.root, "float32", None, None)
    assert channel.require_current().number == 3
    expected = ["current.json", "promotions.jsonl", "versions"]
    assert sorted(path.name for path in channel.root.iterdir()) == expected


def test_inspect_shows_versions_verdicts_and_what_serves(tmp_path: Path) -> None:
    channel, _ = versions(tmp_path, 3)
    channel.record({"reasons": ["it is worse"]})
    channel.rollback()
    done = succeed("inspect", channel.root, "--verify")
    name = channel.version(2).name
    assert done.stdout.startswith(f"channel {channel.root}: 3 versions; serves version {name}, ")
    assert f"* {name}" in done.stdout
    assert ": it is worse" in done.stdout
    assert "the chain of version 2 is complete: version 1 and 1 delta, " in done.stdout
    # One that does not serve may be damaged: what does is looked at all the same.
    (channel.folder_of(3) / "delta.json").write_text("{")
    done = succeed("inspect", channel.root, "--verify")
    told = f"damaged: {channel.folder_of(3)}/delta.json is not JSON: it was cut short or edited."
    assert told in done.stdout
    assert "the chain of version 2 is complete" in done.stdout
    table = channel.folder_of(2) / "table-00000.safetensors"
    table.write_bytes(table.read_bytes()[:-1])
    done = gmeta("inspect", channel.root, "--verify")
    assert done.returncode == 1
    assert str(table) in done.stderr


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["table-00000.safetensors", "layers.safetensors"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_over_a_chain_that_rotted_the_next_version_is_whole(
    tmp_path: Path, cache: Path, number: int, file: str
) -> None:
    """The cache of who promotes is sound: a reader elsewhere has none."""
    channel, _ = versions(tmp_path, 3)
    late, rng = tmp_path / "late", np.random.default_rng(9)
    model = Model.of(SIZES).changed(rng).write(tmp_path / "l")
    pack(channel, shutil.copytree(model, tmp_path / "l2"), late, overwrite=False)
    flip_bit(channel.folder_of(number) / file)
    assert f"{channel.folder_of(number) / file} differs from the checksum in " in catch_message(
        GMetaError, channel.promote, late
    )
    assert channel.require_current().number == 3
    delivery.promote_candidate(model, channel.root, "float32", None, None)
    shutil.rmtree(cache)
    assert (channel.version(4).kind, load_current(channel.root).number) == ("full", 4)


def test_what_serves_over_a_chain_that_rotted_is_promoted_again_whole(
    tmp_path: Path, cache: Path
) -> None:
    channel, _ = versions(tmp_path, 3)
    served = shutil.copytree(materialize_version(channel, 3), tmp_path / "served")
    flip_bit(channel.folder_of(2) / "layers.safetensors")
    delivery.promote_candidate(served, channel.root, "float32", None, None)
    shutil.rmtree(cache)
    assert (channel.version(4).kind, load_current(channel.root).number) == ("full", 4)


def test_what_a_killed_promotion_left_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, _ = versions(tmp_path, 1)
    model = Model.of(SIZES, seed=4).write(tmp_path / "m")
    with monkeypatch.context() as patched:
        patched.setattr(channel_module, "write_checked_json", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            channel.promote(model)
    flip_bit(channel.folder_of(2) / "layers.safetensors")
    assert channel.promote(model).number == 2
    assert content(channel.folder_of(2)) == content(model)


def test_a_log_that_was_edited_or_cut_is_refused_and_a_rollback_mends_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    channel, _ = versions(tmp_path, 3)
    channel.rollback(2)
    log, pointer = channel.root / "promotions.jsonl", channel.root / "current.json"
    sound, serves = log.read_bytes(), pointer.read_bytes()
    lines, own_sum = (
        sound.splitlines(keepends=True),
        "does not match its own checksum: it was edited",
    )
    for damage, damaged_log in (
        (f"line 3 {own_sum}", sound.replace(b'"number":3', b'"number":0')),
        (f"line 1 {own_sum}", sound.replace(b'"seal"', b'"sea1"', 1)),
        ("line 2 does not follow the line before it", b"".join((*lines[:1], *lines[2:]))),
        ("line 2 does not follow the line before it", b"".join(lines[i] for i in (0, 2, 1, 3))),
        ("lines are missing that came before what serves", lines[0]),
        ("lines are missing that came before what serves", b""),
        ("line 4 cannot be read", sound[:-30]),
        ("line 2 cannot be read", sound.replace(lines[1], b"[]\n")),
        ("line 4 cannot be read", sound.replace(b"rolled", b"r\xff")),
    ):
        log.write_bytes(damaged_log)
        pointer.write_bytes(serves)
        message = catch_message(GMetaError, channel.promotions)
        assert message.startswith(f"{log}: {damage}")
        assert message.endswith(
            f". Put the file back from a copy, or run: gmeta channel rollback {channel.root} --to "
            "N, which keeps what is sound of it"
        )
        assert catch_message(GMetaError, channel.record, {}) == message
        assert channel.rollback(2).number == 2
        assert f"{log} is made anew, as {damage}" in caplog.text
        promoted = [one["number"] for one in channel.promotions() if one["action"] == "promoted"]
        assert (sorted(promoted), channel.version_before(channel.current())) == ([1, 2, 3], 1)
        assert log.with_name("promotions.jsonl.damaged").read_bytes() == damaged_log
    log.unlink()
    succeed("channel", "rollback", channel.root, "--to", "3")
    assert [one["number"] for one in channel.promotions()][-1] == 3


def test_a_log_of_an_earlier_release_is_read_and_sealed_from_then_on(tmp_path: Path) -> None:
    channel, _ = versions(tmp_path, 2)
    log = channel.root / "promotions.jsonl"
    kept = ("number", "checksum", "action", "at", "verdict", "model")
    former = [{key: one[key] for key in kept} for one in channel.promotions()]
    log.write_text("".join(json.dumps(one) + "\n" for one in former))
    pointer = json.loads((channel.root / "current.json").read_text())
    del pointer["before"]
    (channel.root / "current.json").write_text(json.dumps(add_checksum(pointer)))
    assert channel.promotions() == former
    channel.rollback(1)
    assert [one["number"] for one in channel.promotions()] == [1, 2, 1]
    log.write_bytes(log.read_bytes().replace(b"0.5", b"0.6", 1))
    with pytest.raises(GMetaError, match="line 3 does not follow the line before it"):
        channel.promotions()
