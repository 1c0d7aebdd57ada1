"""The rules of a schema that deal rows out: which episode, side and split each one belongs to."""

from dataclasses import dataclass
from typing import Literal

from gmeta_keys import key
from metaio.errors import SchemaError


@dataclass(frozen=True)
class RowIdColumn:
    """Names each row of the log, integers or text, no two rows of a task alike.

    Shuffles go by it, and rows of equal time stand in the order of its hash. It is stored beside
    the rows, where predictions take it from; no model sees it.
    """

    column: str


@dataclass(frozen=True)
class EpisodeRule:
    """Which rows of a task are support and which are query.

    by "last": the last `query_rows` are the query. "ratio": the last `query_share`. Both go by
    [time], or by a seeded shuffle without it. "random": as "last" or "ratio", but shuffled even if
    there is a time. "time": rows from `at` on are the query.
    """

    by: Literal["last", "ratio", "random", "time"] = "last"
    query_rows: int | None = None
    query_share: float | None = None
    # In units of the time column, or an ISO date for dates and timestamps.
    at: float | str | None = None
    min_rows: int = 2  # smaller tasks are dropped and counted
    max_rows: int = 4_096  # of an episode
    # truncate keeps the last rows; drop leaves the whole task out, and counts it
    longer: Literal["episodes", "truncate", "drop", "refuse"] = "episodes"


@dataclass(frozen=True)
class MembershipRule:
    """Which rows are support and which are query, as somebody else decided: a raw column says
    "support" or "query", or the names of the input files do.

    A null in the column leaves a task to [episodes], as long as all of its rows of a split are
    null.
    """

    column: str | None = None
    # Patterns of file names, such as "*_support.csv"; each input matches exactly one of them.
    support: str | None = None
    query: str | None = None
    # A task that has query rows alone: kept, it is scored without adapting.
    without_support: Literal["keep", "drop"] = "keep"
    # Of an episode with given sides; absent: that of [episodes].
    max_rows: int | None = None

    @property
    def by_files(self) -> bool:
        """Tell whether the names of the input files decide."""
        return self.column is None


@dataclass(frozen=True)
class SplitRule:
    """Which split a row belongs to: a raw column says so, the hash of its task falls into `shares`,
    or its time falls into a window of `by_time`.

    Vocabularies, means and deviations are taken from the split `train` alone.
    """

    column: str | None = None
    shares: dict[str, float] | None = None
    # Each split's share of the rows, oldest first, or where each split after train begins.
    by_time: dict[str, float] | dict[str, str] | None = None
    # by_time: tasks without a row before a window are cut by time and stand in the window's split,
    # in a split NAME-cold of their own, or are left out.
    new_tasks: Literal["together", "apart", "drop"] | None = None  # absent: "together"
    train: str = "train"
    # So many tasks of that split, by their hash, become the split `valid`.
    validation_from: str | None = None
    validation_share: float | None = None  # absent: 0.1
    # And so many of the values of [item], whose rows leave the train split: `valid-item-cold` of
    # tasks that train, `valid-both-cold` of the tasks of `valid`.
    validation_items: float | None = None

    @property
    def windows(self) -> tuple[str, ...]:
        """Return the splits of by_time, oldest first."""
        named = tuple(self.by_time or ())
        return named if self.train in named or not named else (self.train, *named)


DEFAULT_VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class NegativesRule:
    """Adds rows with label 0 for items that a task does not have, for logs of positives alone.

    A negative is its positive's row with another item: `item` and `columns` are those of the item,
    all other columns stay.
    """

    item: str
    columns: tuple[str, ...] = ()  # the item's attributes, which change with it
    per_positive: int = key(4, "negatives beside each row whose label is above 0", min=1, max=1_000)
    by: Literal["popularity", "uniform"] = "popularity"

    @property
    def features(self) -> tuple[str, ...]:
        """Return the columns of the item, itself first."""
        return tuple(dict.fromkeys((self.item, *self.columns)))


@dataclass(frozen=True)
class ItemRule:
    """Says which [[single]] column is the item, and which columns are the item's attributes: what
    changes where another item takes its place.
    """

    column: str
    columns: tuple[str, ...] = ()

    @property
    def features(self) -> tuple[str, ...]:
        """Return the columns of the item, itself first."""
        return tuple(dict.fromkeys((self.column, *self.columns)))


VALIDATION = "valid"  # the split that validation_from makes
VALIDATION_ITEMS = ("valid-item-cold", "valid-both-cold")  # and those of validation_items


@dataclass(frozen=True)
class TransformRule:
    """What turns the rows of the inputs into those that the schema describes: a function of a
    pyarrow RecordBatch that returns another, by entry point or import path. It may add, change and
    drop columns, and drop or repeat rows; a row's must not depend on the others of its batch.
    """

    function: str
    columns: tuple[str, ...] = ()  # that it is given; absent: all of the inputs'


@dataclass(frozen=True)
class StreamRule:
    """How a log that goes on becomes increments. Durations are in seconds of event time; an integer
    [time] column counts in `unit`.
    """

    gate: float = key(0.05, "share of the tasks, by hash, that no increment trains", min=0, max=0.5)
    support: int = key(20, "newest rows of a task kept as support of later windows", min=1)
    late: float = key(3_600.0, "rows up to so much older than their window are kept", min=0)
    late_share: float = key(0.05, "alarm above this share of late rows", min=0, max=1)
    ttl: float = key(0.0, "ids and rows not seen for so long are forgotten; 0: never", min=0)
    grace: float = key(0.0, "a forgotten id's row stays its own for so long", min=0)
    unit: Literal["s", "ms", "us", "ns", "day"] = "s"
    capacity_block: int = key(65_536, "tables grow by multiples of so many rows", min=1)
    max_new_rows: int = key(0, "most new rows of a table in an increment; 0: any number", min=0)
    drift: float = key(0.5, "alarm where a mean moved so many deviations", min=0)
    label_shift: float = key(0.5, "refuse a label mean so many deviations from recent ones", min=0)
    null_shift: float = key(0.2, "refuse a share of nulls so far above recent ones", min=0, max=1)
    rows_factor: float = key(20.0, "refuse so many times more or fewer rows than of late", min=1)
    recent: int = key(14, "increments that the screen compares with", min=1)
    screen_after: int = key(3, "increments before the screen begins", min=1)


GATE = "gate"  # the split of a stream's tasks that are never trained


def check_episodes(rule: EpisodeRule, has_time: bool) -> None:
    """Raise SchemaError where the keys of [episodes] do not go together."""
    if rule.by == "time":
        if rule.at is None or not has_time:
            raise SchemaError(
                "episodes.by is time, which needs episodes.at and a [time] column. Add both"
            )
    elif (rule.query_rows is None) == (rule.query_share is None):
        raise SchemaError(
            f"episodes.by is {rule.by}, which needs query_rows or query_share. Give exactly one "
            "of them"
        )
    if rule.by == "last" and rule.query_rows is None:
        raise SchemaError(
            "episodes.by is last, which needs query_rows. Add it, or use by = 'ratio'"
        )
    if rule.by == "ratio" and rule.query_share is None:
        raise SchemaError(
            "episodes.by is ratio, which needs query_share. Add it, or use by = 'last'"
        )
    # Beside the query rows at least one support row must be left.
    least = 1 + (rule.query_rows or 1)
    if rule.query_rows is not None and rule.query_rows < 1:
        raise SchemaError(
            f"episodes.query_rows is {rule.query_rows}; at least 1 is needed. Raise it"
        )
    if not least <= rule.min_rows <= rule.max_rows:
        raise SchemaError(
            f"episodes.min_rows is {rule.min_rows} and max_rows is {rule.max_rows}; {least} <= "
            "min_rows <= "
            "max_rows is needed, so that each episode has support and query rows. Change them"
        )
    if rule.query_share is not None and not 0 < rule.query_share < 1:
        raise SchemaError(
            f"episodes.query_share is {rule.query_share}; it must lie between 0 and 1. Change it"
        )


def check_splits(rule: SplitRule, has_time: bool, by: str) -> None:
    """Raise SchemaError where the keys of [splits] do not go together; `by` is episodes.by."""
    given = [name for name in ("column", "shares", "by_time") if getattr(rule, name) is not None]
    if len(given) > 1:
        raise SchemaError(f"splits has both {given[0]} and {given[1]}. Give one of them")
    if rule.shares is not None:
        _check_shares("shares", rule.shares)
        if rule.train not in rule.shares:
            raise SchemaError(
                f"splits.train is {rule.train}, which is not among the shares "
                f"{', '.join(rule.shares)}. Add it"
            )
    if rule.by_time is not None:
        _check_windows(rule, has_time, by)
    if rule.validation_from is not None:
        _check_validation(rule)
    elif rule.validation_share is not None:
        raise SchemaError(
            "splits.validation_share says how many tasks become valid, but not of which split. "
            "Add validation_from"
        )
    if rule.validation_items is not None and rule.validation_from != rule.train:
        raise SchemaError(
            f"splits.validation_items holds items back from the split {rule.train}, and "
            f"validation_from is {rule.validation_from or 'absent'}. Set validation_from = "
            f'"{rule.train}"'
        )
    if rule.new_tasks is not None and rule.by_time is None:
        raise SchemaError(
            "splits.new_tasks is about windows of time, and there is no splits.by_time. Leave it "
            "out"
        )


def _check_shares(name: str, shares: dict[str, float]) -> None:
    total = sum(shares.values())
    # Tenths do not add up to exactly 1 in binary.
    if abs(total - 1) > 1e-9 or min(shares.values(), default=0) <= 0:
        raise SchemaError(
            f"splits.{name} add up to {total:g}; positive shares with sum 1 are needed. Change them"
        )


def _check_windows(rule: SplitRule, has_time: bool, by: str) -> None:
    if not has_time:
        raise SchemaError("splits.by_time needs a [time] column. Add it")
    if by == "time":
        raise SchemaError(
            "splits.by_time says where the query rows begin, and so does episodes.by = 'time'. "
            "Leave out splits.by_time, or cut the train split's tasks by 'last' or 'ratio'"
        )
    if len(rule.windows) < 2:
        raise SchemaError(
            f"splits.by_time names {len(rule.by_time or ())} splits; a split beside {rule.train} "
            "is needed. Add one"
        )
    if rule.train in (rule.by_time or ()):
        if rule.windows[0] != rule.train:
            raise SchemaError(
                f"splits.by_time begins with {rule.windows[0]}; the oldest rows are those of "
                f"{rule.train}. List it first"
            )
        if not all(isinstance(share, float | int) for share in (rule.by_time or {}).values()):
            raise SchemaError(
                f"splits.by_time gives {rule.train} a beginning, but it begins with the first row. "
                "Leave it out, or give shares of the rows"
            )
        _check_shares("by_time", rule.by_time or {})  # type: ignore[arg-type]


def _check_validation(rule: SplitRule) -> None:
    names = list(rule.shares or ()) if rule.column is None else [str(rule.validation_from)]
    if rule.by_time is not None:
        raise SchemaError(
            "splits.validation_from takes tasks out of a split, but by_time deals rows by their "
            "time. Give by_time a window for validation instead"
        )
    if rule.validation_from not in (names or [rule.train]):
        raise SchemaError(
            f"splits.validation_from is {rule.validation_from}, which is no split: there are "
            f"{', '.join(names or [rule.train])}. Name one of them"
        )
    if VALIDATION in names:
        raise SchemaError(
            f"splits.validation_from makes a split {VALIDATION}, which there is already. Leave "
            "out one of them"
        )
    for name in ("validation_share", "validation_items"):
        share = getattr(rule, name)
        if share is not None and not 0 < share < 1:
            raise SchemaError(f"splits.{name} is {share:g}; it must lie between 0 and 1. Change it")


def check_membership(rule: MembershipRule, by: str, by_time: bool) -> None:
    """Raise SchemaError where [membership] says too little or what other tables say otherwise."""
    patterns = [pattern for pattern in (rule.support, rule.query) if pattern is not None]
    if rule.by_files and len(patterns) != 2:
        raise SchemaError(
            "membership needs a column that says support or query, or two patterns of file names, "
            "support and query. Give the column, or both patterns"
        )
    if not rule.by_files and patterns:
        raise SchemaError("membership has both a column and patterns of file names. Give one")
    if rule.max_rows is not None and rule.max_rows < 2:
        raise SchemaError(
            f"membership.max_rows is {rule.max_rows}; at least 2 is needed, a support and a query "
            "row. Raise it"
        )
    if by_time or by == "time":
        raise SchemaError(
            f"[membership] says which rows are query, and so does "
            f"{'splits.by_time' if by_time else 'episodes.by = time'}. Leave one out"
        )


def check_stream(rule: StreamRule, given: dict[str, bool], by: str) -> None:
    """Raise SchemaError where [stream] does not go with other tables; `given` says by name which of
    them the schema has, `by` is episodes.by.
    """
    if not given.pop("time"):
        raise SchemaError("a stream is ordered by event time, and the schema has no [time]. Add it")
    for name, has in given.items():
        if has:
            raise SchemaError(
                f"the schema has {name}, which a stream has no use for: its tasks are trained, or "
                f"in the split {GATE} by their hash, and support is the past. Leave it out"
            )
    if by in ("time", "random"):
        raise SchemaError(
            f"episodes.by is {by}; the support of a stream is the past, window by window. Use "
            "'last' or 'ratio', which cut tasks that are new in a window"
        )
    if rule.grace and not rule.ttl:
        raise SchemaError("stream.grace begins when stream.ttl ends, which is 0. Give ttl too")
