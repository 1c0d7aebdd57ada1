"""train() on a GPU that only pretends: the CPU's losses on one rank and on two, a wait and a copy a
step, on two ranks two copies of which the batch is one, and collectives in one order on all ranks.
"""

from typing import Any

import pytest

from tests.pretended.conftest import MUTANT, RUNS


@pytest.mark.parametrize("name", RUNS)
def test_losses_and_scores_are_the_cpus(runs: dict[str, Any], name: str) -> None:
    of_cpu, of_gpu = runs[name]["cpu"], runs[name]["cuda"]
    assert len(of_cpu) == 7  # five steps, two validations
    for expected, reading in zip(of_cpu, of_gpu, strict=True):
        # Scores of equal models may differ by a pair that changes places.
        rel = 5e-3 if "auc" in expected or name == "bf16" else 1e-5
        assert reading == pytest.approx(expected, rel=rel)


def test_both_exchanges_train_the_same_model(runs: dict[str, Any]) -> None:
    for ours, torchrecs in zip(runs["as it comes"]["cuda"], runs["torchrec"]["cuda"], strict=True):
        assert torchrecs == pytest.approx(ours, rel=5e-3 if "auc" in ours else 1e-5)


@pytest.mark.parametrize("name", [name for name in RUNS if name != "torchrec"])
def test_a_step_waits_once_and_copies_once(runs: dict[str, Any], name: str) -> None:
    assert runs[name]["steps"]
    for step in runs[name]["steps"][1:]:  # the first makes ready
        check_waits(step)
        # The batch, and in the same block the rows to look up.
        assert len(step["to_device"]) <= 1


def test_a_step_of_a_shape_that_came_before_is_a_graph_of_each_part(runs: dict[str, Any]) -> None:
    graphs = {name: [step["graphs"] for step in runs[name]["steps"]] for name in RUNS}
    # Five steps, ten parts; a shape's first is eager.
    assert graphs["graphs"][0] == 0
    assert (max(graphs["graphs"]), max(graphs["graphs of parts"])) == (1, 2)
    assert min(sum(graphs["graphs"]), sum(graphs["graphs of parts"])) >= 3
    assert not any(sum(taken) for name, taken in graphs.items() if "graphs" not in name)
    eager, replayed = (runs[name]["steps"][-1]["launches"] for name in ("as it comes", "graphs"))
    assert replayed < 0.6 * eager


def check_waits(step: dict[str, Any]) -> None:
    """Hold the waits of a step to that of the guard, for its answer about the step before."""
    assert len(step["waits"]) <= 1
    assert all("event.synchronize" in wait for wait in step["waits"])
    assert step["pageable"] == []


@pytest.mark.distributed
def test_two_ranks_train_alike_and_start_collectives_in_one_order(runs: dict[str, Any]) -> None:
    first, second = runs["ranks"]
    assert len(first["uneven"]["cpu"]) >= 4
    for expected, reading in zip(first["uneven"]["cpu"], first["uneven"]["cuda"], strict=True):
        assert reading == pytest.approx(expected, rel=1e-5)
    for steps in (first["uneven"]["steps"], second["uneven"]["steps"]):
        for step in steps[1:]:
            check_waits(step)
        # The batch and the rows to give; and, without a task, what an epoch's last steps announce.
        epochs = 2
        assert sum(len(step["to_device"]) for step in steps) <= 2 * len(steps) + 2 * epochs
    assert sum(step["graphs"] for step in first["uneven"]["steps"]) > 0
    orders = [collectives(one["uneven"]) for one in (first, second)]
    assert orders[0] == orders[1]
    assert {"alltoall_base", "allreduce"} <= set(orders[0][1])
    # Ranks that do not agree are noticed.
    assert collectives(first[MUTANT]) != collectives(second[MUTANT])


def collectives(run: dict[str, Any]) -> list[list[str]]:
    """Those that a rank started in each step, in their order."""
    return [step["collectives"] for step in run["steps"]]
