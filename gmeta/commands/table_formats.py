"""The option that says how tables are held; of each command that writes a model."""

from enum import StrEnum


class Tables(StrEnum):
    """How an exported model holds its embedding tables."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    INT8 = "int8"
