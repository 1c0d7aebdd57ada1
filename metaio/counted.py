"""A number and what it counts, as messages say it."""


def counted(number: int, noun: str) -> str:
    """Return a number and what it counts, such as `7 rows`.

    >>> counted(1, "row"), counted(2815, "row")
    ('1 row', '2,815 rows')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
