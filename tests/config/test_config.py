"""Configs: defaults, overrides, and the exact words of every refusal."""

import json
from pathlib import Path

import pytest

from gmeta.config.train_config import TrainConfig, config_from_dict, describe_config, load_config
from gmeta.errors import ConfigError
from tests.support.refusals import catch_message

OPTIONS = {
    "model": {
        *("bottom", "interaction", "clusters", "history", "attention", "cross_layers"),
        *("cross_rank", "structure", "experts", "expert", "own_experts", "levels"),
    },
    "events": {"blocks", "heads", "dropout", "attention", "search", "category", "newest"},
    "algorithm": {
        *("learned_rates", "encoder_hidden", "encoder_pooling", "encoder_modulation"),
        *("cold_weight", "train_base", "content"),
    },
}
GOOD = '[data]\npath = "logs"\n[run]\ndir = "runs/a"\n'


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "train.toml"
    path.write_text(GOOD)
    return path


def test_overrides_replace_values_with_their_toml_types(good: Path) -> None:
    config = load_config(
        good,
        [
            "outer.dense_lr=1", "model.hidden=[8, 4]", "algorithm.name=fomaml",
            "data.path=s3://bucket/x", "run.dir='b'",
        ],
    )  # fmt: skip
    assert config.outer.dense_lr == 1.0
    assert config.model.hidden == (8, 4)
    assert config.algorithm.name == "fomaml"
    assert config.data.path == "s3://bucket/x"
    assert config.run.dir == "b"


def test_text_is_text_also_where_toml_reads_a_date_or_a_number(good: Path) -> None:
    config = load_config(good, ["run.dir=2026-11-22", "data.path=7", 'model.name="melu"'])
    assert (config.run.dir, config.data.path, config.model.name) == ("2026-11-22", "7", "melu")
    for override in ('labels.loss={click = "bce"}', "labels.loss.click=bce"):
        assert load_config(good, [override]).labels.loss == {"click": "bce"}


def test_a_saved_config_reads_back_equal(good: Path) -> None:
    config = load_config(good, ["algorithm.adapt_layers=['top.*']", "run.epochs=3"])
    assert config_from_dict(config.to_json()) == config


def test_a_key_of_an_earlier_release_loads_with_its_default(good: Path) -> None:
    assert load_config(good, ["sharding.shared_memory=false"]) == load_config(good)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("outer.dense_lrr=1", "outer.dense_lrr is unknown; did you mean outer.dense_lr?"),
        ("otter.dense_lr=1", "otter is unknown; did you mean outer?"),
        (
            "sharding.shared_memory=true",
            "sharding.shared_memory = True is no key any more: ranks of one host exchange over TCP "
            "as others do. Remove it",
        ),
        ("foo=1", "override 'foo=1' is not of the form section.key=value. Write e.g. run.epochs=3"),
        ("outer.dense_lr=nan", "outer.dense_lr = nan is not a finite number. Correct the value"),
        (
            "model.embedding_dim=6",
            "model.embedding_dim = 6 is no multiple of 4: only these are allowed. "
            "Correct the value",
        ),
        ("run.epochs=0", "run.epochs = 0 is too small: at least 1 is allowed. Correct the value"),
        ("model.hidden=8", "model.hidden = 8 is not a list. Write e.g. model.hidden = [...]"),
        (
            "labels.loss={click=bce}",
            "labels.loss = '{click=bce}' is not a table of texts. Write e.g. labels.loss.NAME = "
            "...",
        ),
        (
            "algorithm.learned_rates=row",
            "algorithm.options.learned_rates = 'row' is not allowed: choose one of layer, output, "
            "weight",
        ),
        (
            "model.options.interactoin=cat",
            "model.options.interactoin is unknown; did you mean model.options.interaction?",
        ),
        (
            "algorithm.options.rate=1",
            "algorithm.options.rate is given, but algorithm.name = 'maml' has no options. Remove "
            "it",
        ),
        (
            "data.lanes=2",
            "data.lanes = 2 is no key any more: a step draws from all blocks; data.blocks_per_step "
            "lets each rank read its own. Remove it",
        ),
        (
            "data.path=''",
            "data.path is empty: it is required. Set it in the config, or add data.path=PATH",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_the_key_the_value_and_what_is_allowed(
    good: Path, override: str, message: str
) -> None:
    refusal = catch_message(ConfigError, load_config, good, [override])
    assert refusal.startswith(message)
    if "known are" not in message:
        assert refusal == message


def test_momentum_without_sgd_is_refused(good: Path) -> None:
    assert catch_message(ConfigError, load_config, good, ["outer.momentum=0.9"]) == (
        "outer.momentum = 0.9 has no meaning for outer.dense_optimizer = 'adam': only sgd takes "
        "it. Leave it 0, or choose sgd"
    )


def test_a_section_given_as_a_value_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text("outer = 3\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == "outer = 3 is a value, not a section. Write [outer] in the config"
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["outer.dense_lr=1"])
    assert str(caught.value) == "outer = 3 is a value, not a section. Write [outer] in the config"


def test_a_missing_file_and_broken_toml_are_one_line(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    assert (
        catch_message(ConfigError, load_config, missing)
        == f"config {str(missing)!r} cannot be read: No such file or directory. Give a TOML file"
    )
    broken = tmp_path / "broken.toml"
    broken.write_text("[data\n")
    with pytest.raises(ConfigError) as caught:
        load_config(broken)
    assert str(caught.value).startswith(f"config {str(broken)!r} is no TOML: ")


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text('[data]\npath = "d"\n[run]\ndir = "r"\n', encoding="utf-8-sig")
    assert load_config(path).data.path == "d"


def test_every_key_has_a_line_of_help() -> None:
    described = {key: text for key, _, text in describe_config()}
    assert all(described.values())
    defaults = TrainConfig().to_json()
    options = {f"{part}.options.{key}" for part in ("model", "algorithm") for key in OPTIONS[part]}
    options |= {f"model.event_options.{key}" for key in OPTIONS["events"]}
    keys = {f"{section}.{key}" for section, keys in defaults.items() for key in keys}
    assert set(described) == keys | options
    assert len(keys) <= 124  # a reader of the list has a quarter of an hour


def test_a_model_has_all_of_its_options_and_none_of_another(good: Path) -> None:
    model = load_config(good, ["model.options.bottom=[8]", "model.options.experts=3"]).model
    assert model.options == {"bottom": (8,), "interaction": "dot"}
    mmoe = load_config(good, ["model.name=mmoe", "model.options.experts=3"]).model
    assert mmoe.options == {"experts": 3, "expert": (64,)}
    own = load_config(good, ["model.name=mine:Model", "model.options.depth=3"]).model
    assert own.options == {"depth": 3}


# As an older release saved them; each of its configs had every key.
FORMER = {
    "data": {"lanes": 1, "window_blocks": 0, "drop_last": False, "tasks_per_shard": 0},
    "model": {"name": "din", "bottom": [8], "history": "seen", "attention": [4], "levels": 2},
    "algorithm": {
        "name": "metasgd", "learned_rates": "layer", "inner_path": "materialised",
        "layer_paths": ["decision.*=auto"], "content": [],
    },
    "outer": {"adagrad_floor": 0.0},
    "sharding": {"shared_memory": False, "dense_wire_dtype": "float32"},
    "run": {"early_stop_min_delta": 0.0},
}  # fmt: skip


def test_former_keys_mean_what_they_meant() -> None:
    config = config_from_dict(FORMER)
    assert config.model.options == {"history": "seen", "attention": (4,)}
    assert config.algorithm.options == {"learned_rates": "layer"}
    assert config.algorithm.layer_paths == ("*=materialised", "decision.*=auto")


def test_a_key_that_is_gone_is_refused_in_a_file_and_passed_over_in_what_a_run_saved() -> None:
    changed = {**FORMER, "sharding": {"shared_memory": True}}
    assert catch_message(ConfigError, config_from_dict, changed) == (
        "sharding.shared_memory = True is no key any more: ranks of one host exchange over TCP as "
        "others do. Remove it"
    )
    assert config_from_dict(changed, is_saved=True) == config_from_dict(FORMER)


def test_a_former_key_on_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text(GOOD + "[model]\nbottom = [32]\n[model.options]\ninteraction = 'cat'\n")
    options = load_config(path, ["model.bottom=[8]"]).model.options
    assert options == {"bottom": (8,), "interaction": "cat"}


def test_the_config_that_a_run_saved_is_a_config(tmp_path: Path) -> None:
    config = config_from_dict({"data": {"path": "data"}, "run": {"dir": "run"}})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_json() | {"data": {"path": "data", "drop_last": True}}))
    assert load_config(path) == config
    for broken in ("{", "[1]"):
        path.write_text(broken)
        assert "is no TOML: " in catch_message(ConfigError, load_config, path)
