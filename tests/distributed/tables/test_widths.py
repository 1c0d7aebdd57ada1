"""Which widths tables get, what their weights are called, and what is refused."""

from dataclasses import replace

import pytest

from gmeta.config.table_names import table_of_weight, weight_name
from gmeta.config.table_widths import auto_width, collections_of_tables, widths_of_tables
from gmeta_models import ModelConfig
from metaio.format.features import Features, FeatureSpec, TableSpec
from tests.support.refusals import catch_message

FEATURES = Features(
    tables=(TableSpec("item.id", 10_000), TableSpec("city", 100), TableSpec("a=b", 3)),
    single=(FeatureSpec("item.id", "item.id"), FeatureSpec("city", "city")),
    multi=(FeatureSpec("a=b", "a=b"),),
    dense=(),
)
MODEL = ModelConfig(embedding_dim=32)


def test_all_tables_are_as_wide_as_the_model_unless_it_is_asked_for() -> None:
    assert widths_of_tables(FEATURES, MODEL) == {"item.id": 32, "city": 32, "a=b": 32}
    expected = {"tables": ["item.id", "city", "a=b"]}
    assert collections_of_tables(widths_of_tables(FEATURES, MODEL)) == expected


def test_auto_is_six_times_the_fourth_root_of_the_rows_and_at_most_the_models_width() -> None:
    auto = replace(MODEL, width="auto")
    assert widths_of_tables(FEATURES, auto) == {"item.id": 32, "city": 20, "a=b": 8}
    for rows in (1, 2, 81, 10**6, 10**12):
        width = auto_width(rows)
        assert width % 4 == 0
        assert (width - 4) ** 4 < 6**4 * rows <= width**4


def test_a_named_width_stands_above_the_rule() -> None:
    named = replace(MODEL, width="auto", widths=("city=4", "a=b=16"))
    widths = widths_of_tables(FEATURES, named)
    assert widths == {"item.id": 32, "city": 4, "a=b": 16}
    assert list(collections_of_tables(widths)) == ["tables.w4", "tables.w16", "tables.w32"]


@pytest.mark.parametrize("widths", [(), ("city=4",)])
def test_a_weight_is_found_by_its_table_and_tells_it(widths: tuple[str, ...]) -> None:
    found = widths_of_tables(FEATURES, replace(MODEL, widths=widths))
    names = {table: weight_name(found, table) for table in found}
    assert names["city"] == f"tables.{'w4.' if widths else ''}embeddings.city.weight"
    told = {table_of_weight(name): name for name in names.values()}
    assert told == {name: names[name] for name in names}


@pytest.mark.parametrize("entry", ["city=6", "city=0", "city=36", "city=-4", "city=x", "city"])
def test_a_width_that_no_table_may_have_is_refused(entry: str) -> None:
    with pytest.raises(ValueError) as caught:
        widths_of_tables(FEATURES, replace(MODEL, widths=(entry,)))
    assert str(caught.value) == (
        f"model.widths has {entry!r}: write table=width with a multiple of 4 up to "
        "model.embedding_dim = 32"
    )


def test_a_width_of_an_unknown_table_is_refused() -> None:
    with pytest.raises(ValueError) as caught:
        widths_of_tables(FEATURES, replace(MODEL, widths=("town=4",)))
    assert str(caught.value) == (
        "model.widths names 'town', which is no table: the dataset has item.id, city, a=b. "
        "Name one of them"
    )


def test_the_schemas_width_stands_between_the_rule_and_the_config() -> None:
    tables = (TableSpec("item.id", 10_000, 16), TableSpec("city", 100, 8), TableSpec("a=b", 3))
    features = replace(FEATURES, tables=tables)
    assert Features.from_json(features.to_json()) == features
    config = replace(MODEL, width="auto", widths=("city=4",))
    assert widths_of_tables(features, config) == {"item.id": 16, "city": 4, "a=b": 8}
    with pytest.raises(ValueError) as caught:
        widths_of_tables(features, replace(MODEL, embedding_dim=8))
    assert str(caught.value) == (
        "table 'item.id' is 16 wide by the schema of its data, and model.embedding_dim = 8 is the "
        'most. Set it to 16, or model.widths = ["item.id=8"]'
    )
    assert widths_of_tables(features, replace(MODEL, embedding_dim=8, widths=("item.id=8",)))


@pytest.mark.parametrize("width", [-4, 6, 2**20])
def test_a_manifest_with_a_width_that_no_table_has_is_refused(width: int) -> None:
    features = replace(FEATURES, tables=(TableSpec("item.id", 9, width), *FEATURES.tables[1:]))
    expected = f"table item.id is {width} wide; multiples of 4 up to 65536 are allowed"
    assert catch_message(ValueError, features.check) == expected
