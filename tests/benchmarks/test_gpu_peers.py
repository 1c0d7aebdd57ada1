"""What stands beside the learner's step on a GPU computes in the precision of its row."""

from typing import Any

import _gpu_peers
import gpu
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Products(TorchDispatchMode):
    """Notes the types of what is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket.__name__ in _gpu_peers.PRODUCTS - {"dot"}:  # of losses
            self.dtypes |= {one.dtype for one in args if isinstance(one, torch.Tensor)}
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("precision", "dtype"), [("float32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_both_steps_multiply_in_the_same_precision(precision: str, dtype: torch.dtype) -> None:
    device, batch = torch.device("cpu"), gpu.batch_of(2, ragged=False)
    ours = gpu.step_on(device, batch, "maml", 1, precision)
    for step in (ours, _gpu_peers.vmap_step(device, batch, precision)):
        with Products() as products:
            step()
        assert products.dtypes == {dtype}
