"""Amazon and MovieLens-100k by time: small copies against loops, and the counts of the whole."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from metaio import DataError, open_dataset
from metaio.recipes.amazon import prepare_amazon
from metaio.recipes.by_time import ByTimeConfig
from metaio.recipes.movielens_100k import prepare_movielens_100k
from tests.metaio.conftest import whole_split
from tests.metaio.recipes.test_movielens import SHARED, needs_shared

Line = tuple[int, int, int, int]  # user, item, rating, time


def ratings(num_rows: int = 200) -> list[Line]:
    """Users begin one after the other; no two ratings have one time."""
    rng = np.random.default_rng(0)
    times = rng.permutation(num_rows)
    found = [
        (int(time * 12 / num_rows - rng.integers(0, 4)), int(rng.integers(0, 9)), time)
        for time in times.tolist()
    ]
    return [(max(user, 0), item, int(rng.integers(1, 6)), 10**9 + at) for user, item, at in found]


def amazon(folder: Path, lines: list[Line]) -> Path:
    text = "\n".join("\t".join(map(str, line)) for line in lines)
    (folder / "user_item.dat").write_text(text)
    (folder / "item_brand.dat").write_text("\n".join(f"{item},{item % 3}" for item in range(9)))
    categories = [f"{item},{item % 2}\n{item},7" for item in range(9)]
    (folder / "item_category.dat").write_text("\n".join(categories))
    return folder


def test_support_is_the_past_of_the_window_and_query_what_lies_in_it(tmp_path: Path) -> None:
    lines = ratings()
    out = str(tmp_path / "out")
    config = ByTimeConfig(label="rating", min_rows=2)
    prepare_amazon(str(amazon(tmp_path, lines)), out, config)
    dataset = open_dataset(out)
    bounds = {"valid": (140, 160), "test": (160, 200)}
    for name, (first, stop) in bounds.items():
        before, inside = defaultdict(list), defaultdict(list)
        for user, _, rating, time in sorted(lines, key=lambda line: line[3]):
            place = time - 10**9
            (before if place < first else inside)[user] += [rating] * (place < stop)
        known = {
            (user, tuple(sorted(before[user])), tuple(sorted(rows)))
            for user, rows in inside.items()
            if rows and before.get(user)
        }
        new = {
            (user, tuple(rows[: len(rows) // 2]), tuple(rows[len(rows) // 2 :]))
            for user, rows in inside.items()
            if len(rows) > 1 and not before.get(user)
        }
        assert known
        assert episodes(out, name, ordered=False) == known
        assert episodes(out, f"{name}-cold", ordered=True) == new
    assert len(new) > 1
    (brand, category) = (f for f in dataset.features.multi)
    assert (brand.name, category.name) == ("brand", "category")
    assert dataset.manifest.recipe["name"] == "amazon"


def episodes(path: str, split: str, ordered: bool) -> set[tuple[int, tuple[int, ...], ...]]:
    """Task and ratings of both sides of each episode."""
    found = set()
    for task, support, rows in whole_split(open_dataset(path), split):
        labels = [int(row[0]) for row in rows]  # type: ignore[index]
        sides = (labels[:support], labels[support:])
        found.add((task, *(tuple(side if ordered else sorted(side)) for side in sides)))
    return found


def test_a_click_is_a_rating_of_four_or_more(tmp_path: Path) -> None:
    folder = amazon(tmp_path, ratings())
    found = {}
    for label in ("click", "rating"):
        out = str(tmp_path / label)
        prepare_amazon(str(folder), out, ByTimeConfig(label=label))  # type: ignore[arg-type]
        rows = [row[0] for _, _, rows in whole_split(open_dataset(out), "train") for row in rows]  # type: ignore[index]
        found[label] = rows
    assert found["click"] == [float(rating >= 4) for rating in found["rating"]]


def test_both_spellings_of_movielens_100k_give_the_same_rows(tmp_path: Path) -> None:
    lines = [(user + 1, item + 1, *rest) for user, item, *rest in ratings()]
    body = "\n".join("\t".join(map(str, line)) for line in lines)
    genres = ("Action", "Children's")
    for name in ("own", "atomic"):
        (tmp_path / name).mkdir()
    own, atomic = tmp_path / "own", tmp_path / "atomic"
    (own / "u.data").write_text(body)
    (own / "u.genre").write_text("\n".join(f"{name}|{n}" for n, name in enumerate(genres)))
    (own / "u.user").write_text("\n".join(f"{n}|{17 + n}|M|writer|{n}0210" for n in range(1, 20)))
    (own / "u.item").write_bytes(
        "\n".join(
            f"{n}|Caf\xe9 {n % 3} ({1990 + n})|01-Jan-1995||url|1|{n % 2}" for n in range(1, 10)
        ).encode("latin-1")
    )
    (atomic / "ml-100k.inter").write_text("user\titem\trating\ttime\n" + body)
    (atomic / "ml-100k.user").write_text(
        "\n".join(
            [
                "id\tage\tgender\tjob\tzip",
                *(f"{n}\t{17 + n}\tM\twriter\t{n}0210" for n in range(1, 20)),
            ]
        )
    )
    items = [
        f"{n}\tCaf\xe9 {n % 3}\t{1990 + n}\t{' '.join(genres[: 1 + n % 2])}" for n in range(1, 10)
    ]
    (atomic / "ml-100k.item").write_text("\n".join(["id\ttitle\tyear\tclass", *items]))
    fingerprints = set()
    for folder in (own, atomic):
        prepare_movielens_100k(str(folder), str(folder / "out"), ByTimeConfig())
        dataset = open_dataset(str(folder / "out"))
        fingerprints.add(dataset.fingerprint)
        sizes = {table.name: table.num_rows - 1 for table in dataset.features.tables}
        assert (sizes["age"], sizes["genre"]) == (2, 2)
        # "caf", "0", "1" and "2": what the accent splits off is no word.
        assert sizes["title"] == 4
    assert len(fingerprints) == 1


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("user_item.dat", "1\t2\t3", "line 1: 3 fields, 4 separated by '\\t' are expected. "),
        ("user_item.dat", "1\t2\tgood\t9", "holds rating 'good'; a whole number is needed. "),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, file: str, text: str, message: str) -> None:
    folder = amazon(tmp_path, ratings())
    (folder / file).write_text(text)
    with pytest.raises(DataError) as caught:
        prepare_amazon(str(folder), str(tmp_path / "out"), ByTimeConfig())
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


@needs_shared
@pytest.mark.shared_data
def test_the_whole_files_give_the_counts_of_the_docs(tmp_path: Path) -> None:
    prepare_amazon(str(SHARED / "amazon"), str(tmp_path / "amazon"), ByTimeConfig())
    prepare_movielens_100k(str(SHARED / "ml-100k"), str(tmp_path / "ml"), ByTimeConfig())
    counts = {
        name: {
            split: its.num_episodes
            for split, its in open_dataset(str(tmp_path / name)).splits.items()
        }
        for name in ("amazon", "ml")
    }
    assert counts == {
        "amazon": {
            "train": 4507, "valid": 1645, "test": 1602, "valid-cold": 249, "test-cold": 1058,
        },
        "ml": {"train": 731, "valid": 86, "test": 112, "valid-cold": 87, "test-cold": 204},
    }  # fmt: skip
