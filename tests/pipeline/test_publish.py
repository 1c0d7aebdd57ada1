"""follow.mirror: what is promoted, or rolled back by hand, is at the URL before anything else."""

from contextlib import suppress
from pathlib import Path

import pytest

from gmeta.errors import GMetaError
from gmeta.pipeline.follow_config import load_follow_config
from gmeta.pipeline.pipeline_metrics import PipelineMetrics
from gmeta.serving.channel.channel import Channel
from gmeta.serving.channel.current_version import current_at
from metaio.errors import UrlError
from tests.pipeline.days import write_day, write_loop
from tests.pipeline.following import loop_of, run_stage, stages_of
from tests.serving.channel.models import Model


@pytest.fixture
def channel(tmp_path: Path) -> Channel:
    channel = Channel(tmp_path / "channel")
    for number in (1, 2):
        channel.promote(Model.of({"item": 40}, seed=number).write(tmp_path / str(number)))
    return channel


def config_with(root: Path, mirror: str) -> Path:
    config = write_loop(root, margin=9)
    config.write_text(config.read_text().replace("[follow]", f'[follow]\nmirror = "{mirror}"'))
    return config


def test_every_move_of_the_pointer_is_published_once(channel: Channel, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    config = config_with(tmp_path, url)
    loop = loop_of(config)
    for number in (2, 1):
        channel.rollback(number)
        assert stages_of(loop) == [("publish", 0)]
        assert current_at(url) == channel.require_current()
    # Another loop does not know: it looks once, and copies nothing.
    assert stages_of(loop_of(config)) == [("publish", 0)]


def test_a_place_that_cannot_be_written_is_tried_again(channel: Channel, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    loop = loop_of(config_with(tmp_path, f"file://{tmp_path}/store/clicks"))
    name = f"2-{channel.require_current().checksum[:12]}"
    with pytest.raises(GMetaError, match=rf"^publish of version {name} ended with 1: .*directory"):
        loop.step()
    (tmp_path / "store").unlink()
    assert stages_of(loop) == [("publish", 0)]


def test_while_a_place_is_away_the_rest_goes_on_in_turns(channel: Channel, tmp_path: Path) -> None:
    """An increment waits to be prepared: no hours of an outage may hold its training up."""
    (tmp_path / "store").write_text("a file")
    write_day(tmp_path / "logs", 0)
    asked: list[str] = []

    def stage(arguments: list[str], log: Path) -> int:
        asked.append(arguments[0])
        return run_stage(arguments, log) if arguments[0] in ("publish", "prepare") else 1

    loop = loop_of(config_with(tmp_path, f"file://{tmp_path}/store/clicks"), stage)
    measured = PipelineMetrics(loop)
    for _ in range(5):
        with suppress(GMetaError):
            loop.step()
        measured.refresh()
        assert "publish of version" in measured.status.failure
    assert asked == ["publish", "prepare", "publish", "train", "publish"]
    (tmp_path / "store").unlink()
    with suppress(GMetaError):
        loop.step()  # another stage fails meanwhile
    assert loop.step() is not None
    measured.refresh()
    assert measured.status.failure == ""
    assert asked[5:] == ["train", "publish"]


def test_a_url_that_nothing_reads_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UrlError, match=r"^nil://x cannot be opened: Protocol not known: nil\. "):
        load_follow_config(config_with(tmp_path, "nil://x"))
