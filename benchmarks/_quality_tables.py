"""What evaluations of several seeds say together: adapted minus each baseline, as tables."""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

# Half the width of a 95 % interval in standard errors where 2, 3, ... 10 seeds tell the error:
# Student's t with a degree less than seeds. More of them take the last, a little too large.
STUDENT_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
# What stands beside the adapted model: (run, stage) of evaluation.json -> head of its column.
BASELINES = {
    ("adapted", "before"): "not adapted",
    ("plain", "before"): "plain",
    ("plain", "after"): "plain, fine-tuned",
    ("bias model", "after"): "bias model",
    ("boosted trees", "after"): "boosted trees",
}
OPTIONAL = "boosted trees"  # where gmeta[lightgbm] is not installed
OUTSIDE = "outside"  # a script of anybody's


@dataclass(frozen=True)
class Lead:
    """Adapted minus a baseline, the mean over seeds, with a 95 % interval; `value` is the
    baseline's own. `verdict` is better, worse or noise."""

    baseline: str
    value: float
    difference: float
    low: float
    high: float
    verdict: str


@dataclass(frozen=True)
class Row:
    """A metric of a split: the adapted model's value, the mean over seeds, and its leads, also
    over algorithms that were run beside it."""

    split: str
    metric: str
    label: str
    higher_is_better: bool
    value: float
    num_tasks: int
    leads: tuple[Lead, ...]


def rows_of(
    evaluations: Sequence[Path],
    splits: Sequence[str],
    metrics: Sequence[str],
    others: Sequence[str] = (),
    outside: Mapping[tuple[str, str], float] = MappingProxyType({}),
) -> list[Row]:
    """The rows of a data set from the evaluation.json of each seed; `others` are runs that stand
    beside the baselines, of the seeds that have them, `outside` values of a split and a metric.

    Raises:
        ValueError: an evaluation has no such split, metric or comparison."""
    read = [json.loads(path.read_text()) for path in evaluations]
    return [
        _row(read, split, metric, others, outside.get((split, metric)))
        for split in splits
        for metric in metrics
    ]


def _row(
    read: Sequence[Mapping[str, Any]], split: str, metric: str, others: Sequence[str],
    outside: float | None,
) -> Row:  # fmt: skip
    groups = [_one(each["groups"], name=split) for each in read]
    name = read[0]["runs"][0]["name"]
    higher = bool(read[0]["metrics"][metric]["higher_is_better"])
    adapted = [_one(group["results"], run=name, stage="after") for group in groups]
    leads = []
    for (run, stage), head in (BASELINES | {(other, "after"): other for other in others}).items():
        run = name if run == "adapted" else run
        with_it = [group for group in groups if _found(group["results"], run=run, stage=stage)]
        # What is missing from some seeds is refused, but for what need not be in all of them.
        if head not in others and (with_it or head != OPTIONAL):
            with_it = groups
        if with_it:
            results = [_one(group["results"], run=run, stage=stage) for group in with_it]
            differences = [
                _one(group["comparisons"], run=name, stage="after", minus_run=run,
                     minus_stage=stage)["metrics"][metric]
                for group in with_it
            ]  # fmt: skip
            value = statistics.mean(each["metrics"][metric]["value"] for each in results)
            leads.append(lead(head, value, differences, higher))
    if outside is not None:
        # Its rows are not known, so no difference is paired: the interval is that of adapted alone.
        # It has the stored draw of support and query rows, and is compared on that one.
        differences = []
        for group, each in zip(groups, adapted, strict=True):
            own, drawn = (
                each["metrics"][metric],
                _found(group.get("by_draw", ()), run=name, stage="after"),
            )
            stored = drawn[0]["metrics"][metric][0] if drawn else own["value"]
            less = outside + own["value"] - stored
            found = {key: own[key] and own[key] - less for key in ("value", "low", "high")}
            differences.append({**found, "reason": own.get("reason")})
        leads.append(lead(OUTSIDE, outside, differences, higher))
    return Row(
        split,
        metric,
        read[0]["metrics"][metric]["label"],
        higher,
        statistics.mean(each["metrics"][metric]["value"] for each in adapted),
        groups[0]["num_tasks"],
        tuple(leads),
    )


def lead(
    baseline: str, value: float, differences: Sequence[Mapping[str, Any]], higher: bool
) -> Lead:
    """The differences of several seeds as one.

    All seeds are scored on the same tasks, so what the choice of tasks adds to the error does not
    shrink with their number; what the seed adds does, and three seeds tell it roughly. Each part
    has half an interval by its own quantile, and their squares add up (MOVER: Zou & Donner 2008,
    Statistics in Medicine 27):

        half^2 = mean of the seeds' (half their interval over tasks and draws)^2
               + (t of seeds - 1 degrees)^2 var(seeds) / seeds

    It holds the truth at least as often as it says, also where one part is far the larger; one
    standard error with the degrees of Satterthwaite does in as little as 87 % with two seeds and
    92 % with three. Of one seed the interval does not cover the seed.

    Raises:
        ValueError: a seed has no interval; with its reason."""
    for each in differences:
        if each["low"] is None or each["high"] is None:
            raise ValueError(f"no interval against {baseline}: {each['reason']}")
    values = [each["value"] for each in differences]
    seeds = len(values)
    of_tasks = statistics.mean(((each["high"] - each["low"]) / 2) ** 2 for each in differences)
    of_seeds = 0.0
    if seeds > 1:
        of_seeds = STUDENT_95[min(seeds, 10) - 2] ** 2 * statistics.variance(values) / seeds
    half = math.sqrt(of_tasks + of_seeds)
    mean = statistics.mean(values)
    low, high = mean - half, mean + half
    ahead, behind = (low > 0, high < 0) if higher else (high < 0, low > 0)
    verdict = "better" if ahead else "worse" if behind else "noise"
    return Lead(baseline, value, mean, low, high, verdict)


def _found(items: Sequence[Mapping[str, Any]], **wanted: str) -> list[Mapping[str, Any]]:
    return [item for item in items if all(item[key] == value for key, value in wanted.items())]


def _one(items: Sequence[Mapping[str, Any]], **wanted: str) -> Mapping[str, Any]:
    found = _found(items, **wanted)
    if len(found) != 1:
        asked = ", ".join(f"{key} {value}" for key, value in wanted.items())
        raise ValueError(f"an evaluation has {len(found)} entries with {asked}: 1 is needed")
    return found[0]


def text_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Lines for a terminal of 80 columns: each row, and below it one line a baseline."""
    for row in rows:
        arrow = "↑" if row.higher_is_better else "↓"
        tasks = f"{row.num_tasks:,} tasks"
        yield f"{row.split}  {row.label} {arrow}  adapted {row.value:.4f}  ({tasks})"
        for each in row.leads:
            interval = f"[{each.low:+.4f}, {each.high:+.4f}]"
            yield (
                f"    minus {each.baseline:<18} {each.value:8.4f}  {each.difference:+.4f} "
                f"{interval}  {each.verdict}"
            )


def markdown(rows: Sequence[Row]) -> list[str]:
    """Two tables with a row for each metric of each split and all baselines side by side: what each
    model reaches, and the 95 % intervals of adapted minus each."""
    heads = [each.baseline for each in rows[0].leads]
    values = [[_short(row.value), *(_short(each.value) for each in row.leads)] for row in rows]
    ranges = [[_range(each) for each in row.leads] for row in rows]
    return [
        *_table(rows, ["adapted", *heads], values),
        "",
        "Adapted minus each, from the lower to the upper end of its interval:",
        "",
        *_table(rows, heads, ranges),
    ]


def _table(
    rows: Sequence[Row], heads: Sequence[str], cells: Sequence[Sequence[str]]
) -> Iterator[str]:
    yield f"| split | metric | {' | '.join(heads)} |"
    yield "| --- | --- |" + " ---: |" * len(heads)
    for row, of_row in zip(rows, cells, strict=True):
        arrow = "↑" if row.higher_is_better else "↓"
        yield f"| {row.split} | {row.label} {arrow} | {' | '.join(of_row)} |"


def _range(each: Lead) -> str:
    told = f"{_signed(each.low)} to {_signed(each.high)}"
    return {"better": f"**{told}**", "noise": told, "worse": f"*{told}*"}[each.verdict]


def _short(value: float) -> str:
    return f"{value:.4f}".replace("0.", ".", 1) if 0 <= value < 1 else f"{value:.4f}"


def _signed(value: float) -> str:
    sign = "-" if round(value, 4) < 0 else "+"
    return sign + _short(abs(value))


def counts(rows: Sequence[Row], baseline: str) -> dict[str, int]:
    """How often adapted is better than a baseline, worse, or neither."""
    verdicts = [each.verdict for row in rows for each in row.leads if each.baseline == baseline]
    return {verdict: verdicts.count(verdict) for verdict in ("better", "noise", "worse")}


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """The rows as JSON values."""
    return {
        f"{row.split}/{row.metric}": {
            "adapted": round(row.value, 5),
            "minus": {
                each.baseline: [round(x, 5) for x in (each.difference, each.low, each.high)]
                for each in row.leads
            },
        }
        for row in rows
    }
