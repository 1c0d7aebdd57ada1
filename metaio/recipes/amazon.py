"""Amazon ratings by time: user_item.dat, with the items' brands and categories."""

# As in librahu/HIN-Datasets-for-Recommendation-and-Network-Embedding: 195,791 ratings of 2,753
# items by 6,170 users, 1998 to 2014.
from collections import defaultdict
from pathlib import Path

import pyarrow as pa

from metaio.recipes.by_schema import prepare_table
from metaio.recipes.by_time import ByTimeConfig, check_ratings, protocol_by_time, schema_by_time
from metaio.recipes.field_files import parse_integer, read_fields

_SOURCE = "Amazon"


def prepare_amazon(path: str, out: str, config: ByTimeConfig, overwrite: bool = False) -> None:
    """Write the dataset at URL `out` from the folder `path`."""
    folder = Path(path)
    file = folder / "user_item.dat"
    fields = read_fields(file, "\t", 4, _SOURCE)
    names = ("user", "item", "rating", "time")
    columns = {
        name: pa.array([parse_integer(line[index], file, name) for line in fields], pa.int64())
        for index, name in enumerate(names)
    }
    for name in ("brand", "category"):
        listed = _attributes(folder / f"item_{name}.dat")
        columns[name] = pa.array([listed.get(line[1]) for line in fields], pa.string())
    table = pa.table({"row": pa.array(range(len(fields)), pa.int64()), **columns})
    singles = ["user", "item"]
    check_ratings("amazon", table)
    schema = schema_by_time(singles, ["brand", "category"], ["brand", "category"], config)
    recipe = {"name": "amazon", **vars(config)}
    prepare_table(table, out, schema, recipe, protocol_by_time(config), overwrite)


def _attributes(file: Path) -> dict[str, str]:
    """Return the values of each item, separated by "|", from lines `item,value`."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for item, value in read_fields(file, ",", 2, _SOURCE):
        found[item].append(value)
    # Some lines are repeated: each value counts once.
    return {item: "|".join(dict.fromkeys(values)) for item, values in found.items()}
