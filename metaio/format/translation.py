"""A dataset as seen by a model that was trained on another dataset of the same columns: each id
becomes the row of its value in that model's tables, row 0 where it has none.

Shape suffixes: N rows, F single-id or pooled features, V values, K dense columns, B tables, U
unique ids, R rows of tables"""

from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from metaio.errors import DataError
from metaio.format.block import Block, merge_unknown_ids
from metaio.format.dataset import Dataset, read_column
from metaio.format.features import FeatureSpec, name_event_column
from metaio.format.layout import VOCABULARY_FOLDER
from metaio.ragged import Int64, offsets, owners

_REMEDY = "Prepare it by the schema of the other one, or choose another dataset"
# The keys of a rule that decide which value an id or a number stands for.
_LABEL_MEANING_KEYS = ("threshold", "mask", "null")
_MEANING_KEYS = ("table", "hash", "log1p", "standardise", "fill")


@dataclass(frozen=True)
class _Translation:
    """Maps rows of each table [R] to the other dataset's, and dense x to x * scale + shift."""

    rows_of_tables: tuple[Int64, ...]
    affine_K: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None
    dense_of_events: tuple[int, ...]  # which dense columns events have

    def __call__(self, block: Block) -> Block:
        """Return the block in the other dataset's ids and units."""
        lengths_B = np.diff(block.unique_offsets_B1)
        parts = np.split(block.unique_ids_U, block.unique_offsets_B1[1:-1])
        mapped = [rows[ids] for rows, ids in zip(self.rows_of_tables, parts, strict=True)]
        ids_U = np.concatenate(mapped) if mapped else block.unique_ids_U
        table_U = owners(lengths_B)
        kept_U, kept_B, position_U = merge_unknown_ids(ids_U, ids_U == 0, table_U, len(lengths_B))
        dense_NK, event_numbers = block.dense_NK, block.event_numbers
        if self.affine_K is not None:
            scale_K, shift_K = self.affine_K
            dense_NK = (dense_NK * scale_K + shift_K).astype(np.float32)
            if self.dense_of_events:
                columns, event_numbers = list(self.dense_of_events), event_numbers.copy()
                # Behind the seconds.
                numbers = event_numbers[:, 1:] * scale_K[columns] + shift_K[columns]
                event_numbers[:, 1:] = numbers
        return replace(
            block,
            dense_NK=dense_NK,
            event_numbers=event_numbers,
            unique_ids_U=kept_U,
            unique_offsets_B1=offsets(kept_B),
            positions_NF=position_U[block.positions_NF],
            multi_positions_V=position_U[block.multi_positions_V],
            bundles=None,  # the unknown id of a table is one for all
        )


def translate_dataset(own: Dataset, known: Dataset) -> Dataset:
    """Return `own` with the ids, tables and units of `known`; raise DataError if they differ."""
    # The usual case, a model scored on its own dataset: blocks pass unchanged.
    if own.fingerprint == known.fingerprint:
        return own
    _check_columns(own, known)
    _check_meanings(own, known)
    rows = tuple(
        _match_rows(own, known, table.name, table.num_rows, size.num_rows)
        for table, size in zip(own.features.tables, known.features.tables, strict=True)
    )
    dense_of_events = tuple(map(known.features.dense.index, known.features.event_dense))
    translation = _Translation(rows, _match_moments(own, known), dense_of_events)
    return own.with_features(known.features, translation)


def _check_columns(own: Dataset, known: Dataset) -> None:
    """Raise DataError for another set or order of columns."""

    def describe_columns(columns: tuple[FeatureSpec, ...], kind: str) -> list[tuple[str, str]]:
        return [(column.name, f"{kind} of table {column.table}") for column in columns]

    descriptions = [
        [
            *describe_columns(dataset.features.single, "single column"),
            *describe_columns(dataset.features.multi, "multi column"),
            *((name, "dense column") for name in dataset.features.dense),
            *describe_columns(dataset.features.events, "column of events"),
            *((name_event_column(one), "number of events") for one in dataset.features.event_dense),
        ]
        for dataset in (own, known)
    ]
    kinds = [dict(one) for one in descriptions]
    for name, kind in descriptions[1]:
        if kinds[0].get(name) != kind:
            has = f"has it as {kinds[0][name]}" if name in kinds[0] else "lacks it"
            raise DataError(f"column {name} is a {kind} of {known.url}, {own.url} {has}. {_REMEDY}")
    for (name, _), (other, _) in zip(*descriptions, strict=False):
        if name != other:
            raise DataError(f"{own.url} has column {name} where {known.url} has {other}. {_REMEDY}")
    if len(descriptions[0]) > len(descriptions[1]):
        name = descriptions[0][len(descriptions[1])][0]
        raise DataError(f"{own.url} has a column {name}, {known.url} has none. {_REMEDY}")
    tables = [[table.name for table in dataset.features.tables] for dataset in (own, known)]
    if tables[0] != tables[1]:
        raise DataError(
            f"{own.url} has the tables {', '.join(tables[0])}, {known.url} has "
            f"{', '.join(tables[1])}. {_REMEDY}"
        )


def _collect_meanings(dataset: Dataset) -> dict[str, dict[str, Any]]:
    """Return by column what its ids and numbers mean, and the label's rule as `label NAME`."""
    recipe = dataset.manifest.recipe
    schema = recipe.get("schema") or {}
    kinds = recipe.get("kinds", {})
    labels = schema.get("label") or {}
    names = dataset.features.labels or [dataset.label]
    found: dict[str, dict[str, Any]] = {
        f"label {name}": {key: rule.get(key) for key in _LABEL_MEANING_KEYS}
        for name, rule in zip(names, [labels] if isinstance(labels, dict) else labels, strict=False)
    }
    features = (schema.get(kind, ()) for kind in ("single", "multi", "dense", "vector"))
    for one in chain.from_iterable(features):
        meaning = {key: one.get(key) for key in _MEANING_KEYS}
        # The kind, since 7 and "7" are hashed to different rows.
        found[one["column"]] = {**meaning, "kind": kinds.get(one["column"])}
    if events := schema.get("events"):
        found["events"] = {key: events.get(key) for key in ("where", "delay")}
    return found


def _check_meanings(own: Dataset, known: Dataset) -> None:
    """Raise DataError for columns whose ids or numbers mean something else."""
    own_rules = _collect_meanings(own)
    for name, rule in _collect_meanings(known).items():
        other = own_rules.get(name)
        if other is None:
            raise DataError(f"{known.url} has {name}, {own.url} has another. {_REMEDY}")
        for key, value in rule.items():
            # A column without a value has no kind.
            if other[key] != value and not (key == "kind" and None in (value, other[key])):
                raise DataError(
                    f"column {name} has {key} = {other[key]!r} in {own.url} and {value!r} in "
                    f"{known.url}: its values mean other ids or numbers. {_REMEDY}"
                )


def _check_ids_without_vocabulary(own: Dataset, known: Dataset, table: str) -> None:
    """Raise DataError for a table without a vocabulary whose ids may mean other values."""
    # Ids of a schema are hashes, compared column by column; a recipe may number values as they
    # come.
    recipes = own.manifest.recipe, known.manifest.recipe
    if all(recipe.get("schema") for recipe in recipes) or recipes[0] == recipes[1]:
        return
    keys = sorted(recipes[0].keys() | recipes[1].keys())
    key = next(key for key in keys if recipes[0].get(key) != recipes[1].get(key))
    of_own, of_known = ("another" if key == "schema" else repr(one.get(key)) for one in recipes)
    raise DataError(
        f"table {table} has no vocabulary, and the recipe of {own.url} has {key} = {of_own}, that "
        f"of {known.url} {of_known}: the same ids may mean other values. Prepare it by the recipe "
        "and the options of the other one, or choose another dataset"
    )


def _match_rows(own: Dataset, known: Dataset, table: str, num_rows: int, num_known: int) -> Int64:
    """Return for each row of a table of `own` [R] the row of its value in `known`; 0: none."""
    vocabularies = own.manifest.vocabularies, known.manifest.vocabularies
    rows_R = np.arange(num_rows)
    if table not in vocabularies[1] and table not in vocabularies[0]:
        _check_ids_without_vocabulary(own, known, table)
        return np.where(rows_R < num_known, rows_R, 0)
    if table not in vocabularies[0] or table not in vocabularies[1]:
        missing = known if table in vocabularies[0] else own
        raise DataError(f"table {table} has no vocabulary in {missing.url}. {_REMEDY}")
    values, wanted = _read_vocabulary(own, table), _read_vocabulary(known, table)
    # skip_nulls: a freed row has no value, and must not match another freed row.
    found = pc.index_in(values.cast(wanted.type), value_set=wanted, skip_nulls=True)
    rows_R[:] = 0
    rows_R[1 : 1 + len(values)] = pc.fill_null(found, -1).to_numpy() + 1
    return rows_R


def _read_vocabulary(dataset: Dataset, table: str) -> pa.Array:
    """Return the values of a table's rows from 1 on."""
    entry = dataset.manifest.vocabularies[table]
    return read_column(dataset, f"{VOCABULARY_FOLDER}/{table}.parquet", entry, "value")


def _match_moments(
    own: Dataset, known: Dataset
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None:
    """Return scale and shift [K] from standardised columns of `own` to those of `known`."""
    moments = [dataset.manifest.recipe.get("moments", {}) for dataset in (own, known)]
    # None skips the arithmetic: values stay equal to the bit.
    if moments[0] == moments[1]:
        return None  # to the bit
    scale_K = np.ones(len(known.features.dense))
    shift_K = np.zeros(len(known.features.dense))
    for index, name in enumerate(known.features.dense):
        if name in moments[0] and name in moments[1]:
            (mean, deviation), (to_mean, to_deviation) = moments[0][name], moments[1][name]
            # Both are (raw - mean) / deviation, so one is an affine function of the other.
            scale_K[index] = deviation / to_deviation
            shift_K[index] = (mean - to_mean) / to_deviation
    return scale_K, shift_K
