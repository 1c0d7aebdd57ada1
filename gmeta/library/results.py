"""What library calls return: a dataset, a run, a report, a study, a verdict."""

from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmeta.library.frames import Frame, make_frame
from gmeta.runs.listing import summarise_run
from gmeta.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class PreparedData:
    """A dataset that `gmeta.prepare` made: a path, such as for `data.path`; the number of
    `episodes` and `rows` of each split, and what the report counts, such as tasks left out."""

    path: Path
    splits: dict[str, dict[str, int]]
    report: dict[str, Any] = field(repr=False)

    def __fspath__(self) -> str:
        return str(self.path)

    def _repr_html_(self) -> str:
        lines = [[name, one["episodes"], one["rows"]] for name, one in self.splits.items()]
        return _html_table([[self.path, "episodes", "rows"], *lines])


@dataclass(frozen=True)
class Draft:
    """The files that `gmeta.init` wrote: a schema for `prepare` and a config for `train`."""

    schema: Path
    config: Path


@dataclass(frozen=True)
class TrainedRun:
    """A training run, read from its folder; `gmeta.TrainedRun(path)` opens any."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))
        # Now, not where it is used: UserError, as this is no run folder.
        _ = self.config

    def __fspath__(self) -> str:
        return str(self.path)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return the resolved config."""
        return RunFolder(self.path).read_config().to_json()

    @property
    def best_step(self) -> int | None:
        """Return the step of the best validation so far; None without one."""
        return summarise_run(RunFolder(self.path)).best_step

    @property
    def metrics(self) -> Frame:
        """Return the lines of metrics.jsonl: `step`, `loss`, `valid/auc` and so on, null where a
        line has no such value; a pandas DataFrame where pandas is installed, else an Arrow table.
        """
        lines = [_flatten(line) for line in RunFolder(self.path).read_metrics()]
        names = list(dict.fromkeys(name for line in lines for name in line))
        return make_frame({name: [line.get(name) for line in lines] for name in names})

    @property
    def valid(self) -> dict[str, float]:
        """Return the newest validation; {} without one."""
        found = [line["valid"] for line in RunFolder(self.path).read_metrics() if "valid" in line]
        return found[-1] if found else {}

    def _repr_html_(self) -> str:
        cells = {"run": self.path, **self.valid}
        return _html_table([list(cells), [_short(value) for value in cells.values()]])


@dataclass(frozen=True)
class EvaluationReport:
    """An evaluation: `path` is its page, `evaluation` all its figures (docs/metrics.md)."""

    path: Path
    evaluation: dict[str, Any] = field(repr=False)

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def table(self) -> Frame:
        """Return a row for each group, model and stage: its metrics with their intervals, of
        several labels those of the one that is judged."""
        rows: list[dict[str, Any]] = []
        for group in self.evaluation["groups"]:
            for result in group["results"]:
                row = {"group": group["name"], "model": result["run"], "stage": result["stage"]}
                for name, estimate in result["metrics"].items():
                    row |= {name: estimate["value"]}
                    row |= {f"{name} low": estimate["low"], f"{name} high": estimate["high"]}
                rows.append(row)
        return make_frame({name: [row[name] for row in rows] for name in rows[0]})

    @property
    def cautions(self) -> list[str]:
        """Return what a reader must not miss."""
        return [one["text"] for one in self.evaluation["cautions"]]

    def figure(self) -> "Figure":
        """Return one picture: the headline metric before and after, with rivals as ticks."""
        from gmeta.evaluation.report.summary_figure import draw_summary

        return draw_summary(self.evaluation)

    def _repr_html_(self) -> str:
        name = self.evaluation["headline"]
        lines: list[list[Any]] = [["group", "model", "stage", name]]
        for group in self.evaluation["groups"]:
            lines += [
                [group["name"], one["run"], one["stage"], _short(one["metrics"][name]["value"])]
                for one in group["results"]
            ]
        return _html_table(lines) + f"<p>{escape(str(self.path))}</p>"


@dataclass(frozen=True)
class Tuned:
    """What `gmeta.tune` found: `config` is the best one, for `gmeta.train`."""

    config: Path
    page: Path
    results: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Judgement:
    """Whether a candidate may be promoted, why not, and all that was measured."""

    promote: bool
    reasons: list[str]
    verdict: dict[str, Any] = field(repr=False)


def _flatten(line: dict[str, Any]) -> dict[str, Any]:
    values = {name: value for name, value in line.items() if not isinstance(value, dict | list)}
    nested = ((name, found) for name, found in line.items() if isinstance(found, dict))
    for name, found in nested:
        values |= {f"{name}/{key}": value for key, value in _flatten(found).items()}
    return values


def _short(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _html_table(lines: list[list[Any]]) -> str:
    head, *rows = [[escape(str(cell)) for cell in line] for line in lines]
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    heads = "".join(f"<th>{cell}</th>" for cell in head)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
