"""Names from logs, schemas and manifests that would lead out of the dataset."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gmeta.cli.main import app
from metaio import DataError, FormatError, SchemaError, open_dataset
from metaio.format.names import is_name, is_path_below
from metaio.prepare.engines.local import prepare
from metaio.prepare.schema.schema_file import parse_schema
from tests.metaio.conftest import WriteFn, make_rows
from tests.metaio.format.test_format import rewrite_manifest
from tests.support.refusals import catch_message

OUTSIDE = ["../../victim", "..", ".", "", "/etc/x", "a/b", "a\nb", "a\x00b", "x" * 201, "\ud800"]
RULE = 'letters, digits, spaces, ".", "_" and "-", at most 200 bytes, neither "." nor ".."'


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_leads_elsewhere_is_no_name(name: str) -> None:
    assert not is_name(name)
    assert not is_path_below(f"train/{name}") or name == "a/b"


@pytest.mark.parametrize(
    "name", ["user-cold", "a.b", "...", ".metadata", "User ID", "Größe", "城市"]
)
def test_what_columns_are_called_is_a_name(name: str) -> None:
    assert is_name(name)
    assert is_path_below(f"train/{name}")


def test_only_text_is_a_name() -> None:
    assert not is_name(None)
    assert not is_path_below(["train"])


def prepared_with(tmp_path: Path, splits: dict[str, object], last: str) -> list[str]:
    """What stands below the folder of the inputs after a prepare that is refused."""
    (tmp_path / "in/deep").mkdir(parents=True)
    rows = "".join(f"{i % 5},{i % 3},{i % 2},train\n" for i in range(60))
    (tmp_path / "in/deep/raw.csv").write_text(f"user,item,clicked,part\n{rows}1,1,1,{last}\n")
    schema = parse_schema(
        {
            "task": {"column": "user"}, "label": {"column": "clicked"},
            "single": [{"column": "item", "hash": 9}], "episodes": {"query_rows": 1},
            "splits": splits,
        }
    )  # fmt: skip
    with pytest.raises((SchemaError, DataError)) as caught:
        prepare([str(tmp_path / "in/deep/raw.csv")], str(tmp_path / "in/deep/out"), schema)
    assert str(caught.value).startswith("split name ")
    assert str(caught.value).endswith("Rename the split")
    return sorted(path.name for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("name", ["../../victim", "vocabulary", "/tmp/x", ".", "Train"])
def test_a_split_of_a_log_that_leads_elsewhere_is_refused_before_anything_is_written(
    tmp_path: Path, name: str
) -> None:
    assert prepared_with(tmp_path, {"column": "part"}, name) == ["deep", "in", "raw.csv"]


@pytest.mark.parametrize("name", ["../../victim", "vocabulary"])
def test_a_share_that_leads_elsewhere_is_refused_in_time(tmp_path: Path, name: str) -> None:
    shares = {"train": 0.5, name: 0.5}
    assert prepared_with(tmp_path, {"shares": shares}, "train") == ["deep", "in", "raw.csv"]


@pytest.mark.parametrize("key", ["splits", "vocabularies"])
def test_a_manifest_of_a_place_elsewhere_is_refused_by_readers(write: WriteFn, key: str) -> None:
    path = write({"train": make_rows(4)})
    body = json.loads((Path(path) / "manifest.json").read_text())
    entry = body["splits"]["train"] if key == "splits" else body["splits"]["train"]["block_table"]
    rewrite_manifest(path, **{key: body[key] | {"../../evil": entry}})
    message = (
        f"{path}/manifest.json: {key} has the name '../../evil'; allowed are {RULE}. The program "
        "that wrote it is at fault; see docs/format.md"
    )
    assert catch_message(FormatError, open_dataset, path) == message
    result = CliRunner().invoke(app, ["inspect", path, "--verify"])
    assert result.exit_code == 1
    assert str(result.exception) == message
