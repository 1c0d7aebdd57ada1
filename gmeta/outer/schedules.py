"""Learning-rate schedules: what share of its configured rate an outer step takes.

A pure function of where the step stands in the run, so a resumed run goes on with the rates it
would have had.
"""

import math
from collections.abc import Callable

# The share of the rate after a share of the decaying steps (0 at the first, never quite 1).
DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),  # arXiv 1608.03983, equation 5
}


def rate_scale(schedule: str, warmup_steps: int, step: int, total_steps: int) -> float:
    """Return the factor of the learning rates in the step that comes after `step` steps.

    The first `warmup_steps` rise evenly to the full rate (arXiv 1706.02677, section 2.2); the
    schedule takes its course over the steps after them. Steps beyond `total_steps` (leased shards
    may take a few more) have the scale of the last one.

    >>> [rate_scale("linear", 2, step, 6) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    >>> rate_scale("linear", 2, 9, 6)
    0.25
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    # The warm-up may be longer than the run; then the schedule stands at its beginning.
    step = max(min(step, total_steps - 1), warmup_steps)
    return DECAYS[schedule]((step - warmup_steps) / max(total_steps - warmup_steps, 1))
