"""A log by days for the demo of `gmeta follow`: users with a taste, and items, that come and go.

    python examples/stream/days.py runs/demo-stream/logs --days 5

Every user likes some genres, which their features do not say: a model has to adapt. A fifth of each
day's users and half of its items are new, as of news, and tastes drift. Needs numpy and pyarrow.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

DAY_S = 86_400
GENRES, AGES = 12, 6


def day_of(day: int, users: int, items: int, rows: int, seed: int) -> pa.Table:
    """The clicks of one day, in the order of time."""
    rng = np.random.default_rng((seed, day))
    # Who is active: a window over all users, of which a fifth is new each day.
    user = np.repeat(np.arange(users) + day * users // 5, rows)
    item = rng.integers(0, items, user.size) + day * items // 2
    genre = fixed(item, GENRES, seed + 1)
    # Two genres that a user likes; a user's second one changes every third day.
    first, second = fixed(user, GENRES, seed + 2), fixed(user + 7919 * (day // 3), GENRES, seed + 3)
    logit = -1.2 + 2.2 * (genre == first) + 1.4 * (genre == second)
    logit += 0.6 * np.sin(fixed(item, 1_000, seed + 4)) + 0.15 * np.sin(day / 2)
    click = rng.random(user.size) < 1 / (1 + np.exp(-logit))
    at = rng.integers(day * DAY_S, (day + 1) * DAY_S, user.size)
    order = np.argsort(at, kind="stable")
    columns = {
        "user": user,
        "item": item,
        "genre": genre,
        "age": fixed(user, AGES, seed + 5),
        "position": rng.random(user.size),
        "click": click.astype(np.int8),
        "at": at,
    }
    return pa.table({name: values[order] for name, values in columns.items()})


def fixed(values: np.ndarray, most: int, salt: int) -> np.ndarray:
    """A number below `most` that is always the same for a value."""
    mixed = (values.astype(np.uint64) + np.uint64(salt)) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed ^ (mixed >> np.uint64(29))) % np.uint64(most)).astype(np.int64)


def write_days(
    logs: Path, first: int, last: int, users: int, items: int, rows: int, seed: int = 0
) -> None:
    """Write a folder a day, each closed by _SUCCESS."""
    for day in range(first, last):
        folder = logs / f"day={day:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(day_of(day, users, items, rows, seed), folder / "clicks.parquet")
        (folder / "_SUCCESS").touch()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", type=Path)
    parser.add_argument("--days", type=int, default=5)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--users", type=int, default=2_000)
    parser.add_argument("--items", type=int, default=2_000)
    parser.add_argument("--rows", type=int, default=20, help="rows of a user and day")
    given = parser.parse_args()
    write_days(
        given.logs, given.first, given.first + given.days, given.users, given.items, given.rows
    )
