"""A study: what is proposed first, pruned, taken up again, and refused."""

import json
import statistics
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from gmeta.config.train_config import TrainConfig, config_from_dict
from gmeta.errors import UserError
from gmeta.runs.early_stop import make_early_stop
from gmeta.tuning.outcome import (
    TunedSide,
    choose_side,
    describe_counts,
    describe_edges,
    describe_trial,
    format_best_config,
    format_results,
    format_score,
    shorten_keys,
)
from gmeta.tuning.search_space import SearchChoices, SearchRange
from gmeta.tuning.study import (
    JOURNAL_FILE,
    STARTUP_TRIALS,
    PrunerName,
    Study,
    StudyPlan,
    import_optuna,
)
from gmeta.tuning.study_page import measure_limits, render_study
from tests.support.page_outline import PageOutline, Picture, outline_page
from tests.support.refusals import catch_message

SPACE = (
    SearchRange("algorithm.inner_lr", 0.001, 1.0, True, False),
    SearchChoices("algorithm.name", ("maml", "metasgd")),
)


def opened(folder: Path, pruner: PrunerName = "median", **raw: dict[str, object]) -> Study:
    config: TrainConfig = config_from_dict(raw)
    return Study(folder, StudyPlan(config, SPACE, pruner, 0, "data"), make_early_stop(config))


def played(study: Study, *scores: float | None) -> str:
    """A trial that has these scores, the last of them once more at its end, as far as the study
    lets it; how it ended."""
    number, _ = study.propose_trial()
    for step, score in enumerate(scores):
        if study.report_score(number, step, score):
            return study.finish_trial(number, "pruned").state
    return study.finish_trial(number, "complete", "", scores[-1]).state


def test_the_configs_own_values_come_first(tmp_path: Path) -> None:
    study = opened(tmp_path, algorithm={"inner_lr": 0.02})
    assert study.propose_trial() == (0, {"algorithm.inner_lr": 0.02, "algorithm.name": "maml"})
    number, values = study.propose_trial()
    assert number == 1
    assert 0.001 <= values["algorithm.inner_lr"] <= 1.0
    assert study.config(values).algorithm.name in ("maml", "metasgd")


def test_the_first_trials_change_one_key_of_the_best_so_far(tmp_path: Path) -> None:
    space = (
        SearchChoices("model.without", ([], ["item"])),
        SearchRange("outer.dense_lr", 0.0001, 0.01, True, False),
        SearchChoices("model.dropout", (0.2, 0.0)),
        SearchChoices("algorithm.name", ("maml", "metasgd")),
    )
    config = config_from_dict({"outer": {"dense_lr": 0.002}, "model": {"dropout": 0.2}})
    plan, tried = StudyPlan(config, space, "none", 0, "data"), []
    for score in (0.5, 0.6, 0.4, 0.3):
        # Opened anew each time: which keys had their turn is in the journal.
        study = Study(tmp_path, plan, make_early_stop(config))
        number, values = study.propose_trial()
        study.finish_trial(number, "complete", "", score)
        tried.append(values)
    own, without, faster, undropped = tried
    assert own == {key: config.by_key()[key] for key in own}
    assert without == {**own, "model.without": ["item"]}
    assert faster == {**without, "outer.dense_lr": 0.006}
    assert undropped == {**without, "model.dropout": 0.0}
    assert [space[1].change(rate) for rate in (0.004, 0.0)] == [pytest.approx(0.004 / 3), None]


def test_a_study_goes_on_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where it is relative, Optuna would wait for its lock for ever
    folder = Path("study")
    folder.mkdir()
    # Killed as its first trial began, which was to have the config's values.
    opened(folder, algorithm={"inner_lr": 0.02})._study.ask()
    for torn in (b'{"op_code":4,"wor', b""):
        journal = folder / JOURNAL_FILE
        journal.write_bytes(journal.read_bytes() + torn)
        (folder / f"{JOURNAL_FILE}.lock").symlink_to(journal)
        study = opened(folder, algorithm={"inner_lr": 0.02})
    assert study.propose_trial()[1] == {"algorithm.inner_lr": 0.02, "algorithm.name": "maml"}
    assert [path.name for path in folder.glob("*lock*")] == []


@pytest.mark.parametrize("loss", ["bce", "mse"])
def test_a_trial_below_the_median_of_its_step_is_pruned(tmp_path: Path, loss: str) -> None:
    sign = 1.0 if loss == "bce" else -1.0  # the higher the better, or the lower
    study = opened(tmp_path, outer={"loss": loss})
    curves = [[0.5, 0.60, 0.70], [0.5, 0.62, 0.66], [0.5, 0.64, 0.71], [0.5, 0.58, 0.60]]
    assert len(curves) == STARTUP_TRIALS
    for curve in curves:
        assert played(study, *(sign * score for score in curve)) == "complete"
    median = statistics.median(curve[1] for curve in curves)
    # Not at the first validation, and not above the median of the second.
    assert played(study, sign * 0.1, sign * (median + 0.001), sign * 0.8) == "complete"
    assert played(study, sign * 0.1, sign * (median - 0.005), sign * 0.9) == "pruned"
    assert describe_counts(study) == "5 complete, 1 pruned"
    best = study.best_trial()
    assert best is not None
    assert best.number == 4
    assert best.score == sign * 0.8
    assert [trial.state for trial in study.rank_trials()] == ["complete"] * 5 + ["pruned"]
    assert study.rank_trials()[-1].score == sign * (median - 0.005)


def test_without_a_pruner_every_trial_comes_to_its_end(tmp_path: Path) -> None:
    study = opened(tmp_path, "none")
    for score in (0.9, 0.9, 0.9, 0.9, 0.9, 0.1):
        assert played(study, score, score, score) == "complete"


def test_hyperband_prunes_the_worse_of_many(tmp_path: Path) -> None:
    study = opened(tmp_path, "hyperband")
    states = [played(study, *(0.5 + 0.01 * (9 - n) for _ in range(8))) for n in range(9)]
    assert states[0] == "complete"
    assert "pruned" in states


def test_undefined_scores_count_for_nothing(tmp_path: Path) -> None:
    study = opened(tmp_path)
    assert played(study, None, 0.6) == "complete"
    assert played(study, 0.6, None) == "failed"
    failed = study.trials()[1]
    assert failed.note == "auc is undefined on the validation split"
    assert describe_trial(study, failed, SPACE, "auc") == f"trial 1: failed: {failed.note}"
    told = json.loads(format_results(study, make_early_stop(TrainConfig())))
    assert [(trial["number"], trial["score"]) for trial in told["trials"]] == [(0, 0.6), (1, None)]


def test_a_whole_trial_has_the_score_of_its_end_whatever_came_before(tmp_path: Path) -> None:
    study = opened(tmp_path)
    for at_end in (0.7, 0.9, 0.8):
        number, _ = study.propose_trial()
        study.report_score(number, 0, 1.0 - at_end)
        study.finish_trial(number, "complete", f"adapts for {at_end}", at_end)
    again = opened(tmp_path)
    expected = [(1, 0.9), (2, 0.8), (0, 0.7)]
    assert [(one.number, one.score) for one in again.rank_trials()] == expected
    best = again.best_trial()
    assert best is not None
    assert best.note == "adapts for 0.9"
    for note in ("adapts for 0.9", ""):
        lines = format_best_config(
            again, replace(best, note=note), "valid", "auc", tmp_path
        ).splitlines()
        assert lines[0] == (
            "# Found by `gmeta tune`: auc 0.9000 on split 'valid', trial 1 (3 complete)."
        )
        assert lines[1 : 2 + bool(note)] == [
            *[f"# {note}"] * bool(note),
            "# The score chose the settings, so it flatters them a little.",
        ]
    # The proposals learn from the same.
    told = import_optuna().storages
    journal = told.JournalStorage(told.journal.JournalFileBackend(str(tmp_path / JOURNAL_FILE)))
    proposing = import_optuna().load_study(study_name="tune", storage=journal)
    assert [each.value for each in proposing.get_trials()] == [0.7, 0.9, 0.8]


def test_what_a_killed_study_left_unfinished_is_tried_anew(tmp_path: Path) -> None:
    study = opened(tmp_path)
    played(study, 0.6)
    _, values = study.propose_trial()
    again = opened(tmp_path)
    assert again.interrupted == [1]
    assert again.count_tried() == 1
    assert again.propose_trial() == (2, values)
    assert again.finish_trial(2, "failed", "why").note == "why"
    assert opened(tmp_path).interrupted == []
    assert opened(tmp_path).count_tried() == 2


@pytest.mark.parametrize("at", ["its end", "the next start"])
def test_a_kill_between_two_lines_of_the_journal_counts_no_trial_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    study = opened(tmp_path)
    number, values = study.propose_trial()
    with monkeypatch.context() as killed:
        killed.setattr(import_optuna().study.Study, "tell", Mock(side_effect=KeyboardInterrupt))
        with suppress(KeyboardInterrupt):
            if at == "its end":
                study.finish_trial(number, "complete", "", 0.8)
            opened(tmp_path)
    again = opened(tmp_path)
    if at == "its end":
        assert (again.interrupted, again.count_tried()) == ([], 1)
        best = again.best_trial()
        assert best is not None
        assert (best.number, best.score) == (0, 0.8)
    else:
        assert again.propose_trial()[1] == values
    assert again.propose_trial()[1] != values


def test_a_study_that_goes_on_draws_no_proposal_twice(tmp_path: Path) -> None:
    rates = []
    for _ in range(4):
        study = opened(tmp_path)
        number, values = study.propose_trial()
        study.finish_trial(number, "failed", "why")
        rates.append(values["algorithm.inner_lr"])
    assert len(set(rates)) == 4


def test_a_study_of_something_else_is_refused(tmp_path: Path) -> None:
    opened(tmp_path, run={"dir": "here"})
    opened(tmp_path, run={"dir": "there"})  # where the config's own run goes says nothing
    with pytest.raises(UserError) as raised:
        opened(tmp_path, outer={"loss": "mse"}, data={"valid_split": "valid"})
    assert str(raised.value) == (
        f"--study {tmp_path} was begun with another config (data.valid_split, outer.loss): its "
        "trials do not compare. Give the same command to go on, or another --study"
    )


def test_a_damaged_study_is_refused(tmp_path: Path) -> None:
    opened(tmp_path)
    (tmp_path / "study.json").write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        opened(tmp_path)


def test_the_best_value_at_the_end_of_its_range_is_told(tmp_path: Path) -> None:
    study = opened(tmp_path, algorithm={"inner_lr": 0.97})
    played(study, 0.6)
    best = study.best_trial()
    assert best is not None
    assert describe_edges(SPACE, best) == [
        "algorithm.inner_lr = 0.97 is at the highest end of its range: widen it with --space"
    ]
    found = describe_edges(SPACE, replace(best, values={**best.values, "algorithm.inner_lr": 0.1}))
    assert found == []


def test_without_optuna_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    assert catch_message(UserError, import_optuna) == (
        "`gmeta tune` needs the extra: pip install 'gmeta[tune]' (Optuna is not installed)"
    )


def test_a_score_of_a_run_that_diverged_is_short() -> None:
    expected = ["", "0.5912", "-3.0000", "1.1e+28"]
    assert [format_score(score) for score in (None, 0.59123, -3.0, 1.127e28)] == expected


def test_a_key_is_shown_without_its_section_where_that_is_clear() -> None:
    more = (
        SearchChoices("model.name", ("dlrm", "melu")),
        SearchChoices("neighbours.column", ("", "x")),
    )
    expected = ["inner_lr", "algorithm.name", "model.name", "neighbours.column"]
    assert shorten_keys((*SPACE, *more)) == expected


@pytest.mark.parametrize("loss", ["bce", "mse"])
def test_the_better_side_is_told_with_what_it_gains(tmp_path: Path, loss: str) -> None:
    """And drawn, one trial that diverged not pressing the others into a line."""
    decides = make_early_stop(config_from_dict({"outer": {"loss": loss}}))
    sign = 1.0 if loss == "bce" else -1.0
    sides = []
    for name, scores in (("adapted", (1.5, 1.62, -1e20)), ("plain", (1.5, 1.58, 1.65))):
        (folder := tmp_path / name).mkdir()
        study = opened(folder, outer={"loss": loss})
        for score in scores:
            played(study, sign * score)
        sides.append(TunedSide(name, study, SPACE, folder / "best.toml"))
    path, line = choose_side(sides, sign * 1.7, "valid", decides)
    best_score, minus = f"{sign * 1.65:.4f}", "-" if sign < 0 else ""
    assert path == tmp_path / "plain" / "best.toml"
    assert line == (
        f"to train: gmeta train {path}   {decides.metric} {best_score} on valid, 0.0500 worse "
        f"than boosted trees ({minus}1.7000), 0.0300 better than adapted training ({minus}1.6200), "
        f"0.1500 better than the config as it was ({minus}1.5000)"
    )
    assert ", level with boosted trees" in choose_side(sides, sign * 1.65, "valid", decides)[1]
    page = render_study("to train: gmeta train best.toml   <tune>", sides, None, "valid", decides)
    assert page.count('<svg role="img"') == 3
    assert "<tune>" not in page
    assert "Next: <code>gmeta train best.toml</code>" in page
    tried = ("inner_lr", "name", "score", "maml", "metasgd")
    assert outline_page(page) == PageOutline(
        verdicts=[""],
        tiles=[],
        headings=["adapted against plain", "What was tried"],
        legends=[["adapted", "plain"]],
        pictures=[
            # Three trials and a line of each side.
            Picture(
                "auc, higher is better" if loss == "bce" else "mae, lower is better", ("trial",), 8
            ),
            *(Picture(f"{side}, # whole trials", tried, 3) for side in ("adapted", "plain")),
        ],
        folds=[],
    )
    ranked = [sign * score for score in (1.62, 1.5, -1e20)]
    assert measure_limits(ranked) == (ranked[0], ranked[1])
    assert [SPACE[0].place(0.001), SPACE[1].place("metasgd")] == [0.0, 1.0]


def test_a_study_of_one_trial_has_a_page(tmp_path: Path) -> None:
    study = opened(tmp_path)
    played(study, 0.6)
    side = TunedSide("adapted", study, SPACE, tmp_path / "best.toml")
    decides = make_early_stop(config_from_dict({"outer": {"loss": "bce"}}))
    page = render_study("one", [side], None, "valid", decides)
    assert [picture.num_marks for picture in outline_page(page).pictures] == [2, 1]


def test_a_study_that_an_older_release_began_goes_on(tmp_path: Path) -> None:
    opened(tmp_path)
    path = tmp_path / "study.json"
    told = json.loads(path.read_text())
    model = told["config"]["model"]
    model |= model.pop("options") | {"clusters": 4}
    told["config"]["data"]["lanes"] = 1
    path.write_text(json.dumps(told))
    opened(tmp_path)
