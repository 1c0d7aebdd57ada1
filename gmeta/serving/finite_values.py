"""The guard against values that are not finite: in layers, adapted states and predictions; a row of
the tables, which are mapped and not read, is looked at where one of these uses it.

Shape suffixes: T tasks, N rows, D embedding width, P task-row pairs, O outputs, J parts of a
gate"""

from collections.abc import Mapping
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from gmeta.errors import NotFiniteError
from gmeta.serving.task_states import AdaptedTensors, tensors_of
from metaio.ragged import Float32, Int64


def check_layers(
    layers: Mapping[str, Tensor], untrained: Mapping[str, Tensor], remedy: str
) -> None:
    """Raise NotFiniteError for a layer with a value that is not finite since it was trained."""
    for name, values in layers.items():
        is_wrong = ~values.isfinite()
        if values.shape == untrained[name].shape:  # else its loading says more
            # A plug-in model may start with such values, as with a mask of -inf.
            is_wrong &= values != untrained[name]
        if is_wrong.any():
            raise NotFiniteError(
                f"layer {name} holds values that are not finite: the run diverged. {remedy}"
            )


def find_finite_T(adapted: AdaptedTensors) -> Tensor:
    """Return of each task whether all that adapted is finite."""
    changes = chain.from_iterable(map(tensors_of, adapted.changes.values()))
    # A sum is as finite as its terms; one that overflows is as far off.
    sums = [tensor.flatten(1).sum(1) for tensor in (*adapted.gates_TJO.values(), *changes)]
    rows_T = torch.zeros(len(adapted.supports))
    sums.append(rows_T.index_add_(0, adapted.task_P, adapted.rows_PD.sum(1)))
    return torch.stack(sums).isfinite().all(0)


def find_first_wrong(values_N: Tensor) -> int | None:
    """Return the first row with a value, of any of its labels, that is not finite."""
    is_finite_N = values_N.unsqueeze(-1).flatten(1).isfinite().all(1)
    return None if is_finite_N.all() else int(is_finite_N.int().argmin())


def check_predictions(values_N: Tensor, row_N: Int64 | None = None) -> None:
    """Raise NotFiniteError for a prediction that is not finite; it names the row by `row_N`."""
    if (row := find_first_wrong(values_N)) is not None:
        raise NotFiniteError(
            f"the prediction of query row {row if row_N is None else row_N[row]} is not finite: a "
            "dense value of it or a label that its task adapted by is too large, or the model "
            "diverged. Correct the rows, or export an earlier checkpoint with --step"
        )


def adaptation_error(who: str, label_N: Float32, before_N: Float32) -> NotFiniteError:
    """Return the error of a task whose support rows lead to values that are not finite, where the
    model predicts `before_N` without them."""
    return NotFiniteError(
        f"{who} cannot be adapted to: by its {len(label_N)} support rows, with labels "
        f"{_span(label_N)}, it becomes a model whose values are not finite; unadapted, it predicts "
        f"{_span(before_N)}. Bring the labels to the label's scale in training, or correct a dense "
        "value that is too large"
    )


def _span(values_N: Float32) -> str:
    known_N = values_N[~np.isnan(values_N)]  # a label need not be known
    ends = [f"{end:g}" for end in (known_N.min(), known_N.max())] if known_N.size else ["NaN"]
    return " to ".join(dict.fromkeys(ends))
