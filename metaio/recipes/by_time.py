"""Ratings with times as a question about the future: old rows train, newer validate, newest test.

A user's support in valid and test is from before the window; users without a rating before it are
in valid-cold and test-cold, where their first half is support."""

from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from metaio.errors import DataError, SchemaError

CLICK_RATING = 4  # least rating, of 1 to 5, that counts as a click


@dataclass(frozen=True)
class ByTimeConfig:
    """How a log of ratings becomes episodes and windows; the defaults are ours."""

    label: Literal["click", "rating"] = "click"  # click: 1 where the rating is 4 or more
    valid_share: float = 0.1  # of all rows, the newest before test's
    test_share: float = 0.2  # of all rows, the newest
    min_rows: int = 4  # users with fewer rows in a split are left out
    max_rows: int = 256  # of an episode
    seed: int = 2019

    def __post_init__(self) -> None:
        shares = (self.valid_share, self.test_share)
        if min(shares) <= 0 or sum(shares) >= 1:
            raise SchemaError(
                f"valid_share {self.valid_share:g}, test_share {self.test_share:g}: both above 0, "
                "and less than 1 together, are needed. Change them"
            )


def check_ratings(name: str, table: pa.Table) -> None:
    """Raise DataError for a rating that is not 1 to 5."""
    ratings = table["rating"].to_numpy()
    wrong = (ratings < 1) | (ratings > 5)
    if wrong.any():
        raise DataError(
            f"{name} holds rating {ratings[wrong][0]}; 1 to 5 are allowed. Download it again"
        )


def schema_by_time(
    singles: list[str], multis: list[str], of_item: list[str], config: ByTimeConfig
) -> dict[str, Any]:
    """Return the schema of ratings by row, user, item, rating, time, `singles` and `multis`."""
    limits = {"min_rows": config.min_rows, "max_rows": config.max_rows}
    train = 1.0 - config.valid_share - config.test_share
    shares = {"train": train, "valid": config.valid_share, "test": config.test_share}
    return {
        "seed": config.seed,
        "task": {"column": "user"},
        "label": {"column": "rating"}
        | ({"threshold": CLICK_RATING} if config.label == "click" else {}),
        "time": {"column": "time"},
        "row_id": {"column": "row"},
        "item": {"column": "item", "columns": of_item},
        # Items first rated after training are in no vocabulary: they get row 0.
        "single": [{"column": one, "vocabulary": 1, "null": "unknown"} for one in singles],
        "multi": [
            {"column": one, "separator": "|", "vocabulary": 1, "null": "unknown"} for one in multis
        ],
        # Random: training may draw support and query anew each epoch; scoring goes by time.
        "episodes": {"by": "random", "query_share": 0.5, **limits},
        "splits": {"by_time": shares, "new_tasks": "apart"},
    }


def protocol_by_time(config: ByTimeConfig) -> str:
    """Return in a few words what is scored."""
    return f"by time, the newest {config.test_share:.0%} of the rows are test"
