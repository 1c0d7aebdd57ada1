"""The learner's step on a GPU that only pretends: the CPU's losses and gradients, nothing mixed, no
wait, one copy of the batch, launches within a budget.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.pretended.learner_steps import all_cases

CASES = [case.name for case in all_cases()]
# Of two inner steps on three layers and a bias-free history: a kernel more is a choice to make.
BUDGETS = {
    "melu none": 44,
    "melu maml": 191,
    "melu fomaml": 97,
    "melu anil": 106,
    "melu metasgd": 217,
    "melu maml everything": 259,
    "dlrm maml": 210,
    "dlrm fomaml": 123,
    "dlrm maml everything": 456,
    "cbml maml": 324,
    "cbml fomaml": 189,
    "din maml": 227,
    "din fomaml": 142,
}


@pytest.fixture(scope="module")
def readings(pretended: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    """Of every case; all in one process, in a quarter of a minute."""
    found = pretended("tests.pretended.learner_steps", "readings", list(range(len(CASES))))
    return {reading["case"]: reading for reading in found}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_cpus_without_a_wait_and_with_one_copy(
    readings: dict[str, dict[str, Any]], case: str
) -> None:
    reading = readings[case]
    assert reading["error"] == ""
    # bfloat16 keeps 8 bits: another padding, and a sum in another order moves the last of them.
    assert reading["far"] < (0.1 if "bf16" in case else 1e-12)
    assert reading["waits"] == []
    assert len(reading["to_device"]) == 1
    assert reading["pageable"] == []
    assert reading["copies_inside"] == []


@pytest.mark.parametrize("case", BUDGETS)
def test_a_step_launches_no_more_than_its_budget(
    readings: dict[str, dict[str, Any]], case: str
) -> None:
    assert readings[case]["launches"] <= BUDGETS[case]


FAKE = ["melu maml", "melu metasgd everything", "dlrm fomaml", "dlrm maml everything", "cbml maml"]


def test_the_fast_loop_needs_no_value_to_know_a_shape(pretended: Callable[..., Any]) -> None:
    told = pretended(
        "tests.pretended.learner_steps", "fake_steps", [CASES.index(one) for one in FAKE]
    )
    assert told == dict.fromkeys(FAKE, "")


@pytest.mark.parametrize(
    ("mutant", "shows"),
    [
        (
            "a value read in the step",
            lambda reading: any("item" in w or "scalar" in w for w in reading["waits"]),
        ),
        ("a copy more", lambda reading: len(reading["copies_inside"]) == 1),
        ("labels left on the host", lambda reading: "same device" in reading["error"]),
    ],
)
def test_a_mutant_is_caught(
    pretended: Callable[..., Any], mutant: str, shows: Callable[[dict[str, Any]], bool]
) -> None:
    case = CASES.index("melu maml")
    (reading,) = pretended("tests.pretended.learner_steps", "readings", [case], mutant)
    assert shows(reading), reading
