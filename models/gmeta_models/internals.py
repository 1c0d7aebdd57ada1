"""The private names of torch that the models' and inner loops' products use, each behind a function
of ours. When a new version moves one, tests/platform/test_internals.py names it."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

# If it moves: onednn_linear alone calls it, and whoever counts operations knows it by this name.
ONEDNN_LINEAR = torch.ops.mkldnn._linear_pointwise
# rows W^T + b by oneDNN: [N, O]. Not differentiable; float32 on a CPU. If it moves: torch's own
# F.linear is right too, and slower on AMD's processors.
onednn_linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
onednn_linear = partial(ONEDNN_LINEAR, attr="none", scalars=[], algorithm="")


def has_hooks(model: nn.Module) -> bool:
    """Tell whether a part of a model has hooks, as with weight_norm."""
    # If they move: whatever `nn.Module.__call__` looks at before it calls `forward` alone.
    kinds = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
    return any(getattr(part, kind) for part in model.modules() for kind in kinds)
