"""Configs as TOML: what is written reads as the same config."""

import tomllib

from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.config.train_config import TrainConfig, config_from_dict
from gmeta.tuning.config_toml import format_config, format_toml_value

VALUES = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=8), values),
    max_leaves=6,
)


@given(VALUES)
@settings(max_examples=60)
def test_a_value_reads_as_it_was(value: object) -> None:
    assert tomllib.loads(f"value = {format_toml_value(value)}")["value"] == value


def test_a_config_reads_as_it_was_and_shows_what_was_tuned() -> None:
    raw = {
        "data": {"path": 'a "quoted" path', "eval_splits": ["one", "two"]},
        "algorithm": {"inner_lr": 1e-05, "inner_steps": 1},
        "run": {"dir": "runs/x"},
    }
    text = format_config(config_from_dict(raw), "What it is\n\nof", {"algorithm.inner_steps"})
    assert config_from_dict(tomllib.loads(text)) == config_from_dict(raw)
    assert text.splitlines() == [
        "# What it is",
        "#",
        "# of",
        "",
        "[data]",
        'path = "a \\"quoted\\" path"',
        'eval_splits = ["one", "two"]',
        "",
        "[algorithm]",
        "inner_steps = 1  # tuned",
        "inner_lr = 1e-05",
        "",
        "[run]",
        'dir = "runs/x"',
    ]


def test_a_default_config_is_a_header_alone() -> None:
    assert format_config(TrainConfig(), "nothing") == "# nothing\n"
