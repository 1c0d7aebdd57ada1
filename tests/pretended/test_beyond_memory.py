"""Rows that a GPU does not hold: the same losses to the bit, no wait for them in a step, and one
copy each way, beside it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.distributed.tables.test_beyond_memory import STEPS


def test_tables_beyond_a_gpu_train_to_the_bits_of_those_on_it(
    pretended_once: Callable[..., Any], tmp_path: Path
) -> None:
    found = pretended_once("tests.pretended.beyond_memory", "everything", str(tmp_path))
    assert found["differences"] == []
    # Predictions, too, and at the end two steps without a task.
    fetches = STEPS + len([step for step in range(STEPS) if step % 4 == 1]) + 2
    for place in ("host", "file"):
        assert found["asked"][place] == found["asked"]["device"] == []
        to_device, to_host, pageable = found["beside"][place]
        assert to_device == fetches  # with the numbers of the rows
        assert 0 < to_host <= fetches
        assert pageable == 0
        asked, hits, num_slots = found["moved"][place]
        assert asked - hits > num_slots  # so rows went out
    assert found["beside"]["device"] == [0, 0, 0]
    # What another thread does while a graph is captured is none of the graph's, or rows would come
    # into the cache again with each of its replays.
    assert found["captured"] == [2.0, 1.0]
    # A flush writes all that changed, whatever steps ahead push out meanwhile.
    assert found["flushed"] == [-1.0] * 4
