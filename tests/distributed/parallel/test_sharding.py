"""What a step with a model of somebody's own raises: whose fault it is said to be."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from gmeta.distributed.sharded_learner import ShardedLearner
from gmeta.errors import ConfigError, UserError
from gmeta_models.melu import MeLU


class Own(nn.Module):
    """A model of somebody's own."""


def raised(error: BaseException, model: nn.Module) -> BaseException:
    learner: Any = SimpleNamespace(learner=SimpleNamespace(model=model))
    learner._translate_error = lambda one: ShardedLearner._translate_error(learner, one)
    with pytest.raises(BaseException) as caught, ShardedLearner.translate_model_errors(learner):
        raise error
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        MemoryError(),
        UserError("said already"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed"
        ),
        torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
    ],
)
def test_what_is_no_fault_of_a_model_stays_as_it_is(error: BaseException) -> None:
    assert raised(error, Own()) is error


def test_a_fault_of_an_own_model_is_told_and_one_of_ours_is_not() -> None:
    fault = KeyError("column")
    assert raised(fault, cast(nn.Module, MeLU.__new__(MeLU))) is fault
    told = raised(fault, Own())
    assert isinstance(told, ConfigError)
    assert str(told).startswith(f"a step fails in {__name__}:Own: KeyError: 'column'. Mend it")
