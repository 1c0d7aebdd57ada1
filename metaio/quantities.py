"""Formats counts and durations for messages."""


def format_count(number: int, noun: str) -> str:
    """Return a number and what it counts, such as `7 rows`.

    >>> format_count(1, "row"), format_count(2815, "row")
    ('1 row', '2,815 rows')"""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_duration(seconds: float) -> str:
    """Return a duration in the largest unit of which it has at least two.

    >>> [format_duration(s) for s in (0.4, 90, 7_300, 400_000)]
    ['0.4 s', '90 s', '2.0 h', '4.6 days']"""
    for per_unit, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * per_unit:
            return f"{seconds / per_unit:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
