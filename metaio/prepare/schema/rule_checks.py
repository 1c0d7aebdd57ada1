"""Checks that the keys of a schema's rules fit each other and those of its other tables."""

from metaio.errors import SchemaError
from metaio.prepare.schema.rules import (
    GATE,
    VALIDATION,
    EpisodeRule,
    MembershipRule,
    SplitRule,
    StreamRule,
)


def check_episodes(rule: EpisodeRule, has_time: bool) -> None:
    """Raise SchemaError where the keys of [episodes] contradict each other."""
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
    # Beside the query rows an episode needs at least one support row.
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
    """Raise SchemaError where the keys of [splits] contradict each other; `by` is episodes.by."""
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
    # Tenths have no exact binary form, so their sum is not exactly 1.
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
    # With train in by_time the values are shares, else the beginnings of windows.
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
    # Of a column the names are in the rows, which are not read yet.
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
    """Raise SchemaError where [membership] is incomplete, or contradicts other tables."""
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
    """Raise SchemaError where [stream] contradicts another table that the schema has (`given`)."""
    if not given.pop("time"):
        raise SchemaError("a stream is ordered by event time, and the schema has no [time]. Add it")
    # Each would deal rows in its own way, which a stream decides alone.
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
