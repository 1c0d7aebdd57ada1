"""Tensors of the protocol: what goes in comes out, and what is wrong is told in a line."""

import re
import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gmeta.serving.server.request_errors import RequestError
from gmeta.serving.server.tensors import (
    DATATYPES,
    check_head,
    raw_bytes,
    tensor_from_json,
    tensor_from_raw,
    tensor_from_typed,
)
from gmeta_protos.inference.v2 import open_inference_pb2 as pb

NUMBERS = {
    "BOOL": (np.bool_, [True, False]), "INT8": (np.int8, [-128, 127]),
    "INT16": (np.int16, [-(2**15), 7]), "INT32": (np.int32, [-(2**31), 7]),
    "INT64": (np.int64, [-(2**63), 2**63 - 1]), "UINT8": (np.uint8, [0, 255]),
    "UINT16": (np.uint16, [0, 2**16 - 1]), "UINT32": (np.uint32, [0, 2**32 - 1]),
    "UINT64": (np.uint64, [0, 2**64 - 1]), "FP16": (np.float16, [0.5, -2.0]),
    "FP32": (np.float32, [0.5, -2.0]), "FP64": (np.float64, [0.1, -2.0]),
}  # fmt: skip
FIELDS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents",
    "INT32": "int_contents", "INT64": "int64_contents", "UINT8": "uint_contents",
    "UINT16": "uint_contents", "UINT32": "uint_contents", "UINT64": "uint64_contents",
    "FP32": "fp32_contents", "FP64": "fp64_contents",
}  # fmt: skip


def test_every_datatype_has_its_test() -> None:
    assert {*NUMBERS, "BYTES"} == set(DATATYPES)


@pytest.mark.parametrize("datatype", NUMBERS)
def test_numbers_come_as_json_as_bytes_and_typed(datatype: str) -> None:
    dtype, values = NUMBERS[datatype]
    expected = pa.array(np.array(values, dtype))
    assert tensor_from_json("x", datatype, (2,), values).values.equals(expected)
    assert tensor_from_json("x", datatype, (2, 1), [[value] for value in values]).values.equals(
        expected
    )
    raw = raw_bytes(np.array(values, dtype))
    assert tensor_from_raw("x", datatype, (2,), raw).values.equals(expected)
    if datatype in FIELDS:
        contents = pb.InferTensorContents(**{FIELDS[datatype]: values})
        assert tensor_from_typed("x", datatype, (2,), contents).values.equals(expected)


def test_text_comes_as_json_as_bytes_and_typed() -> None:
    texts = ["", "käse", "a" * 300]
    expected = pa.array(texts)
    assert tensor_from_json("x", "BYTES", (3,), texts).values.equals(expected)
    encoded = [text.encode() for text in texts]
    raw = b"".join(struct.pack("<I", len(each)) + each for each in encoded)
    assert tensor_from_raw("x", "BYTES", (3, 1), raw).values.equals(expected)
    contents = pb.InferTensorContents(bytes_contents=encoded)
    assert tensor_from_typed("x", "BYTES", (3,), contents).values.equals(expected)


def test_null_is_left_to_the_columns() -> None:
    assert tensor_from_json("x", "INT64", (2,), [None, 3]).values.null_count == 1


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "told"),
    [
        ("INT64", (1,), [1.5], "input 'x' of datatype INT64 holds 1.5, which is not of it"),
        ("FP32", (1,), ["1"], "input 'x' of datatype FP32 holds '1', which is not of it"),
        ("INT64", (3,), [1, 2], "input 'x' has shape [3] and 2 elements; 3 are needed"),
        ("INT64", (2, 2), [[1, 2], [3]], "but a row of its data has not 2 elements"),
        ("INT8", (1,), [300], "input 'x' cannot be read as INT8: Python integer 300"),
        ("INT64", (1,), [2**70], "input 'x' cannot be read as INT64: Python int too large"),
        ("BYTES", (1,), ["\ud800"], "input 'x' cannot be read as BYTES: 'utf-8' codec"),
    ],
)
def test_other_json_is_refused(datatype: str, shape: tuple[int, ...], data: Any, told: str) -> None:
    with pytest.raises(RequestError, match=re.escape(told)) as caught:
        tensor_from_json("x", datatype, shape, data)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("datatype", "shape", "content", "told"),
    [
        ("INT64", (2,), b"12345678", "has 8 bytes; 16 are needed"),
        ("FP32", (2**31 - 1, 2**31 - 1), b"", "has 0 bytes; 18446744056529682436 are needed"),
        ("BYTES", (1,), b"\x05\x00\x00\x00abc", "ends within an element of its BYTES"),
    ],
)
def test_bytes_that_do_not_fit_are_refused(
    datatype: str, shape: tuple[int, ...], content: bytes, told: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(told)):
        tensor_from_raw("x", datatype, shape, content)


def test_typed_contents_belong_in_the_field_of_their_datatype() -> None:
    contents = pb.InferTensorContents(fp32_contents=[1.0])
    with pytest.raises(RequestError, match="has its elements in fp32_contents; they belong in"):
        tensor_from_typed("x", "INT64", (1,), contents)
    with pytest.raises(RequestError, match="they belong in raw_input_contents"):
        tensor_from_typed("x", "FP16", (1,), contents)
    with pytest.raises(RequestError, match="input 'x' of datatype INT8 holds 300"):
        tensor_from_typed("x", "INT8", (1,), pb.InferTensorContents(int_contents=[300]))


@pytest.mark.parametrize(
    ("head", "told"),
    [
        ((None, "INT64", [1]), "an input's name is None; a text is needed"),
        (("x", ["INT64"], [1]), "input 'x' has datatype ['INT64']; allowed are BOOL, INT8"),
        (("x", "INT64", [True]), "input 'x' has shape [True]; allowed are [N] and [N, M]"),
        (("x", "INT64", [1, 1, 1]), "input 'x' has shape [1, 1, 1]; allowed are [N] and [N, M]"),
    ],
)
def test_a_head_is_checked(head: tuple[Any, Any, Any], told: str) -> None:
    with pytest.raises(RequestError, match=re.escape(told)):
        check_head(*head)


def test_what_a_caller_wrote_is_told_in_one_line() -> None:
    with pytest.raises(RequestError) as caught:
        check_head("x\n\x1b[31m" + "y" * 500, "NONE\nSUCH", [1])
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 300
