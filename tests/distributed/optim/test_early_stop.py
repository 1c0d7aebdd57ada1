"""Early stopping: what counts as better, when a run ends, which checkpoint stands for it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gmeta.config.train_config import config_from_dict
from gmeta.errors import ConfigError
from gmeta.runs.early_stop import (
    EarlyStop,
    describe_choices,
    describe_end,
    make_early_stop,
    make_scoring,
)
from gmeta.runs.run_progress import RunProgress
from tests.support.commands import SMALL_MODEL, evaluate, gmeta, metrics, succeed, write_config
from tests.support.refusals import catch_message


def judged(stop: EarlyStop, scores: list[float | None]) -> RunProgress:
    progress = RunProgress()
    for step, score in enumerate(scores, start=1):
        progress = stop.update(RunProgress(**{**vars(progress), "step": step}), score)
    return progress


@pytest.mark.parametrize(
    ("higher_is_better", "scores", "best", "stale"),
    [
        (True, [0.5, 0.6, 0.55], (0.6, 2), 1),
        (True, [0.5, 0.5, 0.4, 0.5], (0.5, 1), 3),
        (False, [0.8, 0.7, 0.9, 0.6], (0.6, 4), 0),
        (False, [None, 0.8, float("nan")], (0.8, 2), 1),  # undefined is none better
    ],
)
def test_a_score_that_is_as_good_is_no_better(
    higher_is_better: bool, scores: list[float | None], best: tuple[float, int], stale: int
) -> None:
    progress = judged(EarlyStop("x", higher_is_better, 2), scores)
    assert (progress.best_score, progress.best_step, progress.stale) == (*best, stale)
    assert progress.scored_step == len(scores)
    assert EarlyStop("x", higher_is_better, 3).is_over(progress) == (stale >= 3)
    assert not EarlyStop("x", higher_is_better, 0).is_over(progress)


def test_a_run_ends_with_the_reason() -> None:
    stop = EarlyStop("auc", True, 2)
    assert stop.stop_message(judged(stop, [0.5, 0.4, 0.5])) == (
        "stopped early: after step 1 with auc 0.5000 no validation was better, 2 in a row"
    )
    assert stop.stop_message(judged(stop, [None, None])) == (
        "stopped early: auc was undefined in every validation (2 so far): data.valid_split is too "
        "small, or of one class"
    )


def test_a_run_says_that_it_still_got_better_or_was_best_while_it_trained_plainly() -> None:
    config = config_from_dict(
        {
            "data": {"valid_split": "valid"},
            "algorithm": {"name": "maml", "plain_epochs": 2},
            "run": {"epochs": 5, "early_stop_patience": 4},
        }
    )

    def lines_of(scores: list[float | None]) -> list[str]:
        # A step an epoch.
        stop = make_early_stop(config)
        progress = replace(judged(stop, scores), epoch=len(scores))
        return describe_end(stop, progress, 1, config.run, config.algorithm)

    assert lines_of([0.5, 0.6, 0.7, 0.8, 0.75]) == []
    assert lines_of([0.5, 0.6, 0.7, 0.8, 0.9]) == [
        "ended by run.epochs = 5 while auc still got better: more epochs may be better yet"
    ]
    assert lines_of([0.5, 0.9, 0.7]) == [
        "the best auc, of step 2, lies in the 2 plain epochs: maml made nothing better. Lower "
        "algorithm.inner_lr, or train plainly and fine-tune (algorithm.name = none)"
    ]


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            {"data": {"valid_split": "valid"}},
            "judged by: auc; trained with bce, checkpoints by auc of valid, inner rates by "
            "logloss, trees fitted to bce",
        ),
        (
            {"outer": {"loss": "huber"}, "labels": {"standardise": True}},
            "judged by: mae; trained with huber of standardised labels, inner rates by mae, trees "
            "fitted to mae",
        ),
        (
            {"outer": {"loss": "mae"}, "evaluation": {"metrics": ["rmse", "auc"]}},
            "judged by: rmse; trained with mae, inner rates by rmse, trees fitted to mse",
        ),
    ],
)
def test_the_headline_decides_what_rates_are_chosen_by_and_trees_are_fitted_to(
    config: dict[str, object], line: str
) -> None:
    trained = config_from_dict(config)
    scoring, stop = make_scoring(trained), make_early_stop(trained)
    told = describe_choices(scoring, stop, trained.data.valid_splits, trained.labels.standardise)
    assert told == line


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"run": {"early_stop_patience": 3}},
            "run.early_stop_patience = 3, but there is no split to score. Set data.valid_split, or "
            "leave run.early_stop_patience out",
        ),
        (
            {"run": {"early_stop_metric": "ndgc@5"}},
            "run.early_stop_metric = 'ndgc@5' is no metric: did you mean ndcg@K? Else choose one "
            "of auc, gauc, pr_auc, logloss, ece, mae, rmse, mrr, softmax, pairwise, ndcg@K, "
            "hr@K, p@K, recall@K, with a whole number from 1 to 10,000 for K, or name yours as "
            "package.module:Name (docs/extending.md)",
        ),
    ],
)
def test_what_cannot_be_judged_is_refused(config: dict[str, object], message: str) -> None:
    assert catch_message(ConfigError, make_early_stop, config_from_dict(config)) == message


def test_the_headline_metric_decides_unless_another_is_named() -> None:
    assert make_early_stop(config_from_dict({})).metric == "auc"
    chosen = {"evaluation": {"metrics": ["logloss", "auc"]}}
    stop = make_early_stop(config_from_dict(chosen))
    assert (stop.metric, stop.higher_is_better) == ("logloss", False)
    named = {**chosen, "run": {"early_stop_metric": "hr@10"}}
    assert make_early_stop(config_from_dict(named)).metric == "hr@10"
    ratings = make_early_stop(config_from_dict({"outer": {"loss": "huber"}}))
    assert (ratings.metric, ratings.higher_is_better) == ("mae", False)


@pytest.mark.distributed
def test_a_run_that_gets_no_better_stops_and_keeps_its_best_also_after_a_resume(
    tmp_path: Path, click_logs: Path
) -> None:
    run = tmp_path / "run"
    config = write_config(tmp_path / "train.toml", click_logs, run)
    options = [
        *SMALL_MODEL,
        "data.valid_split=valid",
        "run.valid_every_steps=2",
        "run.early_stop_patience=3",
        "run.checkpoint_every_steps=1",
        "outer.dense_lr=0",  # every validation scores the same: the first is the best
        "outer.sparse_lr=0",
    ]
    first = succeed("train", config, *options, "run.max_steps=5")
    # The run stopped at its limit, which scored as well: one more and it is over.
    rest = succeed("train", config, *options, "run.max_steps=20", "--resume", "--nproc-per-node=2")
    assert [line["step"] for line in metrics(run) if "valid" in line] == [2, 4, 5, 6]
    assert max(line["step"] for line in metrics(run)) == 6
    assert "stopped early: after step 2 with auc 0." in rest.stderr
    assert " no validation was better, 3 in a row\n" in rest.stderr
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000005", "step-00000006"]
    newest = json.loads((run / "checkpoints" / names[-1] / "progress.json").read_text())
    assert (newest["best_step"], newest["stale"], newest["step"]) == (2, 3, 6)

    scored = evaluate(run, "--split", "user-cold", "--no-trees")
    assert scored.returncode == 0
    evaluation = json.loads((run / "evaluation" / "evaluation.json").read_text())
    assert evaluation["runs"][0]["step"] == 2
    assert "stands for the run" not in first.stderr + rest.stderr + scored.stderr


def test_of_several_validation_splits_the_mean_decides(tmp_path: Path, click_logs: Path) -> None:
    """Each split counts alike, whatever its size; logged beside it is what each has."""
    splits = ("valid", "user-cold")
    config = write_config(tmp_path / "train.toml", click_logs, tmp_path / "both")
    common = (*SMALL_MODEL, "run.max_steps=4", "run.valid_every_steps=2")
    succeed("train", config, *common, f"data.valid_split={json.dumps(splits)}")
    alone = {}
    for split in splits:
        dir_ = tmp_path / split
        succeed("train", config, *common, f"data.valid_split={split}", f"run.dir={dir_}")
        alone[split] = [line["valid"] for line in metrics(dir_) if "valid" in line]
    both = [line["valid"] for line in metrics(tmp_path / "both") if "valid" in line]
    assert len(both) == 2
    for step, found in enumerate(both):
        of_splits = [alone[split][step] for split in splits]
        assert set(of_splits[0]) == {name for name in found if "/" not in name}
        for name in of_splits[0]:
            assert found[name] == pytest.approx(sum(one[name] for one in of_splits) / 2)
            seen = [found[f"{name}/{split}"] for split in splits]
            assert seen == [one[name] for one in of_splits]
    progress = tmp_path / "both" / "checkpoints" / "step-00000004" / "progress.json"
    best = max(line["auc"] for line in both)
    assert json.loads(progress.read_text())["best_score"] == pytest.approx(best)
    again = gmeta("train", config, *common, "data.valid_split=valid", "--resume")
    assert again.returncode == 2
    told = "data.valid_split = 'valid', but run "
    assert again.stderr.splitlines()[-1].startswith(f"error: {told}")


def test_where_the_best_is_not_kept_every_command_says_which_checkpoint_it_takes(
    tmp_path: Path, click_logs: Path
) -> None:
    run = tmp_path / "run"
    trained = gmeta(
        "train",
        write_config(tmp_path / "train.toml", click_logs, run),
        *SMALL_MODEL,
        "data.valid_split=valid",
        "run.valid_every_steps=2",
        "run.early_stop_patience=2",
        "run.checkpoint_every_steps=1",
        "run.keep_last=1",
        "run.keep_best=false",
        "outer.dense_lr=0",  # every validation scores the same: the first is the best
        "outer.sparse_lr=0",
    )
    told = (
        f"run {run}: the checkpoint of the best validation, at step 2, is not kept "
        "(run.keep_best = false); the newest, of step 6, stands for the run"
    )
    scored = evaluate(run, "--split", "user-cold", "--no-trees")
    exported = gmeta("export", run, tmp_path / "model")
    for command in (trained, scored, exported):
        assert command.returncode == 0, command.stderr
        assert told in command.stderr.splitlines()
    named = succeed("export", run, tmp_path / "named", "--step=6")
    assert told not in named.stderr
