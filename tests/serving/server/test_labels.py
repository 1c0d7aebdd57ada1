"""Every label of a model is an output with its name: over HTTP and gRPC, in files, and as told."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest

import gmeta
from gmeta.errors import UserError
from gmeta.serving.exported_folder import read_config
from gmeta.serving.server.inference_service import InferenceService
from gmeta.serving.server.version_loader import load_version
from gmeta.serving.server.versions import check_successor
from gmeta_protos.inference.v2 import open_inference_pb2 as pb
from tests.serving.server.serving import get, post, running_server, service_of, tensor
from tests.serving.server.test_grpc import infer, message, with_stub
from tests.support.browser import needs_browser, open_browser
from tests.support.commands import gmeta as command
from tests.support.commands import succeed

LABELS, LOSSES = ("click", "buy", "stars"), ("bce", "bce", "mse")
NAMES = [f"prediction_{label}" for label in LABELS]
BEFORE = [f"prediction_before_{label}" for label in LABELS]


@pytest.fixture(scope="module")
def exported(labelled: Path) -> Path:
    out = labelled / "model"
    succeed("export", labelled / "run", out)
    return out


@pytest.fixture
def service(exported: Path) -> Iterator[InferenceService]:
    with service_of(exported) as found:
        yield found


@pytest.fixture(scope="module")
def rows(labelled: Path) -> tuple[pa.Table, pa.Table]:
    """Support and query rows of one user."""
    table = pc.read_csv(labelled / "log.csv").slice(0, 12)
    return table.slice(0, 8), table.slice(8).drop_columns(["click", "bought", "stars"])


def request_of(rows: tuple[pa.Table, pa.Table], outputs: list[str]) -> dict[str, Any]:
    inputs = [
        tensor(f"{prefix}{name}", "FP64" if name in ("price", "stars") else "INT64", values)
        for prefix, side in zip(("support.", ""), rows, strict=True)
        for name, values in side.drop_columns(["user"]).to_pydict().items()
    ]
    return {"inputs": inputs, "outputs": [{"name": name} for name in outputs]}


def test_each_label_is_an_output_of_its_own(
    service: InferenceService, exported: Path, rows: tuple[pa.Table, pa.Table]
) -> None:
    model = gmeta.load(exported)
    expected_NL = model.adapt(rows[0]).predict(rows[1]).numpy()
    before_NL = model.predict(rows[1]).numpy()
    answer = post(service, request_of(rows, []))
    assert answer.status_code == 200, answer.text
    found = {one["name"]: one for one in answer.json()["outputs"]}
    assert list(found) == NAMES
    for at, name in enumerate(NAMES):
        assert found[name]["shape"] == [4]
        np.testing.assert_allclose(found[name]["data"], expected_NL[:, at], rtol=0, atol=1e-6)
    asked = ["prediction_before_stars", "prediction_buy"]
    for way in ("json", "binary"):
        request = request_of(rows, asked)
        if way == "binary":
            request["parameters"] = {"binary_data_output": True}
        answer = post(service, request)
        if way == "binary":
            size = int(answer.headers["inference-header-content-length"])
            told = json.loads(answer.content[:size])["outputs"]
            values = np.frombuffer(answer.content[size:], np.float32).reshape(2, 4)
        else:
            told = answer.json()["outputs"]
            values = np.array([one["data"] for one in told])
        assert [one["name"] for one in told] == asked
        np.testing.assert_allclose(values, [before_NL[:, 2], expected_NL[:, 1]], atol=1e-6)
    refused = post(service, request_of(rows, ["prediction"]))
    assert refused.json() == {
        "error": "output 'prediction' is unknown; there are "
        f"{', '.join(NAMES + BEFORE)}. Correct it"
    }


def test_grpc_has_the_same_outputs_and_metadata(
    service: InferenceService, rows: tuple[pa.Table, pa.Table]
) -> None:
    support = rows[0].set_column(6, "stars", pa.array([3.0] * 8))  # typed fields have no null
    request = request_of((support, rows[1]), [])
    with service_of(service.config.folder) as served:
        by_http = [one["data"] for one in post(served, request).json()["outputs"]]
        request = {**request, "outputs": []}
        found = infer(served, message(request))
        assert [one.name for one in found.outputs] == NAMES
        by_grpc = [np.frombuffer(raw, np.float32) for raw in found.raw_output_contents]
        np.testing.assert_allclose(by_grpc, by_http, rtol=0, atol=1e-6)
        metadata = with_stub(
            served, lambda stub: stub.ModelMetadata(pb.ModelMetadataRequest(name="model"))
        )
    told = [(one.name, list(one.shape)) for one in metadata.outputs]
    assert told == [(name, [-1]) for name in NAMES + BEFORE]


def test_metadata_and_page_tell_every_label_and_its_loss(service: InferenceService) -> None:
    outputs = get(service, "/v2/models/model").json()["outputs"]
    expected = [
        {"name": name, "datatype": "FP32", "shape": [-1],
         "parameters": {"label": label, "loss": loss}}
        for name, label, loss in zip(NAMES + BEFORE, 2 * LABELS, 2 * LOSSES, strict=True)
    ]  # fmt: skip
    assert outputs == expected
    page = get(service, "/docs").text
    for name, loss in zip(NAMES, LOSSES, strict=True):
        assert f'"name": "{name}"' in page.replace('":"', '": "')
        assert f'"loss": "{loss}"' in page.replace('":"', '": "')


@needs_browser
def test_the_page_ranks_by_the_label_that_is_chosen(exported: Path) -> None:
    model = gmeta.load(exported)
    items = list(range(1, 11))
    rows = {"item": items, "shop": [6] * 10, "price": [1.5] * 10}
    labels = {"click": [1.0], "bought": [1.0], "stars": [5.0]}
    after_NL = model.adapt({name: values[4:5] for name, values in rows.items()} | labels)
    scores_NL = after_NL.predict(rows).numpy()
    with running_server(exported, "--name", "model") as server, open_browser() as page:
        page.open(f"http://127.0.0.1:{server.port}/")
        page.wait_for("#outcome.good", "not adapted")
        assert page.texts("#labels button") == list(LABELS)
        page.click("[aria-label='like 5']")
        page.wait_for("#moved", "Adapted to 1 support row:")
        for at in (2, 1, 0):
            page.click(f"#labels button:nth-child({at + 1})")
            assert page.texts("#labels [aria-pressed=true]") == [LABELS[at]]
            order = sorted(items, key=lambda item, at=at: -scores_NL[item - 1, at])
            assert page.texts("#ranking .name") == [str(item) for item in order]
            ends = [text.split(" to ")[-1] for text in page.texts("#ranking .scores")]
            assert ends == [f"{scores_NL[item - 1, at]:.4f}" for item in order]
        assert page.faults() == []


def test_files_and_inspect_name_every_label(
    labelled: Path, exported: Path, rows: tuple[pa.Table, pa.Table], tmp_path: Path
) -> None:
    for name, side in zip(("support", "query"), rows, strict=True):
        pq.write_table(side, tmp_path / f"{name}.parquet")
    files = [tmp_path / f"{name}.parquet" for name in ("support", "query", "out")]
    succeed("predict", exported, *files[:2], "--out", files[2])
    found = pq.read_table(files[2])
    assert found.column_names[-7:] == [*NAMES, *BEFORE, "support_rows"]
    expected_NL = gmeta.load(exported).adapt(rows[0]).predict(rows[1]).numpy()
    for at, name in enumerate(NAMES):
        np.testing.assert_allclose(found[name].to_numpy(), expected_NL[:, at], atol=1e-6)
    told = command("inspect", exported).stdout
    head = "predicts click (bce), buy (bce, among click), stars (mse), judged by buy; step 10"
    assert head in " ".join(told.split())
    told = json.loads(command("inspect", exported, "--json").stdout)
    assert (told["loss"], told["losses"]) == ("bce", dict(zip(LABELS, LOSSES, strict=True)))


def test_a_version_of_labels_in_another_order_is_refused(exported: Path, tmp_path: Path) -> None:
    """A request that waits while it comes would be answered with another label's values."""
    before = load_version(exported)
    config = read_config(exported)
    assert config.columns.schema is not None
    names = config.features.labels
    turned = replace(config.features, labels=(names[1], names[0], *names[2:]))
    with pytest.raises(UserError, match="version next has another order of labels than version"):
        check_successor(before, replace(config, features=turned), "next")
