"""The columns of a prepared dataset, as a trainer needs to know them; stored in the manifest."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_TABLE_ROWS = 1 << 40
MAX_TABLE_WIDTH = 1 << 16
OOV_ROW = 0  # which every table keeps for ids outside its vocabulary


@dataclass(frozen=True)
class TableSpec:
    """One embedding table with ids 0 (out of vocabulary) to num_rows - 1."""

    name: str
    num_rows: int
    # Numbers of a row; 0: as the model says.
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
    """Return the name of one number of a vector column among the dense columns."""
    return f"{column}[{index}]"


def name_event_column(column: str) -> str:
    """Return the name of a column of events among those that are stored as lists."""
    return f"events.{column}"


def find_vector_column(name: str) -> str:
    """Return the column of a dense input: its vector's name, or its own.

    >>> find_vector_column("image[12]"), find_vector_column("price")
    ('image', 'price')"""
    column, bracket, index = name.removesuffix("]").rpartition("[")
    return column if bracket and index.isdecimal() and name.endswith("]") else name


@dataclass(frozen=True)
class Features:
    """The columns of a prepared dataset, in the order in which a TaskBatch holds them."""

    tables: tuple[TableSpec, ...]
    # One id a row; multi: a list of ids a row, in order, with repeats, possibly empty.
    single: tuple[FeatureSpec, ...]
    multi: tuple[FeatureSpec, ...]
    # float32; the numbers of a vector stand behind the plain columns, each with its own name.
    dense: tuple[str, ...]
    # The raw column by which a row can be found again; no model sees it. "": none.
    row_id: str = ""
    # Names, if there are several labels, or one that not every row has; (): one without a name.
    labels: tuple[str, ...] = ()
    # The raw column of the rows' weights; "": none.
    weight: str = ""
    # Columns of ids of a task's events in time; a row knows as many of them as it says.
    events: tuple[FeatureSpec, ...] = ()
    # Numbers of an event, behind the seconds since the first event that its episode holds.
    event_dense: tuple[str, ...] = ()
    event_longest: int = 0  # newest events kept before each row; 0: all
    # How much older than a row its events are, in their seconds: a schema alone does not tell.
    event_delay: float = field(default=0.0, compare=False)
    # Whether rows of label 0 were drawn, and stand behind the positive that each was drawn for.
    # Files stay what they are: Dataset has it from the recipe, an export in its features.
    draws_negatives: bool = field(default=False, compare=False)

    @property
    def num_labels(self) -> int:
        """Return the number of labels of a row."""
        return max(len(self.labels), 1)

    @property
    def lists(self) -> tuple[FeatureSpec, ...]:
        """Return the columns stored as lists: multi, then events, whose lists stand in the first
        row of an episode and are empty in the others."""
        return self.multi + self.events

    @property
    def event_targets(self) -> tuple[int, ...]:
        """Return for each column of the events the single-id column of the rows with its values."""
        single = {name_event_column(one.name): at for at, one in enumerate(self.single)}
        return tuple(single[one.name] for one in self.events)

    @property
    def num_event_numbers(self) -> int:
        """Return how many numbers an event has, its seconds among them; 0 without events."""
        return 1 + len(self.event_dense) if self.events else 0

    @property
    def sparse(self) -> tuple[FeatureSpec, ...]:
        """Return single, then multi features: the order of a model's pooled embeddings."""
        return self.single + self.multi

    @cached_property
    def table_of_single(self) -> npt.NDArray[np.int64]:
        """Return the index of each single feature's table."""
        return self._tables_of(self.single)

    @cached_property
    def table_of_lists(self) -> npt.NDArray[np.int64]:
        """Return the index of the table of each column of `lists`."""
        return self._tables_of(self.lists)

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
            **({"events": [vars(feature) for feature in self.events]} if self.events else {}),
            **({"event_dense": list(self.event_dense)} if self.event_dense else {}),
            **({"event_longest": self.event_longest} if self.events else {}),
            **({"event_delay": self.event_delay} if self.events else {}),
            **({"draws_negatives": True} if self.draws_negatives else {}),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Features":
        """Return the features that `to_json` wrote; types are trusted."""
        return cls(
            tables=tuple(TableSpec(**table) for table in value["tables"]),
            single=tuple(FeatureSpec(**feature) for feature in value["single"]),
            multi=tuple(FeatureSpec(**feature) for feature in value["multi"]),
            dense=tuple(value["dense"]),
            row_id=value.get("row_id", ""),
            labels=tuple(value.get("labels", ())),
            weight=value.get("weight", ""),
            events=tuple(FeatureSpec(**feature) for feature in value.get("events", ())),
            event_dense=tuple(value.get("event_dense", ())),
            event_longest=value.get("event_longest", 0),
            event_delay=value.get("event_delay", 0.0),
            draws_negatives=value.get("draws_negatives", False),
        )

    def check(self) -> None:
        """Raise ValueError for a feature without a table, or a table of a forbidden size."""
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
        if self.event_dense and not self.events:
            raise ValueError("numbers of events without a column of their ids")
        for feature in self.sparse + self.events:
            if feature.table not in tables:
                raise ValueError(f"feature {feature.name} has no table {feature.table}")
