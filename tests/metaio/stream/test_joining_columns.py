"""Inputs that join a stream at an increment, and policies that change."""

from pathlib import Path

import pytest

from metaio import SchemaError
from metaio.errors import QuarantinedError
from metaio.prepare.schema.schema import Schema
from metaio.prepare.schema.schema_file import parse_schema
from metaio.stream.chain import open_stream
from metaio.stream.quarantine import list_quarantine
from tests.metaio.stream.changing import filling, with_columns, with_inputs, written
from tests.metaio.stream.logs import append, log, schema
from tests.support.refusals import catch_message


@pytest.mark.parametrize("first", [False, True])
def test_inputs_that_join_are_null_in_all_earlier_rows(tmp_path: Path, first: bool) -> None:
    own, wide = schema(), with_inputs(schema(), first)
    for root, given in (("grown", own), ("whole", wide)):
        (tmp_path / root).mkdir()
        early = log(0) if root == "grown" else with_columns(log(0), known=False)
        append(tmp_path / root / "s", early, schema=given)
        for day in (1, 2):
            record = append(tmp_path / root / "s", with_columns(log(day), known=True), schema=wide)
    grown, whole = (open_stream(str(tmp_path / root / "s")) for root in ("grown", "whole"))
    # As if the column had been there from the first day, and nobody had known its values.
    for number in (2, 3):
        assert written(grown.dataset(number)) == written(whole.dataset(number))
        assert grown.dataset(number).features == whole.dataset(number).features
    assert grown.record(2).report["joined_columns"] == [
        name for name in wide.inputs if name not in own.inputs
    ]
    assert "joined_columns" not in record.report
    assert [grown.record(n).report["new_columns"] for n in (2, 3)] == [[], []]
    # From then on the schema is the stream's.
    assert append(tmp_path / "grown" / "s", with_columns(log(3), known=True)).number == 4
    with pytest.raises(SchemaError, match=r"differs from that of the stream .* in single"):
        append(tmp_path / "grown" / "s", log(4), schema=own)


def test_a_number_that_joins_is_standardised_by_its_first_increment(tmp_path: Path) -> None:
    stream = tmp_path / "s"
    append(stream, log(0), schema=schema())
    body = schema().to_json()
    body["dense"].append({"column": "rating", "standardise": True, "fill": 1.0})
    wide, frozen, given = parse_schema(body), [], {1.0}
    for day in (1, 2):
        table = with_columns(log(day), known=True)
        append(stream, table, schema=wide)
        frozen.append(open_stream(str(stream)).newest_recipe["moments"]["rating"])
        dataset = open_stream(str(stream)).dataset(day + 1)
        mean, deviation = frozen[0]
        values = {
            round(float(x) * deviation + mean, 4)
            for i in range(dataset.split("train").num_blocks)
            for x in dataset.read_block("train", i).dense_NK[:, 1]
        }
        given |= {round(x, 4) for x in table["rating"].to_pylist()}
        assert values <= given
        assert day > 1 or 1.0 in values  # of support rows from before
    assert frozen[0] == frozen[1]
    assert frozen[0][0] == pytest.approx(0.5, abs=0.1)


def test_policies_change_at_any_increment(tmp_path: Path) -> None:
    stream, lacking = tmp_path / "s", log(1).drop_columns(["city"])
    own = parse_schema(filling().to_json() | {"stream": schema().to_json()["stream"]})
    append(stream, log(0), schema=own)
    with pytest.raises(QuarantinedError, match="has no column city"):
        append(stream, lacking, "b.parquet")
    assert append(stream, lacking, "b.parquet", schema=filling()).number == 2
    assert append(stream, log(2).drop_columns(["price"])).number == 3


def test_what_cannot_join_is_said(tmp_path: Path) -> None:
    stream = tmp_path / "s"
    append(stream, log(0), schema=schema())

    def joined(kind: str, **column: object) -> Schema:
        body = schema().to_json()
        return parse_schema({**body, kind: [*body.get(kind, []), column]})

    def said(own: Schema) -> str:
        table = with_columns(log(1), known=True)
        return catch_message(SchemaError, append, stream, table, "b.parquet", schema=own)

    for own, null in (
        (joined("single", column="shop", vocabulary=1), 'null = "unknown"'),
        (joined("dense", column="rating"), "fill = VALUE"),
    ):
        name = [*own.inputs]
        column = next(one for one in name if one not in schema().inputs)
        assert said(own) == (
            f"column {column} joins the stream {stream}, whose earlier rows have none, and has no "
            f"null. Say what it is: {null}"
        )
    text = joined("single", column="place", table="item", vocabulary=2, null="unknown")
    assert said(text) == (
        "a column that joins the stream shares table item, and one of the two holds text, the "
        "other integers. Give it a table of its own"
    )
    assert list_quarantine(stream) == []
    # A file without the column, though it may be filled later: its type is not known yet.
    late = joined("dense", column="rating", fill=0.0)
    with pytest.raises(QuarantinedError, match="has no column rating"):
        append(stream, log(2), "c.parquet", schema=late)
