"""gmeta.load onto a GPU that only pretends: the CPU's answers, and tasks that either one kept."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def everything(pretended_once: Callable[..., Any]) -> tuple[dict[str, list[float]], list[str]]:
    found, told = pretended_once("tests.pretended.serving", "everything")
    return found, told


def test_a_model_on_a_gpu_answers_as_on_the_cpu(
    everything: tuple[dict[str, list[float]], list[str]],
) -> None:
    found, _ = everything
    assert len(found) == 13
    largest = {case: max(differences) for case, differences in found.items()}
    assert largest == dict.fromkeys(found, 0.0)


def test_a_device_that_is_not_there_is_refused(
    everything: tuple[dict[str, list[float]], list[str]],
) -> None:
    _, told = everything
    assert told == [
        "device 'cuda:1' is not there: torch sees 1 GPUs. Use device='cpu', or install torch's "
        "CUDA build (docs/install.md)",
        *(
            f"device '{name}' is unknown: cpu, cuda or cuda:N is allowed. Choose one"
            for name in ("gpu", "cuda:x", "cpu:0")
        ),
    ]
