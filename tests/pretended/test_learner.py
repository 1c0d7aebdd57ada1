"""The learner's step on a GPU that only pretends: the CPU's losses and gradients, nothing mixed, no
wait, one copy of the batch, launches within a budget."""

import pytest

from tests.pretended.conftest import FAKE, SHOWN_BY, Reading
from tests.pretended.learner_steps import all_cases

CASES = [case.name for case in all_cases()]
# Of two inner steps on three layers and a bias-free history: a kernel more is a choice to make.
BUDGETS = {
    "melu none": 48, "melu maml": 191, "melu fomaml": 97, "melu anil": 106, "melu metasgd": 217,
    "melu maml everything": 272, "dlrm maml": 210, "dlrm fomaml": 123,
    "dlrm maml everything": 469, "cbml maml": 324, "cbml fomaml": 189, "din maml": 227,
    "din fomaml": 142,
}  # fmt: skip


# The steps of benchmarks/gpu.py, 128 tasks: even and ragged ones alike.
BENCHMARK = {"none k=1": 30, "fomaml k=1": 63, "fomaml k=3": 128, "maml k=1": 96, "maml k=3": 290}


@pytest.fixture(scope="module")
def readings(found: Reading) -> dict[str, Reading]:
    """The reading of each case."""
    return {reading["case"]: reading for reading in found["readings"]}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_cpus_with_no_wait_one_copy(readings: dict[str, Reading], case: str) -> None:
    reading = readings[case]
    assert reading["error"] == ""
    # bfloat16 keeps 8 bits: another padding, and a sum in another order moves the last of them.
    assert reading["far"] < (0.1 if "bf16" in case else 1e-12)
    assert reading["waits"] == []
    assert len(reading["to_device"]) == 1
    assert reading["pageable"] == []
    assert reading["copies_inside"] == []


@pytest.mark.parametrize("case", BUDGETS)
def test_a_step_launches_no_more_than_its_budget(readings: dict[str, Reading], case: str) -> None:
    assert readings[case]["launches"] <= BUDGETS[case]


def test_the_benchmarks_steps_launch_no_more_than_their_budget(found: Reading) -> None:
    for step in found["benchmark"]:
        assert step["launches"] <= BENCHMARK[step["case"].rpartition(" ")[0]]
        assert (step["waits"], step["copies"]) == (0, 1)


def test_the_fast_loop_needs_no_value_to_know_a_shape(found: Reading) -> None:
    assert found["fake"] == dict.fromkeys(FAKE, "")


@pytest.mark.parametrize("mutant", SHOWN_BY)
def test_a_mutant_is_caught(found: Reading, mutant: str) -> None:
    assert found["mutants"][mutant][SHOWN_BY[mutant]]
