"""`gmeta tune` as a process: a small study, one that was killed, trials that fail, refusals."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gmeta.config.train_config import load_config
from metaio import Provenance, write_dataset
from tests.evaluation.baselines.sample import FEATURES, raw_rows
from tests.support.commands import environment, evaluate, gmeta, metrics, succeed
from tests.support.forked import Task, forked
from tests.support.waiting import wait_until

SPACE = '["algorithm.inner_lr"]\nlow = 0.01\nhigh = 1.0\nlog = true\n'


@pytest.fixture
def config(tmp_path: Path, click_logs: Path) -> Path:
    """A config of 8 steps and its validation split, beside space.toml."""
    (tmp_path / "space.toml").write_text(SPACE)
    path = tmp_path / "train.toml"
    path.write_text(
        f'[data]\npath = "{click_logs}"\nvalid_split = "valid"\ntasks_per_step = 16\n'
        f"[model]\nhidden = [16]\nbottom = [8]\nembedding_dim = 4\n"
        f'[run]\ndir = "{tmp_path / "run"}"\nmax_steps = 8\nvalid_every_steps = 4\n'
    )
    return path


def tuned(config: Path, *arguments: str) -> Any:
    space = ["--space", str(config.with_name("space.toml"))]
    return gmeta("tune", config, "--parallel", "1", "--no-trees", *space, *arguments)


def results(config: Path) -> list[dict[str, Any]]:
    """The trials that the study ended with, the best first."""
    found = json.loads((config.parent / "run-tune" / "results.json").read_text())
    return list(found["trials"])


def last_auc(run: Path) -> float:
    return [float(line["valid"]["auc"]) for line in metrics(run) if "valid" in line][-1]


def refused(*arguments: str | Path) -> str:
    result = gmeta("tune", *arguments)
    assert result.returncode == 2, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return str(lines[0])


def test_a_study_finds_a_config_that_trains_and_evaluates_to_its_score(
    config: Path, click_logs: Path, tmp_path: Path
) -> None:
    # Its own copy, of which only the splits for training and validation are left.
    shutil.copytree(click_logs, tmp_path / "data")
    for split in ("user-cold", "item-cold", "user-item-cold"):
        rows = [path for path in (tmp_path / "data" / split).iterdir() if "blocks" not in path.name]
        assert rows
        for path in rows:
            path.unlink()
    data = f"data.path={tmp_path / 'data'}"
    result = tuned(config, "--trials", "2", "--trees", data)
    assert result.returncode == 0, result.stderr
    study = tmp_path / "run-tune"
    ranked = results(config)
    assert sorted(trial["number"] for trial in ranked) == [0, 1]
    assert {trial["state"] for trial in ranked} == {"complete"}
    scores = [trial["score"] for trial in ranked]
    assert scores == sorted(scores, reverse=True)
    for trial in ranked:
        run = study / "trials" / f"{trial['number']:04d}"
        assert last_auc(run) == trial["scores"][-1]
        assert trial["note"].startswith("adapts with the inner_lr x inner_steps of the best logl")
        # An ordinary run; only the best keeps its checkpoints.
        assert (run / "config.json").exists()
        assert (run / "checkpoints").exists() == (trial is ranked[0])
    assert f"train it: gmeta train {study / 'best.toml'}" in result.stderr
    rows = re.findall(r"^ +(\d+) .* complete ", result.stdout, flags=re.MULTILINE)
    assert rows == [str(trial["number"]) for trial in ranked]

    best = load_config(study / "best.toml")
    assert best.algorithm.inner_lr == ranked[0]["values"]["algorithm.inner_lr"]
    assert best.run.dir == str(tmp_path / "run")
    succeed("train", study / "best.toml")
    evaluated = evaluate(tmp_path / "run", "--split", "valid", "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    found = json.loads(evaluated.stdout)["evaluation"]
    (run,), group = found["runs"], found["groups"][0]
    score = {one["run"]: one["metrics"]["auc"]["value"] for one in group["results"]}  # after
    assert score[run["name"]] == pytest.approx(ranked[0]["score"], abs=1e-6)
    told = json.loads((study / "results.json").read_text())
    assert score["boosted trees"] == pytest.approx(told["trees"]["score"], abs=1e-6)
    assert run["adapts_with"] == ranked[0]["note"]


def test_trials_are_judged_by_the_first_label_of_own_loss(labelled: Path, tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text(SPACE)
    config = tmp_path / "train.toml"
    config.write_text(
        f'[data]\npath = "{labelled / "data"}"\nvalid_split = "valid"\ntasks_per_step = 8\n'
        '[model]\nembedding_dim = 4\nhidden = [8]\nbottom = [4]\n[outer]\nloss = "mse"\n'
        '[labels]\nloss = { click = "bce", buy = "bce" }\n'
        '[evaluation]\nmetrics = ["logloss", "auc"]\n'
        f'[run]\ndir = "{tmp_path / "run"}"\nmax_steps = 2\n'
    )
    result = tuned(config, "--trials", "1")
    assert result.returncode == 0, result.stderr
    (trial,) = results(config)
    assert trial["state"] == "complete"
    found = json.loads((tmp_path / "run-tune" / "results.json").read_text())
    assert found["metric"] == "logloss"


def test_plain_training_is_tuned_by_as_many_whole_runs(config: Path, tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text(
        SPACE + '["algorithm.name"]\nchoices = ["maml", "metasgd"]\n'
        '["outer.dense_lr"]\nlow = 0.001\nhigh = 0.002\n'
    )
    result = tuned(config, "--trials", "2", "--with-plain", "--json")
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    scores = {told["best"]: told["trials"][0], told["plain"]["best"]: told["plain"]["trials"][0]}
    best = max(scores, key=lambda path: float(scores[path]["score"]))
    assert told["train"] == best
    assert Path(told["page"]).read_text().count('<svg role="img"') == 3
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(f"to train: gmeta train {best}   auc {scores[best]['score']:.4f} on ")
    assert " than the config as it was (" in last or " level with the config as it was (" in last
    for side, found in (("", told), ("-plain", told["plain"])):
        assert found["best"] == str(tmp_path / f"run-tune{side}" / "best.toml")
        assert [trial["state"] for trial in found["trials"]] == ["complete"] * 2
        # Whole runs: each has both validations.
        assert [len(trial["scores"]) for trial in found["trials"]] == [2, 2]
        assert load_config(Path(found["best"])).run.dir == str(tmp_path / f"run{side}")
    adapted, plain = (load_config(Path(one["best"])) for one in (told, told["plain"]))
    assert (plain.algorithm.name, adapted.algorithm.name != "none") == ("none", True)
    assert set(told["plain"]["trials"][0]["values"]) == {"outer.dense_lr"}
    assert all(one["note"].startswith("fine-tuned with ") for one in told["plain"]["trials"])
    again = (plain.data, plain.augment, plain.support_features, plain.model)
    assert again == (adapted.data, adapted.augment, adapted.support_features, adapted.model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("algorithm.name=none",),
            "--with-plain tunes plain training beside the config, and algorithm.name = 'none' is "
            "plain training. Leave --with-plain out",
        ),
        (
            ("--space", "algorithms.toml"),
            "--space names algorithm.name alone: nothing is left to tune plain training by. Add "
            'e.g. ["outer.dense_lr"], or leave --with-plain out',
        ),
    ],
)
def test_sides_that_could_not_be_tuned_alike_are_refused(
    config: Path, arguments: tuple[str, ...], message: str
) -> None:
    space = config.with_name("algorithms.toml")
    space.write_text('["algorithm.name"]\nchoices = ["maml", "metasgd"]\n')
    words = [str(space) if word == space.name else word for word in arguments]
    assert refused(config, "--parallel", "1", "--with-plain", *words) == f"error: {message}"
    assert not config.with_name("run-tune").exists()


def test_a_killed_study_goes_on(config: Path, tmp_path: Path) -> None:
    space = str(tmp_path / "space.toml")
    command = ("tune", str(config), "--parallel", "1", "--space", space, "--trials", "3")
    folder = tmp_path / "printed"
    folder.mkdir()
    trials = tmp_path / "run-tune" / "trials"
    with forked(Task("gmeta", command, environment(), folder)) as process:
        wait_until(lambda: (trials / "0001" / "config.json").exists(), "a second trial")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    result = tuned(config, "--trials", "3")
    assert result.returncode == 0, result.stderr
    ranked = results(config)
    interrupted = [trial for trial in ranked if trial["state"] == "interrupted"]
    assert len(ranked) - len(interrupted) == 3
    values = [trial["values"] for trial in ranked if trial["state"] != "interrupted"]
    for trial in interrupted:
        assert trial["values"] in values
        assert f"trial {trial['number']}: was interrupted" in result.stderr
        assert not list(trials.glob(f"{trial['number']:04d}*"))
    assert "goes on behind" in result.stderr
    # Nothing is left to do, and the same is told.
    assert tuned(config, "--trials", "3", "--resume").stdout == result.stdout
    assert refused(config, "--resume", "--study", tmp_path / "other") == (
        f"error: --resume, but --study = {str(tmp_path / 'other')!r} holds no study to go on with. "
        "Correct the folder, or leave --resume out to begin one"
    )


def test_an_interrupted_study_says_one_line_wherever_it_is(config: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gmeta", "tune", str(config), "--parallel", "1"]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
        # What a shell starts in the background ignores it, as the suite may.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    # The processes of trials import what they need: nothing of them is ready yet.
    wait_until((tmp_path / "run-tune").exists, "the study's folder")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
    _, said = process.communicate()
    assert process.returncode == 130
    assert said == (
        "error: interrupted: what was committed stays, what was half-written is dropped (trials "
        "that ended count: the same command goes on behind them)\n"
    )


def test_a_trial_that_fails_is_told_and_the_others_go_on(config: Path, tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text(
        '["outer.dense_lr"]\nchoices = [0.001, 1e30]\n["outer.sparse_lr"]\nchoices = [0.05, 1e30]\n'
    )
    result = tuned(config, "--trials", "4", "--seed", "1")
    assert result.returncode == 0, result.stderr
    failed = [trial for trial in results(config) if trial["state"] == "failed"]
    assert failed
    for trial in failed:
        assert trial["note"].endswith(
            "training diverged. Lower outer.dense_lr, outer.sparse_lr or algorithm.inner_lr, "
            "or divide a label whose scale is far from 1"
        )
        assert f"trial {trial['number']}: failed: {trial['note']}" in result.stderr
    assert results(config)[0]["state"] == "complete"


def test_a_study_without_a_whole_trial_ends_with_the_reason(config: Path, tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text('["outer.dense_lr"]\nchoices = [1e29, 1e30]\n')
    result = tuned(config, "--trials", "1", "outer.sparse_lr=1e30")
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(f"error: 0 of 1 trial in {tmp_path / 'run-tune'} came to an end; the ")
    assert not (tmp_path / "run-tune" / "best.toml").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "data.valid_split=",
            'data.valid_split = "": trials are scored on a validation split, and on no other. '
            "Set it, or prepare data with one: [splits] shares in the schema",
        ),
        (
            "data.valid_split=train",
            "data.valid_split = 'train' is data.train_split too: what was trained on tells "
            "nothing of unseen tasks. Name another split",
        ),
        (
            'data.eval_splits=["valid"]',
            "data.valid_split = 'valid' is in data.eval_splits too: what chose the settings is "
            "no measure of them. Take it out of one of the two",
        ),
    ],
)
def test_what_cannot_be_tuned_is_refused(config: Path, override: str, message: str) -> None:
    assert refused(config, override).startswith(f"error: {message}")
    assert not (config.parent / "run-tune").exists()


def test_a_split_cut_out_of_the_training_rows_judges_none(config: Path, tmp_path: Path) -> None:
    with write_dataset(str(tmp_path / "carved"), FEATURES, Provenance("user", "label")) as writer:
        for split in ("train", "fit", "valid-cold"):
            writer.split(split).write(raw_rows(30, "bce"))
    overrides = (f"data.path={tmp_path / 'carved'}", "data.valid_split=valid-cold")
    assert refused(config, *overrides) == (
        "error: data.valid_split = 'valid-cold' holds rows of 'train': what was trained on tells "
        "nothing of unseen tasks. Name another split"
    )


def test_a_folder_of_something_else_is_left_alone(config: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    assert refused(config, "--study", tmp_path / "mine") == (
        f"error: --study = {str(tmp_path / 'mine')!r} is not empty and holds no study. "
        "Choose another folder"
    )
    assert refused(config, "--study", config) == (
        f"error: --study = {str(config)!r} is a file: a folder is needed. Choose another"
    )
