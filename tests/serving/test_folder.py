"""The exported folder: damage is told in one line, no half is seen, narrow tables serve as wide."""

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import gmeta
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.inputs import NeighboursConfig, SupportFeaturesConfig
from gmeta.errors import GMetaError, NotFiniteError, UserError
from gmeta.platform.files.checksums import describe_file
from gmeta.platform.files.tensor_files import ChangedFileError
from gmeta.serving import stored_tables
from gmeta.serving.export import write_model
from gmeta.serving.exported_folder import (
    LAYERS_FILE,
    NEIGHBOURS_FILE,
    new_folder,
    read_config,
    table_file,
)
from gmeta.serving.stored_tables import store_table
from gmeta.serving.table_format import TableFormat
from gmeta_models import MODELS, ModelConfig
from metaio.format.manifest import canonical_json, xxh3_hex
from tests.support.exported import FEATURES, metaemb_rate, random_rows, write_random_model
from tests.support.refusals import catch_message


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_random_model(tmp_path / "model")
    return tmp_path / "model"


def edit_config(folder: Path, **changes: Any) -> None:
    """Change config.json as a release of that kind would have written it, checksum included."""
    body = json.loads((folder / "config.json").read_text())
    body |= changes
    del body["checksum"]
    body["checksum"] = xxh3_hex(canonical_json(body))
    (folder / "config.json").write_text(json.dumps(body))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def narrower_table(model: Path) -> None:
    path = model / "table-00001.safetensors"
    save_file({"values": torch.zeros(8, 4, dtype=torch.float16)}, path)
    files = json.loads((model / "config.json").read_text())["files"]
    edit_config(model, files=files | {path.name: vars(describe_file(path))})


def other_layers(model: Path) -> None:
    path = model / "layers.safetensors"
    save_file({"model.top.0.weight": torch.zeros(2, 2)}, path)
    files = json.loads((model / "config.json").read_text())["files"]
    edit_config(model, files=files | {path.name: vars(describe_file(path))})


def unknown_model(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())["model"]
    edit_config(model, model=config | {"name": "dlrm2"})


def unknown_option(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())["algorithm"]
    edit_config(model, algorithm=config | {"inner_lrr": 1.0})


COPY = "Copy the folder again, or export the run again"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "layers cut short": (
        lambda model: cut(model / "layers.safetensors"),
        "{model}/layers.safetensors has 1,842 bytes, config.json says 1,852: "
        f"it was cut short or rewritten. {COPY}",
    ),
    "a flipped bit": (
        lambda model: flip(model / "table-00000.safetensors"),
        "{model}/table-00000.safetensors differs from the checksum in config.json: "
        f"it was altered. {COPY}",
    ),
    "a lost file": (
        lambda model: (model / "table-00002.safetensors").unlink(),
        f"{{model}}/table-00002.safetensors does not exist, config.json lists it. {COPY}",
    ),
    "a config cut short": (
        lambda model: cut(model / "config.json"),
        f"{{model}}/config.json is not JSON: it was cut short or edited. {COPY}",
    ),
    "an edited config": (
        lambda model: (model / "config.json").write_text(
            (model / "config.json").read_text().replace("0.3", "0.4")
        ),
        f"{{model}}/config.json does not match its own checksum: it was edited. {COPY}",
    ),
    "statistics without a prior": (
        lambda model: edit_config(model, support_features={"task": True}),
        "{model}/config.json is not what an export writes (ValueError('its support_features have "
        f"no label_prior')). {COPY}",
    ),
    "neighbours of no column": (
        lambda model: edit_config(
            model, neighbours={"column": "itm"}, support_features={"label_prior": (0.3, 0.5)}
        ),
        '{model}/config.json is not what an export writes (ValueError("its neighbours are of no '
        f"column 'itm'\")). {COPY}",
    ),
    "another version": (
        lambda model: edit_config(model, version=2),
        "{model}/config.json has format version 2: this release reads version 1. "
        "Export the run again with this release, or load it with the one that wrote it",
    ),
    "no config": (
        lambda model: (model / "config.json").unlink(),
        "{model} is no exported model: it has no config.json. "
        "Give a folder that `gmeta export` wrote",
    ),
    "an unknown option": (
        unknown_option,
        "{model}/config.json asks for what this release does not have (algorithm.inner_lrr is "
        "unknown; did you mean algorithm.inner_lr?). Load it with the release that wrote it",
    ),
    "an unknown model": (
        unknown_model,
        "{model} was made with model.name = 'dlrm2', which is not here: "
        f"known are {', '.join(sorted([*MODELS, 'dot']))}. "
        "Use the release that made it, or install the package that has it: docs/extending.md.",
    ),
    "a loss of a package that is not trusted": (
        lambda model: edit_config(model, loss="evil.losses:LOSS", label_kinds=["bce"]),
        "{model} was made with outer.loss = 'evil.losses:LOSS', code of the package 'evil', which "
        "is not installed as a plug-in here: install the package if it declares entry points of "
        "gmeta, or set GMETA_PLUGINS=evil if you trust it: docs/extending.md.",
    ),
    "a loss of a package that predicts nothing": (
        lambda model: edit_config(model, loss="evil.losses:LOSS", label_kinds=["worst"]),
        "{model}/config.json is not what an export writes (ValueError('its label_kinds are not "
        f"those of its losses')). {COPY}",
    ),
    "a table of another type": (
        narrower_table,
        "{model}/table-00001.safetensors holds values float16 [8, 4]; config.json promises values "
        "float32 [8, 4]. The files come from different exports: export the run again",
    ),
    "layers of another model": (
        other_layers,
        "{model}/layers.safetensors does not fit config.json: it lacks model.bottom.0.weight and 7 "
        "more. The files come from different exports: export the run again",
    ),
}


def test_a_model_of_a_release_without_statistics_is_served(model: Path) -> None:
    rows = random_rows(6)
    expected = gmeta.load(model).adapt(rows).predict(rows)
    body = json.loads((model / "config.json").read_text())
    assert {body.pop("huber_delta"), body.pop("support_features")["task"]} == {1.0, False}
    (model / "config.json").write_text(json.dumps(body))
    edit_config(model)
    assert torch.equal(gmeta.load(model).adapt(rows).predict(rows), expected)


@pytest.mark.parametrize("fault", DAMAGE)
def test_a_damaged_model_is_refused_in_one_line(model: Path, fault: str) -> None:
    damage, message = DAMAGE[fault]
    damage(model)
    assert catch_message(GMetaError, gmeta.load, model) == message.format(model=model)


def test_contents_are_not_read_where_no_verification_is_asked(model: Path) -> None:
    flip(model / "table-00000.safetensors")
    assert gmeta.load(model, verify=False).predict(random_rows(3)).shape == (3,)


@pytest.mark.parametrize("file", ["table-00000.safetensors", NEIGHBOURS_FILE])
def test_a_mapped_file_that_is_cut_short_is_noticed(tmp_path: Path, file: str) -> None:
    prior, near = SupportFeaturesConfig(label_prior=(0.3, 0.5)), NeighboursConfig("item", 3)
    write_random_model(tmp_path, support_features=prior, neighbours=near)
    served, rows = gmeta.load(tmp_path), random_rows(5)
    task = served.adapt(rows)
    os.truncate(tmp_path / file, 4)
    for compute in (served.adapt, served.predict, task.predict):
        with pytest.raises(ChangedFileError, match=f"{file} was changed in place"):
            compute(rows)


def test_a_pickled_model_is_loaded_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(5)
    monkeypatch.chdir(model.parent)
    served = gmeta.load(model.name)
    pickled = pickle.dumps(served)
    assert len(pickled) < model.joinpath("config.json").stat().st_size + 4096  # no tensor is sent
    monkeypatch.chdir("/")
    again = pickle.loads(pickled)
    assert torch.equal(again.predict(rows), served.predict(rows))
    assert torch.equal(again.adapt(rows).predict(rows), served.adapt(rows).predict(rows))
    assert pickle.dumps(again) == pickled
    edit_config(model, source={"step": 8})
    assert catch_message(GMetaError, pickle.loads, pickled) == (
        f"{model} holds another model than the one that was pickled: it was replaced since. "
        "Load it again with gmeta.load, or keep each export in a folder of its own"
    )
    assert catch_message(UserError, pickle.dumps, served.adapt(rows)) == (
        "a task that a model was adapted to cannot be pickled or copied: its layers are those of "
        "this process. Send its state() instead, and call task(state) of the model there"
    )


@pytest.mark.parametrize("table_format", ["float16", "int8"])
def test_stored_tables_keep_their_error_bound(table_format: TableFormat) -> None:
    generator = torch.Generator().manual_seed(0)
    scales = 10.0 ** torch.randint(-6, 4, (500, 1), generator=generator)
    weight_RD = torch.randn(500, 16, generator=generator) * scales
    weight_RD[7] = 0
    stored = store_table("t", weight_RD, table_format)
    error_RD = (stored.rows_UD(torch.arange(500)) - weight_RD).abs()
    largest_R = weight_RD.abs().amax(dim=1, keepdim=True)
    bound = largest_R / 254 if table_format == "int8" else weight_RD.abs() / 2048 + 2.0**-25
    assert bool((error_RD <= bound * (1 + 1e-5)).all())
    assert stored.rows_UD(torch.tensor([7])).tolist() == [[0.0] * 16]


@pytest.mark.parametrize("table_format", ["float32", "float16", "int8"])
def test_a_table_written_some_rows_at_a_time_is_the_file_that_safetensors_writes(
    table_format: TableFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_tables, "_BLOCK_BYTES", 7 * 4 * 5)
    weight_RD = torch.randn(37, 5, generator=torch.Generator().manual_seed(0))
    tensors = store_table("t", weight_RD, table_format).to_tensors()
    save_file(tensors, tmp_path / "whole", {"table": "t"})
    stored_tables.write_table(tmp_path / "parts", "t", weight_RD, table_format)
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()
    weight_RD[20, 1] = torch.inf
    assert "not finite in row 20:" in catch_message(
        NotFiniteError, stored_tables.write_table, tmp_path / "bad", "t", weight_RD, table_format
    )


def test_tables_that_a_format_cannot_hold_are_refused() -> None:
    weight_RD = torch.tensor([[1.0, 2.0], [3.0, 1e5]])
    assert catch_message(GMetaError, store_table, "item", weight_RD, "float16") == (
        "table item holds 100000: float16 ends at 65504. Export with --tables float32 or int8"
    )
    weight_RD[1, 0] = float("nan")
    assert catch_message(GMetaError, store_table, "item", weight_RD, "float32") == (
        "table item holds a value that is not finite in row 1: the run diverged. "
        "Export an earlier checkpoint with --step, or train with lower rates"
    )


def fail_halfway(partial: Path, out: Path) -> None:
    (partial / "half").write_text("x")
    assert not out.exists()
    raise GMetaError


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "new" / "model"
    with pytest.raises(GMetaError), new_folder(out, overwrite=False) as partial:
        fail_halfway(partial, out)
    assert list(out.parent.iterdir()) == []
    left = out.parent / ".model.partial" / "half"  # by a process that was killed
    left.parent.mkdir()
    left.touch()
    with new_folder(out, overwrite=False) as partial:
        (partial / "vocabulary").mkdir()
        (partial / "vocabulary" / "a").write_text("x")
    assert (out / "vocabulary" / "a").stat().st_mode & 0o777 == 0o644
    assert [path.name for path in out.parent.iterdir()] == ["model"]
    with pytest.raises(UserError) as caught, new_folder(out, overwrite=True):
        pass
    assert str(caught.value) == (
        f"{out} exists and is no exported model: a new folder is needed. Choose another place"
    )


MODEL = ModelConfig("melu", 8, hidden=(8,))
NARROW = ModelConfig("melu", 8, hidden=(8,), widths=("item=4", "tag=4"))
METAEMB = AlgorithmConfig(
    "metaemb", inner_steps=2, inner_lr=metaemb_rate("melu"), adapt_embeddings=("city",),
    options={"content": ("tags",)},
)  # fmt: skip


@pytest.mark.parametrize("algorithm", [AlgorithmConfig(inner_steps=2, inner_lr=0.3), METAEMB])
@pytest.mark.parametrize("table_format", ["float32", "int8"])
def test_narrow_tables_serve_what_their_projections_would(
    tmp_path: Path, table_format: TableFormat, algorithm: AlgorithmConfig
) -> None:
    narrow, wide = tmp_path / "narrow", tmp_path / "wide"
    write_random_model(narrow, table_format=table_format, algorithm=algorithm, model=NARROW)
    layers = load_file(narrow / LAYERS_FILE)
    projections = {
        name: layers.pop(f"projections.layers.{name}.weight").T for name in ("item", "tag")
    }
    tables = {}
    for index, table in enumerate(FEATURES.tables):
        stored = load_file(narrow / table_file(index))
        assert stored["values"].shape[1] == (4 if table.name in projections else 8)
        rows = stored["values"].float() * stored.get("scale", torch.ones(())).unsqueeze(-1)
        tables[table.name] = rows @ projections.get(table.name, torch.eye(8))
    wide.mkdir()
    config = replace(read_config(narrow), model=MODEL, table_format="float32", files={})
    write_model(wide, config, layers, tables.__getitem__)
    mine, other = gmeta.load(narrow), gmeta.load(wide)
    support, query = random_rows(9, seed=1), random_rows(7, seed=2)
    torch.testing.assert_close(mine.predict(query), other.predict(query), rtol=0, atol=1e-5)
    after = mine.adapt(support).predict(query)
    torch.testing.assert_close(after, other.adapt(support).predict(query), rtol=0, atol=1e-5)
    assert float((after - mine.predict(query)).abs().max()) > 1e-4
    # As of files, and where a version is judged.
    of_tasks = mine.predict_tasks(support, query)
    torch.testing.assert_close(of_tasks.after_N, after, rtol=0, atol=1e-5)
    torch.testing.assert_close(of_tasks.before_N, mine.predict(query), rtol=0, atol=1e-5)
