"""`gmeta evaluate` with its yardstick, from the command line."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from gmeta.evaluation.baselines.tuning_grid import assign_halves
from metaio import Provenance, open_dataset, write_dataset
from tests.evaluation.baselines.sample import FEATURES, raw_rows, write_data
from tests.support.commands import evaluate, gmeta, succeed


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs `maml` and `none` on ratings."""
    folder = tmp_path_factory.mktemp("runs")
    write_data(folder / "data", "mse")
    config = folder / "train.toml"
    config.write_text(
        f'[data]\npath = "{folder / "data"}"\ntasks_per_step = 16\nvalid_split = "valid"\n'
        '[model]\nname = "dlrm"\nembedding_dim = 4\nhidden = [8]\nbottom = [4]\n'
        '[outer]\nloss = "mse"\ndense_lr = 0.01\n[run]\nepochs = 2\n'
    )
    for name in ("maml", "none"):
        succeed("train", config, f"algorithm.name={name}", f"run.dir={folder / name}")
    return folder


def evaluated(*arguments: str | Path) -> dict[str, Any]:
    """Evaluate; evaluation.json."""
    out = Path(arguments[arguments.index("--out") + 1])
    done = evaluate(*arguments)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((out / "evaluation.json").read_text())
    return {**found, "stdout": done.stdout}


def of_plain(out: Path) -> dict[str, np.ndarray]:
    """Columns of the rows of run `plain` and split `cold`."""
    table = pq.read_table(out / "predictions.parquet")
    keep = pc.and_(pc.equal(table["run"], "plain"), pc.equal(table["split"], "cold"))
    return {name: table.filter(keep)[name].to_numpy() for name in ("task", "label", "after")}


@pytest.mark.distributed
def test_two_ranks_find_what_one_rank_finds(runs: Path, tmp_path: Path) -> None:
    pytest.importorskip("lightgbm")
    command = (runs / "maml", "--against", runs / "none", "--out")
    one = evaluated(*command, tmp_path / "one")
    two = evaluated(*command, tmp_path / "two", "--nproc-per-node", "2")
    assert [model["name"] for model in one["yardsticks"]] == ["bias model", "boosted trees"]
    assert one["yardsticks"] == two["yardsticks"]
    tuned = [found["runs"][1]["fine_tuning"][0] for found in (one, two)]
    for key in ("split", "num_tasks", "metric"):
        assert tuned[0][key] == tuned[1][key]
    assert tuned[0]["split"] == "valid"
    # null: that rate diverged.
    kept = [[tried for tried in each["tried"] if tried["value"] is not None] for each in tuned]
    values = [[tried["value"] for tried in each] for each in kept]
    assert values[0] == pytest.approx(values[1], rel=1e-3)
    assert tuned[0]["chosen"] == [min(kept[0], key=lambda tried: tried["value"])]
    tables = [pq.read_table(tmp_path / name / "predictions.parquet") for name in ("one", "two")]
    for column in ("label", "after"):
        pairs = [np.sort(table[column].to_numpy()) for table in tables]
        np.testing.assert_allclose(*pairs, rtol=1e-4, atol=1e-5)
    for text in (one["stdout"], two["stdout"]):
        assert "\nbias model: mean + item (item, whose means predict best; prior " in text
        assert "none: fine-tuned with the inner_lr x inner_steps of the best mae of " in text
        assert " on 30 tasks of valid\n" in text


def test_of_several_validation_splits_the_mean_error_chooses(runs: Path, tmp_path: Path) -> None:
    plain, out = tmp_path / "plain", tmp_path / "out"
    both = ('data.valid_split=["valid","cold"]', "algorithm.name=none", f"run.dir={plain}")
    assert gmeta("train", runs / "train.toml", *both).returncode == 0
    splits = ("--split", "valid", "--split", "cold")
    found = evaluated(plain, "--no-trees", *splits, "--out", out)
    (tuning,) = found["runs"][0]["fine_tuning"]
    tasks = sum(group["num_tasks"] for group in found["groups"])
    assert (tuning["split"], tuning["num_tasks"]) == ("valid, cold", tasks)
    # All tasks of both judge: the value of what is chosen is the mean of what the report shows.
    errors = [
        result["metrics"]["mae"]["value"]
        for group in found["groups"]
        for result in group["results"]
        if (result["run"], result["stage"]) == ("plain", "after")
    ]
    assert len(errors) == 2
    assert tuning["chosen"][0]["value"] == pytest.approx(sum(errors) / 2, rel=1e-4)
    values = [tried["value"] for tried in tuning["tried"] if tried["value"] is not None]
    assert tuning["chosen"][0]["value"] == min(values)
    assert found["yardsticks"][0]["chosen"]["chosen_on"] == "valid, cold"


def test_without_a_validation_split_each_half_of_the_tasks_chooses_for_the_other(
    runs: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    unseen = ("data.valid_split=", "algorithm.name=none", f"run.dir={plain}")
    assert gmeta("train", runs / "train.toml", *unseen).returncode == 0
    found = evaluated(plain, "--no-trees", "--out", tmp_path / "out")
    tunings = {tuning["split"]: tuning for tuning in found["runs"][0]["fine_tuning"]}
    assert set(tunings) == {"cold", "valid"}
    rows = of_plain(tmp_path / "out")
    half = assign_halves(rows["task"])
    for own, setting in enumerate(tunings["cold"]["chosen"]):
        rate, steps = setting["inner_lr"], setting["inner_steps"]
        overrides = (f"algorithm.inner_lr={rate}", f"algorithm.inner_steps={steps}")
        out = tmp_path / f"again-{own}"
        evaluated(plain, *overrides, "--no-trees", "--split", "cold", "--out", out)
        again = of_plain(out)
        error = np.abs(again["label"] - again["after"])
        # The value is the error of the half that chose, the predictions are those of the other.
        assert error[half != own].mean() == pytest.approx(setting["value"], rel=1e-4)
        expected = again["after"][half == own]
        np.testing.assert_allclose(rows["after"][half == own], expected, rtol=1e-4, atol=1e-5)
    told = "no data.valid_split, so each half of the tasks has what is best for the other half"
    assert told in " ".join(found["stdout"].split())


def of_run(out: Path, name: str) -> np.ndarray:
    """What a run predicts of split `cold` after adapting, task by task."""
    table = pq.read_table(out / "predictions.parquet")
    keep = pc.and_(pc.equal(table["run"], name), pc.equal(table["split"], "cold"))
    return table.filter(keep)["after"].to_numpy()


def test_a_meta_learned_run_adapts_and_is_exported_as_chosen(runs: Path, tmp_path: Path) -> None:
    maml, kept = runs / "maml", runs / "maml" / "adapting.json"
    found = evaluated(maml, "--no-trees", "--out", tmp_path / "chosen")
    (tuning,) = found["runs"][0]["fine_tuning"]
    (best,) = tuning["chosen"]
    values = [tried["value"] for tried in tuning["tried"] if tried["value"] is not None]
    assert best["value"] == min(values)
    own = tuning["tried"][0]
    assert (own["inner_lr"], own["inner_steps"]) == (0.05, 1)
    assert best != own  # or the rest says nothing
    told = f"{best['inner_lr']:g} x {best['inner_steps']} on 30 tasks of valid (its config: 0.05"
    assert told in " ".join(found["stdout"].split())
    chosen = json.loads(kept.read_text())
    setting = best["inner_lr"], best["inner_steps"]
    assert (chosen["inner_lr"], chosen["inner_steps"]) == setting
    assert chosen["chosen_on"] == "valid"

    # Told of the same setting, it predicts the same; told of its own, it is left as it is.
    overrides = (f"algorithm.inner_lr={setting[0]}", f"algorithm.inner_steps={setting[1]}")
    evaluated(maml, *overrides, "--no-trees", "--out", tmp_path / "told")
    told_N = of_run(tmp_path / "told", "maml")
    np.testing.assert_array_equal(of_run(tmp_path / "chosen", "maml"), told_N)
    left = evaluated(maml, "algorithm.inner_lr=0.05", "--no-trees", "--out", tmp_path / "left")
    assert left["runs"][0]["fine_tuning"] == []
    assert np.abs(of_run(tmp_path / "left", "maml") - told_N).max() > 1e-4

    done = succeed("export", maml, tmp_path / "model")
    line = f"adapts with inner_lr = {setting[0]:g} and inner_steps = {setting[1]}, "
    assert line + "which gmeta evaluate chose on validation" in " ".join(done.stderr.split())
    exported = json.loads((tmp_path / "model" / "config.json").read_text())["algorithm"]
    assert (exported["inner_lr"], exported["inner_steps"]) == setting


def test_on_other_data_a_run_adapts_as_its_validation_chose(runs: Path, tmp_path: Path) -> None:
    maml, other = tmp_path / "maml", write_data(tmp_path / "other", "mse")
    shutil.copytree(runs / "maml", maml)
    (maml / "adapting.json").unlink(missing_ok=True)
    on = ("--on", other, "--split", "cold", "--no-trees", "--out")

    def after(out: Path, *arguments: str | Path) -> tuple[np.ndarray, str]:
        found = evaluated(maml, *arguments, *on, out)
        assert found["runs"][0]["fine_tuning"] == []  # no validation split at hand
        return of_run(out, "maml"), found["stdout"]

    as_trained_N, told = after(tmp_path / "as-trained")
    assert "maml: adapts with" not in told
    chosen = evaluated(maml, "--no-trees", "--out", tmp_path / "chosen")
    (best,) = chosen["runs"][0]["fine_tuning"][0]["chosen"]
    chosen_N, told = after(tmp_path / "on")
    line = " ".join(told.split()).partition("maml: adapts with ")[2]
    assert f"inner_lr = {best['inner_lr']:g} (its config: 0.05)" in line
    assert f"inner_steps = {best['inner_steps']} (its config: 1)" in line
    np.testing.assert_array_equal(chosen_N, of_run(tmp_path / "chosen", "maml"))
    assert np.abs(chosen_N - as_trained_N).max() > 1e-4
    # What the command line says comes first; what was chosen for another checkpoint says nothing.
    told_N, _ = after(tmp_path / "told", "algorithm.inner_lr=0.05", "algorithm.inner_steps=1")
    np.testing.assert_array_equal(told_N, as_trained_N)
    kept = json.loads((maml / "adapting.json").read_text())
    (maml / "adapting.json").write_text(json.dumps({**kept, "step": kept["step"] + 1}))
    np.testing.assert_array_equal(after(tmp_path / "later")[0], as_trained_N)


def test_a_handful_of_tasks_chooses_nothing(runs: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with write_dataset(str(data), FEATURES, Provenance("user", "label")) as writer:
        writer.split("train").write(raw_rows(60, "mse"))
        writer.split("valid").write(raw_rows(19, "mse", 1, 1000))
        writer.split("cold").write(raw_rows(30, "mse", 2, 2000))
    for name in ("maml", "none"):
        words = (f"algorithm.name={name}", f"data.path={data}", f"run.dir={tmp_path / name}")
        assert gmeta("train", runs / "train.toml", *words).returncode == 0
    options = ("--against", tmp_path / "none", "--no-trees", "--out", tmp_path / "out")
    found = evaluated(tmp_path / "maml", *options)
    maml, plain = found["runs"]
    assert maml["fine_tuning"] == []
    assert not (tmp_path / "maml" / "adapting.json").exists()
    (tuning,) = plain["fine_tuning"]
    assert (tuning["split"], tuning["num_tasks"], len(tuning["chosen"])) == ("cold", 30, 2)
    told = " ".join(found["stdout"].split())
    assert (
        "maml: adapts as its config says: fewer than 20 tasks in valid choose no inner_lr x "
        "inner_steps" in told
    )
    halves = "fewer than 20 tasks in valid, so each half of the tasks has what is best for the"
    assert halves in told


def test_splits_that_made_a_run_are_told(runs: Path, tmp_path: Path) -> None:
    splits = ("--split", "train", "--split", "valid", "--split", "cold", "--no-trees", "--out")
    rest = "on rows of it, so its figures there flatter and say little of unseen tasks"
    told = [f"train: maml was trained {rest}", f"valid: maml was chosen {rest}"]
    for options in ((), ("--on", runs / "data")):  # by whichever name the data goes
        found = evaluated(runs / "maml", *options, *splits, tmp_path / "out")
        assert [one for one in found["notes"] if rest in one] == told
        groups = {group["name"]: group["results"] for group in found["groups"]}
        simple = {
            name: "bias model" in [one["run"] for one in of_group]
            for name, of_group in groups.items()
        }
        assert simple == {"train": False, "valid": True, "cold": True}
    # Of other data it has seen nothing.
    other = write_data(tmp_path / "other", "mse", poisoned=True)
    found = evaluated(runs / "maml", "--on", other, *splits, tmp_path / "out")
    assert not [one for one in found["notes"] if rest in one]


def test_candidates_are_refused_where_runs_know_other_items(runs: Path, tmp_path: Path) -> None:
    other, run = write_data(tmp_path / "other", "mse", poisoned=True), tmp_path / "run"
    succeed("train", runs / "train.toml", f"data.path={other}", "run.epochs=1", f"run.dir={run}")
    options = ("evaluation.candidates=2", "--item-column", "item", "--out", tmp_path / "out")
    refused = gmeta("evaluate", runs / "none", "--against", run, *options)
    fingerprints = [open_dataset(str(path)).fingerprint[:12] for path in (other, runs / "data")]
    assert refused.returncode == 2
    assert refused.stderr == (
        f"error: evaluation.candidates = 2, but run {run} was trained on {other} "
        f"({fingerprints[0]}), {runs / 'none'} on {runs / 'data'} ({fingerprints[1]}): the ids of "
        "one are other items to the other. Evaluate each run alone, or without candidates\n"
    )
    assert not (tmp_path / "out").exists()


def test_adapting_that_is_made_worse_is_told_in_red(runs: Path, tmp_path: Path) -> None:
    options = ("--no-trees", "--item-column", "maker", "--out", tmp_path / "out")
    found = evaluated(runs / "maml", "algorithm.inner_lr=5.0", *options)
    first = found["cautions"][0]
    assert (first["group"], first["minus_run"]) == ("cold", "maml")
    assert first["text"].startswith("cold: adapting makes it worse, by MAE, RMSE")
    assert first["text"] in found["stdout"]
    assert "maml: adapts with inner_lr = 5.0 (its config: 0.05)" in found["stdout"]
    assert found["yardsticks"][0]["chosen"]["item_column"] == "maker"
    page = (tmp_path / "out" / "report.html").read_text()
    assert f'<section class="alert" role="alert"><ul><li>{first["text"]}</li>' in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("outer.loss=bce",),
            "'outer.loss=bce' cannot be changed for the evaluation of {run}, trained with maml: "
            "allowed are algorithm.inner_lr, algorithm.inner_steps, algorithm.support_prior, "
            "algorithm.adapt_layers, algorithm.adapt_embeddings, evaluation.metrics, "
            "evaluation.positive_rating, evaluation.candidates, evaluation.unit, "
            "evaluation.tuning_tasks. Train another run instead",
        ),
        (
            ("--item-column", "film"),
            "--item-column = 'film' is no [[single]] column of {data}: it has maker, item. "
            "Name one of them, or leave it out",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    runs: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = gmeta("evaluate", runs / "maml", *arguments, "--out", tmp_path / "out")
    line = message.format(run=runs / "maml", data=runs / "data")
    assert (done.returncode, done.stderr.strip()) == (2, f"error: {line}")
    assert not (tmp_path / "out").exists()
