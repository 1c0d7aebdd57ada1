"""Encodes raw rows as a prepared dataset's were: what serving a new user needs."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from metaio.batch import TaskBatch
from metaio.block import Rows, build_block
from metaio.compose import compose
from metaio.dataset import Dataset, verify_file
from metaio.encode import Encoder, Fitted
from metaio.errors import DataError, FormatError
from metaio.layout import VOCABULARY_FOLDER
from metaio.schema import Schema, parse_schema


class RawEncoder:
    """Turns raw rows of one task into a TaskBatch; reads the vocabularies once."""

    def __init__(self, dataset: Dataset) -> None:
        """Read schema and vocabularies.

        Raises:
            FormatError: the dataset was made by a recipe, which keeps no schema, or is damaged.
        """
        recipe = dataset.manifest.recipe
        if recipe.get("name") != "schema":
            raise FormatError(
                f"{dataset.url} was made by recipe {recipe.get('name')}, which keeps no schema to "
                "encode raw rows by. Prepare it with --schema."
            )
        self._schema: Schema = parse_schema(recipe["schema"])
        moments = {name: (mean, deviation) for name, (mean, deviation) in recipe["moments"].items()}
        self._encoder = Encoder(self._schema, Fitted(_vocabularies(dataset), moments))
        self._features = dataset.features

    def encode(self, rows: pa.Table, num_support: int) -> TaskBatch:
        """One episode of all rows, in their order; the first `num_support` are support.

        The table needs the schema's columns of ids and numbers. Task, time and split may be
        missing; the label too, or be null, where it is not known: it is 0 then, and means nothing.

        Raises:
            DataError: a column is missing, of the wrong type, or null where the schema allows none.
        """
        if not 0 <= num_support <= rows.num_rows:
            raise DataError(
                f"num_support is {num_support} of {rows.num_rows} rows; 0 to {rows.num_rows} is "
                "allowed. Correct it."
            )
        # One batch: an episode is one piece, and small.
        batch = self._complete(rows).combine_chunks().to_batches()
        if not batch:
            raise DataError("there are no rows to encode. Give at least one.")
        encoded = self._encoder.encode(batch[0])
        episode = Rows(
            task_T=encoded.task_N[:1],
            row_lengths_T=np.array([rows.num_rows]),
            support_lengths_T=np.array([num_support]),
            label_N=encoded.label_N,
            dense_NK=encoded.dense_NK,
            ids_NF=encoded.ids_NF,
            multi_ids_V=encoded.values_V,
            multi_lengths_NM=encoded.lengths_NM,
        )
        block = build_block(self._features, episode)
        return compose(self._features, [(block, np.zeros(1, dtype=np.int64))])

    def _complete(self, rows: pa.Table) -> pa.Table:
        """The schema's columns, with stand-ins for those that a prediction does not need."""
        schema, columns = self._schema, dict[str, Any]()
        stand_ins: dict[str, Any] = {schema.task.column: 0, schema.label.column: 0.0}
        stand_ins |= {schema.time.column: 0} if schema.time else {}
        stand_ins |= {schema.splits.column: schema.splits.train} if schema.splits.column else {}
        for name in schema.columns:
            if name in rows.column_names:
                columns[name] = rows[name]
            elif name in stand_ins:
                columns[name] = pa.array([stand_ins[name]] * rows.num_rows)
            else:
                raise DataError(
                    f"the rows have no column {name}; they have {', '.join(rows.column_names)}. "
                    "Add it, as the training data had it."
                )
        label = columns[schema.label.column]
        if label.null_count:
            columns[schema.label.column] = pc.fill_null(label, pa.scalar(0).cast(label.type))
        return pa.table(columns)


def _vocabularies(dataset: Dataset) -> dict[str, pa.Array]:
    found = {}
    for name, entry in dataset.manifest.vocabularies.items():
        path = f"{VOCABULARY_FOLDER}/{name}.parquet"
        verify_file(dataset, path, entry)
        table = pq.read_table(pa.BufferReader(dataset.read_file(path)))
        found[name] = table["value"].combine_chunks()
    return found
