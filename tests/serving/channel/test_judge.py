"""The gate: what is refused, what passes, and on which rows a model of another day is scored."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gmeta.cli.commands.work.channel_changes import promote_candidate
from gmeta.errors import UserError
from gmeta.metrics.catalogue import Scoring
from gmeta.serving.channel.champion_judge import Verdict, _Comparison, judge, windows_before
from gmeta.serving.channel.channel import Channel
from gmeta.serving.channel.gate_predictions import GatePredictions, predict_gate
from gmeta.serving.model_loader import load
from metaio.format.dataset import open_dataset
from tests.serving.channel.models import Model
from tests.support.commands import gmeta, succeed
from tests.support.increments import write_increments

CLICKS = _Comparison(Scoring("bce"), "logloss", None)


def predicted(num_tasks: int, seed: int, noise: float = 0.2, rate: float = 1.0) -> GatePredictions:
    """Predictions of a model whose logit is off by `noise`: the rows are the same for all seeds."""
    rows = np.random.default_rng(0)
    task_N = np.repeat(np.arange(num_tasks), 10)
    logit_N = rows.normal(-0.5, 1.2, task_N.size)
    label_N = (rows.random(task_N.size) < 1 / (1 + np.exp(-logit_N))).astype(np.float32)
    own = np.random.default_rng(seed).normal(0, noise, task_N.size)
    prediction_N = 1 / (1 + np.exp(-rate * (logit_N + own)))
    return GatePredictions(task_N, label_N, prediction_N, np.ones(task_N.size))


def verdict(candidate: GatePredictions, champion: GatePredictions) -> Verdict:
    return CLICKS.decide([candidate], [champion])


def test_equal_models_are_refused_one_time_in_twenty_at_most() -> None:
    champion = predicted(1_000, 1)
    told = [verdict(predicted(1_000, seed), champion) for seed in range(2, 62)]
    assert sum(not one.promote for one in told) <= 3
    assert CLICKS.is_narrow([predicted(1_000, 2)], [champion])


def test_rows_count_by_their_weights_and_a_weight_of_two_as_two_rows() -> None:
    champion, candidate = predicted(300, 1), predicted(300, 2)
    weight_N = np.random.default_rng(3).integers(0, 3, champion.task_N.size)

    def weighed(one: GatePredictions) -> GatePredictions:
        return replace(one, weight_N=weight_N.astype(np.float64))

    def repeated(one: GatePredictions) -> GatePredictions:
        columns = (np.repeat(values, weight_N) for values in vars(one).values())
        return GatePredictions(*columns)

    short, long = (verdict(of(candidate), of(champion)) for of in (weighed, repeated))
    assert short.difference is not None
    assert long.difference is not None
    assert short.difference.value == pytest.approx(long.difference.value, rel=1e-9)
    assert short.candidate["logloss"] == pytest.approx(long.candidate["logloss"], rel=1e-9)
    assert short.calibration is not None
    assert long.calibration is not None
    assert short.calibration.value == pytest.approx(long.calibration.value, rel=1e-9)
    assert short.candidate["logloss"] != verdict(candidate, champion).candidate["logloss"]


def test_the_band_of_calibration_is_ones_own() -> None:
    champion = predicted(1_000, 1)
    high = replace(champion, prediction_N=np.minimum(champion.prediction_N * 1.25, 0.999))
    wide = replace(CLICKS, band=(0.5, 1.5), margin=1.0)
    assert not replace(wide, band=(0.9, 1.1)).decide([high], [champion]).promote
    assert wide.decide([high], [champion]).promote


def test_what_broke_is_caught() -> None:
    champion = predicted(1_000, 1)
    flipped = replace(champion, prediction_N=1 - champion.prediction_N)
    wild = predicted(1_000, 1, rate=100.0)
    nan = replace(champion, prediction_N=champion.prediction_N.copy())
    nan.prediction_N[17] = np.nan
    high = replace(champion, prediction_N=np.minimum(champion.prediction_N * 1.25, 0.999))
    refused = [verdict(one, champion) for one in (flipped, wild, nan, high)]
    assert [one.promote for one in refused] == [False] * 4
    assert refused[2].reasons == ["1 of 10,000 predictions are not finite"]
    assert refused[2].candidate == {"auc": None, "logloss": None}
    assert any("of the labels on average" in why for why in refused[3].reasons)
    assert refused[0].reasons[-1].startswith("logloss may be worse by ")


def test_a_better_model_is_promoted_by_the_difference_of_its_tasks() -> None:
    told = verdict(predicted(400, 2, noise=0.1), predicted(400, 1, noise=1.0))
    assert told.promote
    assert told.difference is not None
    assert told.difference.low is not None
    assert told.difference.low > 0
    assert (told.num_tasks, told.num_rows) == (400, 4_000)


def test_too_few_tasks_are_no_proof() -> None:
    few = verdict(predicted(5, 2), predicted(5, 1))
    assert few.reasons[-1].startswith("logloss cannot be compared: rests on only 5 tasks")


def test_scores_of_a_ranking_loss_are_judged_by_it_and_have_no_calibration() -> None:
    champion, wild = predicted(400, 1, noise=0.1), predicted(400, 2, noise=2.0)
    judge_of_scores = _Comparison(Scoring("pairwise"), "pairwise", None)
    # Probabilities are scores too; in other units they are still judged by their order.
    high = replace(champion, prediction_N=champion.prediction_N + 5.0)
    kept = judge_of_scores.decide([high], [champion])
    assert (kept.promote, kept.calibration) == (True, None)
    assert list(kept.candidate) == ["ndcg@10", "gauc", "pairwise"]
    refused = judge_of_scores.decide([wild], [champion])
    assert refused.reasons[-1].startswith("pairwise may be worse by ")


def test_earlier_windows_are_added_until_the_rows_tell(tmp_path: Path) -> None:
    paths = write_increments(tmp_path, (60, 60, 60), num_tasks=80)
    model = Model.of({"item": 60, "city": 60}).write(tmp_path / "model", stream="shop")
    windows = windows_before(open_dataset(str(paths[2])))
    assert windows(0) is not None
    assert windows(3) is None
    same = judge(model, model, windows, "gate", pool=7)
    assert (same.windows, same.difference) == (1, same.difference)
    assert same.difference is not None
    assert (same.difference.low, same.difference.high) == (0, 0)
    other = Model.of({"item": 60, "city": 60}, seed=1).write(tmp_path / "other", stream="shop")
    assert judge(other, model, windows, "gate", margin=1e-6, pool=7).windows == 3
    assert judge(other, model, windows, "gate", margin=1e-6, pool=1).windows == 2


def test_windows_without_gate_tasks_are_passed_over_none_is_refused(tmp_path: Path) -> None:
    paths = write_increments(tmp_path, (60, 60, 60), num_tasks=80, gate_tasks=(20, 0, 0))
    model = Model.of({"item": 60, "city": 60}).write(tmp_path / "model", stream="shop")
    windows = windows_before(open_dataset(str(paths[2])))
    for champion in (model, None):
        found = judge(model, champion, windows, "gate", pool=2)
        assert (found.promote, found.windows, found.num_tasks) == (True, 1, 20), found.reasons
        found = judge(model, champion, windows, "gate", pool=1)
        assert (found.promote, found.windows, found.num_tasks) == (False, 0, 0)
        assert found.reasons == [
            "there is no task in split 'gate', nor in that of earlier windows (pool 1): nothing "
            "to judge by"
        ]


def test_a_model_of_an_earlier_increment_takes_new_ids_as_unknown(tmp_path: Path) -> None:
    """As it does when it is served: slow and obvious, the rows beyond its tables are row 0's."""
    paths = write_increments(tmp_path, (30, 90))
    newest = open_dataset(str(paths[1]))
    small = Model.of({"item": 30, "city": 30})
    grown = Model({name: table.clone() for name, table in small.tables.items()})
    for name, table in grown.tables.items():
        grown.tables[name] = torch.cat([table, table[:1].expand(60, -1)])
    # Without an inner step rows do not adapt, and row 0's copies stay its copies.

    def of_gate(folder: Path, split: str = "gate") -> GatePredictions:
        return predict_gate(load(folder), folder, newest, split)

    found = [
        of_gate(one.write(tmp_path / name, stream="shop", steps=0))
        for name, one in (("small", small), ("grown", grown))
    ]
    np.testing.assert_array_equal(found[0].prediction_N, found[1].prediction_N)
    assert len(np.unique(found[0].prediction_N)) > 10
    with pytest.raises(UserError, match="was not prepared as the data of the model in"):
        of_gate(small.write(tmp_path / "x", stream="other"))
    with pytest.raises(UserError, match="has no tasks in split 'test': it has train, gate"):
        of_gate(tmp_path / "small", "test")


def test_the_command_says_and_keeps_why_it_refuses(tmp_path: Path) -> None:
    paths = write_increments(tmp_path, (60,), num_tasks=80)
    channel = Channel(tmp_path / "channel")
    sizes = {"item": 60, "city": 60}
    channel.promote(Model.of(sizes).write(tmp_path / "champion", stream="shop"))
    bad = Model.of(sizes)
    bad.tables = {name: -9 * table for name, table in bad.tables.items()}
    bad.write(tmp_path / "bad", stream="shop")
    arguments = ["--champion", channel.root, "--on", paths[0], "--out", tmp_path / "verdict.json"]
    done = gmeta("channel", "judge", tmp_path / "bad", *arguments)
    assert done.returncode == 3, done.stderr
    assert "refuse: " in done.stdout
    kept = channel.promotions()[-1]
    assert (kept["action"], kept["verdict"]["verdict"]) == ("refused", "refuse")
    verdict = tmp_path / "verdict.json"
    with pytest.raises(UserError) as caught:
        promote_candidate(tmp_path / "bad", channel.root, "float32", None, verdict)
    assert str(caught.value) == (
        f"--verdict = '{verdict}' refuses it: {'; '.join(kept['verdict']['reasons'])}. "
        "Pass --force to promote it all the same"
    )
    assert channel.require_current().number == 1
    done = succeed(
        "channel", "promote", tmp_path / "bad", channel.root, "--verdict", verdict, "--force"
    )
    assert channel.promotions()[-1]["verdict"]["verdict"] == "refuse"
    assert f"against its verdict: {kept['verdict']['reasons'][0]}" in done.stderr
    assert "refused, promoted by hand: auc " in gmeta("inspect", channel.root).stdout
    succeed("channel", "rollback", channel.root)
    assert channel.require_current().number == 1
