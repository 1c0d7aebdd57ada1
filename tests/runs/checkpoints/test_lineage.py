"""A model goes on with the increment after its last, and with no other; each refusal names why."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gmeta.errors import UserError
from gmeta.runs.checkpoints.continuation import extend_lineage, find_skipped_increments
from gmeta.runs.checkpoints.lineage import (
    Lineage,
    TrainedIncrement,
    count_earlier_steps,
    describe_increments,
    lineage_to_json,
    read_lineage,
)
from metaio import Dataset, open_dataset
from tests.support.increments import write_increments
from tests.support.refusals import catch_message

CHECKPOINT = Path("runs/day-2/checkpoints/step-00000009")


@pytest.fixture(scope="module")
def increments(tmp_path_factory: pytest.TempPathFactory) -> list[Dataset]:
    paths = write_increments(tmp_path_factory.mktemp("shop"), (9, 9, 9, 9), num_tasks=4)
    return [open_dataset(str(path)) for path in paths]


def trained_on(*datasets: Dataset) -> Lineage:
    lineage: Lineage = ()
    for dataset in datasets:
        lineage = extend_lineage(lineage, dataset)
    return lineage


def refusal(lineage: Lineage, dataset: Dataset, *skip: int) -> str:
    return catch_message(UserError, find_skipped_increments, lineage, dataset, skip, CHECKPOINT)


def test_the_increment_after_the_last_is_taken(increments: list[Dataset]) -> None:
    for number in range(1, len(increments)):
        lineage = trained_on(*increments[:number])
        assert find_skipped_increments(lineage, increments[number], (), CHECKPOINT) == []


def test_skipped_doubled_and_old_increments_are_refused_by_name(increments: list[Dataset]) -> None:
    first, second, third, fourth = increments
    was = "; checkpoint runs/day-2/checkpoints/step-00000009 was trained on increments 1 to 2 of "
    remedy = "stream shop. Set data.increment to 3 of that stream"
    lineage = trained_on(first, second)
    assert refusal(lineage, fourth) == (
        f"increment 4 of {fourth.url} skips increment 3, which run.skip_increments does not name"
        f"{was}{remedy}"
    )
    expected = f"increment 2 of {second.url} was trained on already{was}{remedy}"
    assert refusal(lineage, second) == expected
    begun_late = trained_on(third)
    assert refusal(begun_late, second) == (
        f"increment 2 of {second.url} comes out of order; checkpoint {CHECKPOINT} was trained on "
        "increment 3 of stream shop. Set data.increment to 4 of that stream"
    )


def test_increments_are_skipped_where_exactly_they_are_named(increments: list[Dataset]) -> None:
    first, second, third, fourth = increments
    lineage = trained_on(first)
    found = find_skipped_increments(lineage, fourth, (3, 2), CHECKPOINT)
    assert [one.fingerprint for one in found] == [third.fingerprint, second.fingerprint]
    told = "skips increment 2, which run.skip_increments does not name"
    assert told in refusal(lineage, fourth, 3)
    assert "skips increment 2, 3, which" in refusal(lineage, fourth, 2)
    assert refusal(lineage, third, 2, 3, 7) == (
        f"run.skip_increments = [2, 3, 7] names increment 3, 7, which does not stand between "
        f"increment 1, the last of {CHECKPOINT}, and 3 of {third.url}. Leave it out"
    )
    gone_on = extend_lineage(lineage, third)
    assert find_skipped_increments(gone_on, fourth, (), CHECKPOINT) == []
    assert describe_increments(gone_on) == "increments 1 to 3 without 2 of stream shop"
    assert "increment 2 of" in refusal(gone_on, second)


def test_another_pasts_skipped_increment_fails(increments: list[Dataset], tmp_path: Path) -> None:
    rewritten = write_increments(tmp_path, (9, 9, 9), num_tasks=5)
    newest = open_dataset(str(rewritten[2]))
    oldest = open_dataset(str(rewritten[0])).fingerprint
    found = f"follows another increment 1 (fingerprint {oldest[:12]}, "
    assert found in refusal(trained_on(increments[0]), newest, 2)
    shutil.rmtree(rewritten[1])
    shutil.copytree(increments[1].url, rewritten[1])
    assert "skips increment 2" in refusal(trained_on(increments[0]), newest, 2)


def test_an_increment_of_another_stream_or_of_another_past_is_refused_by_name(
    increments: list[Dataset], tmp_path: Path
) -> None:
    lineage = trained_on(increments[0])
    *_, foreign = write_increments(tmp_path / "other", (9, 9), stream="bank", num_tasks=4)
    found = f"increment 2 of {foreign} is of another stream, bank; checkpoint"
    assert found in refusal(lineage, open_dataset(str(foreign)))
    rewritten = write_increments(tmp_path / "rewritten", (9, 9), num_tasks=5)
    past, present = (open_dataset(str(path)) for path in rewritten)
    assert (
        f"increment 2 of {present.url} follows another increment 1 (fingerprint "
        f"{past.fingerprint[:12]}, the checkpoint's is {lineage[0].fingerprint[:12]}); checkpoint"
    ) in refusal(lineage, present)


def test_what_is_of_no_stream_is_not_followed(increments: list[Dataset], click_logs: Path) -> None:
    alone = open_dataset(str(click_logs))
    assert extend_lineage((), alone) == ()
    found = f"dataset {click_logs} is no increment of a stream"
    assert found in refusal(trained_on(increments[0]), alone)
    found = f"checkpoint {CHECKPOINT} was trained on no increment of a stream: increment 1"
    assert found in refusal((), increments[0])


def test_a_lineage_counts_the_steps_of_its_last_increment_when_it_is_written() -> None:
    lineage = tuple(TrainedIncrement("s", number, f"f{number}", 10) for number in (1, 2, 3))
    told = json.loads(json.dumps(lineage_to_json(lineage, 7)))
    found = read_lineage(told)
    assert [one.steps for one in found] == [10, 10, 7]
    assert count_earlier_steps(found) == 20
    assert lineage_to_json((), 7) == {}
    assert read_lineage({}) == ()


@pytest.mark.parametrize(
    "told",
    ["x", [1], [{"increment": 1}], [{**vars(TrainedIncrement("s", 1, "f", 2)), "steps": "2"}]],
)
def test_a_lineage_that_is_none_is_refused(told: Any) -> None:
    with pytest.raises(ValueError, match="its lineage"):
        read_lineage({"lineage": told})
