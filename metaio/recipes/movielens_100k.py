"""MovieLens-100k by time, from GroupLens' files (u.data, u.item, u.user, u.genre), or from
RecBole's atomic files (ml-100k.inter, .item, .user)."""

import re
from pathlib import Path

import pyarrow as pa

from metaio.errors import DataError
from metaio.recipes.by_schema import keep_shared_words, prepare_table
from metaio.recipes.by_time import ByTimeConfig, check_ratings, protocol_by_time, schema_by_time
from metaio.recipes.field_files import parse_integer, read_fields

_SOURCE = "ml-100k"
_YEAR = re.compile(r"\((\d{4})\)\s*$")
# The age groups of MovieLens-1M, each by its youngest.
_AGES = (1, 18, 25, 35, 45, 50, 56)
Attributes = dict[str, dict[str, str | None]]  # id -> column -> value


def prepare_movielens_100k(
    path: str, out: str, config: ByTimeConfig, overwrite: bool = False
) -> None:
    """Write the dataset at URL `out` from the folder `path`."""
    folder = Path(path)
    is_atomic = (folder / "ml-100k.inter").is_file()
    file = folder / ("ml-100k.inter" if is_atomic else "u.data")
    # Atomic files begin with a header.
    fields = read_fields(file, "\t", 4, _SOURCE)[is_atomic:]
    columns = {
        name: pa.array([parse_integer(line[index], file, name) for line in fields], pa.int64())
        for index, name in enumerate(("user", "item", "rating", "time"))
    }
    items = _atomic_items(folder) if is_atomic else _items(folder)
    for index, known in enumerate((_users(folder, is_atomic), items)):
        ids = [line[index] for line in fields]
        unknown = next((one for one in ids if one not in known), None)
        if unknown is not None:
            raise DataError(
                f"{file} rates or is rated by {unknown}, of which nothing else is known. Download "
                f"{_SOURCE} again"
            )
        for name in next(iter(known.values())):
            columns[name] = pa.array([known[one][name] for one in ids], pa.string())
    table = pa.table({"row": pa.array(range(len(fields)), pa.int64()), **columns})
    singles = ["user", "item", "year", "age", "gender", "occupation", "zip"]
    check_ratings("movielens-100k", table)
    schema = schema_by_time(singles, ["title", "genre"], ["year", "title", "genre"], config)
    recipe = {"name": "movielens-100k", **vars(config)}
    prepare_table(table, out, schema, recipe, protocol_by_time(config), overwrite)


def _users(folder: Path, is_atomic: bool) -> Attributes:
    file = folder / ("ml-100k.user" if is_atomic else "u.user")
    found: Attributes = {}
    for user, age, gender, job, code in read_fields(file, "|\t"[is_atomic], 5, _SOURCE)[is_atomic:]:
        years = parse_integer(age, file, "age")
        group = max((least for least in _AGES if least <= years), default=_AGES[0])
        # The first digit is a region; by complete zips most users would be alone.
        zip_code = code[:1] or None
        found[user] = {"age": str(group), "gender": gender, "occupation": job, "zip": zip_code}
    return found


def _items(folder: Path) -> Attributes:
    names = [name for name, _ in read_fields(folder / "u.genre", "|", 2, _SOURCE)]
    lines = read_fields(folder / "u.item", "|", 5 + len(names), _SOURCE)
    years = [_YEAR.search(line[1]) for line in lines]
    genres = [
        [name for name, flag in zip(names, line[5:], strict=True) if flag == "1"] for line in lines
    ]
    return _make_attributes(
        [line[0] for line in lines],
        [_YEAR.sub("", line[1]) for line in lines],
        [year.group(1) if year else "" for year in years],
        genres,
    )


def _atomic_items(folder: Path) -> Attributes:
    lines = read_fields(folder / "ml-100k.item", "\t", 4, _SOURCE)[1:]
    ids, titles, years, genres = zip(*lines, strict=True)
    return _make_attributes(
        list(ids), list(titles), list(years), [one.split(" ") for one in genres]
    )


def _make_attributes(
    ids: list[str], titles: list[str], years: list[str], genres: list[list[str]]
) -> Attributes:
    words = keep_shared_words(titles)
    return {
        item: {
            "title": title.replace(" ", "|") if title else None,
            "year": year or None,
            "genre": "|".join(genre) or None,
        }
        for item, title, year, genre in zip(ids, words, years, genres, strict=True)
    }
