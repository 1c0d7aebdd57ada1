"""Prints docs/benchmarks.md, made of the benchmarks' JSON lines: make benchmarks-page writes it."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
TEMPLATE = FOLDER / "_benchmarks_page.md"
RECORDED = FOLDER / "figures.jsonl"
PLACE = re.compile(r"\{(\w+)(?::([^}]+))?\}")  # {script}: where it ran; {script:name}: a figure


def benchmarks_page(template: str, lines: Sequence[str]) -> str:
    """Return the page: the template with the figures of all lines of a script in their places.

    Raises:
        KeyError: no line has a figure that the template names."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        run = json.loads(line)
        what = [run["what"]] if "what" in run else []
        runs.setdefault("_".join([run["benchmark"], *what]), []).append(run)

    def text_at(place: re.Match[str]) -> str:
        script, name = place.groups()
        return _circumstances(runs[script]) if name is None else _range(runs[script], name)

    return PLACE.sub(text_at, template)


def _circumstances(runs: Sequence[Mapping[str, Any]]) -> str:
    """The commands of the runs, their machines and dates."""
    found = [run.get("environment", run) for run in runs]
    commands = dict.fromkeys(f"`{one['command']}`" for one in found)
    wheres = dict.fromkeys(f"{one.get('gpu', one['processor'])}, {one['date']}" for one in found)
    return f"{' and '.join(commands)} ({'; '.join(wheres)})"


def _range(runs: Sequence[Mapping[str, Any]], name: str) -> str:
    """A figure, from the lowest of all runs to the highest."""
    values = [value for run in runs for found, value in _figures(run) if found == name]
    if not values:
        raise KeyError(f"no line of {RECORDED.name} has {name}")
    return " to ".join(dict.fromkeys([_short(min(values)), _short(max(values))]))


def _figures(run: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a run by their names, which a dot joins; a list has those of several runs."""
    for key, value in run.items():
        if isinstance(value, Mapping):
            yield from _figures(value, f"{before}{key}.")
        else:
            values = value if isinstance(value, list) else [value]
            yield from ((before + key, one) for one in values if isinstance(one, int | float))


def _short(value: float) -> str:
    """Three digits, and all that stand before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    print(benchmarks_page(TEMPLATE.read_text(), RECORDED.read_text().splitlines()), end="")
