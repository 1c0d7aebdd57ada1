"""What requests wait for at 60 % of a server's most, and the least that this could be.

The least is that of a server which answers all that wait at once, where a batch of n takes a + b n
and nothing else delays anybody; what comes meanwhile is the next batch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from _http_load import closed_loop, for_seconds, open_loop, paced_loop, run

LOAD = 0.6
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Latencies:
    """One round, in seconds: the median of single requests, the slowest hundredth under load, and
    the least of it."""

    single_s: float
    paced_s: float
    random_s: float
    least_paced_s: float
    least_random_s: float
    failed: int


def latencies(
    port: int,
    path: str,
    bodies: Sequence[bytes],
    clients: int,
    most_per_s: float,
    seconds: float,
    seed: int,
) -> Latencies:
    """Of one call at a time, and of calls at 60 % of the most: at a pace, and at random times."""
    alone = run(closed_loop(port, path, bodies, 1, for_seconds(seconds / 2)))
    single_s, per_s = float(np.median(alone.seconds)), LOAD * most_per_s
    rng, num = np.random.default_rng(seed), round(3 * seconds * per_s)
    at_a_pace_s, at_random_s = at_a_pace(rng, num, per_s, clients), at_random(rng, num, per_s)
    paced = run(paced_loop(port, path, bodies, clients, at_a_pace_s.tolist()))
    by_chance = run(open_loop(port, path, bodies, at_random_s.tolist()))
    return Latencies(
        single_s,
        p99(paced.seconds),
        p99(by_chance.seconds),
        least_p99(at_a_pace_s, single_s, most_per_s, clients),
        least_p99(at_random_s, single_s, most_per_s, clients),
        alone.failed + paced.failed + by_chance.failed,
    )


def latency_figures(rounds: Sequence[Latencies]) -> dict[str, float]:
    """Medians over rounds; ratios are multiples of the round's single request."""

    def median(values: Iterable[float]) -> float:
        return float(np.median(list(values)))

    return {
        "single_ms": median(1_000 * each.single_s for each in rounds),
        "p99_ms_paced": median(1_000 * each.paced_s for each in rounds),
        "p99_ms_random": median(1_000 * each.random_s for each in rounds),
        "p99_ratio_paced": median(each.paced_s / each.single_s for each in rounds),
        "p99_ratio_random": median(each.random_s / each.single_s for each in rounds),
        "p99_least_paced": median(each.least_paced_s / each.single_s for each in rounds),
        "p99_least_random": median(each.least_random_s / each.single_s for each in rounds),
    }


def p99(seconds: Sequence[float] | Float64) -> float:
    """The slowest hundredth."""
    return float(np.quantile(seconds, 0.99))


def least_p99(due_s: Float64, single_s: float, most_per_s: float, clients: int) -> float:
    """The slowest hundredth of requests that are due at these times, in order, by a and b alone: a
    server answers one request in a + b = `single_s`, and those of so many callers, each with its
    next one at once, in a + b clients = clients / `most_per_s`."""
    each_s = max(0.0, (clients / most_per_s - single_s) / (clients - 1))
    free_s, first, waited = 0.0, 0, list[Float64]()
    while first < len(due_s):
        begin_s = max(free_s, due_s[first])
        stop = int(np.searchsorted(due_s, begin_s, side="right"))
        free_s = begin_s + single_s + each_s * (stop - first - 1)
        waited.append(free_s - due_s[first:stop])
        first = stop
    return p99(np.concatenate(waited))


def at_random(rng: np.random.Generator, num: int, per_s: float) -> Float64:
    """Times of requests that know nothing of each other."""
    return np.cumsum(rng.exponential(1 / per_s, num))


def at_a_pace(rng: np.random.Generator, num: int, per_s: float, clients: int) -> Float64:
    """Times of requests of callers who call equally often, each from a random time on."""
    every_s = clients / per_s
    first = np.sort(rng.uniform(0, every_s, clients))
    return (np.arange(-(-num // clients))[:, None] * every_s + first).ravel()[:num]
