"""What a model's forward returns: outputs, or with them an auxiliary loss.

Shape suffix: N rows"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

# A tuple's second is the auxiliary loss [N] of each row, which is added to that of its labels where
# query rows teach; no inner step goes by it.
ModelOutput: TypeAlias = "Tensor | tuple[Tensor, Tensor]"


def split_output(made: ModelOutput) -> tuple[Tensor, Tensor | None]:
    """Return outputs and auxiliary losses; None: there are none."""
    return made if isinstance(made, tuple) else (made, None)
