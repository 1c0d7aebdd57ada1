"""What a run on the next increment must have in common with the run before it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gmeta.config.train_config import TrainConfig, config_from_dict
from gmeta.errors import ConfigError, UserError
from gmeta.runs.checkpoints.continuation import find_continued_checkpoint
from gmeta.runs.run_folder import RunFolder, list_checkpoints, write_json
from metaio import open_dataset
from tests.support.commands import gmeta, succeed
from tests.support.increments import write_increments
from tests.support.refusals import catch_message


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_increments(tmp_path_factory.mktemp("shop"), (30, 100))


@pytest.fixture(scope="module")
def trained(stream: list[Path]) -> Path:
    """A run on the first increment."""
    run = stream[0].parent / "run"
    config = stream[0].parent / "train.toml"
    config.write_text(
        f'[data]\npath = "{stream[0]}"\ntasks_per_step = 16\n'
        '[model]\nname = "melu"\nhidden = [4]\nembedding_dim = 4\n'
        f'[run]\ndir = "{run}"\ndevice = "cpu"\n'
    )
    succeed("train", config)
    return run


def going_on(run: Path, section: str = "run", **keys: Any) -> TrainConfig:
    raw = RunFolder(run).read_config().to_json()
    raw["run"] |= {"dir": f"{run}-2", "continue_from": str(run)}
    raw[section] |= keys
    return config_from_dict(raw)


def test_the_newest_checkpoint_of_a_run_that_is_over_or_one_that_is_named_is_taken(
    stream: list[Path], trained: Path
) -> None:
    second = open_dataset(str(stream[1]))
    (newest,) = list_checkpoints(RunFolder(trained).checkpoints)
    for named in (trained, newest):
        found, lineage, skipped = find_continued_checkpoint(
            going_on(trained, continue_from=str(named)), second
        )
        assert (found, skipped) == (newest, [])
        assert [one.increment for one in lineage] == [1]
    nothing = replace(going_on(trained).run, continue_from="")
    expected = (None, (), [])
    assert find_continued_checkpoint(replace(going_on(trained), run=nothing), second) == expected


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("outer", "loss", "mse"), ("outer", "dense_optimizer", "sgd"),
        ("outer", "sparse_optimizer", "adagrad"), ("outer", "embedding_init_std", 0.1),
        ("run", "seed", 7),
    ],
)  # fmt: skip
def test_what_belongs_to_the_weights_stays(
    stream: list[Path], trained: Path, section: str, key: str, value: Any
) -> None:
    with pytest.raises(UserError) as caught:
        find_continued_checkpoint(
            going_on(trained, section, **{key: value}), open_dataset(str(stream[1]))
        )
    assert f"{section}.{key} = {value!r}" in str(caught.value)
    assert "was trained with" in str(caught.value)


def test_a_run_that_is_not_over_is_refused_unless_its_checkpoint_is_named(
    stream: list[Path], trained: Path
) -> None:
    second, before = open_dataset(str(stream[1])), RunFolder(trained).read_config()
    longer = replace(before, run=replace(before.run, epochs=2))
    write_json(trained / "config.json", longer.to_json())
    try:
        assert catch_message(UserError, find_continued_checkpoint, going_on(trained), second) == (
            f"run.continue_from = '{trained}' is not over: it stands at step 3, in epoch 2 of 2. "
            "Let it end, with --resume if it was stopped, or name one of its checkpoints"
        )
        (newest,) = list_checkpoints(RunFolder(trained).checkpoints)
        find_continued_checkpoint(going_on(trained, continue_from=str(newest)), second)
    finally:
        write_json(trained / "config.json", before.to_json())


def test_increments_to_skip_without_an_earlier_run_fail(stream: list[Path], trained: Path) -> None:
    config = going_on(trained, continue_from="", skip_increments=[2])
    with pytest.raises(ConfigError) as caught:
        find_continued_checkpoint(config, open_dataset(str(stream[1])))
    assert str(caught.value) == (
        "run.skip_increments = [2] has no effect without run.continue_from: a model that begins "
        "anew is trained on data.increment alone. Leave it out"
    )


def test_a_discount_that_nothing_would_feel_is_refused(stream: list[Path], trained: Path) -> None:
    config = going_on(trained, "outer", adagrad_decay=0.9, sparse_optimizer="sgd")
    with pytest.raises(ConfigError) as caught:
        find_continued_checkpoint(config, open_dataset(str(stream[1])))
    assert str(caught.value) == (
        "outer.adagrad_decay = 0.9, but neither outer.dense_optimizer = 'adam' nor "
        "outer.sparse_optimizer = 'sgd' keeps sums of squares. Leave it 1, or choose one of "
        "Adagrad's kinds"
    )


def test_the_command_line_goes_on_and_refuses_in_one_line(
    stream: list[Path], trained: Path, tmp_path: Path
) -> None:
    config = stream[0].parent / "train.toml"
    path, run = f"data.path={stream[1]}", f"run.dir={tmp_path / 'two'}"
    both = gmeta(
        "train", config, path, run, f"run.start_from={trained}", f"run.continue_from={trained}"
    )
    assert both.returncode == 2
    assert both.stderr == (
        f"error: run.start_from = '{trained}' and run.continue_from = '{trained}': a run begins "
        "with one of them. Leave one empty\n"
    )
    went_on = succeed("train", config, path, run, f"run.continue_from={trained}")
    assert f"goes on from {trained}/checkpoints/step-00000003\n" in went_on.stderr
    assert "before training, gate: auc 0." in went_on.stderr
    doubled = gmeta("train", config, path, run + "-3", f"run.continue_from={tmp_path / 'two'}")
    assert doubled.returncode == 2
    assert f"error: increment 2 of {stream[1]} was trained on already; " in doubled.stderr
    assert len(doubled.stderr.splitlines()) == 1
    shown = gmeta("inspect", tmp_path / "two")
    assert "trained on increments 1 to 2 of stream shop\n" in shown.stdout
