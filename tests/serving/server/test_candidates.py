"""Columns that are the same in all rows of a request are sent once, and several tasks in one
request: answers are those of the rows written out."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import torch

import gmeta
from gmeta.config.inputs import ItemFeaturesConfig, SupportFeaturesConfig
from gmeta.serving.server.inference_service import InferenceService
from gmeta.serving.server.server_limits import RequestLimits
from gmeta_models.inputs import RowInputs
from tests.metaio.prepare.test_local import changed
from tests.metaio.prepare.test_vectors import VECTORS, with_vectors
from tests.serving.formats.models import model_of
from tests.serving.server.serving import (
    INFER,
    post,
    service_of,
    tensor,
    tensors,
    values,
    with_client,
)
from tests.serving.server.test_grpc import infer, message
from tests.serving.server.test_grpc import values as grpc_values
from tests.serving.server.test_vectors import exported as exported_raw
from tests.serving.server.test_vectors import inputs_of
from tests.support.exported import random_rows

Inputs = list[dict[str, Any]]
NUM_CANDIDATES = 40
USER = ("city", "tags", "seen", "price")
SUPPORT = random_rows(9, seed=1)


def candidates(seed: int = 2, num_rows: int = NUM_CANDIDATES) -> tuple[Inputs, Inputs]:
    """The query inputs of one user's candidates: with each column once, and with all in full."""
    rows = random_rows(num_rows, seed).drop_columns(["user", "click"])
    user = rows.slice(0, 1)
    user = user.set_column(3, "seen", pa.array([[3, 3, 41]])).set_column(
        2, "tags", pa.array([[seed, 5]])
    )
    once = tensors(user.select(USER)) + tensors(rows.select(["item"]))
    full = {name: pa.concat_arrays(user[name].chunks * num_rows) for name in USER}
    return once, tensors(pa.table({"item": rows["item"], **full}))


def support_inputs() -> Inputs:
    return tensors(SUPPORT.drop_columns(["user"]), "support.")


def predict(service: InferenceService, inputs: Inputs, **more: Any) -> npt.NDArray[np.float32]:
    return values(post(service, {"inputs": inputs, **more}))


def equal_bits(found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> bool:
    assert len(np.unique(expected)) > 3  # candidates differ
    return found.tobytes() == expected.tobytes()


MODELS = ("dlrm", "dlrm cat", "din", "cbml", "deepfm", "mmoe", "a table left out")
STATISTICS: dict[str, dict[str, Any]] = {
    "support lists": {
        "support_features": SupportFeaturesConfig(columns=("tags",), label_prior=(0.5, 0.5))
    },
    "item lists": {"item_features": ItemFeaturesConfig(columns=("seen", "item"))},
}


@pytest.mark.parametrize("case", [*MODELS, *STATISTICS, "metaemb"])
def test_columns_of_one_row_are_those_of_all_candidates_to_the_bit(
    tmp_path: Path, case: str
) -> None:
    options = STATISTICS.get(case, {})
    algorithm = "metaemb" if case == "metaemb" else "maml"
    model_of(tmp_path / "model", case if case in MODELS else "dlrm", algorithm, **options)
    once, full = candidates()
    with service_of(tmp_path / "model") as service:
        for support in ([], support_inputs()):
            expected = predict(service, full + support)
            assert equal_bits(predict(service, once + support), expected)


def test_a_shared_list_is_pooled_once(
    service: InferenceService, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, pool = list[int](), RowInputs.pooled_NMD

    def record(inputs: RowInputs, mode: Any) -> torch.Tensor:
        seen.append(len(inputs.bag_values_VD))
        return pool(inputs, mode)

    monkeypatch.setattr(RowInputs, "pooled_NMD", record)
    once, full = candidates()
    for inputs in (once, full):
        predict(service, inputs)
    assert seen == [5, 5 * NUM_CANDIDATES]


@pytest.mark.parametrize("way", ["binary", "typed", "raw"])
def test_every_form_of_the_protocol_takes_them(service: InferenceService, way: str) -> None:
    once, full = candidates()
    expected = predict(service, full + support_inputs())
    inputs = once + support_inputs()
    if way != "binary":
        found = grpc_values(infer(service, message({"inputs": inputs}, raw=way == "raw")))
        assert equal_bits(found, expected)
        return
    behind = []
    for each in inputs:
        kind = np.float64 if each["datatype"] == "FP64" else np.int64
        behind.append(np.array(each.pop("data"), kind).tobytes())
        each["parameters"] = {"binary_data_size": len(behind[-1])}
    head = json.dumps({"inputs": inputs}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    answer = post(service, b"".join([head, *behind]), headers=headers)
    assert equal_bits(values(answer), expected)


def test_a_kept_task_and_support_rows_take_columns_of_one_row(service: InferenceService) -> None:
    once, full = candidates()
    rows = SUPPORT.drop_columns(["user"])
    user = rows.slice(0, 1).select(USER)
    columns = {name: pa.concat_arrays(user[name].chunks * 9) for name in USER}
    support = {
        "once": tensors(user, "support.") + tensors(rows.select(["item", "click"]), "support."),
        "full": tensors(
            pa.table({**columns, "item": rows["item"], "click": rows["click"]}), "support."
        ),
    }
    expected = predict(service, full + support["full"])
    assert equal_bits(predict(service, once + support["once"]), expected)
    key = {"parameters": {"task_key": "u"}}
    assert predict(service, support["once"], **key).size == 0
    assert equal_bits(predict(service, once, **key), expected)
    # Adapted anew, of what was kept.
    service._cache.forget_states("")
    assert equal_bits(predict(service, once, **key), expected)


def rows_with_vectors(num_rows: int) -> pa.Table:
    """Rows of test_vectors.py whose vectors are all known."""
    raw = with_vectors()
    return raw.filter(pa.compute.is_valid(raw["image"])).slice(0, num_rows)


def test_texts_vectors_and_split_texts_too(tmp_path: Path) -> None:
    raw, shared = rows_with_vectors(30), ("city", "tags", "age", "text")
    folder = exported_raw(tmp_path / "raw", with_vectors(), changed(**VECTORS))
    full, once = list[Inputs](), list[Inputs]()
    for user in (raw.slice(row, 1) for row in (0, 1, 7)):
        columns = {name: raw[name] for name in raw.column_names}
        columns |= {name: pa.concat_arrays(user[name].chunks * 30) for name in shared}
        full.append(inputs_of(pa.table(columns)))
        pairs = zip(full[-1], inputs_of(user), strict=True)
        once.append([own if own["name"] in shared else all_ for all_, own in pairs])

    async def call_all(client: httpx.AsyncClient) -> list[httpx.Response]:
        # In one batch: their texts, each of which stands once, meet in one column.
        calls = (client.post(INFER, content=json.dumps({"inputs": one})) for one in once)
        return await asyncio.gather(*calls)

    with service_of(folder) as service:
        alone = [predict(service, one) for one in full]
        assert all(map(equal_bits, [predict(service, one) for one in once], alone))
        for found, expected in zip(with_client(service, call_all), alone, strict=True):
            # Tasks of a batch are added up in another order.
            np.testing.assert_allclose(values(found), expected, rtol=0, atol=1e-6)


def test_several_tasks_of_a_request_are_as_many_requests(service: InferenceService) -> None:
    sizes, support_sizes = (3, 0, NUM_CANDIDATES, 2), (4, 2, 0, 3)
    rows = SUPPORT.drop_columns(["user"])
    ends = np.cumsum([0, *support_sizes])
    alone, inputs = [], list[Inputs]()
    for seed, size in enumerate(sizes):
        once, full = candidates(seed, size) if size else (candidates(seed, 1)[0], [])
        inputs.append(once)
        if size:
            own = rows.slice(ends[seed], support_sizes[seed])
            alone.append(
                predict(service, full + (tensors(own, "support.") if own.num_rows else []))
            )
    joined = [
        {**parts[0], "data": data, "shape": [len(data)]}
        for parts in zip(*inputs, strict=True)
        for data in [[value for part in parts for value in part["data"]]]
    ]
    # The item of the task without a candidate is left out.
    (item,) = (each for each in joined if each["name"] == "item")
    del item["data"][3]
    item["shape"] = [sum(sizes)]
    lengths = [
        tensor("task.lengths", "INT64", sizes),
        tensor("support.task.lengths", "INT64", support_sizes),
    ]
    found = predict(service, joined + lengths + tensors(rows, "support."))
    # Tasks stand in one product: their sums are added up in another order.
    np.testing.assert_allclose(found, np.concatenate(alone), rtol=0, atol=1e-6)
    again = predict(service, [*joined, lengths[0]])
    assert np.abs(again - found).max() > 1e-3  # support rows matter


def refusal(service: InferenceService, inputs: Inputs, status: int = 400, **more: Any) -> str:
    answer = post(service, {"inputs": inputs, **more})
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"])


def test_what_does_not_fit_is_refused_in_a_line(service: InferenceService) -> None:
    once, _ = candidates()
    item = next(each for each in once if each["name"] == "item")
    others = [each for each in once if each["name"] not in ("item", "city")]
    assert refusal(service, [*others, item, tensor("city", "INT64", [1, 2])]).endswith(
        "each needs all 40 rows, or 1 that is the same in all of them. Correct city"
    )
    lengths = tensor("task.lengths", "INT64", [1, 39])
    assert refusal(service, [*once, lengths], parameters={"task_key": "u"}) == (
        "task.lengths is of 2 tasks, and parameter task_key of one. Leave it out, or send a "
        "request for each task"
    )
    assert refusal(service, [*once, lengths, *support_inputs()]).startswith(
        "one of task.lengths and support.task.lengths is missing: "
    )
    of_three = tensor("support.task.lengths", "INT64", [3, 3, 3])
    assert refusal(service, [*once, lengths, *support_inputs(), of_three]).startswith(
        "support.task.lengths and task.lengths are of 3 and 2 tasks; both need the same"
    )
    assert refusal(service, [*once, tensor("task.lengths", "INT64", [1, 3, 40])]).endswith(
        "each needs all 44 rows, or 1 that is the same in all of them, or 3, one for each task. "
        "Correct item"
    )
    two = candidates(num_rows=2)[0]
    assert refusal(service, [*two, tensor("task.lengths", "INT64", [2, 0])]).startswith(
        "task.lengths has 2 tasks of 2 rows, some of them without a row: "
    )
    assert "holds -1; from 0 on" in refusal(
        service, [*two, tensor("task.lengths", "INT64", [3, -1])]
    )
    huge = tensor("task.lengths", "INT64", [2**62] * 4)
    assert "at most 10000 are allowed" in refusal(service, [*two, huge], 413)
    empty = [0] * 10_001
    assert "10001 rows" in refusal(service, [*two, tensor("task.lengths", "INT64", empty)], 413)


def test_no_short_request_becomes_a_huge_one(exported: Path) -> None:
    _, full = candidates()
    support = {each["name"]: each for each in support_inputs()}
    support["support.seen"] = tensor("support.seen", "INT64", [1] * 500)
    support["support.seen.lengths"] = tensor("support.seen.lengths", "INT64", [500])
    with service_of(exported, limits=RequestLimits(body_bytes=4_400)) as service:
        inputs = full[:1], list(support.values())
        with_limits = json.dumps({"inputs": inputs[1]})
        assert len(with_limits) < 4_400
        assert refusal(service, inputs[1], parameters={"task_key": "u"}) == (
            "columns of one row, written out for all rows, have 4500 values; at most 4400 are "
            "allowed, as --max-body. Send shorter lists, or split the request"
        )


def test_inputs_that_are_no_columns_are_ignored_by_choice(exported: Path) -> None:
    once, full = candidates()
    extra = [
        tensor("feature_store_time", "INT64", [7, 8, 9]),
        tensor("support.embedding", "FP32", [0.5]),
        tensor("embedding.lengths", "INT64", [1]),
    ]
    with service_of(exported) as service:
        expected = predict(service, full + support_inputs())
        assert "is no column of this model" in refusal(service, once + extra)
    with service_of(exported, limits=RequestLimits(ignores_extra=True)) as service:
        assert equal_bits(predict(service, once + support_inputs() + extra), expected)
        # What the model needs is still needed, and its own columns are still checked.
        missing = [{**each, "name": "itme"} if each["name"] == "item" else each for each in once]
        assert "query rows have no column item" in refusal(service, missing)


@pytest.mark.parametrize("way", ["typed", "raw", "json"])
def test_a_mask_makes_nulls_where_a_form_has_none(tmp_path: Path, way: str) -> None:
    folder = exported_raw(tmp_path / "raw", with_vectors(), changed(**VECTORS))
    raw = rows_with_vectors(4)
    ages = raw["age"].to_pylist()
    known = [age is not None and at != 2 for at, age in enumerate(ages)]
    nulls = pa.array([age if there else None for age, there in zip(ages, known, strict=True)])
    place = raw.schema.get_field_index("age")
    expected = gmeta.load(folder).predict(raw.set_column(place, "age", nulls)).numpy()
    mask = tensor("age.mask", "BOOL", known)
    inputs = inputs_of(raw)
    (age,) = (each for each in inputs if each["name"] == "age")
    age["data"] = [value if there else -7.0 for value, there in zip(ages, known, strict=True)]
    with service_of(folder) as service:
        if way == "json":
            found = predict(service, [*inputs, mask])
        else:
            request = message({"inputs": []})
            for each in [*inputs, mask]:
                kind, data = each["datatype"], each["data"]
                added = request.inputs.add(name=each["name"], datatype=kind, shape=each["shape"])
                if way == "raw":
                    request.raw_input_contents.append(raw_content(kind, data))
                    continue
                fields = {"INT64": "int64_contents", "FP32": "fp32_contents"}
                fields |= {"BOOL": "bool_contents", "BYTES": "bytes_contents"}
                texts = [(value or "").encode() for value in data] if kind == "BYTES" else data
                getattr(added.contents, fields[kind]).extend(texts)
            found = grpc_values(infer(service, request))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
        short = tensor("age.mask", "BOOL", known[:3])
        assert refusal(service, [*inputs, short]) == (
            "input age.mask has 3 elements of bool; age needs 4 of BOOL, false where it is null. "
            "Correct it"
        )


def raw_content(kind: str, data: list[Any]) -> bytes:
    if kind == "BYTES":
        encoded = [(value or "").encode() for value in data]
        return b"".join(len(each).to_bytes(4, "little") + each for each in encoded)
    kinds: dict[str, Any] = {"INT64": np.int64, "FP32": np.float32, "BOOL": np.bool_}
    return np.array(data, kinds[kind]).tobytes()
