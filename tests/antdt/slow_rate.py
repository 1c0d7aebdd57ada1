"""A rate of calls that a fast machine and a slow one exceed alike."""

import itertools

from gmeta.access.rate import CallLimits

TOKENS_PER_LOOK = 0.375  # a call that is admitted looks twice and costs one


def limits_by_count() -> CallLimits:
    """A handful of calls per connection; the clock goes by calls, not by this machine's speed."""
    looks = itertools.count()
    return CallLimits(1.0, clock=lambda: TOKENS_PER_LOOK * next(looks))
