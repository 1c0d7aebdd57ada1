"""The loop: every closed partition is trained once and served in its turn, whatever is killed."""

import errno
import io
import json
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

from gmeta.cli.commands.follow import _run_stages as take_stages
from gmeta.errors import GMetaError, UserError
from gmeta.pipeline.follow_config import load_follow_config
from gmeta.pipeline.pipeline_metrics import PipelineMetrics
from gmeta.pipeline.pipeline_status import read_status
from gmeta.pipeline.stage_outcome import ENDED_FILE
from gmeta.pipeline.stream_page import render_stream
from gmeta.runs.checkpoints.progress_file import read_about
from gmeta.runs.run_folder import RunFolder, list_checkpoints
from gmeta.serving.channel.channel import Channel
from gmeta.serving.channel.decision_files import read_verdict, write_verdict
from gmeta.serving.channel.version_cache import CACHE_VARIABLE
from gmeta.serving.channel.version_packing import pack
from gmeta_keys.stop_flag import StopFlag
from metaio.stream.chain import open_stream
from tests.pipeline.days import write_day, write_loop
from tests.pipeline.following import loop_of, run_stage, stages_of
from tests.serving.channel.models import Model, content
from tests.serving.channel.test_channel import SIZES
from tests.support.commands import environment, succeed
from tests.support.commands import gmeta as run_gmeta
from tests.support.forked import Task, forked
from tests.support.refusals import catch_message
from tests.support.waiting import PATIENCE_S, wait_until


def lineage(run: Path) -> list[int]:
    about = read_about(list_checkpoints(run / "checkpoints")[-1])
    return [one["increment"] for one in about["lineage"]]


def outcome(root: Path) -> tuple[object, ...]:
    """What must be the same however often the loop was killed."""
    stream, channel = open_stream(str(root / "stream")), Channel(root / "channel")
    tables = {
        name: data
        for name, data in content(root / "runs" / "000002" / "model").items()
        if name != "config.json"  # holds the time of the export
    }
    return (
        [record.fingerprint for record in stream.records],
        lineage(root / "runs" / "000002" / "run"),
        [entry["number"] for entry in channel.promotions()], channel.numbers(), tables,
    )  # fmt: skip


@pytest.mark.distributed
def test_each_day_is_trained_once_judged_and_served(followed: Path) -> None:
    _, lineages, promoted, numbers, _ = outcome(followed)
    assert lineages == [1, 2] == promoted == numbers
    loop = loop_of(followed / "stream.toml")
    assert loop.step() is None
    metrics = PipelineMetrics(loop)
    metrics.refresh()

    def value(name: str) -> float | None:
        return metrics.registry.get_sample_value(f"gmeta_follow_{name}")

    assert (value("served_increment"), value("prepared_increment")) == (2, 2)
    assert (value("waiting_partitions"), value("refused_in_a_row")) == (0, 0)
    assert (value("event_age_seconds") or 0) > 86_400


@pytest.mark.distributed
def test_runs_are_promoted_and_exported_as_what_changed(
    followed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    channel, runs = Channel(tmp_path / "channel"), followed / "runs"
    out = tmp_path / "out"
    told = ""
    for arguments in (
        ["channel", "promote", runs / "000001" / "run", channel.root],
        ["export", runs / "000002" / "run", out, "--since", channel.root],
        ["channel", "promote", out, channel.root],
        # Of the same checkpoint: it serves.
        ["channel", "promote", runs / "000002" / "run", channel.root],
    ):
        done = succeed(*arguments)
        told += done.stderr
    # Of so small a model a delta is more than half.
    assert "; whole, since the deltas over version 1 are half of it)" in told
    assert channel.numbers() == [1, 2]
    assert channel.require_current().number == 2
    assert not list(tmp_path.glob(".*")) + list(channel.root.glob(".*"))


def test_refused_candidates_leave_the_champion_and_are_set_aside_after_a_few(
    followed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge refuses whatever comes: what it refused is gone on from by nothing."""
    config = write_loop(tmp_path, max_refused=2)
    shutil.copytree(followed / "stream", tmp_path / "stream")
    asked: list[list[str]] = []

    def stage(arguments: list[str], log: Path) -> int:
        asked.append(arguments)
        root = log.parent
        if arguments[0] == "export":
            (root / "model").mkdir()
            (root / "model" / "config.json").touch()
        if arguments[0] == "judge":
            verdict = {"verdict": "refuse", "reasons": ["worse"], "model": root.name}
            (root / "verdict.json").write_text(json.dumps(verdict))
            return 3
        return 0

    loop = loop_of(config, stage)
    for number in (1, 2):
        # No line can be appended, as on a full disk: the stages have ended all the same.
        (tmp_path / "runs" / f"{number:06d}" / ENDED_FILE).mkdir(parents=True)
        assert [loop.step().stage for _ in range(3)] == ["train", "export", "judge"]  # type: ignore[union-attr]
    trains = [one for one in asked if one[0] == "train"]
    assert not [one for train in trains for one in train if "continue_from" in one]
    assert loop.step() is None  # no third increment yet
    assert loop.refused_before(3) == [1, 2]
    shutil.copytree(tmp_path / "stream/increments/000002", tmp_path / "stream/increments/000003")
    monkeypatch.setattr(loop, "_check_runs", lambda: None)  # the third is a copy
    message = catch_message(GMetaError, loop.step)
    assert message.startswith(
        "increments 1, 2 are set aside: 2 candidates were refused in a row, the last because "
        "worse. None serves yet. Raise judge.max_refused, or promote by hand: "
    )
    assert message.endswith("verdict.json --force")


def test_a_candidate_is_judged_again_where_another_champion_serves_by_now(
    followed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person goes back behind the champion that it was compared with."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    root = shutil.copytree(followed, tmp_path / "copy")
    shutil.rmtree(root / "logs")  # what was taken has other names
    write_day(root / "logs", 2)
    asked: list[str] = []

    def stage(arguments: list[str], log: Path) -> int:
        asked.append(arguments[0])
        return run_stage(arguments, log)

    loop = loop_of(write_loop(root, margin=9), stage)
    while "judge" not in asked:
        loop.step()
    loop.channel.rollback(1)
    assert [loop.step().stage for _ in range(2)] == ["judge", "promote"]  # type: ignore[union-attr]
    served = loop.channel.require_current()
    assert served.verdict is not None
    assert (served.number, served.verdict["champion_version"]) == (3, 1)
    # Killed before the log was written, it is promoted, and not judged against itself.
    log = root / "channel" / "promotions.jsonl"
    told = log.read_text()
    log.write_text("".join(told.splitlines(keepends=True)[:-1]))
    assert [loop.step().stage for _ in range(2)] == ["promote", "score"]  # type: ignore[union-attr]
    assert log.read_text() == told


@pytest.mark.distributed
def test_a_stream_put_back_from_an_older_copy_is_told_at_once(
    followed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its second partition has changed since, of which there is a run already."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    root = shutil.copytree(followed, tmp_path / "copy")
    config = write_loop(root, margin=9)
    shutil.rmtree(root / "logs")  # what was taken has other names
    resident = loop_of(config)
    assert stages_of(resident) == []
    for name in ("increments", "state"):
        shutil.rmtree(root / "stream" / name / "000002")
    write_day(root / "logs", 2)
    prepared = resident.step()
    assert prepared is not None
    assert (prepared.stage, prepared.increment) == ("prepare", 2)
    for loop in (resident, loop_of(config)):
        with pytest.raises(GMetaError) as caught:
            loop.step()
    was, now = (open_stream(str(one / "stream")).record(2).fingerprint for one in (followed, root))
    assert str(caught.value) == (
        f"{root}/runs/000002/run was trained on {was[:12]}, but {root}/stream has {now[:12]} as "
        "increment 2: one of them was put back from an older copy. Put back the other as well, or "
        f"move {root}/runs/000002 and all later ones away, and these increments are trained again"
    )
    shutil.move(root / "runs/000002", tmp_path)
    assert [done.stage for _ in range(4) if (done := resident.step())] == [
        *("train", "export", "judge", "promote")
    ]
    assert lineage(root / "runs/000002/run") == [1, 2]
    assert loop.channel.require_current().number == 3


def test_a_model_a_person_promotes_unjudged_is_known(followed: Path, tmp_path: Path) -> None:
    """It was refused, or would be promoted next: the loop must not wait, or promote it for ever."""
    root = shutil.copytree(followed, tmp_path / "copy")
    shutil.rmtree(root / "channel")
    loop = loop_of(config := write_loop(root, margin=9))
    for number in (1, 2):
        assert loop.first_unfinished() == number
        loop.channel.promote(root / f"runs/00000{number}/model")
        assert loop.promoted_version(number) == number
    for number in (1, 2):  # as follow.keep removes them one day
        shutil.rmtree(loop.channel.folder_of(number))
    assert loop_of(config).first_unfinished() is None


def test_damaged_verdicts_are_restored_from_the_log_and_told(
    followed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = shutil.copytree(followed, tmp_path / "copy")
    config = write_loop(root, margin=9)
    paths = [root / f"runs/00000{number}/verdict.json" for number in (1, 2)]
    sound = [read_verdict(path) for path in paths]
    text = paths[0].read_text()
    for damaged in (text[:40], "", "[]", text.replace('"promote"', '"qromote"'), None):
        for path in paths:
            path.unlink() if damaged is None else path.write_text(damaged)
        assert loop_of(config).first_unfinished() is None
        assert [read_verdict(path) for path in paths] == sound
    assert f"{paths[1]} is restored from {root}/channel/promotions.jsonl: " in caplog.text
    paths[1].write_text("")
    log = root / "channel" / "promotions.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"number":2', b'"number":0'))
    with pytest.raises(GMetaError, match=r"jsonl: line 2 does not match its own checksum: it was"):
        loop_of(config).step()
    log.write_text("")
    with pytest.raises(GMetaError, match="lines are missing that came before what serves"):
        loop_of(config).step()


def test_a_promotion_that_the_log_does_not_name_is_told(
    followed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a digit of a log without checksums has changed, of an earlier release."""
    root = shutil.copytree(followed, tmp_path / "copy")
    loop = loop_of(write_loop(root, margin=9), lambda arguments, log: 0)
    monkeypatch.setattr(loop, "_read_log", lambda: ({}, {}))
    with pytest.raises(GMetaError, match=r"does not name .*/runs/000001/model: it was edited"):
        loop._promote(1)


@pytest.mark.parametrize("of_nobody", [1, 2])
def test_no_run_goes_on_from_what_a_model_of_no_increment_replaced_by_a_rollback(
    followed: Path, tmp_path: Path, of_nobody: int
) -> None:
    root = shutil.copytree(followed, tmp_path / "copy")
    verdict = root / "runs" / f"00000{of_nobody}" / "verdict.json"
    write_verdict(verdict, read_verdict(verdict) | {"model": "of no version"})
    loop = loop_of(write_loop(root, margin=9))
    assert loop.continued_from(3) == {1: 2, 2: 1}[of_nobody]
    loop.channel.rollback(1)
    assert loop.continued_from(3) == {1: None, 2: 1}[of_nobody]
    log, pointer = root / "channel" / "promotions.jsonl", root / "channel" / "current.json"
    told = log.read_text()
    loop.channel.rollback(2)
    whole, _ = log.read_text(), log.write_text(told)  # killed before it wrote the log
    assert loop.continued_from(3) == {1: 2, 2: 1}[of_nobody]
    log.write_text(whole)
    pointer.unlink()
    assert loop.continued_from(3) == {1: 2, 2: 1}[of_nobody]


@pytest.mark.distributed
@pytest.mark.parametrize("rolled_back", [False, True])
def test_the_next_run_goes_on_from_what_serves_and_skips_what_was_refused(
    followed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rolled_back: bool
) -> None:
    """Increment 2 was refused, or promoted and rolled back: the third never saw its weights."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    root = tmp_path / "copy"
    shutil.copytree(followed, root)
    write_day(root / "logs", 2)
    config = write_loop(root, margin=9)
    loop = loop_of(config)
    if not rolled_back:
        verdict = root / "runs" / "000002" / "verdict.json"
        told = read_verdict(verdict) | {"verdict": "refuse", "model": "of no version"}
        write_verdict(verdict, told)
    loop.channel.rollback(1)
    run_gmeta("prepare", "--extend", root / "stream", root / "logs/day=002/part-0.parquet")
    assert loop.continued_from(3) == 1
    assert loop.refused_before(3) == ([] if rolled_back else [2])
    done = loop.step()
    assert done is not None
    assert (done.stage, done.increment) == ("train", 3)
    assert done.summary.endswith("run, without increment 2")
    assert lineage(root / "runs" / "000003" / "run") == [1, 3]
    # Killed before it was noted, it goes on as it began, whatever serves by now.
    (root / "runs" / "000003" / "trained.json").unlink()
    loop.channel.rollback(2)
    assert loop.step() is not None
    begun = RunFolder(root / "runs" / "000003" / "run").read_config().run
    assert begun.skip_increments == (2,)
    assert begun.continue_from.endswith("000001/run")


@pytest.mark.distributed
def test_old_versions_and_their_checkpoints_go_and_what_goes_on_stays(
    followed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    root = tmp_path / "copy"
    shutil.copytree(followed, root)
    write_day(root / "logs", 2)
    config = write_loop(root, margin=9)
    config.write_text(config.read_text().replace("every_s", "keep = 1\nevery_s"))
    run_gmeta("prepare", "--extend", root / "stream", root / "logs/day=002/part-0.parquet")
    loop = loop_of(config)
    found = []
    while loop.first_unfinished() is not None:
        done = loop.step()
        assert done is not None
        found.append(done)
    assert found[-1].summary.endswith("; removed 1 version")
    assert loop.channel.numbers() == [2, 3]  # what serves, and what a rollback goes back to
    runs = root / "runs"
    kept = [n for n in (1, 2, 3) if (runs / f"{n:06d}" / "run" / "checkpoints").exists()]
    assert kept == [2, 3] == [n for n in (1, 2, 3) if (runs / f"{n:06d}" / "model").exists()]
    after = loop_of(config)
    assert "promoted" in render_stream(after, read_status(after))
    assert loop_of(config).first_unfinished() is None
    loop.channel.rollback()
    assert loop.continued_from(4) == 2


@pytest.mark.distributed
def test_increments_without_a_gate_task_are_trained_and_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    for day in range(2):
        write_day(tmp_path / "logs", day)
    config = write_loop(tmp_path)
    for name, before, after in (
        ("schema.toml", "gate = 0.3", "gate = 0.000001"),
        ("train.toml", "[data]", '[data]\nvalid_split = "gate"'),
        ("train.toml", "[run]", "[run]\nvalid_every_steps = 1\nearly_stop_patience = 2"),
    ):
        file = tmp_path / name
        file.write_text(file.read_text().replace(before, after))
    loop = loop_of(config)
    assert stages_of(loop) == [
        (stage, number) for number in (1, 2) for stage in ("prepare", "train", "export", "judge")
    ]
    verdict = loop.verdict(2) or {}
    assert (verdict["verdict"], verdict["reasons"]) == (
        "refuse",
        [
            "there is no task in split 'gate', nor in that of earlier windows (pool 7): nothing "
            "to judge by"
        ],
    )
    assert "nothing to judge by" in render_stream(loop, read_status(loop))


@pytest.mark.distributed
def test_sigterm_ends_the_stage_under_way_behind_a_checkpoint_from_which_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    write_day(tmp_path / "logs", 0)
    config, train = write_loop(tmp_path), tmp_path / "train.toml"
    short = train.read_text().replace("[run]", "[run]\nlog_every_steps = 1")
    train.write_text(short.replace("epochs = 1", "epochs = 1000000"))
    root = tmp_path / "runs" / "000001"
    task = Task("gmeta", ("follow", str(config)), environment(), tmp_path)
    with forked(task) as running:
        metrics = root / "run" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and '"loss"' in metrics.read_text(), "a step")
        os.kill(running.pid, signal.SIGTERM)
        assert running.wait(PATIENCE_S) == 0, running.stderr
    log = root / "train.log"
    found = re.search(
        r"stopped by SIGTERM behind step (\d+), and nothing of it is lost", log.read_text()
    )
    assert found is not None
    assert f"stopped: train of increment 1 ended with 143: {found[0]}" in running.stdout
    *_, checkpoint = list_checkpoints(root / "run" / "checkpoints")  # epochs may have ended before
    assert read_about(checkpoint)["step"] == int(found[1])
    assert not (root / "trained.json").exists()
    train.write_text(short)  # it was trained longer than that, and ends at once
    done = loop_of(config).step()
    assert done is not None
    assert (done.stage, lineage(root / "run")) == ("train", [1])


def test_checkpoints_of_versions_that_later_ones_build_on_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollback may go to each version that is there, and training goes on from its checkpoint."""
    config = write_loop(tmp_path)
    config.write_text(config.read_text().replace("every_s", "keep = 1\nevery_s"))
    rng, channel, model = np.random.default_rng(3), Channel(tmp_path / "channel"), Model.of(SIZES)
    numbers = range(1, 5)
    for number in numbers:
        (tmp_path / "stream" / "increments" / f"{number:06d}").mkdir(parents=True)
        root, packed = tmp_path / "runs" / f"{number:06d}", tmp_path / f"packed-{number}"
        (root / "run" / "checkpoints" / "step-00000009").mkdir(parents=True)
        verdict = {"verdict": "promote", "model": f"m{number}"}
        for name in ("trained.json", "verdict.json"):
            (root / name).write_text(json.dumps(verdict))
        pack(channel, model.write(tmp_path / f"m{number}"), packed, False, 16)
        if number < 4:
            channel.promote(packed, verdict)
        model = model.changed(rng)

    def promote(arguments: list[str], log: Path) -> int:
        assert arguments[0] == "promote"
        channel.promote(packed, verdict)
        return 0

    loop = loop_of(config, promote)
    monkeypatch.setattr(loop, "_check_runs", lambda: None)  # its increments are empty folders
    done = loop.step()
    assert done is not None
    assert done.summary.startswith("version 4-")
    expected = ["full", "delta", "delta", "delta"]
    assert [channel.version(number).kind for number in channel.numbers()] == expected
    channel.rollback(1)
    assert loop.continued_from(5) == 1
    runs = tmp_path / "runs"
    found = [n for n in numbers if list_checkpoints(runs / f"{n:06d}" / "run/checkpoints")]
    assert found == [*numbers]


def test_a_store_that_cannot_be_listed_is_a_line_and_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loop, left, asked = loop_of(write_loop(tmp_path)), 9, StopFlag()

    def fails(self: object, path: str, **_: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            asked.stop()
        raise RuntimeError("no route to the store")

    monkeypatch.setattr(LocalFileSystem, "glob", fails)
    for looks in (loop.step, loop.missing_input):
        with pytest.raises(GMetaError) as caught:
            looks()
        assert str(caught.value) == (
            f"follow.inputs: {tmp_path}/logs/day=* cannot be read: no route to the store. "
            "Look at the place, the network and the credentials"
        )
    metrics = PipelineMetrics(loop)
    take_stages(loop, metrics, asked, False, None, None)
    assert "".join(capsys.readouterr().out.split()) == "".join(f"waiting: {caught.value}".split())
    assert metrics.registry.get_sample_value("gmeta_follow_failing") == 1


def test_a_full_log_disk_ends_no_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    loop, asked = loop_of(write_loop(tmp_path)), StopFlag()
    monkeypatch.setattr(loop, "missing_input", lambda: asked.stop() or "no input yet")
    monkeypatch.setattr("sys.stdout", Full())
    take_stages(loop, PipelineMetrics(loop), asked, False, None, None)


def test_a_failed_stage_says_what_it_said(tmp_path: Path) -> None:
    write_day(tmp_path / "logs", 0)
    config = write_loop(tmp_path)

    def stage(arguments: list[str], log: Path) -> int:
        assert arguments[:3] == ["prepare", "--extend", str(tmp_path / "stream")]
        log.parent.mkdir(parents=True)
        log.write_text("reading\nerror: it is full\n")
        return 2

    message = catch_message(UserError, loop_of(config, stage).step)
    log = tmp_path / "runs" / "logs" / "prepare-day=000.log"
    expected = f"prepare of {tmp_path}/logs/day=000 ended with 2: it is full (see {log})"
    assert message == expected


def test_a_killed_stage_says_by_what(tmp_path: Path) -> None:
    """Its log may end with what an earlier try said."""
    write_day(tmp_path / "logs", 0)
    log = tmp_path / "runs" / "logs" / "prepare-day=000.log"
    log.parent.mkdir(parents=True)
    log.write_text("error: it is full\n")
    told = f"prepare of {tmp_path}/logs/day=000 ended with"
    for code, why in ((-9, "SIGKILL, as where memory runs out"), (-11, "SIGSEGV")):
        loop = loop_of(write_loop(tmp_path), lambda arguments, log, code=code: code)
        assert catch_message(GMetaError, loop.step) == f"{told} {code}: {why} (see {log})"


def test_an_idle_turn_lists_the_log_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a store with ten thousand folders."""
    loop, listed = loop_of(write_loop(tmp_path)), []
    glob = LocalFileSystem.glob

    def counted(self: LocalFileSystem, path: str, **how: object) -> object:
        listed.append(path)
        return glob(self, path, **how)

    monkeypatch.setattr(LocalFileSystem, "glob", counted)
    for _ in range(2):
        listed.clear()
        assert loop.step() is None
        PipelineMetrics(loop).refresh()
        assert listed == [f"{tmp_path}/logs/day=*"]


def test_a_pattern_that_finds_nothing_is_told(tmp_path: Path) -> None:
    write_day(tmp_path / "logs", 0, done=False)
    loop = loop_of(write_loop(tmp_path))
    assert loop.step() is None
    assert loop.missing_input() == (
        f"no closed partition matches follow.inputs = '{tmp_path}/logs/day=*'. A folder is closed "
        "by a file _SUCCESS, or by its age with follow.closed_after_s; else correct the pattern"
    )
    write_day(tmp_path / "logs", 1)
    assert loop.missing_input() == ""


def test_a_config_without_a_place_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "stream.toml"
    config.write_text('[follow]\ninputs = "logs/*"\n')
    with pytest.raises(UserError) as caught:
        load_follow_config(config)
    assert str(caught.value) == f"follow.schema is empty: it is required. Set it in {config}"


def test_the_command_follows_to_the_end_in_a_process_a_stage(followed: Path) -> None:
    """`gmeta follow --once` where nothing is left to do."""
    done = run_gmeta("follow", followed / "stream.toml", "--once")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
