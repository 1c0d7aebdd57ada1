"""Spaces: what a TOML file may say, what a config gets by default, which values are tried."""

from pathlib import Path
from typing import Any

import pytest

from gmeta.config.train_config import TrainConfig, config_from_dict, load_config
from gmeta.errors import UserError
from gmeta.tuning.default_space import IdTables, make_default_space
from gmeta.tuning.search_space import (
    SearchChoices,
    SearchRange,
    check_metric,
    check_space,
    make_plain_config,
    make_plain_space,
    read_space,
    replace_values,
)
from tests.support.refusals import catch_message

CONFIG = config_from_dict({})
EXAMPLES = Path(__file__).parents[2] / "examples"
INNER = ["algorithm.inner_lr", "algorithm.inner_steps"]


def space_of(path: Path, text: str, config: TrainConfig = CONFIG) -> Any:
    path.write_text(text)
    return read_space(path, config)


class Fixed:
    """A trial that suggests what it is given, and remembers what it was asked."""

    def __init__(self, value: Any) -> None:
        self.value, self.asked = value, None

    def suggest_float(self, *asked: Any, **more: Any) -> Any:
        self.asked = (*asked, more)
        return self.value

    suggest_int = suggest_categorical = suggest_float


def test_a_file_names_ranges_and_choices(tmp_path: Path) -> None:
    space = space_of(
        tmp_path / "space.toml",
        '["algorithm.inner_lr"]\nlow = 0.01\nhigh = 1\nlog = true\n'
        '["algorithm.inner_steps"]\nlow = 1\nhigh = 5\n'
        '["model.hidden"]\nchoices = [[64], [128, 64]]\n',
    )
    assert space == (
        SearchRange("algorithm.inner_lr", 0.01, 1.0, True, False),
        SearchRange("algorithm.inner_steps", 1, 5, False, True),
        SearchChoices("model.hidden", ([64], [128, 64])),
    )


@pytest.mark.parametrize("name", ["amazon", "movielens-100k"])
def test_the_space_of_the_examples_suits_both_sides(name: str) -> None:
    adapted = load_config(EXAMPLES / f"{name}.toml", [])
    space = read_space(EXAMPLES / "tune" / "by-time.toml", adapted)
    of_plain = make_plain_space(space)
    check_space(of_plain, make_plain_config(adapted))
    assert [each.key for each in space if each not in of_plain] == INNER
    # What the other side's example was found to be lies in it, too.
    found = load_config(EXAMPLES / "plain" / f"{name}.toml", [])
    for config in (adapted, found):
        assert all(each.normalise(config.by_key()[each.key]) is not None for each in space)


def test_a_value_is_rounded_but_never_out_of_its_range() -> None:
    rate = SearchRange("algorithm.inner_lr", 0.012349, 0.5, True, False)
    assert rate.suggest(Fixed(0.123456)) == 0.123
    assert rate.suggest(Fixed(0.012349)) == 0.012349
    steps = Fixed(3)
    assert SearchRange("algorithm.inner_steps", 1, 5, False, True).suggest(steps) == 3
    assert steps.asked == ("algorithm.inner_steps", 1, 5, {"log": False})


def test_choices_may_be_lists() -> None:
    choices = SearchChoices("model.hidden", ([64], [128, 64]))
    assert choices.suggest(Fixed("[128, 64]")) == [128, 64]
    assert choices.normalise([64]) == "[64]"
    assert choices.normalise([32]) is None


def test_a_number_is_held_as_the_choices_have_it() -> None:
    """Optuna refuses a text that is none of them, and a config has 3.0 where a file may have 3."""
    choices = SearchChoices("algorithm.support_prior", (0, 3))
    assert (choices.normalise(3.0), choices.normalise(1.0)) == ("3", None)
    assert SearchChoices("model.linear", (1, 2)).normalise(True) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "",
            'names 0 keys: at least one is needed. Write e.g. ["algorithm.inner_lr"] with '
            "low = 0.01, high = 1.0, log = true",
        ),
        (
            '["algorithm.inner_rl"]\nlow=0.1\nhigh=1.0\n',
            "algorithm.inner_rl is unknown; did you mean algorithm.inner_lr?",
        ),
        (
            '["algorithm.inner_lr"]\nlow=0.0\nhigh=1.0\nlog=true\n',
            "--space algorithm.inner_lr = {'low': 0.0, 'high': 1.0, 'log': True}: "
            "0 < low < high with log = true is needed. Correct the range",
        ),
        (
            '["algorithm.name"]\nlow=1\nhigh=2\n',
            "--space algorithm.name is no number, so it has no range. Write choices = [...] "
            "instead",
        ),
        (
            '["run.seed"]\nlow=0\nhigh=9\n',
            "--space has run.seed, which is not tuned: the luckiest seed is no better setting. "
            "Remove it",
        ),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    refusal = catch_message(UserError, space_of, tmp_path / "space.toml", text)
    assert message in refusal
    assert "\n" not in refusal


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [("none", INNER[0]), ("none", "algorithm.plain_epochs"), ("encoder", INNER[1])],
)
def test_a_key_that_no_trial_trains_by_is_refused(tmp_path: Path, algorithm: str, key: str) -> None:
    config, text = (
        config_from_dict({"algorithm": {"name": algorithm}}),
        f'["{key}"]\nchoices=[1, 2]\n',
    )
    assert catch_message(UserError, space_of, tmp_path / "space.toml", text, config) == (
        f"--space has {key}, by which algorithm.name = {algorithm!r} does not train: trials that "
        "differ in it would be the same. Remove it"
    )
    # Some trials are of another algorithm, which does.
    text += f'["algorithm.name"]\nchoices=["{algorithm}", "maml"]\n'
    assert len(space_of(tmp_path / "space.toml", text, config)) == 2


def test_losses_that_are_judged_differently_do_not_share_a_space() -> None:
    space = (SearchChoices("outer.loss", ("bce", "mse")),)
    assert catch_message(UserError, check_metric, space, CONFIG) == (
        "--space outer.loss = 'mse' is judged by mae, the config by auc: the scores do not "
        "compare. Remove it, or set run.early_stop_metric"
    )


def test_a_config_with_a_value_differs_in_it_alone() -> None:
    changed = replace_values(CONFIG, {"algorithm.inner_lr": 0.5, "model.hidden": [7]})
    assert (changed.algorithm.inner_lr, changed.model.hidden) == (0.5, (7,))
    assert changed.by_key()["model.hidden"] == [7]
    found = replace_values(changed, {"algorithm.inner_lr": 0.05, "model.hidden": [256, 128]})
    assert found == CONFIG


@pytest.mark.parametrize("loss", ["bce", "huber"])
def test_the_default_holds_the_configs_own_values_and_treats_the_baseline_alike(loss: str) -> None:
    keys = {}
    for name in ("maml", "none"):
        raw = {
            "algorithm": {"name": name, "inner_lr": 0.0005},
            "outer": {"loss": loss},
            "run": {"epochs": 4},
        }
        config = config_from_dict(raw)
        space = make_default_space(config)
        check_metric(space, config)
        keys[name] = [dimension.key for dimension in space]
        for dimension in space:
            value = config.by_key()[dimension.key]
            assert dimension.normalise(value) is not None, dimension
            assert dimension.find_edge(value) == ""
    more = {"algorithm.name", "algorithm.plain_epochs", *INNER}
    assert set(keys["maml"]) - set(keys["none"]) == more
    assert {"algorithm.support_prior", "outer.dense_lr"} <= set(keys["none"])
    assert ("outer.loss" in keys["none"]) == (loss == "huber")


def test_the_default_has_what_labels_losses_and_a_number_of_epochs_allow() -> None:
    def choices_of(key: str, *labels: str, **raw: Any) -> tuple[Any, ...]:
        found = [one for one in make_default_space(config_from_dict(raw), labels) if one.key == key]
        return found[0].values if found and isinstance(found[0], SearchChoices) else ()

    name, plain = "algorithm.name", "algorithm.plain_epochs"
    assert choices_of(name) == ("maml", "metasgd", "ridge")
    assert choices_of(name, outer={"loss": "softmax"}) == ("maml", "metasgd")
    assert choices_of(name, "buy", labels={"loss": {"buy": "softmax"}}) == ("maml", "metasgd")
    assert choices_of(name, "click", "buy") == ("maml", "metasgd")
    assert choices_of(name, "buy") == ("maml", "metasgd", "ridge")
    assert choices_of(name, algorithm={"adapt_layers": []}) == ("maml", "metasgd")
    assert choices_of(name, algorithm={"name": "ridge"}) == ("ridge", "maml", "metasgd")
    assert choices_of(plain, run={"epochs": 1}) == ()
    assert choices_of(plain, run={"epochs": 12}) == (0, 6, 9)
    assert choices_of(plain, run={"epochs": 2}) == (0, 1)
    assert choices_of(plain, run={"epochs": 12}, algorithm={"plain_epochs": 7}) == (0, 6, 7, 9)


def test_the_default_has_length_widths_ids_and_neighbours_where_there_are_any() -> None:
    def choices_of(tables: IdTables, **raw: Any) -> dict[str, Any]:
        space = make_default_space(config_from_dict(raw), (), tables)
        check_space(space, config_from_dict(raw))
        return {one.key: one.values for one in space if isinstance(one, SearchChoices)}

    named = IdTables(("book", "author"), "book", "book")
    informed: dict[str, Any] = {"support_features": {"task": True}, "model": {"hidden": [64, 64]}}
    found = choices_of(named, **informed, run={"epochs": 4})
    assert found["run.epochs"] == (4, 12)
    assert found["model.hidden"] == ([64, 64], [64], [256, 128])
    assert found["model.dropout"] == (0.0, 0.2)
    assert found["outer.sparse_weight_decay"] == (0.0, 1.0, 8.0)
    assert found["model.without"] == ([], ["book"], ["book", "author"])
    assert found["neighbours.column"] == ("", "book")
    # Plain training's is the same but for the algorithm.
    plain = choices_of(named, **informed, run={"epochs": 4}, algorithm={"name": "none"})
    assert plain == {key: found[key] for key in found if key in plain}
    assert set(found) - set(plain) == {"algorithm.name", "algorithm.plain_epochs"}
    fixed = choices_of(named, algorithm={"adapt_embeddings": ["book"]}, run={"epochs": 20})
    assert not {"run.epochs", "model.without"} & set(fixed)
    # Nothing but ids to see, and no item known.
    assert not {"model.without", "neighbours.column"} & set(choices_of(IdTables(("book",))))


def test_plain_training_is_tuned_by_all_but_the_algorithm_and_its_inner_loop() -> None:
    config = config_from_dict({"run": {"epochs": 4}})
    kept = make_plain_space(make_default_space(config))
    found = {each.key for each in make_default_space(config)} - {each.key for each in kept}
    assert found == {"algorithm.name", "algorithm.plain_epochs", *INNER}


def test_a_config_whose_rates_are_all_0_has_no_default_space() -> None:
    raw = {"algorithm": {"name": "encoder"}, "outer": {"dense_lr": 0.0, "sparse_lr": 0.0}}
    with pytest.raises(UserError, match="all of its rates are 0"):
        make_default_space(config_from_dict(raw))


def test_a_value_at_the_end_of_its_range_is_told() -> None:
    rate = SearchRange("algorithm.inner_lr", 0.001, 1.0, True, False)
    assert [rate.find_edge(value) for value in (0.0012, 0.03, 0.9)] == ["lowest", "", "highest"]


def test_options_of_models_are_tuned_too(tmp_path: Path) -> None:
    changed = replace_values(CONFIG, {"model.options.bottom": [8]})
    assert changed.model.options == {"bottom": (8,), "interaction": "dot"}
    assert replace_values(changed, {"model.name": "ple"}).model.options["levels"] == 2
    path = tmp_path / "space.toml"
    path.write_text('["model.experts"]\nlow = 2\nhigh = 4\n')  # of an older release
    (dimension,) = read_space(path, CONFIG)
    assert dimension == SearchRange("model.options.experts", 2, 4, log=False, whole=True)
