"""Which columns a prepared dataset carries, as the trainer needs to know them. Stored in the
manifest.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_TABLE_ROWS = 1 << 40
MAX_TABLE_WIDTH = 1 << 16
OOV_ROW = 0  # which every table keeps for ids outside its vocabulary


@dataclass(frozen=True)
class TableSpec:
    """One embedding table: `num_rows` rows, ids 0 to num_rows - 1. Row 0 is the out-of-vocabulary
    row. `width` is how wide its rows are to be; 0: as the model says."""

    name: str
    num_rows: int
    width: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return plain values for the manifest."""
        width = {"width": self.width} if self.width else {}
        return {"name": self.name, "num_rows": self.num_rows, **width}


@dataclass(frozen=True)
class FeatureSpec:
    """One sparse column and the table that its ids index. Several features may share a table."""

    name: str
    table: str


def name_component(column: str, index: int) -> str:
    """Return what one number of a vector column is called among the dense ones."""
    return f"{column}[{index}]"


def find_vector_column(name: str) -> str:
    """Return the column that a dense one is a number of: itself, unless it is of a vector.

    >>> find_vector_column("image[12]"), find_vector_column("price")
    ('image', 'price')
    """
    column, bracket, index = name.removesuffix("]").rpartition("[")
    return column if bracket and index.isdecimal() and name.endswith("]") else name


@dataclass(frozen=True)
class Features:
    """The columns of a prepared dataset, in the order in which a TaskBatch holds them.

    `single` features hold exactly one id a row, `multi` features a list of ids (kept in order,
    repeats kept, possibly empty). `dense` columns are float32; the numbers of a vector stand
    side by side behind the others, each with a name of its own. `tables` is the order of
    TaskBatch.unique_ids_U. `row_id` is the raw column by which a row can be found again, which no
    model sees; "": none is stored. `labels` names the labels where there are several, or one that
    not every row has; (): one that needs no name. `weight` is the raw column of the rows' weights.
    """

    tables: tuple[TableSpec, ...]
    single: tuple[FeatureSpec, ...]
    multi: tuple[FeatureSpec, ...]
    dense: tuple[str, ...]
    row_id: str = ""
    labels: tuple[str, ...] = ()
    weight: str = ""

    @property
    def num_labels(self) -> int:
        """Return how many labels a row has."""
        return max(len(self.labels), 1)

    @property
    def sparse(self) -> tuple[FeatureSpec, ...]:
        """Return the single features, then the multi ones: the order of the pooled embeddings that
        a model sees."""
        return self.single + self.multi

    @cached_property
    def table_of_single(self) -> npt.NDArray[np.int64]:
        """Return the index of each single feature's table."""
        return self._tables_of(self.single)

    @cached_property
    def table_of_multi(self) -> npt.NDArray[np.int64]:
        """Return the index of each multi feature's table."""
        return self._tables_of(self.multi)

    def _tables_of(self, kind: tuple[FeatureSpec, ...]) -> npt.NDArray[np.int64]:
        index = {table.name: index for index, table in enumerate(self.tables)}
        return np.array([index[feature.table] for feature in kind], dtype=np.int64)

    def to_json(self) -> dict[str, Any]:
        """Return plain lists and dicts for the manifest."""
        return {
            "tables": [table.to_json() for table in self.tables],
            "single": [{"name": feature.name, "table": feature.table} for feature in self.single],
            "multi": [{"name": feature.name, "table": feature.table} for feature in self.multi],
            "dense": list(self.dense),
            # Left out where there is none: manifests without them stay as they were.
            **({"row_id": self.row_id} if self.row_id else {}),
            **({"labels": list(self.labels)} if self.labels else {}),
            **({"weight": self.weight} if self.weight else {}),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Features":
        """Return what `to_json` was called on; its types are taken on trust."""
        return cls(
            tables=tuple(TableSpec(**table) for table in value["tables"]),
            single=tuple(FeatureSpec(**feature) for feature in value["single"]),
            multi=tuple(FeatureSpec(**feature) for feature in value["multi"]),
            dense=tuple(value["dense"]),
            row_id=value.get("row_id", ""),
            labels=tuple(value.get("labels", ())),
            weight=value.get("weight", ""),
        )

    def check(self) -> None:
        """Raise ValueError unless each feature has its one table, of a size that there may be."""
        tables = {table.name: table.num_rows for table in self.tables}
        if len(set(self.labels)) < len(self.labels):
            raise ValueError("two labels have one name")
        if len(tables) < len(self.tables):
            raise ValueError("two tables have one name")
        for name, num_rows in tables.items():
            if not 1 <= num_rows <= MAX_TABLE_ROWS:
                raise ValueError(f"table {name} has {num_rows} rows; 1 to 2^40 are allowed")
        for table in self.tables:
            if table.width % 4 or not 0 <= table.width <= MAX_TABLE_WIDTH:
                raise ValueError(
                    f"table {table.name} is {table.width} wide; multiples of 4 up to "
                    f"{MAX_TABLE_WIDTH} are allowed"
                )
        for feature in self.sparse:
            if feature.table not in tables:
                raise ValueError(f"feature {feature.name} has no table {feature.table}")
