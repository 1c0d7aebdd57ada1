"""`gmeta inspect` on an exported model: the columns it reads, and whether all of it is there."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gmeta.cli.commands.inspect import inspect
from gmeta.cli.commands.inspect_model import is_model
from gmeta.errors import GMetaError, UserError
from gmeta.serving.exported_folder import (
    LAYERS_FILE,
    ExportedColumns,
    read_config,
    vocabulary_file,
    write_config,
)
from metaio.prepare.schema.schema_file import parse_schema
from tests.support.exported import write_random_model

SCHEMA: dict[str, Any] = {
    "task": {"column": "user"},
    "label": {"column": "click"},
    "single": [
        {"column": "item", "hash": 50},
        {"column": "city", "vocabulary": 1, "null": "unknown"},
    ],
    "multi": [{"column": "tags", "table": "tag", "hash": 12}],
    "dense": [{"column": "price", "fill": 2.5}, {"column": "age"}],
    "episodes": {"by": "last", "query_rows": 2, "min_rows": 3},
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_random_model(tmp_path / "model", table_format="int8")
    return tmp_path / "model"


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines, with one space for any number of them."""
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_columns_are_ids_of_the_tables_where_there_is_no_schema(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inspect(str(model), verify=True, picture=None)
    lines = told(capsys)
    assert lines[0].startswith(f"model {model}: maml with dlrm, predicts clicks; ")
    assert "seen multi item ids 0 to 49; 0: unknown" in lines
    assert "price dense a number" in lines
    assert "click label 0 to 1" in lines
    assert any(line.startswith("city 8 4 int8 ") for line in lines)
    assert lines[-1] == "complete: every file is there, and as its checksum says"


def test_columns_are_those_of_the_schema_where_there_is_one(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = ExportedColumns("user", "click", parse_schema(SCHEMA), {}, {"item": "text"})
    config = read_config(model)
    vocabulary = model / vocabulary_file("city")
    vocabulary.parent.mkdir()
    vocabulary.write_bytes((model / LAYERS_FILE).read_bytes())  # of which inspect asks the size
    files = {**config.files, vocabulary_file("city"): config.files[LAYERS_FILE]}
    changed = replace(config, columns=columns, loss="mse", label_kinds=("mse",), files=files)
    write_config(model, changed)
    inspect(str(model), verify=False, picture=None)
    lines = told(capsys)
    assert "item single item text" in lines
    assert "city single city integer or text; nulls allowed" in lines
    assert "tags multi tag integer or text" in lines
    assert "price dense a number; nulls become 2.5" in lines
    assert "age dense a number" in lines
    assert "click label a number" in lines


def test_a_cut_file_and_an_altered_one_are_told(model: Path) -> None:
    layers = model / LAYERS_FILE
    whole = layers.read_bytes()
    layers.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    inspect(str(model), verify=False, picture=None)  # sizes alone
    with pytest.raises(GMetaError, match=re.escape(LAYERS_FILE)):
        inspect(str(model), verify=True, picture=None)
    layers.write_bytes(whole[:-1])
    with pytest.raises(GMetaError, match=re.escape(LAYERS_FILE)):
        inspect(str(model), verify=False, picture=None)


def test_a_picture_is_of_datasets(model: Path) -> None:
    with pytest.raises(UserError, match="--picture is for datasets"):
        inspect(str(model), verify=False, picture=Path("episodes.png"))


def test_other_folders_are_no_models(tmp_path: Path) -> None:
    assert not is_model(tmp_path)
    (tmp_path / "config.json").write_text('{"data": {}}')  # a run's
    assert not is_model(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    assert not is_model(tmp_path)


def test_a_model_whose_config_is_damaged_is_told_as_one(model: Path) -> None:
    (model / "config.json").write_text("{")  # a copy that was cut short
    with pytest.raises(GMetaError, match="is not JSON: it was cut short or edited"):
        inspect(str(model), verify=False, picture=None)
