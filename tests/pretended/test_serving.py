"""gmeta.load onto a GPU that only pretends: the CPU's answers, and tasks that either one kept."""

from tests.pretended.conftest import Reading


def test_a_model_on_a_gpu_answers_as_on_the_cpu(found: Reading) -> None:
    differences, _ = found["serving"]
    assert len(differences) == 13
    largest = {case: max(each) for case, each in differences.items()}
    assert largest == dict.fromkeys(differences, 0.0)


def test_a_device_that_is_not_there_is_refused(found: Reading) -> None:
    _, told = found["serving"]
    assert told == [
        "device 'cuda:1' is not there: torch sees 1 GPUs. Use device='cpu', or install torch's "
        "CUDA build (docs/install.md)",
        *(
            f"device '{name}' is unknown: cpu, cuda or cuda:N is allowed. Choose one"
            for name in ("gpu", "cuda:x", "cpu:0")
        ),
    ]
