"""What a stream decides of a run's config: the next increment, once, and the label prior."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gmeta.config.train_config import TrainConfig, config_from_dict, load_config
from gmeta.data.opening import open_by_name, open_data, resolve_newest
from gmeta.errors import ConfigError, UserError
from gmeta.runs.resolve import resolve
from gmeta.runs.run_folder import RunFolder
from metaio.errors import NoDatasetError
from tests.support.commands import evaluate, succeed
from tests.support.logs_by_day import write_day, write_stream
from tests.support.refusals import catch_message


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stream of two increments, trained on the first of them in a run beside it."""
    path = tmp_path_factory.mktemp("shop") / "stream"
    write_stream(path, days=2)
    config = path.parent / "train.toml"
    config.write_text(
        f'[data]\npath = "{path}"\nincrement = "next"\ntasks_per_step = 16\n'
        '[model]\nname = "melu"\nhidden = [4]\nembedding_dim = 4\n[support_features]\ntask = true\n'
        f'[run]\ndir = "{path.parent / "one"}"\ndevice = "cpu"\nmax_steps = 1\n'
    )
    succeed("train", config)
    return path


def asked(stream: Path, increment: str, **run: Any) -> TrainConfig:
    return config_from_dict(
        {
            "data": {"path": str(stream), "increment": increment},
            "support_features": {"task": True},
            "run": {"dir": str(stream.parent / "new"), **run},
        }
    )


def test_next_is_the_first_then_the_one_after_the_run_before(stream: Path) -> None:
    one = str(stream.parent / "one")
    assert resolve(asked(stream, "next")).data.increment == "1"
    assert resolve(asked(stream, "next", continue_from=one)).data.increment == "2"
    assert resolve(asked(stream, "002")).data.increment == "2"
    # A run that was begun stays with its increment, whatever has come since.
    assert RunFolder(Path(one)).read_config().data.increment == "1"
    resumed = asked(stream, "next", dir=one)
    assert resolve(resumed).data.increment == "1"


def test_the_label_prior_is_that_of_the_first_run(stream: Path) -> None:
    one = str(stream.parent / "one")
    first = resolve(asked(stream, "1")).support_features.label_prior
    second = resolve(asked(stream, "2")).support_features.label_prior
    assert len(first) == 2
    assert first != second
    for config in (
        asked(stream, "next", continue_from=one),
        asked(stream, "2", start_from=one),
        asked(stream, "next", dir=one),
    ):
        assert resolve(config).support_features.label_prior == first
    given = asked(stream, "2", continue_from=one)
    chosen = replace(given.support_features, label_prior=(0.5, 0.5))
    assert resolve(replace(given, support_features=chosen)).support_features == chosen


def test_an_increment_that_is_not_there_is_refused_in_one_line(stream: Path) -> None:
    succeed(
        "train", stream.parent / "train.toml", "data.increment=2",
        f"run.dir={stream.parent / 'two'}", f"run.continue_from={stream.parent / 'one'}",
    )  # fmt: skip
    with pytest.raises(UserError) as caught:
        resolve(asked(stream, "next", continue_from=str(stream.parent / "two")))
    assert str(caught.value) == (
        f'data.increment = "next", but stream {stream} has no increment after 2, the last that '
        "run.continue_from was trained on. Append one with gmeta prepare --extend"
    )
    with pytest.raises(ConfigError, match=r"data\.increment = 'last' is no increment: a number"):
        resolve(asked(stream, "last"))
    for opening in (
        lambda: open_data(asked(stream, "9").data),
        lambda: open_by_name(f"{stream}:9"),
    ):
        assert catch_message(NoDatasetError, opening) == (
            f"{stream} has no increment 9; it has 1 to 2. Choose one of them, or append it with "
            "gmeta prepare --extend"
        )


@pytest.mark.parametrize("command", [("config", "--check"), ("plan", "--gpus", "1")])
def test_a_look_at_a_config_takes_the_next_one(stream: Path, command: tuple[str, ...]) -> None:
    name, *options = command
    one, new = stream.parent / "one", stream.parent / "new"
    keys = (f"run.dir={new}", f"run.continue_from={one}")
    succeed(name, stream.parent / "train.toml", *keys, *options)
    assert not new.exists()


def test_trials_are_all_of_the_next_increment(stream: Path) -> None:
    before, study = stream.parent / "one", stream.parent / "study"
    (stream.parent / "space.toml").write_text('["algorithm.inner_lr"]\nlow = 0.01\nhigh = 1.0\n')
    succeed(
        "tune",
        stream.parent / "train.toml",
        *("--trials", "1", "--parallel", "1", "--study", study),
        *("--space", stream.parent / "space.toml"),
        *("data.valid_split=gate", "data.eval_splits=[]", f"run.continue_from={before}"),
        f"run.dir={stream.parent / 'tuned'}",
    )
    trial = RunFolder(study / "trials" / "0000").read_config()
    assert trial.data.increment == load_config(study / "best.toml").data.increment == "2"


def test_an_increment_without_a_gate_task_is_told_to_be_without_validation(tmp_path: Path) -> None:
    path = write_stream(tmp_path / "stream", days=1)
    log = tmp_path / "small.csv"
    write_day(log, 1)
    lines = log.read_text().splitlines()
    log.write_text("\n".join([lines[0], *(one for one in lines if one.startswith("u21,"))]) + "\n")
    succeed("prepare", "--extend", path, log)
    assert open_by_name(f"{path}:2").splits["gate"].num_episodes == 0
    config = tmp_path / "train.toml"
    config.write_text(
        f'[data]\npath = "{path}"\nvalid_split = "gate"\ntasks_per_step = 16\n'
        '[model]\nname = "melu"\nhidden = [4]\nembedding_dim = 4\n[run]\ndevice = "cpu"\n'
        "max_steps = 1\nearly_stop_patience = 2\n"
    )
    told = []
    for number in (1, 2):
        keys = (f"data.increment={number}", f"run.dir={tmp_path / str(number)}")
        result = succeed("train", config, *keys)
        told.append([line for line in result.stderr.splitlines() if "no task" in line])
    line = "split gate has no task in increment 2: no validation, no early stopping in this run"
    assert told == [[], [line]]


def test_a_stream_is_named_with_and_without_a_number(stream: Path) -> None:
    numbers = []
    for named in (f"{stream}:1", str(stream), str(stream / "increments" / "000001")):
        place = open_by_name(named).manifest.stream
        assert place is not None
        numbers.append(place.increment)
    assert numbers == [1, 2, 1]
    # What all ranks and runs of an evaluation go by, whatever lands meanwhile.
    names = [f"{stream}:2", f"{stream}:1", str(stream / "increments" / "000001")]
    assert [resolve_newest(one) for one in (str(stream), *names[1:])] == names


def test_a_run_is_scored_on_another_increment(stream: Path, tmp_path: Path) -> None:
    options = ("--on", stream, "--no-trees", "--out", tmp_path / "out")
    result = evaluate(stream.parent / "one", *options)
    assert result.returncode == 0, result.stderr
    assert "train: " in result.stdout
    assert "gate: " in result.stdout
    text = (tmp_path / "out" / "evaluation.json").read_text()
    assert f"{stream}/increments/000002" in text
