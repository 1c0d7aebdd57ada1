"""Reads the files of MovieLens-1M, and MeLU's additions to them if they exist.

Shape suffix: N rows"""

import io
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pa_csv

from metaio.errors import DataError
from metaio.ragged import Int64
from metaio.recipes.field_files import parse_integer, read_fields

_YEAR = re.compile(r"\((\d{4})\)\s*$")
_IN_PARENTHESES = re.compile(r"\([^()]*\)")
_MELU_STATES = ("warm_state", "user_cold_state", "item_cold_state", "user_and_item_cold_state")


@dataclass(frozen=True)
class Ratings:
    """One entry a rating, in file order; `time_N` is None if the file has no timestamps."""

    user_N: Int64
    movie_N: Int64
    rating_N: npt.NDArray[np.float32]
    time_N: Int64 | None


@dataclass(frozen=True)
class Movies:
    """Attributes by movie id; without movies_extrainfos.dat rate, director, actor are empty."""

    year: dict[int, int]
    genre: dict[int, list[str]]
    rate: dict[int, str]
    director: dict[int, list[str]]
    actor: dict[int, list[str]]

    @property
    def has_extra(self) -> bool:
        """Return whether MPAA rate, directors and actors are known."""
        return bool(self.rate)


def read_ratings(folder: Path) -> Ratings:
    """Return the ratings of ratings.dat, or of ratings_notime.dat, which has no timestamps."""
    # The file with timestamps has everything that the other has.
    with_time = (folder / "ratings.dat").is_file()
    path = folder / ("ratings.dat" if with_time else "ratings_notime.dat")
    if not path.is_file():
        raise DataError(
            f"{folder} holds neither ratings.dat nor ratings_notime.dat. Point PATH at the ml-1m "
            "folder"
        )
    names = ["user", "movie", "rating", "time"][: 4 if with_time else 3]
    try:
        table = pa_csv.read_csv(
            # Arrow splits at single characters only.
            io.BytesIO(path.read_bytes().replace(b"::", b"\t")),
            pa_csv.ReadOptions(column_names=names),
            pa_csv.ParseOptions(delimiter="\t"),
            # No word means a null: an empty field is an error.
            pa_csv.ConvertOptions(column_types=dict.fromkeys(names, pa.int64()), null_values=[]),
        )
    except pa.ArrowInvalid as error:
        raise DataError(f"{path} cannot be read: {error}. Download the file again") from error
    columns = {name: table[name].to_numpy() for name in names}
    ratings = columns["rating"]
    if ((ratings < 1) | (ratings > 5)).any():
        raise DataError(
            f"{path} holds rating {ratings[(ratings < 1) | (ratings > 5)][0]}; 1 to 5 are allowed. "
            "Download the file again"
        )
    return Ratings(
        columns["user"], columns["movie"], ratings.astype(np.float32), columns.get("time")
    )


def read_users(folder: Path) -> dict[int, tuple[str, str, str, str]]:
    """Return gender, age, occupation and zip by user id."""
    path = folder / "users.dat"
    return {
        # "98107-2117" becomes "98107", as in MeLU.
        parse_integer(user, path, "user"): (gender, age, job, code[:5])
        for user, gender, age, job, code in read_fields(path, "::", 5, "ml-1m")
    }


def read_movies(folder: Path) -> Movies:
    """Return the attributes of all movies; genres of movies_extrainfos.dat replace the others."""
    path = folder / "movies_extrainfos.dat"
    if not path.is_file():
        return _plain_movies(folder)
    movies = Movies({}, {}, {}, {}, {})
    for fields in read_fields(path, "::", 11, "ml-1m"):
        movie = parse_integer(fields[0], path, "movie")
        movies.year[movie] = parse_integer(fields[2], path, "year")
        movies.rate[movie] = fields[3]
        movies.genre[movie] = _names(fields[5])
        # "John Lasseter (co-director)" is the person of that name, as in MeLU.
        movies.director[movie] = [
            _IN_PARENTHESES.sub("", name).strip() for name in _names(fields[6])
        ]
        movies.actor[movie] = _names(fields[8])
    return movies


def _names(field: str) -> list[str]:
    return [name.strip() for name in field.split(", ")]


def _plain_movies(folder: Path) -> Movies:
    movies = Movies({}, {}, {}, {}, {})
    path = folder / "movies.dat"
    for line, (movie, title, genres) in enumerate(read_fields(path, "::", 3, "ml-1m"), start=1):
        year = _YEAR.search(title)
        if year is None:
            raise DataError(
                f"{path}, line {line}: title {title!r} does not end in '(year)'. Download it again"
            )
        number = parse_integer(movie, path, "movie")
        movies.year[number] = int(year.group(1))
        movies.genre[number] = genres.split("|")
    return movies


def read_titles(folder: Path) -> dict[int, tuple[str, str, list[str]]]:
    """Return title, year and genres by movie id, from movies.dat."""
    found, path = {}, folder / "movies.dat"
    for movie, title, genres in read_fields(path, "::", 3, "ml-1m"):
        year = _YEAR.search(title)
        found[parse_integer(movie, path, "movie")] = (
            _YEAR.sub("", title).strip(),
            year.group(1) if year else "",
            genres.split("|"),
        )
    return found


def read_vocabulary(folder: Path, name: str) -> list[str] | None:
    """Return MeLU's list of values (m_NAME.txt, one a line), or None if it does not exist."""
    path = folder / f"m_{name}.txt"
    if not path.is_file():
        return None
    return [line.strip() for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def read_melu_split(folder: Path) -> list[dict[int, tuple[Int64, Int64]]] | None:
    """Return MeLU's four states, each user -> (movies, ratings) in file order, or None."""
    if not (folder / "melu_split").is_dir():
        return None
    states = []
    for name in _MELU_STATES:
        movies, ratings = (
            _load_json(folder / "melu_split" / f"{name}{suffix}.json") for suffix in ("", "_y")
        )
        counts, others = ({user: len(v) for user, v in own.items()} for own in (movies, ratings))
        if counts != others:
            raise DataError(
                f"{folder / 'melu_split'}: {name}.json and {name}_y.json hold different users or "
                "counts. Copy both from the same place"
            )
        state = {
            int(u): (np.array(movies[u], dtype=np.int64), np.array(ratings[u], dtype=np.int64))
            for u in movies
        }
        states.append(state)
    return states


def _load_json(path: Path) -> dict[str, list[int]]:
    try:
        loaded: dict[str, list[int]] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read: {error}. Copy MeLU's split again, or remove the folder"
        ) from error
    return loaded
