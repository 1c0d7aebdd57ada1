"""Which columns a prepared dataset carries, as the trainer needs to know them. Stored in the
manifest.
"""

from dataclasses import dataclass
from typing import Any

MAX_TABLE_ROWS = 1 << 40


@dataclass(frozen=True)
class TableSpec:
    """One embedding table: `num_rows` rows, ids 0 to num_rows - 1. Row 0 is the out-of-vocabulary
    row.
    """

    name: str
    num_rows: int


@dataclass(frozen=True)
class FeatureSpec:
    """One sparse column and the table that its ids index. Several features may share a table."""

    name: str
    table: str


@dataclass(frozen=True)
class Features:
    """The columns of a prepared dataset, in the order in which a TaskBatch holds them.

    `single` features hold exactly one id a row, `multi` features a list of ids (kept in order,
    repeats kept, possibly empty). `dense` columns are float32. `tables` is the order of
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
        a model sees.
        """
        return self.single + self.multi

    def to_json(self) -> dict[str, Any]:
        """Return plain lists and dicts for the manifest."""
        return {
            "tables": [{"name": table.name, "num_rows": table.num_rows} for table in self.tables],
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
        for feature in self.sparse:
            if feature.table not in tables:
                raise ValueError(f"feature {feature.name} has no table {feature.table}")
