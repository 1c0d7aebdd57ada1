"""How an export may hold its embedding tables; apart, so that the command line loads no more."""

from typing import Literal, TypeAlias, get_args

TableFormat: TypeAlias = Literal["float32", "float16", "int8"]
TABLE_FORMATS: tuple[TableFormat, ...] = get_args(TableFormat)
