"""The grid of a plain run's fine-tuning finds what is best, also beyond its edges."""

import math
from collections.abc import Callable

import pytest

from gmeta.yardstick.finetune import RATES, STEPS, best_of, try_all


def peak_at(rate: float, steps: int) -> Callable[[float, int], float]:
    """An error that is 0 at one setting."""

    def error(tried_rate: float, tried_steps: int) -> float:
        return abs(math.log(tried_rate / rate)) + 0.1 * abs(tried_steps - steps)

    return error


@pytest.mark.parametrize("rate", [0.03, 0.1, 0.3])
@pytest.mark.parametrize("steps", STEPS)
def test_the_best_of_the_grid_is_the_best_of_all(rate: float, steps: int) -> None:
    error = peak_at(rate, steps)
    tried = try_all(error, (0.05, 1))
    slow = min(((r, s) for r in RATES for s in STEPS), key=lambda one: error(*one))
    best = best_of(tried)
    assert (best.inner_lr, best.inner_steps) == slow == (rate, steps)
    assert len(tried) == 1 + len(RATES) * len(STEPS)


@pytest.mark.parametrize(("rate", "found"), [(3.0, 3.0), (0.001, 0.001), (1e6, 30.0)])
def test_the_grid_goes_on_where_its_best_lies_at_an_edge(rate: float, found: float) -> None:
    tried = try_all(peak_at(rate, 3), (0.05, 1))
    assert best_of(tried).inner_lr == pytest.approx(found)


def test_what_diverged_is_never_the_best() -> None:
    errors = {(0.05, 2): math.nan}

    def error(rate: float, steps: int) -> float:
        return errors.get((rate, steps), peak_at(0.1, 5)(rate, steps))

    best = best_of(try_all(error, (0.05, 2)))
    assert (best.inner_lr, best.inner_steps) == (0.1, 5)


def test_of_equal_settings_the_config_s_own_is_kept() -> None:
    best = best_of(try_all(lambda *_: 0.5, (0.07, 2)))
    assert (best.inner_lr, best.inner_steps) == (0.07, 2)
