"""gmeta.load onto a GPU that only pretends: the CPU's answers, and tasks that either one kept."""

from collections.abc import Callable
from typing import Any


def test_a_model_on_a_gpu_answers_as_on_the_cpu(pretended: Callable[..., Any]) -> None:
    found = pretended("tests.pretended.serving", "compared")
    assert len(found) == 13
    largest = {case: max(differences) for case, differences in found.items()}
    assert largest == dict.fromkeys(found, 0.0)


def test_a_device_that_is_not_there_is_refused(pretended: Callable[..., Any]) -> None:
    told = pretended("tests.pretended.serving", "refusals")
    assert told == [
        "device 'cuda:1' is not there: torch sees 1 GPUs. Use device='cpu', or install torch's "
        "CUDA build (docs/install.md)",
        *(
            f"device '{name}' is unknown: cpu, cuda or cuda:N is allowed. Choose one"
            for name in ("gpu", "cuda:x", "cpu:0")
        ),
    ]
