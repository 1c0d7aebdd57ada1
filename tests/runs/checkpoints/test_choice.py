"""Weights are used with the model, algorithm and loss that they were trained with."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gmeta.config.inputs import SupportFeaturesConfig
from gmeta.errors import GMetaError
from gmeta.runs.checkpoints.progress_file import read_about
from gmeta.runs.checkpoints.selected_checkpoint import check_config
from gmeta.runs.run_folder import RunFolder
from tests.support.commands import SMALL_MODEL, gmeta
from tests.support.refusals import catch_message
from tests.support.sealed import seal


def refusal(key: str, now: object, checkpoint: Path, was: object) -> str:
    return (
        f"{key} = {now!r}, but checkpoint {checkpoint} was trained with {was!r}, and its weights "
        "mean nothing with another. Set it as it was, or train a new run, which may begin with "
        "run.start_from"
    )


@pytest.mark.distributed
def test_no_command_goes_on_with_a_config_that_was_edited_since(
    run: Path, checkpoint: Path, trained: Path, tmp_path: Path
) -> None:
    resumed = ("train", trained.parent / "train.toml", *SMALL_MODEL, f"run.dir={run}", "--resume")
    ended = gmeta(*resumed, "algorithm.inner_lr=0.7", "run.max_steps=3")
    was = read_about(checkpoint)["config"]["algorithm"]["inner_lr"]
    line = f"error: {refusal('algorithm.inner_lr', 0.7, checkpoint, was)}\n"
    assert (ended.returncode, ended.stderr.endswith(line)) == (2, True), ended.stderr
    config = json.loads((run / "config.json").read_text())
    assert config["algorithm"]["inner_lr"] == was  # the refused command left it alone
    config["algorithm"]["inner_lr"] = 0.7
    (run / "config.json").write_text(json.dumps(config))
    for command in (("evaluate", run), ("export", run, tmp_path / "model")):
        ended = gmeta(*command)
        assert (ended.returncode, ended.stderr) == (2, line)
    assert not (tmp_path / "model").exists()


def test_a_checkpoint_is_held_against_what_made_its_weights(run: Path, checkpoint: Path) -> None:
    config = RunFolder(run).read_config()
    check_config(checkpoint, config)
    rates = replace(config, outer=replace(config.outer, dense_lr=0.5))
    check_config(checkpoint, replace(rates, data=replace(config.data, tasks_per_step=3)))
    of_task = SupportFeaturesConfig(task=True)
    for key, now, was, changed in (
        ("outer.loss", "mse", "bce", replace(config, outer=replace(config.outer, loss="mse"))),
        ("support_features.task", True, False, replace(config, support_features=of_task)),
        ("model.name", "melu", "dlrm", replace(config, model=replace(config.model, name="melu"))),
    ):
        with pytest.raises(GMetaError) as caught:
            check_config(checkpoint, changed)
        assert str(caught.value) == refusal(key, now, checkpoint, was)


def test_another_releases_word_is_taken_or_refused_by_name(run: Path, checkpoint: Path) -> None:
    config = RunFolder(run).read_config()
    about = checkpoint / "progress.json"
    # A key that this release has and that one had not stands for its default.
    seal(about, lambda body: body["config"]["algorithm"].pop("inner_lr"))
    check_config(checkpoint, config)
    seal(about, lambda body: body["config"]["algorithm"].update(warp=1))
    assert catch_message(GMetaError, check_config, checkpoint, config).startswith(
        f"checkpoint {checkpoint} was trained with what this release does not have (algorithm.warp "
        "is unknown; "
    )
    seal(about, lambda body: body.pop("config"))
    check_config(checkpoint, replace(config, algorithm=replace(config.algorithm, inner_lr=0.1)))
