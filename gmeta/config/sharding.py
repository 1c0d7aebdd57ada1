"""How the embedding tables are cut up and spread over the ranks: the [sharding] section.

Row-wise: every rank holds a block of rows. Table-wise: one rank holds the table. Column-wise: every
rank holds some columns of all rows. Data-parallel: every rank holds all of it. The plan changes
where rows live and what travels, never what is trained."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from gmeta.errors import ConfigError
from gmeta_keys import key

Kind = Literal["row_wise", "table_wise", "column_wise", "data_parallel"]
DefaultKind = Literal["row_wise", "table_wise", "column_wise", "data_parallel", "planner"]
WireDtype = Literal["float32", "bfloat16", "float16"]
ExchangeKind = Literal["host", "torchrec"]
Placement = Literal["auto", "device", "host", "file", "uvm", "uvm_cached"]
SequenceKind = Literal["none", "ulysses", "ring", "both"]
IN_HOST_MEMORY = ("uvm", "uvm_cached")  # by fbgemm's kernels
BEYOND_DEVICE = ("host", "file")  # by our own exchange
# Optimizers that keep one number a row, made from all of its values.
ROW_OPTIMIZERS = ("rowwise_adagrad", "partial_rowwise_adam")


@dataclass(frozen=True)
class ShardingConfig:
    """Where the tables' rows live, and in which precision they travel."""

    default: DefaultKind = key(
        "row_wise",
        "how tables are spread over the ranks: by rows, whole, by columns, or copied; "
        "planner: TorchRec's chooses (docs/scaling.md)",
    )
    exchange: ExchangeKind = key(
        "host",
        "what brings rows to ranks. host: ours, on any device; torchrec: TorchRec's exchange "
        "and fbgemm's kernels",
    )
    tables: tuple[str, ...] = key((), 'exceptions, e.g. ["city=table_wise", "item=column_wise"]')
    placement: Placement = key(
        "auto",
        "memory that holds the tables: device, host or file with our exchange, uvm or uvm_cached "
        "with TorchRec's; auto: device (docs/scaling.md)",
    )
    placements: tuple[str, ...] = key((), 'exceptions to placement by table, e.g. ["item=file"]')
    cache_share: float = key(
        0.1, "share of the rows of a table in host or file that the cache holds", min=0, max=1
    )
    file_dir: str = key(
        "", "folder on a local disk for the scratch of tables in a file; empty: run.dir"
    )
    wire_dtype: WireDtype = key(
        "float32", "precision of embedding rows and their gradients between ranks"
    )
    groups: int = key(
        1,
        "groups of ranks; each shards the tables over its ranks and has a copy of its own "
        "(docs/scaling.md)",
        min=1,
    )
    sync_every: int = key(
        1, "steps after which groups average; until then each trains by itself. 1: exact", min=1
    )
    overlap_sync: bool = key(
        False, "whether groups average beside the steps that follow, which then come too early"
    )
    outer_momentum: float = key(
        0.0, "momentum of the layers' averages, with sync_every above 1", min=0.0, max=0.99
    )
    sequence: SequenceKind = key(
        "none",
        "how ranks share a long task's events: not at all, by heads, by places or by both "
        "(docs/scaling.md)",
    )
    sequence_from: int = key(2048, "events from which a task is long", min=1)


def keeps_tables_beyond(config: ShardingConfig) -> bool:
    """Return whether any table may be kept beyond the devices' memory by our exchange."""
    exceptions = (entry.rpartition("=")[2] for entry in config.placements)
    return any(placement in BEYOND_DEVICE for placement in (config.placement, *exceptions))


def sharding_to_evaluate(config: ShardingConfig, on_cuda: bool) -> ShardingConfig:
    """Return how a run that was sharded so is spread over ranks that only predict, which may be on
    another kind of device: by rows, but tables beyond memory stay there."""

    def keep(placement: str) -> Placement:
        if placement == "host" and on_cuda:
            return "host"
        return "file" if placement == "file" else "auto"

    entries = (one.rpartition("=") for one in config.placements)
    return ShardingConfig(
        placement=keep(config.placement),
        placements=tuple(f"{table}={keep(placement)}" for table, _, placement in entries),
        cache_share=config.cache_share,
        file_dir=config.file_dir,
        # Events that were too long for one rank still are; by both kinds any number of ranks can.
        sequence="none" if config.sequence == "none" else "both",
        sequence_from=config.sequence_from,
    )


def check_sequences(config: ShardingConfig, encoder: str, accumulate_steps: int) -> None:
    """Raise ConfigError where ranks cannot share events of this encoder, or of such steps."""
    if config.sequence == "none":
        return
    shared = f'sharding.sequence = "{config.sequence}" has ranks share a long task\'s events'
    rest = 'or set sharding.sequence = "none"'
    if encoder == "none":
        raise ConfigError(
            f'{shared}, and model.events = "none" reads none. Choose sasrec, hstu or din, {rest}'
        )
    if encoder == "sim":
        raise ConfigError(
            f'{shared}, and model.events = "sim" attends only to the few that its search finds. '
            f"Choose sasrec, hstu or din, {rest}"
        )
    if config.sync_every > 1:
        raise ConfigError(
            f"{shared}, and with sharding.sync_every = {config.sync_every} groups of ranks have "
            f"layers of their own. Set it to 1, {rest}"
        )
    if accumulate_steps > 1:
        raise ConfigError(
            f"{shared} in each step, and outer.accumulate_steps = {accumulate_steps} cuts a step "
            f"into parts that ranks take apart from each other. Set it to 1, {rest}"
        )


def check_groups(config: ShardingConfig, world_size: int) -> None:
    """Raise ConfigError where so many ranks do not fill the groups evenly."""
    if world_size % config.groups:
        raise ConfigError(
            f"sharding.groups = {config.groups} with {world_size} ranks: each group needs the same "
            "number of them. Set it to a divisor of the number of ranks, or to 1"
        )


def kinds_of_tables(config: ShardingConfig, tables: list[str]) -> dict[str, Kind | None]:
    """Return the kind of each table, in their order; None: TorchRec's planner is to choose. Raises
    ConfigError: an entry of `sharding.tables` names no table or no kind."""
    default: Kind | None = None if config.default == "planner" else config.default
    kinds: dict[str, Kind | None] = {}
    kinds |= dict.fromkeys(tables, default)
    kinds |= _exceptions("sharding.tables", "kind", config.tables, get_args(Kind), tables)
    return kinds


def placements_of_tables(config: ShardingConfig, tables: list[str]) -> dict[str, Placement]:
    """Return the memory that is to hold each table, in their order. Raises ConfigError: an entry of
    `sharding.placements` names no table or no placement."""
    placements: dict[str, Placement] = {}
    placements |= dict.fromkeys(tables, config.placement)
    known = get_args(Placement)
    placements |= _exceptions("sharding.placements", "placement", config.placements, known, tables)
    return placements


def _exceptions(
    key: str, what: str, entries: tuple[str, ...], known: tuple[str, ...], tables: list[str]
) -> dict[str, Any]:
    """Return what entries table=value say. Raise ConfigError: a table or a value is unknown."""
    found = {}
    for entry in entries:
        name, _, value = entry.rpartition("=")  # a table may have one in its name
        if value not in known:
            raise ConfigError(
                f"{key} has {entry!r}: write table={what} with one of the {what}s "
                f"{', '.join(known)}"
            )
        if name not in tables:
            raise ConfigError(
                f"{key} names {name!r}, which is no table: the dataset has "
                f"{', '.join(tables)}. Name one of them"
            )
        found[name] = value
    return found


def check_sharding(config: ShardingConfig, tables: list[str], sparse_optimizer: str) -> None:
    """Raise ConfigError for what fits neither dataset nor optimizer, before any rank starts."""
    kinds = kinds_of_tables(config, tables)
    by_columns = [name for name, kind in kinds.items() if kind == "column_wise"]
    if by_columns and sparse_optimizer in ROW_OPTIMIZERS:
        raise ConfigError(
            f"table {by_columns[0]!r} is to be column_wise with "
            f'outer.sparse_optimizer = "{sparse_optimizer}": it keeps the mean square over a whole '
            "row, of which each rank would see only some columns, and train another model. "
            'Set outer.sparse_optimizer = "adagrad", or another kind of sharding'
        )
    if config.groups == 1 and config.sync_every > 1:
        raise ConfigError(
            f"sharding.sync_every = {config.sync_every} is of groups of ranks, and sharding.groups "
            "= 1. Set groups, or sync_every = 1"
        )
    if config.sync_every == 1 and (config.outer_momentum or config.overlap_sync):
        raise ConfigError(
            f"sharding.outer_momentum = {config.outer_momentum:g} and sharding.overlap_sync = "
            f"{str(config.overlap_sync).lower()} are of averages, and with sharding.sync_every = 1 "
            "there are none. Set sync_every above 1, or leave these as they are by default"
        )
    if config.groups > 1 and config.exchange != "host":
        raise ConfigError(
            f'sharding.groups = {config.groups} with sharding.exchange = "torchrec", which has no '
            'copies of tables. Set sharding.exchange = "host", or sharding.groups = 1'
        )
    for name, placement in placements_of_tables(config, tables).items():
        if placement in BEYOND_DEVICE:
            _check_beyond_device(config, name, placement)
        if placement not in IN_HOST_MEMORY:
            continue
        if config.exchange == "host":
            raise ConfigError(
                f'table {name!r} is to be placed in "{placement}", which needs fbgemm\'s kernels, '
                'and sharding.exchange = "host" has tables of its own. Set sharding.exchange = '
                '"torchrec", or placement "host"'
            )
        if kinds[name] == "data_parallel":
            raise ConfigError(
                f'table {name!r} is to be data_parallel and placed in "{placement}": every GPU '
                'holds its own copy of such a table. Choose another kind, or placement "device"'
            )


def check_admission(
    admission: tuple[int, ...], config: ShardingConfig, algorithm: str, tables: list[str]
) -> None:
    """Raise ConfigError where rows cannot wait for embeddings of their own by `model.admission`."""
    wanted = f"model.admission = {list(admission)}"
    if len(admission) != 2 or (admission[1] and not admission[0]):
        raise ConfigError(
            f"{wanted} is no rule: two numbers are allowed: after how many steps a row has an "
            "embedding of its own, and, if any, after how many without it loses it. Correct it, or "
            "remove the key"
        )
    if not admission[0]:
        return
    rest = "or model.admission = [0, 0]"
    if config.exchange != "host":
        raise ConfigError(
            f"{wanted}, which TorchRec's exchange cannot count. Set sharding.exchange = "
            f'"host", {rest}'
        )
    if config.groups > 1:
        raise ConfigError(
            f"{wanted}, and with sharding.groups = {config.groups} each group would count its own "
            f"steps. Set sharding.groups = 1, {rest}"
        )
    by_columns = [n for n, kind in kinds_of_tables(config, tables).items() if kind == "column_wise"]
    if by_columns or config.default == "planner":
        what = (
            f"table {by_columns[0]!r} is column_wise"
            if by_columns
            else "the planner may cut columns"
        )
        raise ConfigError(
            f"{wanted} counts whole rows, and {what}: parts of a row on several ranks. "
            f"Set another kind of sharding, {rest}"
        )
    if algorithm == "metaemb":
        raise ConfigError(
            f'{wanted}, and algorithm.name = "metaemb" makes the embeddings of ids that are rare. '
            f"Choose another algorithm, {rest}"
        )


def _check_beyond_device(config: ShardingConfig, name: str, placement: Placement) -> None:
    wanted = f'table {name!r} is to be placed in "{placement}"'
    if config.exchange == "torchrec":
        raise ConfigError(
            f'{wanted}, as only our own exchange can. Set sharding.exchange = "host", or '
            'placement "uvm_cached"'
        )
    if config.groups > 1:
        raise ConfigError(
            f"{wanted}, and with sharding.groups = {config.groups} a group of ranks updates rows "
            'that it did not ask for. Set sharding.groups = 1, or placement "auto"'
        )
    if config.default == "planner":
        raise ConfigError(
            f"{wanted}, of which TorchRec's planner knows nothing. Set sharding.default = "
            '"row_wise", or placement "auto"'
        )
