"""Says in a sentence a group what an evaluation found: the first thing that a reader sees."""

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class GroupVerdict:
    """A group's sentence; `kind` is good (adapting helps, and no rival is ahead), bad or empty."""

    group: str
    sentence: str
    kind: str


@dataclass(frozen=True)
class Tile:
    """A number with its name, what stands below it, and whether it is good or bad."""

    value: str
    name: str
    detail: str
    kind: str


def judge_groups(evaluation: Evaluation) -> list[GroupVerdict]:
    """Return the verdict on the headline metric, group by group."""
    return [_judge_group(evaluation, group) for group in evaluation.groups]


def make_tiles(evaluation: Evaluation) -> list[Tile]:
    """Return a tile for each of the first groups, and one for tasks that adapting makes worse."""
    label = evaluation.metrics[evaluation.headline].label
    tiles = []
    for group in evaluation.groups[:MAX_TILES]:
        line = make_headline(evaluation, group, evaluation.headline)
        change = f"{format_signed(line.change.value)} by adapting"
        kind = {"better": "good", "worse": "bad"}.get(line.change.verdict, "")
        tiles.append(Tile(format_number(line.after.value), f"{label}, {group.name}", change, kind))
    gains = evaluation.groups[0].task_gains
    if gains:
        better = f"{gains.share_better:.0%} are better off"
        tiles.append(Tile(f"{gains.share_worse:.0%}", "of tasks worse off", better, ""))
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
