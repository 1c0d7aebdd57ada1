"""Settings from nested dicts: every key checked once, every complaint says what is allowed."""

import dataclasses
import math
from typing import Any, Literal

import pytest

from gmeta.config.settings import describe_settings, settings_from_dict
from gmeta.errors import ConfigError
from gmeta_keys import key


def setting(default: Any, help_: str = "about it", **bounds: float) -> Any:
    return key(default, help_, **bounds)


@dataclasses.dataclass(frozen=True)
class Engine:
    rate: float = setting(0.1, "step size", min=0)
    steps: int = setting(1, "inner steps", min=0, max=10)
    exact: bool = setting(True)
    kind: Literal["maml", "reptile"] = setting("maml")
    hidden: tuple[int, ...] = setting((8, 4), min=1)


@dataclasses.dataclass(frozen=True)
class Order:
    by: Literal["time", "hash"] = setting("time", "time, or hash: a shuffle")


@dataclasses.dataclass(frozen=True)
class Settings:
    engine: Engine = dataclasses.field(default_factory=Engine)
    spare: Engine = dataclasses.field(default_factory=Engine)
    order: Order = dataclasses.field(default_factory=Order)


def settings(**engine: Any) -> Settings:
    made = settings_from_dict(Settings, {"engine": engine})
    assert isinstance(made, Settings)
    return made


def test_what_is_not_named_keeps_its_default() -> None:
    assert settings_from_dict(Settings, {}) == Settings()
    assert settings(steps=3) == Settings(engine=Engine(steps=3))


def test_values_have_the_types_of_their_fields() -> None:
    made = settings(rate=1, hidden=[16]).engine
    assert (type(made.rate), made.rate) == (float, 1.0)  # TOML's 1 is a fine rate
    assert made.hidden == (16,)  # and its list a tuple, so that the settings can be hashed
    assert hash(made) == hash(Engine(rate=1.0, hidden=(16,)))


@pytest.mark.parametrize(
    ("engine", "complaint"),
    [
        ({"step": 2}, r"engine\.step is unknown; did you mean engine\.steps\?"),
        ({"zzz": 2}, r"engine\.zzz is unknown; known are rate, steps, exact, kind, hidden"),
        ({"steps": 2.0}, r"engine\.steps = 2\.0 is not of type int"),
        ({"steps": True}, r"engine\.steps = True is not of type int"),
        ({"rate": "0.1"}, r"engine\.rate = '0\.1' is not of type float"),
        ({"rate": math.nan}, r"engine\.rate = nan is not a finite number"),
        ({"rate": 10**400}, r"engine\.rate = 10+ is not of type float"),
        ({"rate": -0.5}, r"engine\.rate = -0\.5 is too small: at least 0 is allowed"),
        ({"steps": 11}, r"engine\.steps = 11 is too large: at most 10 is allowed"),
        (
            {"kind": "mmal"},
            r"= 'mmal' is not allowed: choose one of maml, reptile\. Did you mean maml\?$",
        ),
        ({"hidden": [8, 0]}, r"engine\.hidden\[1\] = 0 is too small"),
        ({"hidden": "84"}, r"engine\.hidden = '84' is not a list"),
    ],
)
def test_a_wrong_value_is_one_line_with_its_key(engine: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as refused:
        settings(**engine)
    assert "\n" not in str(refused.value)


def test_a_value_in_a_sections_place_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"engine = 3 is a value, not a section. Write \[engine\]"
    ):
        settings_from_dict(Settings, {"engine": 3})


def test_an_unknown_section_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"^engin is unknown; did you mean engine\?$"):
        settings_from_dict(Settings, {"engin": {}})


def test_the_description_is_every_key_in_order_with_its_default_as_json() -> None:
    rows = describe_settings(Settings)
    assert rows[:2] == [
        ("engine.rate", "0.1", "step size (at least 0)"),
        ("engine.steps", "1", "inner steps (0 to 10)"),
    ]
    assert ("engine.exact", "true", "about it") in rows
    # What there is to choose from, where the help does not say it.
    assert ("engine.kind", '"maml"', "about it (one of maml, reptile)") in rows
    assert ("order.by", '"time"', "time, or hash: a shuffle") in rows
    assert ("spare.hidden", "[8, 4]", "about it (each at least 1)") in rows
    assert len(rows) == 11


def test_a_field_may_have_several_types_and_names_them_all() -> None:
    @dataclasses.dataclass(frozen=True)
    class Choice:
        tables: bool | tuple[str, ...] = setting(True)

    for value, parsed in ((False, False), (["item"], ("item",)), ([], ())):
        assert settings_from_dict(Choice, {"tables": value}) == Choice(parsed)
    with pytest.raises(ConfigError) as caught:
        settings_from_dict(Choice, {"tables": "item"})
    assert str(caught.value) == "tables = 'item' is not of type bool or list. Correct the value"


def test_a_field_of_several_types_with_bounds_is_a_mistake_of_the_program() -> None:
    @dataclasses.dataclass(frozen=True)
    class Wrong:
        rate: int | None = setting(None, min=0)

    with pytest.raises(TypeError, match="config fields have one type each"):
        settings_from_dict(Wrong, {"rate": 1})
