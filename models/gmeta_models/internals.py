"""The private names of torch that the models use, each behind a function of ours. When a new
version moves one, tests/test_internals.py names it, and this is the file to mend.
"""

from torch import nn


def has_hooks(model: nn.Module) -> bool:
    """Tell whether something is called before or after a part of a model, as weight_norm has it.

    If it moves: whatever `nn.Module.__call__` looks at before it calls `forward` alone.
    """
    kinds = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
    return any(getattr(part, kind) for part in model.modules() for kind in kinds)
