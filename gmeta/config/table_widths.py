"""How wide the rows of each table are: `model.embedding_dim`, or less."""

import math
from collections.abc import Mapping

from gmeta_models.model_config import ModelConfig
from metaio.format.features import Features

# fbgemm's kernels read a row four values at a time.
WIDTH_MULTIPLE = 4


def widths_of_tables(features: Features, model: ModelConfig) -> dict[str, int]:
    """Return the width of each table by name, in their order: that of `model.widths`, else that of
    the data's schema, else by the rule of `model.width`. Raises ValueError: an entry of
    `model.widths` names no table, or no width that one may have; or the schema's is larger than the
    model's; or `model.without` names no table."""
    widths = {}
    for table in features.tables:
        rule = auto_width(table.num_rows) if model.width == "auto" else model.embedding_dim
        widths[table.name] = table.width or min(model.embedding_dim, rule)
    for entry in model.widths:
        name, _, text = entry.rpartition("=")  # a table may have one in its name
        width = int(text) if text.isascii() and text.isdecimal() else 0
        if width not in range(WIDTH_MULTIPLE, model.embedding_dim + 1, WIDTH_MULTIPLE):
            raise ValueError(
                f"model.widths has {entry!r}: write table=width with a multiple of "
                f"{WIDTH_MULTIPLE} up to model.embedding_dim = {model.embedding_dim}"
            )
        if name not in widths:
            raise ValueError(
                f"model.widths names {name!r}, which is no table: the dataset has "
                f"{', '.join(widths)}. Name one of them"
            )
        widths[name] = width
    of_events = tables_of_events(features, model)
    for name in model.without:
        if name not in widths:
            raise ValueError(
                f"model.without names {name!r}, which is no table: the dataset has "
                f"{', '.join(widths)}. Name some of them"
            )
        if name not in of_events:
            widths[name] = WIDTH_MULTIPLE
    for name, width in widths.items():
        if width > model.embedding_dim:
            raise ValueError(
                f"table {name!r} is {width} wide by the schema of its data, and "
                f"model.embedding_dim = {model.embedding_dim} is the most. Set it to {width}, or "
                f'model.widths = ["{name}={model.embedding_dim}"]'
            )
    return widths


def tables_of_events(features: Features, model: ModelConfig) -> set[str]:
    """Return the names of the tables that the model's encoder of events reads."""
    return {column.table for column in features.events} if model.events != "none" else set()


def auto_width(num_rows: int) -> int:
    """Return 6 times the fourth root of a table's rows, rounded up to a multiple of 4.

    The rule of Wang et al., "Deep & Cross Network for Ad Click Predictions" (arXiv 1708.05123),
    section 4.1.

    >>> [auto_width(rows) for rows in (2, 100, 10_000, 10_000_000)]
    [8, 20, 60, 340]"""
    return math.ceil(6 * math.sqrt(math.sqrt(num_rows)) / WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def collections_of_tables(widths: Mapping[str, int]) -> dict[str, list[str]]:
    """Return the tables that one EmbeddingCollection of TorchRec holds, which are of one width, by
    the name of the collection: "tables" if there is one, else "tables.w4" and so on."""
    found: dict[int, list[str]] = {}
    for name, width in widths.items():
        found.setdefault(width, []).append(name)
    if len(found) <= 1:
        return {"tables": list(widths)}
    return {f"tables.w{width}": names for width, names in sorted(found.items())}
