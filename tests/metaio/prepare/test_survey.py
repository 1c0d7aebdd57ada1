"""The survey of a log of any length: what it holds, and how often it is merged."""

import numpy as np
import pyarrow as pa
import pytest

from metaio.errors import DataError
from metaio.prepare.episodes import survey
from metaio.prepare.episodes.survey import Survey


def part_of(values: range) -> Survey:
    """A batch of a table's values, each of them once."""
    counted = pa.table({"value": list(values), "count": [1] * len(values)})
    return Survey(len(values), counts={"item": [counted]})


@pytest.mark.parametrize("apart", [10, 0])
def test_work_follows_rows_and_memory_values(monkeypatch: pytest.MonkeyPatch, apart: int) -> None:
    real, read, total = survey.merge_counts, 0, Survey()

    def counting(parts: list[pa.Table]) -> pa.Table:
        nonlocal read
        read += sum(map(len, parts))
        return real(parts)

    monkeypatch.setattr(survey, "merge_counts", counting)
    batches = 250
    for batch in range(batches):
        total.add(part_of(range(batch * apart, batch * apart + 10)))
        held, distinct = sum(map(len, total.counts["item"])), 10 + batch * apart
        assert held <= 1.5 * distinct + 170  # of some parts that are not yet merged
    assert read < 5 * total.num_rows
    found = real(total.counts["item"])
    assert len(found) == distinct
    assert sum(found["count"].to_pylist()) == 10 * batches


def test_more_texts_than_32_bits_count_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Arrow's grouping returns then, without the 2 GiB: offsets that begin anew."""
    offsets = pa.py_buffer(np.array([0, 4, -4, 3], np.int32))
    texts = pa.StringArray.from_buffers(3, offsets, pa.py_buffer(b"abcd"))

    class Grouped:
        def aggregate(self, of: object) -> dict[str, pa.Array]:
            return {"value": texts, "count_sum": pa.array([1, 1, 1])}

    class Joined:
        def group_by(self, key: str) -> Grouped:
            return Grouped()

    monkeypatch.setattr(survey.pa, "concat_tables", lambda parts: Joined())
    with pytest.raises(DataError, match="more than 2 GiB"):
        survey.merge_counts([pa.table({"value": ["a"], "count": [1]})])


def test_memory_that_runs_out_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(parts: object) -> None:
        raise pa.ArrowMemoryError("malloc of size 64 failed")

    monkeypatch.setattr(survey.pa, "concat_tables", full)
    with pytest.raises(MemoryError):
        survey.merge_counts([pa.table({"value": ["a"], "count": [1]})])
