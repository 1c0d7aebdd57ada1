"""A dataset of the previous release is read, and what is written is what that one reads."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from metaio import open_dataset
from metaio.format.inspection import find_damage, summarise
from metaio.prepare.engines.local import prepare
from metaio.prepare.schema.schema_file import load_schema
from tests.metaio.damage import whole_content

PREVIOUS = Path(__file__).with_name("previous")
WRITTEN = PREVIOUS / "data"
FINGERPRINT = "566761413d6e4e3e46432de9efa354fb"  # as that release told it
OF_THE_WRITER = {"created_by", "checksum"}  # and of the Parquet library that it had
OF_A_FILE = {"num_bytes", "xxh3", "footer_bytes", "footer_xxh3"}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same logs, prepared by this release."""
    out = tmp_path_factory.mktemp("prepared") / "data"
    prepare([str(PREVIOUS / "logs.csv")], str(out), load_schema(PREVIOUS / "clicks.toml"))
    return out


def files(dataset: Path) -> list[str]:
    return sorted(str(path.relative_to(dataset)) for path in dataset.rglob("*") if path.is_file())


def told(value: Any) -> Any:
    """A manifest without what follows from the bytes of the files."""
    if isinstance(value, dict):
        left = value.keys() - OF_THE_WRITER
        return {key: "" if key in OF_A_FILE else told(value[key]) for key in sorted(left)}
    return [told(each) for each in value] if isinstance(value, list) else value


def test_a_dataset_of_the_previous_release_is_whole_and_read() -> None:
    dataset = open_dataset(str(WRITTEN))
    assert find_damage(dataset) == []
    assert dataset.fingerprint == FINGERPRINT
    assert [(x.name, x.num_rows) for x in summarise(dataset)] == [("train", 112), ("valid", 48)]


def test_the_same_logs_make_the_same_dataset_as_in_the_previous_release(prepared: Path) -> None:
    """Else a run could not go on, nor be exported, after its data were prepared again."""
    before, now = open_dataset(str(WRITTEN)), open_dataset(str(prepared))
    assert now.fingerprint == FINGERPRINT
    assert whole_content(now) == whole_content(before)


def test_what_is_written_now_is_what_the_previous_release_reads(prepared: Path) -> None:
    """That one refuses another version and columns of other types, and looks for these files."""
    assert files(prepared) == files(WRITTEN)
    before, now = (json.loads((each / "manifest.json").read_text()) for each in (WRITTEN, prepared))
    assert (now["format"], now["version"]) == ("gmeta-metaio", 1)
    assert told(now) == told(before)
    for name in files(WRITTEN):
        if name.endswith(".parquet"):
            assert pq.read_schema(prepared / name).equals(pq.read_schema(WRITTEN / name)), name
