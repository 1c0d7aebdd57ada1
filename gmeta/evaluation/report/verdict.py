"""Says in a sentence a group what an evaluation found: the first thing that a reader sees."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gmeta.evaluation.report.evaluation_schema import Evaluation, GroupEvaluation
from gmeta.evaluation.report.headline import (
    HeadlineRow,
    Rival,
    format_number,
    format_signed,
    make_headline,
)
from metaio.quantities import format_count

# A screen of tiles; the tables have all groups.
MAX_TILES = 4
# A page is to stay below 1 MB: pictures and all metrics of a group take up to 100 KB, a row 1.5 KB.
MAX_DRAWN_GROUPS = 6
MAX_LISTED_GROUPS = 50


@dataclass(frozen=True)
class GroupVerdict:
    """A group's sentence; `kind` is good (adapting helps, and no rival is ahead), bad or empty."""

    group: str
    sentence: str
    kind: str


@dataclass(frozen=True)
class FigureTile:
    """A number with its name, what stands below it, and whether it is good or bad."""

    value: str
    name: str
    detail: str
    kind: str


def judge_groups(evaluation: Evaluation) -> list[GroupVerdict]:
    """Return the verdict on the headline metric, group by group."""
    return [_judge_group(evaluation, group) for group in evaluation.groups]


def limit_groups(evaluation: Evaluation, most: int = MAX_DRAWN_GROUPS) -> Evaluation:
    """Return the evaluation with at most so many groups, the worst among them, in their order."""
    if len(evaluation.groups) <= most:
        return evaluation
    kinds = [one.kind for one in judge_groups(evaluation)]
    # The sort is stable: of one kind the first are chosen.
    order = sorted(range(len(kinds)), key=lambda at: ("bad", "", "good").index(kinds[at]))
    chosen = sorted(order[:most])
    return replace(evaluation, groups=tuple(evaluation.groups[at] for at in chosen))


def judge_all(verdicts: Sequence[GroupVerdict]) -> GroupVerdict | None:
    """Return one sentence of more groups than are drawn; None of fewer."""
    if len(verdicts) <= MAX_DRAWN_GROUPS:
        return None
    good, bad = (sum(one.kind == kind for one in verdicts) for kind in ("good", "bad"))
    rest = len(verdicts) - good - bad
    sentence = (
        f"Of {len(verdicts)} groups adapting improves {good} with no rival ahead; {bad} are worse "
        f"than before or than a rival; {rest} show no more than chance does."
    )
    return GroupVerdict("", sentence, "bad" if bad else "good" if good > rest else "")


def make_tiles(evaluation: Evaluation) -> list[FigureTile]:
    """Return a tile for each of the first groups, and one for tasks that adapting makes worse."""
    label = evaluation.metrics[evaluation.headline].label
    tiles = []
    for group in evaluation.groups[:MAX_TILES]:
        line = make_headline(evaluation, group, evaluation.headline)
        change = f"{format_signed(line.change.value)} by adapting"
        kind = {"better": "good", "worse": "bad"}.get(line.change.verdict, "")
        tiles.append(
            FigureTile(format_number(line.after.value), f"{label}, {group.name}", change, kind)
        )
    gains = [one.task_gains for one in evaluation.groups if one.task_gains is not None]
    if gains:
        sizes = [sum(one.num_tasks_in_bin) for one in gains]
        worse, better = (
            sum(size * share for size, share in zip(sizes, shares, strict=True)) / sum(sizes)
            for shares in ([g.share_worse for g in gains], [g.share_better for g in gains])
        )
        of_groups = f", {len(gains)} groups together" if len(gains) > 1 else ""
        shares = sorted(one.share_worse for one in gains)
        spread = f"; {shares[0]:.0%} to {shares[-1]:.0%} worse off by group" if of_groups else ""
        name = f"of tasks worse off{of_groups}"
        tiles.append(FigureTile(f"{worse:.0%}", name, f"{better:.0%} are better off{spread}", ""))
    return tiles


def _judge_group(evaluation: Evaluation, group: GroupEvaluation) -> GroupVerdict:
    line = make_headline(evaluation, group, evaluation.headline)
    parts = [_describe_change(line, evaluation.metrics[evaluation.headline].label)]
    parts += _describe_rivals(line.rivals)
    verdicts = [line.change.verdict, *(rival.difference.verdict for rival in line.rivals)]
    is_good = line.change.verdict == "better" and "worse" not in verdicts
    kind = "bad" if "worse" in verdicts else "good" if is_good else ""
    tasks = format_count(group.num_tasks, "task")
    return GroupVerdict(group.name, f"{group.name}, {tasks}: {'; '.join(parts)}.", kind)


def _describe_change(line: HeadlineRow, label: str) -> str:
    values = f"{label} {format_number(line.before.value)} \N{RIGHTWARDS ARROW} "
    values += format_number(line.after.value)
    match line.change.verdict:
        case "better":
            return f"adapting improves {values}"
        case "worse":
            return f"adapting makes it worse, {values}"
        case "same":
            return f"adapting changes nothing, {label} {format_number(line.after.value)}"
        case "noise":
            return f"adapting changes no more than chance does, {values}"
    return f"{values}, of too few tasks to judge"


def _describe_rivals(rivals: Sequence[Rival]) -> list[str]:
    """Return what is ahead of the run, level with it and behind it, the bad news first."""
    behind = [_name_with_size(one) for one in rivals if one.difference.verdict == "worse"]
    ahead = [_name_with_size(one) for one in rivals if one.difference.verdict == "better"]
    level = [one.short_name for one in rivals if one.difference.verdict in ("noise", "same")]
    return [
        f"{word} {', '.join(names)}"
        for word, names in (("behind", behind), ("ahead of", ahead), ("level with", level))
        if names
    ]


def _name_with_size(rival: Rival) -> str:
    return f"{rival.short_name} by {format_number(abs(rival.difference.value))}"
