"""The page of a stream, as a file and live, and what it says: scores, freshness, alarms."""

import json
import re
import shutil
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from gmeta.access.address import AddressError
from gmeta.errors import UserError
from gmeta.evaluation.report.chart_files import render_svg
from gmeta.pipeline.live_page import StreamPageServer
from gmeta.pipeline.outcome_reader import read_days
from gmeta.pipeline.pipeline_metrics import PipelineMetrics
from gmeta.pipeline.pipeline_status import PipelineStatus, read_status
from gmeta.pipeline.stage_outcome import RunningStage
from gmeta.pipeline.stream_charts import stream_chart
from gmeta.pipeline.stream_page import draw_stream, render_page, render_stream
from gmeta.serving.channel.channel import Channel
from gmeta.serving.channel.decision_files import read_verdict, write_verdict
from metaio.stream.chain import open_stream
from tests.pipeline.days import write_loop
from tests.pipeline.following import loop_of
from tests.support.commands import gmeta
from tests.support.page_outline import outline_page
from tests.support.refusals import catch_message


def copied(followed: Path, root: Path) -> Path:
    """The two days at another place, to be changed; its stream.toml."""
    for name in ("stream", "runs", "channel"):
        shutil.copytree(followed / name, root / name)
    return write_loop(root, margin=9)


@pytest.mark.distributed
def test_the_page_shows_every_increment_with_its_version(followed: Path) -> None:
    loop = loop_of(followed / "stream.toml")
    page = render_stream(loop, read_status(loop))
    for number in (1, 2):
        assert loop.channel.version(number).name in page
    titles = re.findall("<figcaption>(.*?)</figcaption>", page)
    assert titles == [
        "AUC before training on it (prequential)", "AUC of gate tasks", "Logloss of gate tasks",
        "Logloss before training on it (prequential)", "Training rows",
        "Ids that came (up) and went (down)", "Bytes shipped", "Where the time goes",
    ]  # fmt: skip
    assert page.count("<svg role") == len(titles)
    outline = outline_page(page)
    assert outline.verdicts == ["good"]
    assert outline.tiles == [
        *("served version", "promoted", "knows events up to", "partitions waiting")
    ]
    hero, _, gate, *_, shipped, times = outline.pictures
    axes = ("end of the increment (UTC)", "AUC", "(higher is better)")
    # Two lines, the second of one point; both increments were promoted.
    assert (hero.words, hero.num_marks) == ((*axes, "continued", "frozen", "promoted"), 4)
    assert gate.words[-2:] == ("candidate", "champion")
    assert shipped.words == ("increment", "bytes", "whole model", "full")
    assert times.words == ("increment", "seconds", "prepare", "train", "deliver")
    assert page.count("promoted") >= 4  # verdicts and moves of the pointer
    # Every colour goes by the reader's choice of light or dark.
    assert not re.findall("(?:fill|stroke): ?#[0-9a-f]{6}", page)
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")
    assert 'http-equiv="refresh"' not in page


@pytest.mark.distributed
def test_the_first_version_is_scored_on_what_came_after_it(followed: Path) -> None:
    """As the judge scored it when it was the champion; and it was still the newest model when the
    second increment was forecast, of which it knew all values but the new ones."""
    frozen = json.loads((followed / "runs/000002/frozen.json").read_text())
    verdict = json.loads((followed / "runs/000002/verdict.json").read_text())
    assert (verdict["windows"], verdict["champion_version"]) == (1, 1)
    gate = frozen["splits"]["gate"]
    assert gate["num_tasks"] == verdict["num_tasks"]
    for name, value in verdict["champion"].items():
        assert gate["scores"][name] == pytest.approx(value, abs=1e-12)
    stream, channel = open_stream(str(followed / "stream")), Channel(followed / "channel")
    assert frozen["fingerprint"] == stream.record(2).fingerprint
    assert frozen["model"] == channel.version(1).checksum
    prequential = json.loads((followed / "runs/000002/run/prequential.json").read_text())
    (second,) = read_days(loop_of(followed / "stream.toml"))[1:]
    assert second.frozen == frozen["splits"]["train"]["scores"]
    assert second.forecast == prequential["splits"]["train"]["scores"]
    assert second.frozen.keys() == second.forecast.keys()
    assert second.frozen["logloss"] == pytest.approx(second.forecast["logloss"], abs=0.02)


@pytest.mark.distributed
def test_the_best_possible_auc_is_of_the_partition(followed: Path, tmp_path: Path) -> None:
    config = copied(followed, tmp_path)
    best = tmp_path / "days.json"
    best.write_text(json.dumps([{"day": "day=001", "auc_of_p_click": 0.875}]))
    text = config.read_text()
    config.write_text(text.replace("[follow]", f'[follow]\nbest = "{best}"'))
    days = read_days(loop_of(config))
    assert [day.best_auc for day in days] == [None, 0.875]
    (panel,) = (one for one in stream_chart(days).panels if one.title.startswith("AUC before"))
    assert panel.description.endswith(", best possible 0.8750")
    best.write_text("{}{}")
    assert catch_message(UserError, read_days, loop_of(config)).startswith(
        f"follow.best = '{best}' is no list of {{day, auc_of_p_click}}: "
    )


@pytest.mark.distributed
def test_a_refused_candidate_is_crossed_a_lost_record_not(followed: Path, tmp_path: Path) -> None:
    config = copied(followed, tmp_path)
    root = tmp_path / "runs" / "000002"
    verdict = read_verdict(root / "verdict.json")
    verdict |= {"verdict": "refuse", "reasons": ["<b>worse</b>"]}
    write_verdict(root / "verdict.json", verdict)
    (root / "frozen.json").write_text("{")
    (root / "stages.jsonl").write_text('{"stage": "train", "took_s": 2.5}\n{"stage": "expo')
    loop = loop_of(config)
    days = read_days(loop)
    expected = (True, {}, {"train": 2.5})
    assert (days[1].refused, dict(days[1].frozen), dict(days[1].took_s)) == expected
    descriptions = [panel.description for panel in stream_chart(days).panels]
    assert any(", refused 0." in told for told in descriptions)
    assert not any("frozen" in told for told in descriptions)
    page = render_stream(loop, read_status(loop))
    assert re.search('class="chip bad">refused</span>\\s*<small>&lt;b&gt;worse&lt;/b&gt;', page)


@pytest.mark.distributed
def test_the_live_page_and_its_metrics_are_of_now(followed: Path) -> None:
    loop = loop_of(followed / "stream.toml")
    metrics = PipelineMetrics(loop)
    metrics.refresh()
    live = StreamPageServer(loop, metrics, "127.0.0.1:0")
    try:

        def get(path: str) -> str:
            url = f"http://127.0.0.1:{live.port}{path}"
            with urllib.request.urlopen(url, timeout=60) as answer:
                return str(answer.read().decode())

        page = get("/")
        assert 'http-equiv="refresh"' in page
        assert page.count("<svg role") == 8
        assert "train of increment 7" not in page
        loop.under_way = RunningStage("train", 7, time.monotonic() - 300)
        metrics.note_failure("no room")
        assert re.search("5.0 min</dd>.*train of increment 7", get("/"))
        assert "the next stage fails: no room" in get("/")
        measured = get("/metrics")
        running = dict(re.findall(r'stage_running_seconds{stage="(\w+)"} ([\d.]+)', measured))
        assert {stage for stage, value in running.items() if float(value) > 0} == {"train"}
        assert "gmeta_follow_failing 1.0" in measured
        assert get("/healthz") == "serving\n"
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{live.port}: "):
            StreamPageServer(loop, metrics, f"127.0.0.1:{live.port}")
    finally:
        live.stop()
    with pytest.raises(AddressError, match="--listen is 'nowhere'"):
        StreamPageServer(loop, metrics, "nowhere")


@pytest.mark.distributed
def test_a_page_that_cannot_be_drawn_says_why_and_is_drawn_once_it_can_be(
    followed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = copied(followed, tmp_path)
    best = tmp_path / "days.json"
    config.write_text(config.read_text().replace("[follow]", f'[follow]\nbest = "{best}"'))
    loop = loop_of(config)
    metrics = PipelineMetrics(loop)
    live = StreamPageServer(loop, metrics, "127.0.0.1:0")
    address = f"http://127.0.0.1:{live.port}/"
    try:
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(address, timeout=60)
        assert caught.value.code == 500
        assert caught.value.read().decode() == (
            f"the page cannot be drawn: follow.best = '{best}' is no list of {{day, "
            f"auc_of_p_click}}: [Errno 2] No such file or directory: '{best}'. Give the days.json "
            "of the recipe synthetic-days, or leave it empty\n"
        )
        with monkeypatch.context() as patched:
            patched.setattr("gmeta.pipeline.live_page.draw_stream", lambda loop: {}["day"])
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(address, timeout=60)
        assert caught.value.read().decode() == (
            "the page cannot be drawn: KeyError: 'day'. That is a defect; report it with its "
            "traceback\n"
        )
        best.write_text("[]")
        with urllib.request.urlopen(address, timeout=60) as answer:
            assert answer.status == 200
    finally:
        live.stop()
    assert "Traceback" not in capfd.readouterr().err


def test_a_stream_without_an_increment_has_a_page(tmp_path: Path) -> None:
    loop = loop_of(write_loop(tmp_path))
    status = read_status(loop)
    assert status == PipelineStatus()
    page = render_page(draw_stream(loop), status)
    assert "No increment yet." in page
    assert (outline_page(page).verdicts, outline_page(page).pictures) == ([""], [])
    # Stale: what serves is older than follow.fresh_s allows.
    stale = replace(status, event_end_s=time.time() - 7_201, fresh_s=3_600)
    page = render_page(draw_stream(loop), stale)
    assert outline_page(page).verdicts == ["bad"]
    assert "Look at this: the served model knows nothing of the last 2.0 h" in page
    metrics = PipelineMetrics(loop)
    metrics.refresh()
    age = metrics.registry.get_sample_value("gmeta_follow_event_age_seconds")
    assert age is not None
    assert age != age  # NaN: no rule fires for it


@pytest.mark.distributed
def test_the_page_stands_without_a_chart_and_with_times_beyond_all_dates(followed: Path) -> None:
    loop = loop_of(followed / "stream.toml")
    status, days = read_status(loop), read_days(loop)
    far = [replace(day, window_s=(1e15, 2e15)) for day in days]
    assert [panel.title for panel in stream_chart(far).panels] == [
        panel.title for panel in stream_chart(days).panels
    ]
    render_svg(stream_chart(far), 0)
    bare = replace(draw_stream(loop), panels=[])
    assert "Increments, the newest first" in render_page(bare, status)


def test_alarms_say_what_to_look_at() -> None:
    status = PipelineStatus(
        prepared=9, event_end_s=time.time() - 7_201, fresh_s=3_600, refused=2,
        refused_files={"day=7/part-0.parquet": "it holds 3 rows"}, failure="disk full",
        newest_alarms=("table item is 81 % full",),
    )  # fmt: skip
    assert status.alarms() == [
        "the next stage fails: disk full",
        "the served model knows nothing of the last 2.0 h; follow.fresh_s allows 60.0 min",
        "2 candidates in a row refused: an earlier model serves on",
        "1 file quarantined, and in no increment",
        "increment 9: table item is 81 % full",
    ]
    assert PipelineStatus(event_end_s=0.0, fresh_s=0.0).alarms() == []
    expected = ["3 candidates in a row refused: nothing of it is served"]
    assert PipelineStatus(refused=3).alarms() == expected


def test_an_address_that_strangers_reach_needs_a_proof(tmp_path: Path) -> None:
    done = gmeta("follow", write_loop(tmp_path), "--once", "--listen", "0.0.0.0:0")
    assert done.returncode == 2
    assert done.stderr == (
        "error: --listen 0.0.0.0:0 can be reached from other machines. Pass --tls-cert, --tls-key "
        "and one of --tokens and --tls-client-ca; or listen on 127.0.0.1\n"
    )
