"""The least that latencies could be, against a server that is played request by request."""

import numpy as np
import pytest
from _latency import Float64, at_a_pace, at_random, least_p99

CLIENTS = 16


def played_p99(due_s: Float64, fixed_s: float, each_s: float) -> float:
    """The same by a queue in which everybody stands."""
    waiting, queue, done, now_s = due_s.tolist(), list[float](), list[float](), 0.0
    while waiting or queue:
        if not queue:
            now_s = max(now_s, waiting[0])
        while waiting and waiting[0] <= now_s:
            queue.append(waiting.pop(0))
        now_s += fixed_s + each_s * len(queue)
        done += [now_s - due for due in queue]
        queue.clear()
    return float(np.quantile(done, 0.99))


@pytest.mark.parametrize("each_s", [0.0, 0.002, 0.01])
def test_the_least_latency_is_that_of_batches_one_after_the_other(each_s: float) -> None:
    fixed_s, rng = 0.01, np.random.default_rng(0)
    most_per_s = CLIENTS / (fixed_s + each_s * CLIENTS)
    for due_s in (
        at_random(rng, 2_000, 0.6 * most_per_s),
        at_a_pace(rng, 2_000, 0.6 * most_per_s, CLIENTS),
    ):
        found = least_p99(due_s, fixed_s + each_s, most_per_s, CLIENTS)
        assert found == pytest.approx(played_p99(due_s, fixed_s, each_s), rel=1e-9)


def test_requests_far_apart_wait_for_nobody() -> None:
    assert least_p99(np.arange(50.0), 0.01, 400.0, CLIENTS) == pytest.approx(0.01)


def test_callers_at_a_pace_call_equally_often_and_in_turn() -> None:
    due_s = at_a_pace(np.random.default_rng(0), 50, 8.0, 4)
    assert len(due_s) == 50
    assert (np.diff(due_s) > 0).all()
    np.testing.assert_allclose(due_s[4:] - due_s[:-4], 0.5)
