"""A stream made by `gmeta prepare --extend` from a log by days, with new items every day."""

import csv
import random
from pathlib import Path

from tests.support.commands import succeed

SCHEMA = """
[task]
column = "user"
[label]
column = "click"
[time]
column = "second"
[[single]]
column = "item"
vocabulary = 1
[[single]]
column = "city"
vocabulary = 1
[[dense]]
column = "price"
standardise = true
[episodes]
by = "ratio"
query_share = 0.5
[stream]
gate = 0.3
capacity_block = 16
"""


def write_stream(stream: Path, days: int) -> Path:
    """Extend a stream by so many days of the log; the schema lies beside it."""
    schema = stream.parent / "schema.toml"
    schema.write_text(SCHEMA)
    for day in range(days):
        log = stream.parent / f"day{day}.csv"
        write_day(log, day)
        arguments = ["--schema", schema] if day == 0 else []
        succeed("prepare", *arguments, "--extend", stream, log)
    return stream


def write_day(log: Path, day: int) -> None:
    """Write a day of 40 users, half of them of the day before, and ten new items."""
    rng = random.Random(day)
    rows = [
        (
            f"u{user + 20 * day}", f"i{rng.randrange(20 + 10 * day)}", f"c{rng.randrange(5)}",
            round(rng.random() + day, 3), int(rng.random() < 0.3 + 0.3 * day),
            1_000 * day + rng.randrange(1_000),
        )
        for user in range(40)
        for _ in range(6)
    ]  # fmt: skip
    with log.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["user", "item", "city", "price", "click", "second"])
        writer.writerows(sorted(rows, key=lambda row: row[-1]))
