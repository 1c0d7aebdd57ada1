"""A model of another shape is trained beside the live one, judged against it, and takes over."""

from pathlib import Path

import pytest

from gmeta.errors import ConfigError
from gmeta.pipeline.follow_config import load_follow_config
from gmeta.pipeline.pipeline_status import read_status
from gmeta.pipeline.stream_page import render_stream
from gmeta.serving.channel.channel import Channel
from gmeta.serving.channel.decision_files import read_verdict, write_verdict
from tests.pipeline.days import TRAIN, write_day, write_loop
from tests.pipeline.following import loop_of, run_stage, stages_of

WIDER = TRAIN.replace("hidden = [8]\noptions.bottom = [4]", 'name = "melu"\nhidden = [12, 6]')


def write_challenger(root: Path) -> Path:
    """challenger.toml beside stream.toml, with the stream and the logs of that."""
    (root / "wider.toml").write_text(WIDER)
    config = root / "challenger.toml"
    live = (root / "stream.toml").read_text().replace("[judge]", "frozen = false\n[judge]")
    (root / "stream.toml").write_text(live)
    own = live.replace("train.toml", "wider.toml").replace(f'"{root}/runs"', f'"{root}/wider"')
    own = own.replace(f'channel = "{root}/channel"', f'channel = "{root}/challenger"')
    config.write_text(own.replace("[judge]", f'takes_over = "{root}/channel"\n[judge]'))
    return config


@pytest.mark.distributed
def test_a_challenger_takes_over_once_it_is_better(tmp_path: Path) -> None:
    live_loop = loop_of(write_loop(tmp_path, margin=9))
    config, logs, low = write_challenger(tmp_path), tmp_path / "logs", -0.1
    live = Channel(tmp_path / "channel")

    def judged(arguments: list[str], log: Path) -> int:
        """A stage; the difference between both models is what the test wants."""
        code = run_stage(arguments, log)
        out = Path(arguments[-1])
        if arguments[0] == "judge" and out.name == "challenge.json":
            verdict = read_verdict(out)
            assert verdict["champion_version"] == live.require_current().number
            assert {"logloss"} <= verdict["candidate"].keys() & verdict["champion"].keys()
            write_verdict(out, {**verdict, "difference": {"value": 0.2, "low": low, "high": 0.5}})
        return code

    write_day(logs, 0)
    live_loop = loop_of(tmp_path / "stream.toml")
    stages_of(live_loop)
    challenger = loop_of(config, judged)
    write_day(logs, 1)
    own = ["train", "export", "judge", "promote"]
    # It leaves the next partition to the live loop, and loses by the judge's interval.
    assert stages_of(challenger) == [*((stage, 1) for stage in own), ("challenge", 1)]
    assert (live.require_current().number, challenger.has_taken_over()) == (1, False)
    stages_of(live_loop)
    # The live model has changed: the challenger's next one is judged against that.
    low = 0.1
    won = [("challenge", 2), ("challenge", 2)]
    assert stages_of(challenger) == [*((stage, 2) for stage in own), *won]
    assert challenger.has_taken_over()
    assert live.require_current().number == 3
    assert live.model_of(3) == (challenger.verdict(2) or {})["model"]
    page = render_stream(challenger, read_status(challenger))
    assert page.count("loss lower by 0.2000 (") == 2
    assert "against version 1, candidate " in page
    assert "against version 2, candidate " in page
    # From then on it prepares, and need not be better than itself.
    low = -0.1
    write_day(logs, 2)
    assert stages_of(loop_of(config, judged)) == [
        *((stage, 3) for stage in ("prepare", *own)), *[("challenge", 3)] * 2
    ]  # fmt: skip
    assert live.require_current().number == 4


def test_a_challenger_has_a_channel_of_its_own(tmp_path: Path) -> None:
    write_loop(tmp_path)
    config = write_challenger(tmp_path)
    text = config.read_text().replace(f'"{tmp_path}/challenger"', f'"{tmp_path}/channel"')
    config.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_follow_config(config)
    assert str(error.value) == (
        f"follow.takes_over = '{tmp_path}/channel' is follow.channel: a challenger has a channel "
        "of its own. Name another one"
    )
