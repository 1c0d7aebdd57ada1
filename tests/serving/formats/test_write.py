"""`gmeta export --format`: what is written whole, and inputs.json as its readers use it."""

import json
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import xxhash
from typer.testing import CliRunner

import gmeta
from gmeta.cli.main import app
from gmeta.errors import GMetaError, UserError
from gmeta.serving.formats import export_runtime as write
from gmeta.serving.formats.export_runtime import export_for
from gmeta.serving.served_model import ServedModel
from metaio.hashing import splitmix64
from tests.metaio.prepare.test_local import changed, prepared, raw_table
from tests.serving.formats.models import column_of, model_of, write_schema_model
from tests.support.full_disk import files_of_at_most
from tests.support.refusals import catch_message


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runtimes") / "model"
    model_of(folder)
    return folder


def test_a_program_is_there_whole_or_not_at_all(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "program"
    monkeypatch.setattr(write, "export_adapted", refused)
    written = export_for(exported, out, "torch")
    assert written.left_out == "without adapt_predict.pt2: such a model cannot"
    names = sorted(path.name for path in out.rglob("*"))
    assert names == ["inputs.json", "predict.pt2"]
    assert written.num_bytes == sum(path.stat().st_size for path in out.iterdir())
    before = (out / "predict.pt2").read_bytes()
    assert str(Path.cwd()).encode() not in before
    with files_of_at_most(1_000), pytest.raises(OSError, match="File too large"):
        write._save(torch.export.load(out / "predict.pt2"), tmp_path / "full")
    (tmp_path / "full").unlink()
    monkeypatch.setattr(write, "write_inputs", refused)
    with pytest.raises(GMetaError):
        export_for(exported, out, "torch", overwrite=True)
    assert (out / "predict.pt2").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["program"]


def refused(*_: Any) -> None:
    raise GMetaError("such a model cannot")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tables", "int8"), "{source} is an exported model, whose step and tables are chosen: "
         "--step and --tables are for runs. Leave them out, or name the run"),
        ((), "{out} exists and is no exported program: a new folder is needed. Choose another "
         "place"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told(
    exported: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    (tmp_path / "note").write_text("mine")
    command = ["export", str(exported), str(tmp_path), "--format", "torch", *options]
    found = CliRunner().invoke(app, command).exception
    assert isinstance(found, UserError)
    assert str(found) == message.format(source=exported, out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_onnx_without_its_packages_is_told_before_anything_is_done(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = util.find_spec
    monkeypatch.setattr(
        "gmeta.serving.formats.torch_onnx_export.find_spec",
        lambda name: None if name == "onnx" else found(name),
    )
    assert catch_message(UserError, export_for, exported, tmp_path / "out", "onnx") == (
        "--format onnx needs the extra, as onnx is not installed: pip install 'gmeta[onnx]'"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_knows_inputs_json_alone_gets_the_models_predictions(tmp_path: Path) -> None:
    """Raw columns to ids by what is written there, in plain Python."""
    schema = changed(
        dense=[
            {"column": "price", "log1p": True, "standardise": True},
            {"column": "age", "fill": 5.0},
        ]
    )
    table = raw_table()
    dataset = prepared(tmp_path, table, schema)
    write_schema_model(tmp_path / "model", dataset)
    result = CliRunner().invoke(
        app, ["export", str(tmp_path / "model"), str(tmp_path / "out"), "--format", "onnx"]
    )
    assert result.exit_code == 0, result.exception
    assert result.stderr.endswith(f'/predict.onnx"), by {tmp_path / "out"}/inputs.json\n')
    rows = table.slice(0, 40).set_column(
        1, "item", [[*range(10_000, 10_003), *table["item"].to_pylist()[3:40]]]
    )
    feeds = read_by_hand(tmp_path / "out", rows.to_pylist())
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "predict.onnx"))
    (found,) = session.run(None, feeds)
    served: ServedModel = gmeta.load(tmp_path / "model")
    np.testing.assert_allclose(found, served.predict(rows), rtol=0, atol=1e-5)
    assert 0 in feeds["ids"][:, 0]  # outside the vocabulary
    assert not torch.equal(served.predict(rows), served.predict(table.slice(0, 40)))


def read_by_hand(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The inputs of a program, value by value."""
    told = json.loads((folder / "inputs.json").read_text())["inputs"]

    def id_of(column: dict[str, Any], value: Any) -> int:
        if value is None:
            assert column["null"] == "unknown"
            return int(column["unknown_row"])
        if column["ids"] == "vocabulary":
            known = column_of(folder / column["vocabulary"])
            return known.index(value) + 1 if value in known else int(column["unknown_row"])
        is_text = column["values"] == "text"
        bits = xxhash.xxh3_64_intdigest(value.encode()) if is_text else value & (2**64 - 1)
        return int(splitmix64(np.uint64(bits))) % (column["hash"] - 1) + 1

    def number(column: dict[str, Any], value: float | None) -> float:
        value = column["fill"] if value is None else value
        value = np.log1p(value) if column["log1p"] else value
        return (value - column["mean"]) / column["deviation"] if "mean" in column else value

    (tags,) = told["lists"]["columns"]
    lists = [
        [id_of(tags, part) for part in (row["tags"] or "").split(tags["separator"]) if part]
        for row in rows
    ]
    longest = max(map(len, lists))
    single, dense = told["ids"]["columns"], told["dense"]["columns"]
    return {
        "ids": np.array([[id_of(c, row[c["name"]]) for c in single] for row in rows]),
        "dense": np.array([[number(c, row[c["name"]]) for c in dense] for row in rows], np.float32),
        "lists": np.array([[ids + [0] * (longest - len(ids))] for ids in lists]),
        "list_lengths": np.array([[len(ids)] for ids in lists]),
    }
