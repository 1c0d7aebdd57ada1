"""Next item: a file of users' items in their order, of which the last two are held back.

As in RUCAIBox/CIKM2020-S3Rec: a line is a user and then items, oldest first. A user's last item is
predicted in `test` and the one before it in `valid`, each from all before it, which are events."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa

from metaio.errors import DataError
from metaio.ragged import places
from metaio.recipes.by_schema import prepare_table

_LEAST_ITEMS = 3  # a row to train on, and the two that are held back
MOST_ATTRIBUTES = 8  # of an item; further ones are left out
LONGEST = 50  # events before a row


def prepare_next_item(
    path: str, attributes: str | None, out: str, seed: int, overwrite: bool = False
) -> None:
    """Write the dataset at URL `out` from a file of users and, if there is one, a JSON object of
    each item's attributes."""
    tasks, items = _read_sequences(Path(path))
    lengths = np.array([len(own) for own in items])
    item, user, place = np.concatenate(items), np.repeat(tasks, lengths), places(lengths)
    left = np.repeat(lengths, lengths) - place  # 1: the last
    parts = []
    for split, held_back in (("train", 3), ("valid", 2), ("test", 1)):
        chosen = np.flatnonzero(left >= held_back)
        sides = np.where(left[chosen] == held_back, "query", "support")
        # Training predicts each row, so that its episodes may be cut in any way.
        side = pa.nulls(len(chosen), pa.string()) if split == "train" else pa.array(sides)
        parts.append(
            pa.table(
                {
                    "user": user[chosen], "item": item[chosen], "place": place[chosen],
                    "taken": np.ones(len(chosen), np.int8), "side": side,
                    "split": pa.array([split] * len(chosen)),
                }
            )
        )  # fmt: skip
    table, names = pa.concat_tables(parts), []
    if attributes is not None:
        columns = _read_attributes(Path(attributes), table["item"].to_numpy())
        names = list(columns)
        for name, column in columns.items():
            table = table.append_column(name, column)
    known = [
        {"column": name, "table": "attribute", "vocabulary": 1, "null": "unknown"} for name in names
    ]
    schema = {
        "seed": seed,
        "task": {"column": "user"},
        "label": {"column": "taken"},
        "time": {"column": "place"},
        "item": {"column": "item", "columns": names},
        "single": [{"column": "item", "vocabulary": 1}, *known],
        "events": {"columns": ["item", *names], "longest": LONGEST},
        "episodes": {"by": "last", "query_rows": 1, "min_rows": 2},
        "splits": {"column": "split"},
        "membership": {"column": "side"},
    }
    recipe = {"name": "next-item", "longest": LONGEST}
    protocol = "leave one out: a user's last item is test, the one before it valid"
    prepare_table(table, out, schema, recipe, protocol, overwrite)


def _read_sequences(path: Path) -> tuple[list[int], list[list[int]]]:
    """Return the users and their items; users of fewer than three items are left out."""
    tasks, items = [], []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not all(word.isdecimal() for word in words):
                raise DataError(
                    f"{path}, line {number} is {line.strip()[:60]!r}; a user and items, whole "
                    "numbers with spaces between, are needed. Correct the line"
                )
            if len(words) > _LEAST_ITEMS:
                tasks.append(int(words[0]))
                items.append([int(word) for word in words[1:]])
    if not tasks:
        raise DataError(f"{path} has no user of {_LEAST_ITEMS} items or more: nothing to predict")
    return tasks, items


def _read_attributes(path: Path, item: np.ndarray) -> dict[str, pa.Array]:
    """Return a column for each place among an item's attributes; null where it has fewer."""
    try:
        of_item = json.loads(path.read_text(encoding="utf-8"))
        lists = {
            int(item): [int(one) for one in own][:MOST_ATTRIBUTES] for item, own in of_item.items()
        }
    except (ValueError, AttributeError, TypeError) as error:
        raise DataError(
            f"{path} is no JSON object of items and lists of whole numbers ({error}). Correct it"
        ) from error
    most = max(map(len, lists.values()), default=0)
    rows = [lists.get(item, []) for item in item.tolist()]
    return {
        f"attribute_{place + 1}": pa.array(
            [own[place] if place < len(own) else None for own in rows], pa.int64()
        )
        for place in range(most)
    }
