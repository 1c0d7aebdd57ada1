"""The formats of exported tables: a module of its own, so that the command line loads no torch."""

from typing import Literal, TypeAlias, get_args

TableFormat: TypeAlias = Literal["float32", "float16", "int8"]
TABLE_FORMATS: tuple[TableFormat, ...] = get_args(TableFormat)
