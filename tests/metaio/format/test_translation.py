"""A dataset as the model of another one sees it: by value, against a loop over dictionaries."""

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metaio import DataError, Dataset, FormatError, open_dataset
from metaio.format.manifest import canonical_json, xxh3_hex
from metaio.format.shard_writer import make_file_entry
from metaio.format.translation import translate_dataset
from metaio.prepare.engines.local import prepare
from metaio.prepare.job import PrepareOptions
from metaio.prepare.schema.schema_file import parse_schema
from metaio.recipes.synthetic import SyntheticConfig, prepare_synthetic
from tests.metaio.conftest import whole_split
from tests.support.refusals import catch_message

SCHEMA: dict[str, Any] = {
    "task": {"column": "user"},
    "label": {"column": "click"},
    "single": [{"column": "item", "vocabulary": 1}, {"column": "shop", "hash": 50}],
    "multi": [{"column": "tags", "vocabulary": 1, "separator": "|"}],
    "dense": [{"column": "price", "standardise": True}],
    "episodes": {"by": "ratio", "query_share": 0.5},
}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Dataset]:
    """Prepares a log of other values for each seed by the schema with these keys replaced."""

    def made(seed: int, **changes: Any) -> Dataset:
        rng = random.Random(seed)
        log, out = tmp_path / f"{seed}.csv", tmp_path / f"{seed}-{len(changes)}"
        with log.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["user", "item", "shop", "tags", "price", "click"])
            for row in range(200):
                item = f"i{rng.randrange(30) + 10 * seed}"
                tags = "|".join(f"t{rng.randrange(8) + seed}" for _ in range(rng.randrange(1, 4)))
                price = round(rng.gauss(10 * seed, 1 + seed), 4)
                writer.writerow([row % 20, item, f"s{rng.randrange(9)}", tags, price, row % 2])
        prepare([str(log)], str(out), parse_schema({**SCHEMA, **changes}), PrepareOptions())
        return open_dataset(str(out))

    return made


def values_of(dataset: Dataset, table: str) -> dict[int, Any]:
    """Row -> value."""
    path = Path(dataset.url) / "vocabulary" / f"{table}.parquet"
    return dict(enumerate(pq.read_table(path)["value"].to_pylist(), start=1))


def test_ids_become_the_rows_of_their_values_and_numbers_get_the_other_units(
    make: Callable[..., Dataset],
) -> None:
    known, own = make(1), make(2)
    seen = translate_dataset(own, known)
    assert seen.features == known.features
    rows = {
        table: {value: row for row, value in values_of(known, table).items()}
        for table in ("item", "tags")
    }
    values = {table: values_of(own, table) for table in ("item", "tags")}
    (mean, std), (to_mean, to_std) = (
        dataset.manifest.recipe["moments"]["price"] for dataset in (own, known)
    )

    def row_of(table: str, row: int) -> int:
        return rows[table].get(values[table].get(row), 0)

    num_known = 0
    for split in own.splits:
        pairs = zip(whole_split(own, split), whole_split(seen, split), strict=True)
        for (task, support, lines), (seen_task, seen_support, seen_lines) in pairs:
            assert (task, support) == (seen_task, seen_support)
            for line, found in zip(lines, seen_lines, strict=True):
                label, (price,), (item, shop), (tags,) = line  # type: ignore[misc]
                found_label, (found_price,), ids, bags = found  # type: ignore[misc]
                assert found_label == label
                assert ids == [row_of("item", item), shop]
                assert bags == [[row_of("tags", tag) for tag in tags]]
                assert found_price == pytest.approx(
                    (price * std + mean - to_mean) / to_std, rel=1e-4, abs=1e-5
                )
                num_known += ids[0] > 0
    assert 0 < num_known < 200  # some values are new, some are not


def test_a_vocabulary_without_its_column_is_refused(make: Callable[..., Dataset]) -> None:
    known, own = make(1), make(2)
    for column, told in (("value", ""), ("other", "'Field \"value\" does not exist in schema'")):
        path = Path(own.url) / "vocabulary" / "item.parquet"
        pq.write_table(pa.table({column: pa.array(["i1"])}), path)
        body = json.loads((Path(own.url) / "manifest.json").read_text())
        body["vocabularies"]["item"] = vars(make_file_entry(memoryview(path.read_bytes())))
        del body["checksum"]
        body["checksum"] = xxh3_hex(canonical_json(body))
        (Path(own.url) / "manifest.json").write_text(json.dumps(body))
        if not told:
            translate_dataset(open_dataset(own.url), known)
            continue
        assert catch_message(FormatError, translate_dataset, open_dataset(own.url), known) == (
            f"{path} has no column value to read: {told}. The program that wrote it is at fault; "
            "see docs/format.md"
        )


def test_a_dataset_is_itself_to_its_own_model(make: Callable[..., Dataset]) -> None:
    own = make(1)
    assert translate_dataset(own, own) is own


def test_ids_that_a_recipe_numbers_are_those_of_the_same_recipe_alone(tmp_path: Path) -> None:
    for name, seed in (("known", 1), ("other", 2)):
        small = SyntheticConfig(num_tasks=20, num_items=30, seed=seed)
        prepare_synthetic(str(tmp_path / name), small)
    known, other = (open_dataset(str(tmp_path / name)) for name in ("known", "other"))
    assert catch_message(DataError, translate_dataset, other, known) == (
        f"table item has no vocabulary, and the recipe of {other.url} has seed = 2, that of "
        f"{known.url} 1: the same ids may mean other values. Prepare it by the recipe and the "
        "options of the other one, or choose another dataset"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"single": SCHEMA["single"][:1]},
            "column shop is a single column of table shop of {known}, {own} lacks it",
        ),
        (
            {"single": [SCHEMA["single"][0], {"column": "shop", "hash": 60}]},
            "column shop has hash = 60 in {own} and 50 in {known}: its values mean other ids",
        ),
    ],
)
def test_a_column_that_means_something_else_is_refused_by_name(
    make: Callable[..., Dataset], changes: dict[str, Any], message: str
) -> None:
    known, own = make(1), make(2, **changes)
    refusal = catch_message(DataError, translate_dataset, own, known)
    assert refusal.startswith(message.format(known=known.url, own=own.url))
    assert refusal.endswith(
        ". Prepare it by the schema of the other one, or choose another dataset"
    )
