"""A first schema as commented TOML, to read and correct: it says what a log's columns were taken
for."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from metaio.errors import shown
from metaio.format.names import is_name
from metaio.prepare.guess import MOST_DISTINCT_SHARE, Guess
from metaio.prepare.log_look import Column
from metaio.prepare.schema import TextRule

HASHED_ROWS = 1_000_000
NEGATIVES = 4  # of each positive row
MOST_ROWS = 200  # of an episode
RARE = 0.1  # share of clicks
MOST_QUERY_ROWS = {False: 10, True: 50}  # True: clicks are rare, ten rows may have none
# Tasks held back for validation, and as many again to score: enough to tell settings apart, but
# each at most a fifth of all tasks.
HELD_BACK_TASKS, LEAST_SHARE, MOST_SHARE = 200, 0.1, 0.2


_NO_NAME = re.compile(r"[^\w .-]+")  # what no table's name may hold


@dataclass(frozen=True)
class Episodes:
    """How a first schema deals rows and tasks out."""

    query_rows: int
    min_rows: int
    held_back: float  # share of the tasks in valid, and of those in user-cold
    num_tasks: int  # with enough rows

    @property
    def num_training_tasks(self) -> int:
        """Return how many tasks train, about."""
        return round(self.num_tasks * (1 - 2 * self.held_back))


def episodes_of(found: Guess) -> Episodes:
    """Return how rows and tasks are dealt out, by how many there are: a third of the median task's
    rows are to be predicted, ten at most, more where clicks are rare."""
    sizes = found.task_sizes
    clicked = (found.mean_label - found.label.least) / (found.label.most - found.label.least or 1)
    is_rare = not (found.is_rating or found.is_positives) and min(clicked, 1 - clicked) < RARE
    most = MOST_QUERY_ROWS[is_rare]
    query_rows = int(np.clip(np.median(sizes) // 3, 1, most)) if len(sizes) else most
    min_rows = query_rows + max(1, query_rows // 3)
    num_tasks = int(np.count_nonzero(sizes >= min_rows))
    share = float(np.clip(HELD_BACK_TASKS / max(num_tasks, 1), LEAST_SHARE, MOST_SHARE))
    return Episodes(query_rows, min_rows, round(share, 2), num_tasks)


def schema_toml(found: Guess, urls: Sequence[str]) -> str:
    """Return the schema."""
    lines = [
        f"# From the first {found.num_rows:,} rows of {shown(' '.join(urls))}: a guess at what",
        "# each column is for. Read it, correct it, then prepare. docs/format.md has every key.",
    ]
    (task,) = found.of("task")
    lines += ["", f"[task]  # what the model adapts to; {_told(task)}", _column(task)]
    lines += _label(found)
    for time in found.of("time"):
        lines += ["", f"[time]  # orders a task's rows; {_told(time)}", _column(time)]
        if time.time_format:
            lines.append(f"format = {_quoted(time.time_format)}")
    for row_id in found.of("row id"):
        lines += ["", f"[row_id]  # a number of its own in each row; {_told(row_id)}"]
        lines.append(_column(row_id))
    lines += _ids(found)
    lines += _numbers(found)
    lines += _item(found)
    if found.text != TextRule():
        lines += ["", "[text]"]
    if found.text.encoding != "utf-8":
        lines.append(f"encoding = {_quoted(found.text.encoding)}")
    if found.text.null:
        lines.append(f"null = [{', '.join(map(_quoted, found.text.null))}]  # these mean a null")
    left_out = found.of("left out")
    if left_out:
        lines += ["", "# Left out:"]
        lines += [
            f"#   {shown(column.name)}: {found.why[column.name]} ({_told(column)})"
            for column in left_out
        ]
    return "\n".join(lines + _dealt(found)) + "\n"


def _label(found: Guess) -> list[str]:
    label, threshold = found.label, found.threshold
    lines = ["", f"[label]  # {_told(label)}", _column(label)]
    if threshold is not None:
        lines.append(f"threshold = {threshold:g}  # 1 from there on, else 0")
    elif found.is_rating:
        lines.append(
            f"# threshold = {found.median_label:g}  # to learn whether it is at least that"
        )
    if label.num_null:
        lines.append('null = "unknown"  # rows of which the label is not known')
    return lines


def _ids(found: Guess) -> list[str]:
    lines: list[str] = []
    for column in (*found.of("single"), *found.of("multi")):
        lines += ["", f"[[{found.roles[column.name]}]]  # {_told(column)}", _column(column)]
        if not is_name(column.name):
            lines.append(f"table = {_quoted(_NO_NAME.sub('-', column.name)[:60])}")
        if column.num_distinct > MOST_DISTINCT_SHARE * found.num_rows:
            lines.append(f"hash = {HASHED_ROWS}  # most rows have an id of their own")
        else:
            lines.append("vocabulary = 2  # ids seen less often share row 0")
        if column.separator:
            lines.append(f"separator = {_quoted(column.separator)}")
        if column.num_null:
            lines.append('null = "unknown"')
    if not lines:
        (task,) = found.of("task")
        lines += ["", "[[single]]  # a model needs a column of ids: all of these share one row"]
        lines += [_column(task), "hash = 2"]
    return lines


def _numbers(found: Guess) -> list[str]:
    lines: list[str] = []
    for column in found.of("dense"):
        lines += ["", f"[[dense]]  # {_told(column)}", _column(column)]
        if column.num_null:
            lines.append("fill = 0.0  # for nulls")
        if column.least >= 0 and column.most > 1000:
            lines.append("log1p = true")
        lines.append("standardise = true")
    for column in found.of("vector"):
        lines += ["", f"[[vector]]  # {_told(column)}", _column(column), f"width = {column.width}"]
        if column.num_null:
            lines.append("fill = 0.0  # for nulls")
    return lines


def _item(found: Guess) -> list[str]:
    if not found.item:
        return []
    columns = f"[{', '.join(map(_quoted, found.of_item))}]"
    lines = ["", "[item]  # what is recommended; beside it the columns that change with it alone"]
    if found.is_positives:
        lines = ["", "[negatives]  # all labels are 1: items that the task has not stand for 0"]
    lines += [f"{'item' if found.is_positives else 'column'} = {_quoted(found.item)}"]
    lines += [f"columns = {columns}"] if found.of_item else []
    if found.is_positives:
        lines += [f"per_positive = {NEGATIVES}", 'by = "popularity"']
    return lines


def _dealt(found: Guess) -> list[str]:
    dealt = episodes_of(found)
    few, median, many = np.percentile(found.task_sizes, (5, 50, 95)).astype(int)
    order = "its newest rows" if found.of("time") else "rows drawn by their hash"
    train = round(1 - 2 * dealt.held_back, 2)
    return [
        "",
        f"# {len(found.task_sizes):,} tasks of {median:,} rows in the median, most of {few:,} to "
        f"{many:,}.",
        f"[episodes]  # what is to be predicted of a task: {order}; the others are its support",
        f"query_rows = {dealt.query_rows}",
        f"min_rows = {dealt.min_rows}  # smaller tasks are dropped, and counted",
        f"max_rows = {MOST_ROWS}",
        "",
        "[splits]  # of tasks, by their hash: those of user-cold are never trained",
        f"shares = {{ train = {train:g}, valid = {dealt.held_back:g}, "
        f"user-cold = {dealt.held_back:g} }}",
    ]


def _told(column: Column) -> str:
    kind = f"text split at {column.separator!r}" if column.separator else str(column.type)
    nulls = f", {column.num_null:,} null" if column.num_null else ""
    plain = isinstance(column.least, int | float) and not isinstance(column.least, bool)
    span = f", {column.least:,} to {column.most:,}" if plain and not column.is_list else ""
    return f"{kind}, {column.num_distinct:,} distinct{span}{nulls}"


def _column(column: Column) -> str:
    return f"column = {_quoted(column.name)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # TOML has the same escapes
