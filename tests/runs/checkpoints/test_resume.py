"""What a resumed run may change, and what it may not; which checkpoint it finds."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest

from gmeta.config.evaluation import EvaluationConfig
from gmeta.config.train_config import TrainConfig, config_from_dict
from gmeta.errors import GMetaError, UserError
from gmeta.runs.checkpoints.progress_file import restore_replaced
from gmeta.runs.checkpoints.resume import check_resumable, find_start_checkpoint
from gmeta.runs.environment import describe_environment
from gmeta.runs.run_folder import RunFolder, create_run_folder, list_checkpoints
from gmeta.runs.run_progress import RunProgress
from metaio import Dataset, open_dataset
from tests.support.refusals import catch_message


@pytest.fixture
def config(tmp_path: Path, click_logs: Path) -> TrainConfig:
    data = {"path": str(click_logs), "tasks_per_step": 16}
    return config_from_dict({"data": data, "run": {"dir": str(tmp_path / "run")}})


@pytest.fixture
def dataset(click_logs: Path) -> Dataset:
    return open_dataset(str(click_logs))


def begun(
    config: TrainConfig, fingerprint: str, epoch_step: int, best_score: float | None = None
) -> tuple[RunFolder, Path]:
    """A run of this config that was left so many steps into its first epoch."""
    folder = create_run_folder(config, describe_environment(1, fingerprint))
    checkpoint = folder.checkpoints / f"step-{epoch_step:08d}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "progress.json").write_text(
        json.dumps(
            asdict(RunProgress(step=epoch_step, epoch_step=epoch_step, best_score=best_score))
        )
    )
    return folder, checkpoint


def test_a_half_done_epoch_keeps_its_order(config: TrainConfig, dataset: Dataset) -> None:
    folder, checkpoint = begun(config, dataset.fingerprint, epoch_step=5)
    check_resumable(folder, checkpoint, config, dataset)
    changed = replace(config, data=replace(config.data, tasks_per_step=8))
    assert catch_message(UserError, check_resumable, folder, checkpoint, changed, dataset) == (
        f"data.tasks_per_step = 8, but run {folder.root} stands 5 steps into an epoch that began "
        "with 16: the rest of it would train some episodes twice and others never. Set it as it "
        "was until the epoch is over, or choose another run.dir"
    )


def test_between_epochs_the_order_may_change_and_rates_at_any_time(
    config: TrainConfig, dataset: Dataset
) -> None:
    folder, between = begun(config, dataset.fingerprint, epoch_step=0)
    changed = replace(config, data=replace(config.data, tasks_per_step=8))
    check_resumable(folder, between, changed, dataset)
    _, within = begun(config, dataset.fingerprint, epoch_step=5)
    check_resumable(folder, within, with_outer(config, dense_lr=0.5), dataset)


ADAM = {"dense_optimizer": "adam"}
SGD = {"dense_optimizer": "sgd"}
HEAVY = {**SGD, "momentum": 0.9}


def with_outer(config: TrainConfig, **outer: Any) -> TrainConfig:
    return replace(config, outer=replace(config.outer, **outer))


@pytest.mark.parametrize(
    ("was", "asked", "named"),
    [
        (ADAM, SGD, "outer.dense_optimizer = 'sgd', but run {run} was trained with 'adam'"),
        (SGD, ADAM, "outer.dense_optimizer = 'adam', but run {run} was trained with 'sgd'"),
        (HEAVY, SGD, "outer.momentum = 0.0, but run {run} was trained with 0.9"),
        (
            {"sparse_optimizer": "adagrad"},
            {"sparse_optimizer": "sgd"},
            "outer.sparse_optimizer = 'sgd', but run {run} was trained with 'adagrad'",
        ),
    ],
)
@pytest.mark.parametrize("source", ["static", "service"])
def test_the_state_of_an_optimizer_is_not_dropped_for_another(
    config: TrainConfig, dataset: Dataset, source: str, was: dict[str, Any],
    asked: dict[str, Any], named: str,
) -> None:  # fmt: skip
    config = replace(config, data=replace(config.data, source=cast(Any, source)))
    folder, checkpoint = begun(with_outer(config, **was), dataset.fingerprint, epoch_step=0)
    with pytest.raises(UserError) as caught:
        check_resumable(folder, checkpoint, with_outer(config, **asked), dataset)
    assert str(caught.value) == (
        f"{named.format(run=folder.root)}, whose state is of no use to the other. Set it as it "
        "was, or begin a new run with the weights alone: add "
        f"run.start_from={folder.root} and choose another run.dir"
    )


def test_a_run_goes_on_with_the_loss_it_began_with(config: TrainConfig, dataset: Dataset) -> None:
    folder, checkpoint = begun(config, dataset.fingerprint, epoch_step=0)
    with pytest.raises(UserError) as caught:
        check_resumable(folder, checkpoint, with_outer(config, loss="mse"), dataset)
    assert str(caught.value) == (
        f"outer.loss = 'mse', but run {folder.root} was trained with 'bce': the state of its "
        "optimizers and its metrics are of no use to the other. Set it as it was, or begin a new "
        f"run with the weights alone: add run.start_from={folder.root} and choose another run.dir"
    )


def test_adam_goes_on_as_adamw_momentum_may_change(config: TrainConfig, dataset: Dataset) -> None:
    folder, checkpoint = begun(with_outer(config, **ADAM), dataset.fingerprint, epoch_step=5)
    check_resumable(folder, checkpoint, with_outer(config, dense_optimizer="adamw"), dataset)
    folder, checkpoint = begun(with_outer(config, **HEAVY), dataset.fingerprint, epoch_step=5)
    check_resumable(folder, checkpoint, with_outer(config, **{**HEAVY, "momentum": 0.5}), dataset)


def test_scores_of_two_metrics_are_not_compared(config: TrainConfig, dataset: Dataset) -> None:
    config = replace(config, data=replace(config.data, valid_split="valid"))
    by_loss = replace(config, run=replace(config.run, early_stop_metric="logloss"))
    folder, checkpoint = begun(config, dataset.fingerprint, epoch_step=0, best_score=0.61234)
    assert catch_message(UserError, check_resumable, folder, checkpoint, by_loss, dataset) == (
        f"run.early_stop_metric = 'logloss', but run {folder.root} holds its best 'auc' so far "
        "(0.6123), with which no other can be compared. Set it as it was, or begin a new run with "
        f"the weights: add run.start_from={folder.root} and choose another run.dir"
    )
    cold = replace(config, data=replace(config.data, valid_split="user-cold"))
    with pytest.raises(UserError, match=r"^data.valid_split = 'user-cold', but .* best 'valid' so"):
        check_resumable(folder, checkpoint, cold, dataset)
    # Nothing is scored any more.
    unscored = replace(by_loss, data=replace(config.data, valid_split=""))
    check_resumable(folder, checkpoint, unscored, dataset)
    # Nothing was scored yet.
    folder, checkpoint = begun(config, dataset.fingerprint, epoch_step=5)
    check_resumable(folder, checkpoint, by_loss, dataset)


@pytest.mark.parametrize(("metric", "compares"), [("auc", False), ("hr@3", False), ("mae", True)])
def test_another_positive_rating_is_another_metric_where_it_asks_for_one(
    config: TrainConfig, dataset: Dataset, metric: str, compares: bool
) -> None:
    config = replace(
        with_outer(config, loss="mse"),
        data=replace(config.data, valid_split="valid"),
        run=replace(config.run, early_stop_metric=metric),
    )
    folder, checkpoint = begun(config, dataset.fingerprint, epoch_step=0, best_score=0.6)
    other = replace(config, evaluation=EvaluationConfig(positive_rating=3.0))
    if compares:
        check_resumable(folder, checkpoint, other, dataset)
        return
    with pytest.raises(UserError, match=r"^evaluation.positive_rating = 3.0, but .* best 4.0 so"):
        check_resumable(folder, checkpoint, other, dataset)


def starting_from(config: TrainConfig, path: Path) -> TrainConfig:
    return replace(config, run=replace(config.run, start_from=str(path)))


def test_a_new_run_starts_from_a_run_or_from_one_of_its_checkpoints(
    config: TrainConfig, dataset: Dataset
) -> None:
    assert find_start_checkpoint(config.run, dataset) is None
    folder, older = begun(config, dataset.fingerprint, epoch_step=5)
    _, newest = begun(config, dataset.fingerprint, epoch_step=9)
    assert find_start_checkpoint(starting_from(config, folder.root).run, dataset) == newest
    assert find_start_checkpoint(starting_from(config, older).run, dataset) == older
    missing = folder.checkpoints / "step-00000007"
    with pytest.raises(UserError) as caught:
        find_start_checkpoint(starting_from(config, missing).run, dataset)
    assert str(caught.value) == (
        f"run.start_from = '{missing}' has no checkpoint: a run folder that has one, or one of its "
        "checkpoints is needed. Correct it, or leave it empty"
    )
    begun(config, "0" * 32, epoch_step=9)
    with pytest.raises(GMetaError, match="has fingerprint"):
        find_start_checkpoint(starting_from(config, folder.root).run, dataset)


def test_a_run_goes_on_with_the_data_it_began_with(config: TrainConfig, dataset: Dataset) -> None:
    folder, checkpoint = begun(config, "0" * 32, epoch_step=0)
    assert catch_message(GMetaError, check_resumable, folder, checkpoint, config, dataset) == (
        f"dataset {dataset.url} has fingerprint {dataset.fingerprint[:12]}, run {folder.root} was "
        "trained on 000000000000: its ids may mean other values. Bring back that dataset, or train "
        "on this one"
    )
    # Nothing is known of it: it is taken at its word, but not where ids become values again.
    (folder.root / "environment.json").write_text("{")
    check_resumable(folder, checkpoint, config, dataset)
    assert catch_message(GMetaError, folder.check_dataset, dataset.url, dataset.fingerprint) == (
        f"run {folder.root} does not say which data it was trained on: environment.json is missing "
        "or broken. Bring it back from where the run was copied from"
    )


def test_a_checkpoint_put_aside_by_a_killed_writer_has_its_name_again(tmp_path: Path) -> None:
    for name in ("tmp-replaced-step-00000004", "tmp-step-00000004"):
        (tmp_path / name).mkdir()
    restore_replaced(tmp_path)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000004"]
    # Killed behind the new one's rename instead: that one counts.
    (tmp_path / "tmp-replaced-step-00000004").mkdir()
    (tmp_path / "step-00000004" / "new").touch()
    restore_replaced(tmp_path)
    assert (tmp_path / "step-00000004" / "new").exists()
