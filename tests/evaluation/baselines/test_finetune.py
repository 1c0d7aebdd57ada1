"""The grid of a plain run's fine-tuning finds what is best, also beyond its edges."""

import math
from collections.abc import Callable, Sequence

import pytest

from gmeta.evaluation.baselines.tuning_grid import RATES, STEPS, choose_best, try_settings
from gmeta.evaluation.report.evaluation_schema import TriedSetting


def tried_all(
    error: Callable[[float, int], float], own: tuple[float, int]
) -> tuple[TriedSetting, ...]:
    """The grid with the errors of single settings; no setting is asked for twice."""
    asked: list[tuple[float, int]] = []

    def errors(rate: float, steps: Sequence[int]) -> list[float]:
        assert list(steps) == sorted({*steps})
        asked.extend((rate, one) for one in steps)
        return [error(rate, one) for one in steps]

    tried = try_settings(errors, own)
    assert sorted(asked) == sorted((one.inner_lr, one.inner_steps) for one in tried)
    assert (tried[0].inner_lr, tried[0].inner_steps) == own
    return tried


def peak_at(rate: float, steps: int) -> Callable[[float, int], float]:
    """An error that is 0 at one setting."""

    def error(tried_rate: float, tried_steps: int) -> float:
        return abs(math.log(tried_rate / rate)) + 0.1 * abs(tried_steps - steps)

    return error


@pytest.mark.parametrize("rate", [0.03, 0.1, 0.3])
@pytest.mark.parametrize("steps", STEPS)
def test_the_best_of_the_grid_is_the_best_of_all(rate: float, steps: int) -> None:
    error = peak_at(rate, steps)
    tried = tried_all(error, (0.05, 1))
    slow = min(((r, s) for r in RATES for s in STEPS), key=lambda one: error(*one))
    best = choose_best(tried)
    assert (best.inner_lr, best.inner_steps) == slow == (rate, steps)
    assert len(tried) == 1 + len(RATES) * len(STEPS)


def test_a_rate_of_the_grid_is_one_way_with_the_config_s_steps() -> None:
    ways: list[tuple[float, list[int]]] = []

    def errors(rate: float, steps: Sequence[int]) -> list[float]:
        ways.append((rate, list(steps)))
        return [abs(math.log(rate / 0.1))] * len(steps)

    try_settings(errors, (0.1, 2))
    grid = list(STEPS)
    own = (0.1, [1, 2, 3, 5, 10])
    assert sorted(ways) == [(0.01, grid), (0.03, grid), own, (0.3, grid), (1.0, grid)]


@pytest.mark.parametrize(("rate", "found"), [(3.0, 3.0), (0.001, 0.001), (1e6, 30.0)])
def test_the_grid_goes_on_where_its_best_lies_at_an_edge(rate: float, found: float) -> None:
    tried = tried_all(peak_at(rate, 3), (0.05, 1))
    assert choose_best(tried).inner_lr == pytest.approx(found)


def test_what_diverged_is_never_the_best() -> None:
    errors = {(0.05, 2): math.nan}

    def error(rate: float, steps: int) -> float:
        return errors.get((rate, steps), peak_at(0.1, 5)(rate, steps))

    best = choose_best(tried_all(error, (0.05, 2)))
    assert (best.inner_lr, best.inner_steps) == (0.1, 5)


def test_of_equal_settings_the_config_s_own_is_kept() -> None:
    best = choose_best(tried_all(lambda *_: 0.5, (0.07, 2)))
    assert (best.inner_lr, best.inner_steps) == (0.07, 2)
