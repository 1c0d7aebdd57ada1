"""Judges a window before it becomes an increment: faults refuse it, alarms are only reported."""

import math
import statistics
from collections import Counter
from typing import Any

import numpy as np

from metaio.prepare.episodes.survey import compute_mean_and_deviation
from metaio.prepare.schema.rules import StreamRule
from metaio.quantities import format_duration
from metaio.stream.chain import TICKS_PER_S, infer_time_unit
from metaio.stream.window import StreamClock, WindowSummary, find_span_starts

# In standard errors: a window of few rows differs by chance.
_BY_CHANCE = 4.0
# A row is of a wrong clock if it is ahead of most others by so many of their spans, and by more
# than a week, the longest usual gap; or ahead of now by more than a day, as zones differ.
_SPANS_AHEAD, _GAP_S, _FUTURE_S = 4, 7 * 86_400, 86_400
_FEWEST = 10  # rows of which "most" means something
_LEAST_NOW_S = 1.6e9  # in 2020: a clock before that was never set


def find_latest_time(
    times: Counter[int], clock: StreamClock, is_dated: bool, now_s: float
) -> int | None:
    """Return the time behind which rows are of a wrong clock; None if there is no such bound."""
    spans, limits = sorted(times), list[float]()
    if not spans:
        return None
    per_s, num_rows = TICKS_PER_S[clock.unit], times.total()
    ranks = [int(share * (num_rows - 1)) for share in (0.1, 0.5, 0.9)]
    places = np.searchsorted(np.cumsum([times[span] for span in spans]), ranks, side="right")
    first, half, last = (spans[place] for place in places)
    low, middle, high = find_span_starts([first, half, last + 1])  # behind the last span
    if num_rows >= _FEWEST:
        limits.append(high + max(_SPANS_AHEAD * (high - low), _GAP_S * per_s))
    now, begin = (now_s + _FUTURE_S) * per_s, clock.start
    # Integers need not count from 1970, nor in the unit that the schema says. Where the window
    # begins behind now, either clock may be wrong.
    is_since_1970 = is_dated or begin is not None or middle <= now
    is_since_1970 |= infer_time_unit(int(middle)) == clock.unit
    if now_s > _LEAST_NOW_S and (begin is None or begin <= now) and is_since_1970:
        limits.append(now)
    return int(min(limits)) if limits else None


def summarise_window(summary: WindowSummary) -> dict[str, Any]:
    """Return the statistics that later windows are compared with."""
    rows = max(summary.num_rows, 1)
    mean = summary.label_sum / rows
    deviation = math.sqrt(max(summary.label_squares / rows - mean * mean, 0.0))
    return {
        "rows": summary.num_rows,
        "span": summary.most_time - summary.least_time,
        # The last bits of sums depend on the order of adding: rounded, engines agree.
        "label_mean": float(f"{mean:.9g}"),
        "label_deviation": float(f"{deviation:.6g}"),
        "nulls": {name: count / rows for name, count in summary.nulls.items()},
    }


def find_faults(
    own: dict[str, Any],
    recent: list[dict[str, Any]],
    rule: StreamRule,
    unit: str,
    with_sizes: bool = True,
) -> list[str]:
    """Return why a window is suspicious, given those before it; [] if it is not. Its rows and its
    span count only `with_sizes`."""
    recent = recent[-rule.recent :]
    # So few windows do not show what is usual.
    if len(recent) < rule.screen_after:
        return []
    found = []
    typical = statistics.median(window["rows"] for window in recent)
    is_usual = typical / rule.rows_factor <= own["rows"] <= typical * rule.rows_factor
    if with_sizes and not is_usual:
        found.append(
            f"it holds {own['rows']:,} rows, recent increments about {typical:,.0f} "
            f"(stream.rows_factor {rule.rows_factor:g})"
        )
    span = statistics.median(window["span"] for window in recent)
    # One wrong time far ahead would move the window's end there, and make all later rows late.
    if with_sizes and own["span"] > max(span, 1) * rule.rows_factor:
        per_s = TICKS_PER_S[unit]
        found.append(
            f"its times span {format_duration(own['span'] / per_s)}, those of recent increments "
            f"{format_duration(span / per_s)}, and all that comes before its end would be late "
            f"(stream.rows_factor {rule.rows_factor:g})"
        )
    mean = statistics.fmean(window["label_mean"] for window in recent)
    deviation = statistics.fmean(window["label_deviation"] for window in recent)
    most = deviation * (rule.label_shift + _BY_CHANCE / math.sqrt(max(own["rows"], 1)))
    if abs(own["label_mean"] - mean) > most:
        found.append(
            f"its labels have the mean {own['label_mean']:.4g}, those of recent increments "
            f"{mean:.4g} (stream.label_shift {rule.label_shift:g})"
        )
    for name, share in own["nulls"].items():
        # The highest recent share: a column that is sometimes null is not suspicious.
        # A column that joined, or that files lacked, is not in all of them.
        shares = [window["nulls"][name] for window in recent if name in window["nulls"]]
        usual = max(shares, default=1.0)
        if share > usual + rule.null_shift:
            found.append(
                f"column {name} is null in {share:.0%} of the rows, in recent increments in at "
                f"most {usual:.0%} (stream.null_shift {rule.null_shift:g})"
            )
    return found


def describe_set_aside(summary: WindowSummary) -> str:
    """Return how many rows are quarantined for what they hold, and why."""
    reasons = "; ".join(f"{why} ({count:,})" for why, count in sorted(summary.set_aside.items()))
    num_rows = summary.num_rows + summary.num_dropped + summary.set_aside.total()
    return f"{summary.set_aside.total():,} of {num_rows:,} rows are quarantined: {reasons}"


def measure_drift(
    summary: WindowSummary, frozen: dict[str, tuple[float, float]]
) -> dict[str, dict[str, float]]:
    """Return how far the mean of each standardised column moved, and how much wider it became."""
    found = {}
    # Both in frozen deviations, the unit in which the model sees the column.
    for name, (mean, deviation) in frozen.items():
        count, own_mean, squares = summary.moments.get(name, (0, mean, 0.0))
        _, own_deviation = compute_mean_and_deviation(count, own_mean, squares)
        found[name] = {
            "shift": round((own_mean - mean) / deviation, 6),
            "width": round(own_deviation / deviation, 6),
        }
    return found


def find_alarms(
    summary: WindowSummary,
    num_late: int,
    moved: dict[str, dict[str, float]],
    tables: dict[str, dict[str, int]],
    rule: StreamRule,
    unit: str,
) -> list[str]:
    """Return what a person should look at, one line each; the increment stands nevertheless."""
    found = []
    # A wrong unit makes all durations wrong, and nothing else would show it.
    likely = infer_time_unit(summary.most_time)
    if unit != "day" and likely not in (unit, None):
        found.append(
            f"times such as {summary.most_time:,} look like {likely} since 1970, and are taken for "
            f"{unit} (stream.unit): ttl, grace and late count in it"
        )
    if summary.set_aside:
        found.append(f"{describe_set_aside(summary)}. Mend them, and give them in a new file")
    all_rows = summary.num_rows + summary.num_dropped
    late = num_late + summary.num_dropped
    if late > rule.late_share * all_rows:
        found.append(
            f"{late:,} of {all_rows:,} rows are late, {summary.num_dropped:,} of them dropped "
            f"(stream.late_share {rule.late_share:g})"
        )
    for name, change in moved.items():
        rows = max(summary.moments.get(name, (1, 0.0, 0.0))[0], 1)
        if abs(change["shift"]) > rule.drift + _BY_CHANCE / math.sqrt(rows):
            found.append(
                f"dense column {name} has moved by {change['shift']:+.2f} of its deviations "
                f"(stream.drift {rule.drift:g})"
            )
    for name, table in tables.items():
        if table["rows"] > 0.8 * table["capacity"]:
            found.append(
                f"table {name} holds {table['rows']:,} of {table['capacity']:,} rows: it grows soon"
            )
        if table["waiting"]:
            found.append(
                f"{table['waiting']:,} new values of table {name} wait for rows "
                f"(stream.max_new_rows {rule.max_new_rows:,})"
            )
    return found
