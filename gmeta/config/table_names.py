"""What an embedding table is called inside torch, where not every column's name can stand."""

from collections.abc import Mapping

from torch import nn

from gmeta.config.table_widths import collections_of_tables

# Prefix of the tables' weights in the state dict of a ShardedLearner.
TABLES_PREFIX = "tables."
_OF_EVERY_DICT = nn.ModuleDict()


def module_name(table: str) -> str:
    """Return the table's name as that of a module: the name itself, but for a percent sign,
    wherever torch takes it.

    torch takes no dot, and no name that a ModuleDict has for itself, such as "type" and "items".

    >>> [module_name(table) for table in ("item", "user.id", "type", "50%")]
    ['item', 'user%2Eid', 'type%', '50%25']"""
    escaped = table.replace("%", "%25").replace(".", "%2E")
    return f"{escaped}%" if hasattr(_OF_EVERY_DICT, escaped) else escaped


def table_of(module: str) -> str:
    """Return the table of a module's name: the inverse of `module_name`."""
    return module.removesuffix("%").replace("%2E", ".").replace("%25", "%")


def weight_name(widths: Mapping[str, int], table: str) -> str:
    """Return what a table's weight is called in the state dict of a ShardedLearner."""
    collections = collections_of_tables(widths)
    (path,) = (path for path, names in collections.items() if table in names)
    return f"{path}.embeddings.{module_name(table)}.weight"


def table_of_weight(name: str) -> str:
    """Return the table whose weight has this name in a state dict, whatever module holds it.

    >>> table_of_weight("tables.w4.embeddings.user%2Eid.weight")
    'user.id'"""
    return table_of(name.removesuffix(".weight").rpartition(".")[2])
