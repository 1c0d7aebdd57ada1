"""A task's state as bytes, for a feature store or a cache: a header of 24 bytes, then safetensors.

Nothing in the bytes is run, and each tensor is checked: the bytes may come from anybody.

Shape suffixes: T tasks, N rows, S support rows, F single-id or pooled features, M multi-id
features, V values, K dense columns, D embedding width, P task-row pairs, I inputs, O outputs, J
parts of a gate"""

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor

from gmeta.adaptation.plain_update import LowRankUpdate, MaterialisedUpdate, PlainUpdate
from gmeta.errors import UserError
from gmeta.serving.encoded_rows import EncodedColumns, labels_shape
from gmeta.serving.row_translation import RowTranslation
from gmeta.serving.task_states import TaskState
from metaio.format.block import find_features_of_values
from metaio.format.features import Features

MAGIC = b"GMETATS"
VERSION, RENEWABLE_VERSION = 1, 2  # the latter carries support rows
_HEADER = struct.Struct("<7sB8s8s")  # magic, version, the model's checksum, that of the rest
_CHECKSUM_BYTES = 8
_CHANGE, _GATE, _SUPPORT = "change", "gate", "support"
_RENEWAL = "renewal"
_MOST_RENEWAL_BYTES = 64 << 20  # of unpacked support rows
_ROWS, _KEYS = "rows", "keys"
_REMEDY = "Adapt the task anew by its support rows"
_Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class StateShape:
    """What the states of a model hold, as far as bytes can be checked against it."""

    # The widths (I, O) of each layer that may adapt.
    layers: Mapping[str, tuple[int, int]]
    # The gates of a task of which nothing is known: any other task has the same shapes.
    gates_1JO: Mapping[str, Tensor]
    width: int
    # Rows of all tables together.
    num_keys: int
    features: Features
    keeps_support: bool


def to_bytes(state: TaskState, model_checksum: str, renewal: bytes = b"") -> bytes:
    """Return a state as bytes, tied to the exported model with this checksum (hexadecimal);
    `renewal` (pack_rows) makes it one that other versions renew."""
    arrays = _to_arrays(state)
    if renewal:
        arrays[_RENEWAL] = np.frombuffer(renewal, np.uint8)
    payload: bytes = save(arrays)
    version = RENEWABLE_VERSION if renewal else VERSION
    # The checksum covers the fields before it as well as the rest.
    before = _HEADER.pack(MAGIC, version, bytes.fromhex(model_checksum), b"")[:-_CHECKSUM_BYTES]
    return before + _checksum(before, payload) + payload


def pack_rows(rows: EncodedColumns, translation: RowTranslation) -> bytes:
    """Return support rows as a state carries them."""
    arrays = {name: np.ascontiguousarray(one) for name, one in translation.to_common(rows).items()}
    # Most columns of a task are its own, the same in all rows: packed, they cost next to nothing.
    return bytes.fromhex(translation.name) + zlib.compress(save(arrays), 1)


def _unpack_rows(
    packed: bytes, translation: RowTranslation, shape: StateShape
) -> EncodedColumns | None:
    """Return the rows, or None where they are of other columns."""
    name_bytes = len(translation.name) // 2
    if packed[:name_bytes].hex() != translation.name:
        return None
    unpacking = zlib.decompressobj()
    content = unpacking.decompress(packed[name_bytes:], _MOST_RENEWAL_BYTES)
    if unpacking.unconsumed_tail:
        raise ValueError(f"its support rows take more than {_MOST_RENEWAL_BYTES} bytes")
    rows = translation.from_common(load(content))
    _check_rows(rows, shape.features)
    if not rows.num_rows:
        raise ValueError("it has 0 support rows")
    return rows


def is_renewable(content: bytes) -> bool:
    """Return whether a state carries support rows."""
    return content[len(MAGIC) : len(MAGIC) + 1] == bytes([RENEWABLE_VERSION])


def from_bytes(
    content: object,
    model_checksum: str,
    shape: StateShape,
    translation: RowTranslation,
    renews: bool = False,
) -> TaskState | EncodedColumns:
    """Return the state in what `to_bytes` returned, bit for bit; of another version's state, or if
    it `renews` any, the support rows that it carries, to adapt anew by."""
    if not isinstance(content, bytes | bytearray | memoryview):
        raise UserError(
            f"a task's state is of type {type(content).__name__}; bytes are needed. Give what "
            "task.state() returned"
        )
    content = bytes(content)
    if len(content) < _HEADER.size or not content.startswith(MAGIC):
        raise UserError(
            f"a task's state begins with {content[:8]!r} and has {len(content)} bytes: it is none. "
            "Give what task.state() returned"
        )
    _, version, model, checksum = _HEADER.unpack_from(content)
    if version not in (VERSION, RENEWABLE_VERSION):
        raise UserError(
            f"a task's state has format version {version}; this release reads versions {VERSION} "
            f"and {RENEWABLE_VERSION}. {_REMEDY}, or read it with the release that wrote it"
        )
    payload = content[_HEADER.size :]
    # Before the model's name: of altered bytes nothing is to be believed.
    if checksum != _checksum(content[: _HEADER.size - _CHECKSUM_BYTES], payload):
        raise UserError(
            f"a task's state of {len(content)} bytes does not match its checksum: it was cut short "
            f"or altered. {_REMEDY}"
        )
    rows, is_own = None, model.hex() == model_checksum and not renews
    try:
        if is_own or version == RENEWABLE_VERSION:
            arrays = load(payload)
            renewal = arrays.pop(_RENEWAL, np.zeros(0, np.uint8))
            if is_own:
                return _to_state(arrays, shape)
            rows = _unpack_rows(renewal.tobytes(), translation, shape)
    except (
        SafetensorError,
        ValueError,
        LookupError,
        TypeError,
        OverflowError,
        zlib.error,
    ) as error:
        # The checksum held, but whoever can write the bytes can make it hold.
        raise UserError(
            f"a task's state holds what this model cannot take ({error!s:.200}). {_REMEDY}"
        ) from error
    if rows is not None:
        return rows
    carried = "support rows of other columns" if version == RENEWABLE_VERSION else "no support rows"
    raise UserError(
        f"a task's state is of the exported model {model.hex()}; this one is {model_checksum}, and "
        f"it carries {carried}. {_REMEDY}, or load the model that it was adapted with"
    )


def _checksum(before: bytes, payload: bytes) -> bytes:
    hashed = xxhash.xxh3_64(before)
    hashed.update(payload)
    return hashed.digest()


def _to_arrays(state: TaskState) -> dict[str, npt.NDArray[Any]]:
    tensors = {_ROWS: state.rows_PD, _KEYS: state.key_P}
    tensors |= {f"{_GATE}/{name}": gate_1JO for name, gate_1JO in state.gates_1JO.items()}
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, change in state.changes.items():
        for part, value in vars(change).items():
            if isinstance(value, Tensor):
                tensors[f"{_CHANGE}/{name}/{part}"] = value
            else:
                # A bias's rate, a float of Python: 64 bits bring it back as it was.
                arrays[f"{_CHANGE}/{name}/{part}"] = np.array([value], np.float64)
    arrays |= {name: tensor.contiguous().numpy() for name, tensor in tensors.items()}
    if state.support is not None:
        # Views of a batch's rows need not lie side by side; their bytes are what is written.
        kept = dict(vars(state.support))
        if not kept["event_times"].shape[1]:
            del kept["event_times"]  # so states of models without events stay as they were
        arrays |= {
            f"{_SUPPORT}/{name}": np.ascontiguousarray(array) for name, array in kept.items()
        }
    return arrays


def _to_state(arrays: _Arrays, shape: StateShape) -> TaskState:
    """Return the state of these arrays. Raise ValueError or its like for what does not fit."""
    parts: dict[str, dict[str, npt.NDArray[Any]]] = {}
    for name, array in arrays.items():
        room, _, rest = name.partition("/")
        if room not in (_CHANGE, _GATE, _SUPPORT, _ROWS, _KEYS):
            raise ValueError(f"{name!r:.60} is no part of a state")
        parts.setdefault(room, {})[rest] = array
    changes: dict[str, dict[str, npt.NDArray[Any]]] = {}
    for name, array in parts.get(_CHANGE, {}).items():
        # From the right: the part's name holds no slash.
        layer, _, part = name.rpartition("/")
        changes.setdefault(layer, {})[part] = array
    gates = parts.get(_GATE, {})
    if gates.keys() != shape.gates_1JO.keys():
        raise ValueError(f"it has gates of {len(gates)} layers, not of {len(shape.gates_1JO)}")
    key_P = arrays[_KEYS]
    _check_array(_KEYS, key_P, np.int64, (None,))
    # Keys are looked up by bisection, which takes their order on trust.
    if np.any(key_P[1:] <= key_P[:-1]) or np.any((key_P < 0) | (key_P >= shape.num_keys)):
        raise ValueError("its keys are no ascending rows of the tables")
    return TaskState(
        {layer: _parse_change(layer, own, shape) for layer, own in changes.items()},
        {
            name: _parse_tensor(f"gate {name}", gates[name], tuple(gate_1JO.shape))
            for name, gate_1JO in shape.gates_1JO.items()
        },
        _parse_tensor(_ROWS, arrays[_ROWS], (len(key_P), shape.width)),
        torch.from_numpy(key_P.copy()),
        _parse_support(parts.get(_SUPPORT, {}), shape),
    )


def _parse_change(layer: str, parts: _Arrays, shape: StateShape) -> PlainUpdate:
    if layer not in shape.layers:
        raise ValueError(f"layer {layer!r:.60} does not adapt")
    width_in, width_out = shape.layers[layer]
    if parts.keys() == {"activations_TSI", "scaled_grads_TSO", "bias_rate"}:
        activations_TSI = _parse_tensor(layer, parts["activations_TSI"], (1, None, width_in))
        num_rows = activations_TSI.shape[1]
        grads_TSO = _parse_tensor(layer, parts["scaled_grads_TSO"], (1, num_rows, width_out))
        _check_array("bias_rate", parts["bias_rate"], np.float64, (1,))
        return LowRankUpdate(activations_TSI, grads_TSO, float(parts["bias_rate"][0]))
    if parts.keys() != {"weight_TIO", "bias_T1O"}:
        raise ValueError(f"layer {layer} has the parts {', '.join(sorted(parts))!r:.80}")
    return MaterialisedUpdate(
        _parse_tensor(layer, parts["weight_TIO"], (1, width_in, width_out)),
        _parse_tensor(layer, parts["bias_T1O"], (1, 1, width_out)),
    )


def _parse_support(parts: _Arrays, shape: StateShape) -> EncodedColumns | None:
    if not shape.keeps_support:
        if parts:
            raise ValueError("it has support rows, of which the model takes no statistics")
        return None
    if not parts:
        return None  # of a task of which nothing is known
    # A state of a release before weights has none.
    # Nor has one of a release before events any of those.
    none: dict[str, npt.NDArray[Any]] = {
        "weight_NW": np.zeros((len(parts["label_N"]), 0), np.float32),
        "event_times": np.zeros((len(parts["label_N"]), 0)),
    }
    parts = {**none, **parts}
    rows = EncodedColumns(**{own.name: parts[own.name] for own in fields(EncodedColumns)})
    _check_rows(rows, shape.features)
    return rows


def _check_rows(rows: EncodedColumns, features: Features) -> None:
    """Raise ValueError for rows that a model of these features cannot have."""
    num_rows = len(rows.label_N)
    _check_array("task_N", rows.task_N, np.int64, (num_rows,))
    _check_array("label_N", rows.label_N, np.float32, labels_shape(features, num_rows))
    _check_array("weight_NW", rows.weight_NW, np.float32, (num_rows, int(bool(features.weight))))
    event_shape = (num_rows, 2 * bool(features.events))
    _check_array("event_times", rows.event_times, np.float64, event_shape)
    _check_array("dense_NK", rows.dense_NK, np.float32, (num_rows, len(features.dense)))
    _check_array("lengths_NM", rows.lengths_NM, np.int32, (num_rows, len(features.multi)))
    _check_array("ids_NF", rows.ids_NF, np.integer, (num_rows, len(features.single)))
    if np.any(rows.lengths_NM < 0):
        raise ValueError("a list of its support rows has a length below 0")
    num_values = int(rows.lengths_NM.sum(dtype=np.int64))
    _check_array("values_V", rows.values_V, np.integer, (num_values,))
    limits = {table.name: table.num_rows for table in features.tables}
    limit_F = np.array([limits[feature.table] for feature in features.single], np.int64)
    limit_M = np.array([limits[feature.table] for feature in features.multi], np.int64)
    limit_V = limit_M[find_features_of_values(rows.lengths_NM)]
    for ids, limit in ((rows.ids_NF, limit_F), (rows.values_V, limit_V)):
        if np.any((ids < 0) | (ids >= limit)):
            raise ValueError("a support row has an id that its table does not have")


def _parse_tensor(name: str, array: npt.NDArray[Any], shape: tuple[int | None, ...]) -> Tensor:
    _check_array(name, array, np.float32, shape)
    # Copied: it is a view of the bytes, which must not be written to.
    return torch.from_numpy(array.copy())


def _check_array(
    name: str, array: npt.NDArray[Any], dtype: type, shape: tuple[int | None, ...]
) -> None:
    """Raise ValueError unless an array is finite, of this type and shape (None: any length)."""
    is_shape = len(array.shape) == len(shape) and all(
        wanted in (None, size) for size, wanted in zip(array.shape, shape, strict=True)
    )
    if not (is_shape and np.issubdtype(array.dtype, dtype)):
        raise ValueError(f"{name} is {array.dtype} {list(array.shape)}")
    # A label that is not known is NaN.
    if name != "label_N" and not np.isfinite(array).all():
        raise ValueError(f"{name} holds a value that is not finite")
