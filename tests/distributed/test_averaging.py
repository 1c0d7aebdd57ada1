"""The layers' gradients, averaged over the ranks."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gmeta.distributed.averaging import LayerAverage
from gmeta.distributed.ranks import Ranks
from tests.distributed.harness import on_ranks
from tests.distributed.test_sharding_plans import Run


def average_on_rank(ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor, str]:
    # DistributedDataParallel lays out its messages anew after one step, and gloo then adds those of
    # three ranks in another order: a resumed run would be another one in its last digits.
    modules = Run(ranks, "mixed").sharded.modules()
    assert not any(isinstance(one, DistributedDataParallel) for one in modules)
    torch.manual_seed(ranks.rank)
    used, unused = nn.Linear(3, 2), nn.Linear(2, 2)
    wide = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    LayerAverage([*used.parameters(), wide], ranks)
    ((used(torch.ones(1, 3)).sum() + wide) * (ranks.rank + 1)).backward()
    assert wide.grad is not None
    assert wide.grad.tolist() == [1.5]
    assert used.weight.grad is not None
    LayerAverage([*unused.parameters()], ranks)
    with pytest.raises(RuntimeError) as error:
        unused.weight.sum().backward()
    return used.weight.detach(), used.weight.grad, str(error.value)


@pytest.mark.distributed
def test_layers_start_equal_average_their_gradients_and_must_all_have_one() -> None:
    (weight, grad, message), (other, _, _) = on_ranks(2, average_on_rank)
    assert torch.equal(weight, other)
    assert torch.equal(grad, torch.full((2, 3), 1.5))
    assert message == "backward gave 1 of the layers no gradient to average"
