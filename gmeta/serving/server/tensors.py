"""Tensors of the Open Inference Protocol to Arrow arrays, from JSON, raw bytes and typed fields,
row by row. BYTES holds UTF-8 text: no model of ours reads anything else."""

import math
import struct
from collections.abc import Iterable, Sequence
from itertools import chain
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gmeta.serving.server.request_errors import abbreviate, bad_request

_INTEGERS = {
    f"{sign}{bits}": np.dtype(f"{sign.lower()}{bits}")
    for sign in ("INT", "UINT")
    for bits in (8, 16, 32, 64)
}
_FLOATS = {"FP16": np.float16, "FP32": np.float32, "FP64": np.float64}
_NUMBERS: dict[str, Any] = {"BOOL": np.bool_, **_INTEGERS, **_FLOATS}
DATATYPES = (*_NUMBERS, "BYTES")
MAX_NAME_CHARS = 1024
MAX_DIMENSION = 2**31 - 1
# In front of a column's name: an input of support rows; behind it: one that says more of it.
SUPPORT, LENGTHS, MASK = "support.", ".lengths", ".mask"
EVENTS = "events."  # in front of an event's
TASK_LENGTHS = f"task{LENGTHS}"
# What JSON may hold for a datatype; null stands for an unknown value where the model allows one.
_PYTHON_TYPES: dict[str, set[type]] = {
    "BOOL": {bool, NoneType},
    "BYTES": {str, NoneType},
    **{name: {int, NoneType} for name in _INTEGERS},
    **{name: {int, float, NoneType} for name in _FLOATS},
}
# Lists of these types alone NumPy reads as Arrow does, in two thirds of the time.
_QUICK_TYPES = {**{name: {int} for name in _INTEGERS}, "FP64": {float}}
# The field of InferTensorContents for a datatype; 16-bit floats have none.
_TYPED_FIELDS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


class Tensor(NamedTuple):
    """One input: a name, a shape and its elements row by row."""

    name: str
    shape: tuple[int, ...]
    values: pa.Array


def check_head(name: object, datatype: object, shape: object) -> tuple[str, str, tuple[int, ...]]:
    """Return a tensor's name, datatype and shape, checked. Raise RequestError."""
    if not isinstance(name, str) or not name:
        raise bad_request(
            f"an input's name is {abbreviate(name)}; a text is needed. Name the column"
        )
    # Before anything looks for a column that is near it.
    if len(name) > MAX_NAME_CHARS:
        raise bad_request(
            f"input {abbreviate(name)}... has a name of {len(name)} characters; at most "
            f"{MAX_NAME_CHARS} are allowed. Name the column"
        )
    if not isinstance(datatype, str) or datatype not in _PYTHON_TYPES:
        raise bad_request(
            f"input {abbreviate(name)} has datatype {abbreviate(datatype)}; allowed are "
            f"{', '.join(DATATYPES)}. Correct it"
        )
    is_shape = isinstance(shape, list | tuple) and 1 <= len(shape) <= 2
    for size in shape if is_shape else [None]:  # type: ignore[attr-defined]
        # Not isinstance: JSON's true would be a size of 1.
        if type(size) is int and 0 <= size <= MAX_DIMENSION:
            continue
        raise bad_request(
            f"input {abbreviate(name)} has shape {abbreviate(shape)}; allowed are [N] and [N, M] "
            "with sizes from 0 on. Correct it"
        )
    return name, datatype, tuple(shape)  # type: ignore[arg-type]


def tensor_from_json(name: str, datatype: str, shape: tuple[int, ...], data: object) -> Tensor:
    """Return a tensor whose elements came as JSON, in one list or in one for each row."""
    if not isinstance(data, list):
        raise bad_request(
            f"input {abbreviate(name)} has data {abbreviate(data)}; a list of its elements is "
            "needed"
        )
    if len(shape) == 2 and data and isinstance(data[0], list):
        if any(not isinstance(row, list) or len(row) != shape[1] for row in data):
            raise bad_request(
                f"input {abbreviate(name)} has shape {list(shape)}, but a row of its data has not "
                f"{shape[1]} elements. Correct the shape or the data"
            )
        data = list(chain.from_iterable(data))
    _check_count(name, shape, len(data))
    # The types of all elements at once: far fewer steps of Python than a check of each.
    kinds = set(map(type, data))
    if not kinds <= _PYTHON_TYPES[datatype]:
        wrong = kinds - _PYTHON_TYPES[datatype]
        wrong_value = next(value for value in data if type(value) in wrong)
        raise bad_request(
            f"input {abbreviate(name)} of datatype {datatype} holds {abbreviate(wrong_value)}, "
            "which is not of it. Send values of the datatype, or name another one"
        )
    return Tensor(name, shape, _json_array(name, datatype, data, kinds))


def _json_array(name: str, datatype: str, data: Sequence[Any], kinds: set[type]) -> pa.Array:
    try:
        if kinds == _QUICK_TYPES.get(datatype):
            return pa.array(np.array(data, _NUMBERS[datatype]))
        kind = pa.string() if datatype == "BYTES" else pa.from_numpy_dtype(_NUMBERS[datatype])
        if datatype == "FP16":
            with np.errstate(over="ignore"):  # becomes infinite, which is refused later
                # Arrow makes 16-bit floats of NumPy's scalars alone.
                data = [None if value is None else np.float16(value) for value in data]
        return pa.array(data, kind)
    except (pa.ArrowException, OverflowError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise bad_request(
            f"input {abbreviate(name)} cannot be read as {datatype}: {reason}"
        ) from error


def tensor_from_raw(name: str, datatype: str, shape: tuple[int, ...], content: bytes) -> Tensor:
    """Return a tensor of little-endian numbers, or of BYTES each behind its length."""
    if datatype == "BYTES":
        texts = _split_raw_texts(name, content)
        _check_count(name, shape, len(texts))
        return Tensor(name, shape, _decode_texts(name, texts))
    dtype = np.dtype(_NUMBERS[datatype]).newbyteorder("<")
    num_bytes = math.prod(shape) * dtype.itemsize
    # Also what keeps a large shape from asking for memory that no byte stands for.
    if len(content) != num_bytes:
        raise bad_request(
            f"input {abbreviate(name)} of datatype {datatype} and shape {list(shape)} has "
            f"{len(content)} bytes; {num_bytes} are needed. Correct the shape or the data"
        )
    values = np.frombuffer(content, np.uint8 if datatype == "BOOL" else dtype)
    if datatype == "BOOL":
        values = values != 0
    # Arrow takes the machine's own byte order alone.
    return Tensor(name, shape, pa.array(values.astype(values.dtype.newbyteorder("="))))


def _split_raw_texts(name: str, content: bytes) -> list[bytes]:
    texts, place = [], 0
    while place < len(content):
        stop = place + 4
        if stop <= len(content):
            stop += struct.unpack_from("<I", content, place)[0]
        # The length is the caller's: it may point behind the content.
        if stop > len(content) or stop < place + 4:
            raise bad_request(
                f"input {abbreviate(name)} ends within an element of its BYTES: each stands "
                "behind its length in 4 bytes, little-endian. Correct the data"
            )
        texts.append(content[place + 4 : stop])
        place = stop
    return texts


def tensor_from_typed(name: str, datatype: str, shape: tuple[int, ...], contents: Any) -> Tensor:
    """Return a tensor whose elements stand in a field of gRPC's InferTensorContents."""
    field = _TYPED_FIELDS.get(datatype)
    others = [each.name for each, _ in contents.ListFields() if each.name != field]
    if field is None or others:
        raise bad_request(
            f"input {abbreviate(name)} of datatype {datatype} has its elements in "
            f"{', '.join(others) or 'no field of contents'}; they belong in "
            f"{field or 'raw_input_contents'}. Move them"
        )
    data = getattr(contents, field)
    _check_count(name, shape, len(data))
    if datatype == "BYTES":
        return Tensor(name, shape, _decode_texts(name, data))
    dtype = np.dtype(_NUMBERS[datatype])
    if dtype.kind in "iu" and len(data):
        # Narrow integers travel in 32 bits.
        limits = np.iinfo(dtype)
        outside = next((value for value in data if not limits.min <= value <= limits.max), None)
        if outside is not None:
            raise bad_request(
                f"input {abbreviate(name)} of datatype {datatype} holds {outside}. Correct it"
            )
    return Tensor(name, shape, pa.array(np.fromiter(data, dtype, len(data))))


def _decode_texts(name: str, values: Iterable[bytes]) -> pa.Array:
    try:
        return pa.array([value.decode() for value in values], pa.string())
    except UnicodeDecodeError as error:
        raise bad_request(
            f"input {abbreviate(name)} has an element of BYTES that is no UTF-8; text is needed. "
            "Encode it as UTF-8"
        ) from error


def _check_count(name: str, shape: tuple[int, ...], count: int) -> None:
    if count != math.prod(shape):
        raise bad_request(
            f"input {abbreviate(name)} has shape {list(shape)} and {count} elements; "
            f"{math.prod(shape)} are needed. Correct the shape or the data"
        )


def raw_bytes(values: npt.NDArray[Any]) -> bytes:
    """Return an output's elements as the binary forms of the protocol carry them."""
    return values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
