"""How the embedding tables are cut up and spread over the ranks: the [sharding] section.

Row-wise: every rank holds a block of rows. Table-wise: one rank holds the table. Column-wise: every
rank holds some columns of all rows. Data-parallel: every rank holds all of it. The plan changes
where rows live and what travels, never what is trained.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from gmeta.errors import ConfigError
from gmeta_keys import key

Kind = Literal["row_wise", "table_wise", "column_wise", "data_parallel"]
DefaultKind = Literal["row_wise", "table_wise", "column_wise", "data_parallel", "planner"]
WireDtype = Literal["float32", "bfloat16", "float16"]
ExchangeKind = Literal["host", "torchrec"]
# Optimizers that keep one number a row, made from all of its values.
ROW_OPTIMIZERS = ("rowwise_adagrad", "partial_rowwise_adam")


@dataclass(frozen=True)
class ShardingConfig:
    """Where the tables' rows live, and in which precision they travel."""

    default: DefaultKind = key(
        "row_wise",
        "how tables are spread over the ranks: by rows, whole, by columns, or copied "
        "(CUDA with TorchRec's exchange only); planner: TorchRec's planner chooses",
    )
    exchange: ExchangeKind = key(
        "host",
        "what brings rows to ranks. host: ids sorted on the host, tables in plain torch, on any "
        "device; torchrec: TorchRec's exchange and fbgemm's kernels",
    )
    tables: tuple[str, ...] = key((), 'exceptions, e.g. ["city=table_wise", "item=column_wise"]')
    wire_dtype: WireDtype = key(
        "float32", "precision of embedding rows and their gradients between ranks"
    )
    dense_wire_dtype: Literal["float32", "bfloat16"] = key(
        "float32", "precision of the layers' gradients between ranks"
    )
    shared_memory: bool = key(
        False,
        "ranks of one host exchange through memory in place of TCP, on the CPU: "
        "faster where every rank has a core to itself, slower beside other work",
    )


def kinds_of_tables(config: ShardingConfig, tables: list[str]) -> dict[str, Kind | None]:
    """Return the kind of each table, in their order; None: TorchRec's planner is to choose.

    Raises:
        ConfigError: an entry of `sharding.tables` names no table or no kind.
    """
    default: Kind | None = None if config.default == "planner" else config.default
    kinds: dict[str, Kind | None] = {}
    kinds |= dict.fromkeys(tables, default)
    for entry in config.tables:
        name, _, kind = entry.rpartition("=")  # a table may have one in its name
        if kind not in get_args(Kind):
            raise ConfigError(
                f"sharding.tables has {entry!r}: write table=kind with one of the kinds "
                f"{', '.join(get_args(Kind))}"
            )
        if name not in kinds:
            raise ConfigError(
                f"sharding.tables names {name!r}, which is no table: the dataset has "
                f"{', '.join(tables)}. Name one of them"
            )
        kinds[name] = kind  # type: ignore[assignment]
    return kinds


def check_sharding(config: ShardingConfig, tables: list[str], sparse_optimizer: str) -> None:
    """Refuse what fits neither the dataset nor the optimizer, before any rank starts.

    Raises:
        ConfigError: see the message.
    """
    kinds = kinds_of_tables(config, tables)
    by_columns = [name for name, kind in kinds.items() if kind == "column_wise"]
    if by_columns and sparse_optimizer in ROW_OPTIMIZERS:
        raise ConfigError(
            f"table {by_columns[0]!r} is to be column_wise with "
            f'outer.sparse_optimizer = "{sparse_optimizer}": it keeps the mean square over a whole '
            "row, of which each rank would see only some columns, and train another model. "
            'Set outer.sparse_optimizer = "adagrad", or another kind of sharding'
        )
