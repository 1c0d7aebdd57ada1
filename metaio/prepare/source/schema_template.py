"""Writes a first schema as commented TOML, for a person to read and correct."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from metaio.errors import to_one_line
from metaio.format.names import is_name
from metaio.prepare.schema.schema import TextRule
from metaio.prepare.source.infer_roles import MAX_DISTINCT_SHARE, InferredRoles, Role
from metaio.prepare.source.profile import ColumnProfile

HASHED_ROWS = 1_000_000
NEGATIVES = 4  # of each positive row
MAX_ROWS = 200  # of an episode
RARE_SHARE = 0.1  # share of clicks
MAX_QUERY_ROWS = {False: 10, True: 50}  # True: clicks are rare, ten rows may have none
# Tasks for validation, and as many again to score: enough to tell settings apart, but each at most
# a fifth of all tasks.
HELD_BACK_TASKS, LEAST_SHARE, MOST_SHARE = 200, 0.1, 0.2


_NO_NAME = re.compile(r"[^\w .-]+")  # what no table's name may hold


@dataclass(frozen=True)
class EpisodeProposal:
    """How a first schema deals rows and tasks out."""

    query_rows: int
    min_rows: int
    held_back_share: float  # share of the tasks in valid, and of those in user-cold
    num_tasks: int  # with enough rows

    @property
    def num_training_tasks(self) -> int:
        """Return about how many tasks train."""
        return round(self.num_tasks * (1 - 2 * self.held_back_share))


def propose_episodes(found: InferredRoles) -> EpisodeProposal:
    """Return how to deal rows and tasks out, by how many there are."""
    sizes = found.task_sizes
    clicked = (found.mean_label - found.label.least) / (found.label.most - found.label.least or 1)
    is_rare = not (found.is_rating or found.is_positives) and min(clicked, 1 - clicked) < RARE_SHARE
    # A third of the median task's rows, at most ten; fifty where ten rows may hold no click.
    most = MAX_QUERY_ROWS[is_rare]
    # Two at least, for what ranks them, where most tasks are larger than that.
    least = 2 if len(sizes) and np.median(sizes) > 3 else 1
    query_rows = int(np.clip(np.median(sizes) // 3, least, most)) if len(sizes) else most
    min_rows = query_rows + max(1, query_rows // 3)
    num_tasks = int(np.count_nonzero(sizes >= min_rows))
    share = float(np.clip(HELD_BACK_TASKS / max(num_tasks, 1), LEAST_SHARE, MOST_SHARE))
    return EpisodeProposal(query_rows, min_rows, round(share, 2), num_tasks)


def name_table(column: ColumnProfile) -> str:
    """Return the name of the table of an id column: its own, where a table may have it."""
    return column.name if is_name(column.name) else _NO_NAME.sub("-", column.name)[:60]


def has_events(found: InferredRoles) -> bool:
    """Return whether a log has what [events] needs: times, and an item."""
    return bool(found.item and found.select("time"))


def format_schema(found: InferredRoles, urls: Sequence[str], reads_events: bool = False) -> str:
    """Return the schema as TOML; its [events] are comments, unless they are to be read."""
    lines = [
        f"# From the first {found.num_rows:,} rows of {to_one_line(' '.join(urls))}: a guess at "
        "what",
        "# each column is for. Read it, correct it, then prepare. docs/format.md has every key.",
    ]
    (task,) = found.select("task")
    lines += _begin_table("[task]", task, "what the model adapts to; ")
    lines += _format_label(found)
    for time in found.select("time"):
        lines += _begin_table("[time]", time, "orders a task's rows; ")
        if time.time_format:
            lines.append(f"format = {_quote_text(time.time_format)}")
    for row_id in found.select("row id"):
        lines += _begin_table("[row_id]", row_id, "a number of its own in each row; ")
    lines += _format_ids(found)
    lines += _format_numbers(found)
    lines += _format_item(found) + _format_events(found, reads_events)
    if found.text != TextRule():
        lines += ["", "[text]"]
    if found.text.encoding != "utf-8":
        lines.append(f"encoding = {_quote_text(found.text.encoding)}")
    if found.text.separator is not None:
        lines.append(f"separator = {_quote_text(found.text.separator)}")
    if found.text.null:
        lines.append(
            f"null = [{', '.join(map(_quote_text, found.text.null))}]  # these mean a null"
        )
    left_out = found.select("left out")
    if left_out:
        lines += ["", "# Left out:"]
        lines += [
            f"#   {to_one_line(column.name)}: {found.reasons[column.name]} "
            f"({_describe_column(column)})"
            for column in left_out
        ]
    return "\n".join(lines + _format_episodes(found)) + "\n"


def _format_label(found: InferredRoles) -> list[str]:
    label, threshold = found.label, found.threshold
    lines = _begin_table("[label]", label)
    if threshold is not None:
        lines.append(f"threshold = {threshold:g}  # 1 from there on, else 0")
    elif found.is_rating:
        lines.append(
            f"# threshold = {found.median_label:g}  # to learn whether it is at least that"
        )
    if label.num_null:
        lines.append('null = "unknown"  # rows of which the label is not known')
    return lines


def _format_ids(found: InferredRoles) -> list[str]:
    lines: list[str] = []
    for column in (*found.select("single"), *found.select("multi")):
        lines += _begin_table(f"[[{found.roles[column.name]}]]", column)
        if (table := name_table(column)) != column.name:
            lines.append(f"table = {_quote_text(table)}")
        if column.num_distinct > MAX_DISTINCT_SHARE * found.num_rows:
            lines.append(f"hash = {HASHED_ROWS}  # most rows have an id of their own")
        else:
            lines.append("vocabulary = 2  # ids seen less often share row 0")
        if column.separator:
            lines.append(f"separator = {_quote_text(column.separator)}")
        if column.num_null:
            lines.append('null = "unknown"')
    if not lines:
        (task,) = found.select("task")
        lines += ["", "[[single]]  # a model needs a column of ids: all of these share one row"]
        lines += [_quote_column(task), "hash = 2"]
    return lines


def _format_numbers(found: InferredRoles) -> list[str]:
    lines: list[str] = []
    for column in found.select("dense"):
        lines += _begin_table("[[dense]]", column)
        if column.num_null:
            lines.append("fill = 0.0  # for nulls")
        # Large counts and amounts mostly have a long tail.
        if column.least >= 0 and column.most > 1000:
            lines.append("log1p = true")
        lines.append("standardise = true")
    for column in found.select("vector"):
        lines += [*_begin_table("[[vector]]", column), f"width = {column.width}"]
        if column.num_null:
            lines.append("fill = 0.0  # for nulls")
    return lines


def _format_item(found: InferredRoles) -> list[str]:
    if not found.item:
        return []
    columns = f"[{', '.join(map(_quote_text, found.of_item))}]"
    lines = ["", "[item]  # what is recommended; beside it the columns that change with it alone"]
    if found.is_positives:
        lines = ["", "[negatives]  # all labels are 1: items that the task has not stand for 0"]
    lines += [f"{'item' if found.is_positives else 'column'} = {_quote_text(found.item)}"]
    lines += [f"columns = {columns}"] if found.of_item else []
    if found.is_positives:
        lines += [f"per_positive = {NEGATIVES}", 'by = "popularity"']
    return lines


def _format_events(found: InferredRoles, reads_events: bool) -> list[str]:
    """Return [events], or as a proposal, where a log has times and an item."""
    if not has_events(found):
        return []
    rule = ["[events]"]
    kinds: tuple[tuple[str, Role], ...] = (("columns", "single"), ("dense", "dense"))
    for key, role in kinds:
        names = [one.name for one in found.select(role) if one.name in found.item_and_its_columns]
        if names:
            rule.append(f"{key} = [{', '.join(map(_quote_text, names))}]")
    label = found.label.name
    if not (found.is_rating or found.is_positives or '"' in label):
        name = label if re.fullmatch(r"\w+", label) else f'"{label}"'
        where = _quote_text(f"{name} = {float(found.label.most):.15g}")
        rule.append(f"where = {where}  # which rows are events; absent: all")
    rule += [
        "longest = 200  # newest events before each row",
        "delay = 0  # how old an event is before the online system knows it",
        '# files = "views/*.parquet"  # another log, whose rows are the events',
    ]
    about = "# What a row knows of its task's earlier rows: docs/sequences.md."
    hint = "# Uncomment it, and train with model.events, or let gmeta init --events do both."
    if reads_events:
        return ["", about, *rule]
    return ["", about, hint, *(f"# {line}" for line in rule)]


def _format_episodes(found: InferredRoles) -> list[str]:
    proposal = propose_episodes(found)
    few, median, many = np.percentile(found.task_sizes, (5, 50, 95)).astype(int)
    order = "its newest rows" if found.select("time") else "rows drawn by their hash"
    train = round(1 - 2 * proposal.held_back_share, 2)
    return [
        "",
        f"# {len(found.task_sizes):,} tasks of {median:,} rows in the median, most of {few:,} to "
        f"{many:,}.",
        f"[episodes]  # what is to be predicted of a task: {order}; the others are its support",
        f"query_rows = {proposal.query_rows}",
        f"min_rows = {proposal.min_rows}  # smaller tasks are dropped, and counted",
        f"max_rows = {MAX_ROWS}",
        "",
        *_format_protocol(found, train, proposal.held_back_share),
    ]


def _format_protocol(found: InferredRoles, train: float, held_back: float) -> list[str]:
    lines = []
    for side in found.select("side"):
        lines += [*_begin_table("[membership]", side, "these rows are support, those query; "), ""]
    for split in found.select("split"):
        is_made = found.valid_split not in found.splits
        lines += _begin_table("[splits]", split)[1:]
        return lines + ['validation_from = "train"  # a tenth of its tasks'] * is_made
    return [
        *lines,
        "[splits]  # of tasks, by their hash: those of user-cold are never trained",
        f"shares = {{ train = {train:g}, valid = {held_back:g}, user-cold = {held_back:g} }}",
    ]


def _begin_table(name: str, column: ColumnProfile, what: str = "") -> list[str]:
    return ["", f"{name}  # {what}{_describe_column(column)}", _quote_column(column)]


def _describe_column(column: ColumnProfile) -> str:
    kind = f"text split at {column.separator!r}" if column.separator else str(column.type)
    nulls = f", {column.num_null:,} null" if column.num_null else ""
    plain = isinstance(column.least, int | float) and not isinstance(column.least, bool)
    span = f", {column.least:,} to {column.most:,}" if plain and not column.is_list else ""
    return f"{kind}, {column.num_distinct:,} distinct{span}{nulls}"


def _quote_column(column: ColumnProfile) -> str:
    return f"column = {_quote_text(column.name)}"


def _quote_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # TOML has the same escapes
