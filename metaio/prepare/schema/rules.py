"""The rules of a schema that assign each row to an episode, a side and a split."""

from dataclasses import dataclass
from typing import Literal

from gmeta_keys import key


@dataclass(frozen=True)
class RowIdColumn:
    """Names each row of the log, integers or text, no two rows of a task alike."""

    # Shuffles, and rows of equal time, go by its hash. Stored for predictions; no model sees it.
    column: str


@dataclass(frozen=True)
class EpisodeRule:
    """Which rows of a task are support and which are query."""

    # last: the last `query_rows` are query. ratio: the last `query_share`. Both go by [time], or by
    # a seeded shuffle without it. random: as these, but always shuffled. time: rows from `at` on.
    by: Literal["last", "ratio", "random", "time"] = "last"
    query_rows: int | None = None
    query_share: float | None = None
    # In units of the time column, or an ISO date for dates and timestamps.
    at: float | str | None = None
    min_rows: int = 2  # smaller tasks are dropped and counted
    max_rows: int = 4_096  # of an episode
    # truncate keeps the last rows; drop leaves the task out, and counts it
    longer: Literal["episodes", "truncate", "drop", "refuse"] = "episodes"


@dataclass(frozen=True)
class MembershipRule:
    """Which rows are support and which query, where a column or the names of input files say so."""

    # A null leaves a task to [episodes], if all of its rows of a split are null.
    column: str | None = None
    # Patterns of file names, such as "*_support.csv"; each input matches exactly one of them.
    support: str | None = None
    query: str | None = None
    # Tasks with query rows alone; those kept are scored without adapting.
    without_support: Literal["keep", "drop"] = "keep"
    # Of an episode with given sides; absent: that of [episodes].
    max_rows: int | None = None

    @property
    def by_files(self) -> bool:
        """Return whether the names of the input files decide."""
        return self.column is None


@dataclass(frozen=True)
class SplitRule:
    """Which split a row belongs to: a column says so, the hash of its task, or its time."""

    column: str | None = None
    shares: dict[str, float] | None = None
    # Each split's share of the rows, oldest first, or where each split after train begins.
    by_time: dict[str, float] | dict[str, str] | None = None
    # Of by_time: tasks without a row before a window are cut by time and stand in the window's
    # split, in a split NAME-cold, or nowhere.
    new_tasks: Literal["together", "apart", "drop"] | None = None  # absent: "together"
    # Vocabularies, means and deviations are taken from this split alone.
    train: str = "train"
    # The split of which a share of the tasks, by their hash, becomes the split `valid`.
    validation_from: str | None = None
    validation_share: float | None = None  # absent: 0.1
    # The share of the values of [item] whose rows leave the train split: for `valid-item-cold` if
    # their task trains, for `valid-both-cold` if it is in `valid`.
    validation_items: float | None = None

    @property
    def windows(self) -> tuple[str, ...]:
        """Return the splits of by_time, oldest first."""
        named = tuple(self.by_time or ())
        return named if self.train in named or not named else (self.train, *named)


DEFAULT_VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class NegativesRule:
    """Adds rows of label 0 for items that a task does not have, for logs of positives alone."""

    # A negative is its positive's row with these columns of another item; the rest stays.
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
    """Says which [[single]] column is the item, and which columns are attributes of the item."""

    column: str
    columns: tuple[str, ...] = ()

    @property
    def features(self) -> tuple[str, ...]:
        """Return the columns of the item, itself first."""
        return tuple(dict.fromkeys((self.column, *self.columns)))


@dataclass(frozen=True)
class EventsRule:
    """What a row knows of its task's earlier rows: its events, in time."""

    columns: tuple[str, ...]  # [[single]] columns, whose ids an event has
    dense: tuple[str, ...] = ()  # [[dense]] columns, whose numbers an event has
    # Another log, whose rows are the events: URL, glob or folder; absent: a task's earlier rows.
    files: str = ""
    # Which rows are events, as in "click = 1 and kind != 'ad'"; absent: all of them.
    where: str = ""
    longest: int = key(200, "newest events kept before each row; 0: all", min=0)
    # How much older than a row its events are: seconds, or units of a [time] of numbers; or "10m".
    delay: float | str = 0.0


VALIDATION = "valid"  # the split that validation_from makes
VALIDATION_ITEMS = ("valid-item-cold", "valid-both-cold")  # and those of validation_items


@dataclass(frozen=True)
class TransformRule:
    """A function, by entry point or import path, that turns raw batches into rows of the schema."""

    # It sees batches of any size: what it makes of a row must not depend on the others.
    function: str
    columns: tuple[str, ...] = ()  # that the function is given; absent: all of the inputs'


@dataclass(frozen=True)
class StreamRule:
    """How a growing log becomes increments; durations are in seconds of event time."""

    gate: float = key(0.05, "share of the tasks, by hash, that no increment trains", min=0, max=0.5)
    support: int = key(20, "newest rows of a task kept as support of later windows", min=1)
    late: float = key(3_600.0, "rows up to so much older than their window are kept", min=0)
    late_share: float = key(0.05, "alarm above this share of late rows", min=0, max=1)
    ttl: float = key(0.0, "ids and rows not seen for so long are forgotten; 0: never", min=0)
    grace: float = key(0.0, "a forgotten id's row stays its own for so long", min=0)
    # Of an integer [time] column; timestamps and dates have units of their own.
    unit: Literal["s", "ms", "us", "ns", "day"] = "s"
    capacity_block: int = key(65_536, "tables grow by multiples of so many rows", min=1)
    max_new_rows: int = key(0, "most new rows of a table in an increment; 0: any number", min=0)
    drift: float = key(0.5, "alarm where a mean moved so many deviations", min=0)
    label_shift: float = key(0.5, "refuse a label mean so many deviations from recent ones", min=0)
    null_shift: float = key(0.2, "refuse a share of nulls so far above recent ones", min=0, max=1)
    rows_factor: float = key(20.0, "refuse so many times more or fewer rows than of late", min=1)
    recent: int = key(14, "increments that the screen compares with", min=1)
    screen_after: int = key(3, "increments before the screen begins", min=1)
    # A file that lacks a column is set aside; or taken, with the column's null in all of its rows;
    # or prepare ends, with nothing set aside.
    missing: Literal["quarantine", "fill", "stop"] = "quarantine"


GATE = "gate"  # the split of a stream's tasks that are never trained
