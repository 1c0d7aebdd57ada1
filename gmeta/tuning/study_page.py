"""Draws a study as one HTML page: the best so far, adapted against plain, and what was tried."""

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

from matplotlib.ticker import MaxNLocator

from gmeta.evaluation.report.chart_files import Axes, Chart, Panel, PlotSeries, light_color
from gmeta.evaluation.report.html_page import draw_panels
from gmeta.platform.pages.templates import load_template
from gmeta.runs.early_stop import EarlyStop
from gmeta.tuning.outcome import TunedSide, format_score, shorten_keys

# Trials that are drawn strongly: the best ones.
NUM_STRONG = 3


def render_study(
    verdict: str, sides: Sequence[TunedSide], trees: float | None, splits: str, decides: EarlyStop
) -> str:
    """Return the page of one study, or of two beside each other; `trees` is the trees' score.

    The verdict is a command to train, three blanks, and what was found."""
    series = [
        PlotSeries(side.name, "after", side.name, f"series-{at}", "os"[at])
        for at, side in enumerate(sides)
    ]
    named = f"{decides.metric}, {'higher' if decides.higher_is_better else 'lower'} is better"
    draw = partial(_draw_scores, sides, series, trees, decides)
    best = [Panel(named, f"{named}: the score of each trial", draw)]
    told = "A mark is a trial, a line the best so far" + "; dashed: boosted trees" * bool(trees)
    tried = [
        Panel(
            f"{side.name}, {len(side.scores)} whole trials",
            f"the values of each key in the trials of {side.name} training",
            partial(_draw_values, side, series[at].color_name),
            0.8 + 0.42 * (len(side.space) + 1),
        )
        for at, side in enumerate(sides)
    ]
    how = f"A line is a trial, down through its values to its score; strong: the best {NUM_STRONG}"
    charts = [
        Chart("scores", " against ".join(side.name for side in sides), told, best, series),
        Chart("values", "What was tried", how, tried),
    ]
    command, _, found = verdict.partition("   ")
    return load_template("gmeta.tuning", "study.html").render(
        verdict=found or command,
        next=command.removeprefix("to train: ") if found else "",
        splits=splits,
        charts=map(draw_panels, charts),
    )


def measure_limits(scores: Sequence[float]) -> tuple[float, float]:
    """Return the best of ranked scores, and the worst that is shown."""
    best, middle = scores[0], median(scores)
    # One trial that diverged would press all others into a line.
    farthest = middle + 2 * (middle - best)
    return best, min(scores, key=lambda score: abs(score - farthest))


def _draw_scores(
    sides: Sequence[TunedSide],
    series: Sequence[PlotSeries],
    trees: float | None,
    decides: EarlyStop,
    axes: Axes,
) -> None:
    better = max if decides.higher_is_better else min
    shown = [] if trees is None else [trees]
    for side, one in zip(sides, series, strict=True):
        shown += measure_limits(list(side.scores.values()))
        numbers = sorted(side.scores)
        scores = [side.scores[number] for number in numbers]
        best = [better(scores[: at + 1]) for at in range(len(scores))]
        axes.step(numbers, best, where="post", color=one.style["color"], linewidth=1.8)
        axes.plot(numbers, scores, linestyle="none", **one.style)
    if trees is not None:
        axes.axhline(trees, color=light_color("muted"), linewidth=1.3, linestyle=(0, (4, 3)))
    room = 0.05 * (max(shown) - min(shown) or 1.0)
    axes.set(xlabel="trial", ylim=(min(shown) - room, max(shown) + room))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(axis="y")


def _draw_values(side: TunedSide, color_name: str, axes: Axes) -> None:
    best, worst = measure_limits(list(side.scores.values()))
    rows = range(len(side.space) + 1)
    values = {trial.number: trial.values for trial in side.study.trials()}
    # The best last, above the others.
    for rank, (number, score) in reversed(list(enumerate(side.scores.items()))):
        places = [dimension.place(values[number][dimension.key]) for dimension in side.space]
        share = (score - worst) / (best - worst) if best != worst else 1.0
        style: dict[str, Any] = {"color": light_color("muted"), "alpha": 0.35, "linewidth": 0.9}
        if rank < NUM_STRONG:
            style = {"color": light_color(color_name), "linewidth": 2.4 - 0.6 * rank}
        axes.plot([*places, max(share, 0.0)], rows, **style)
    marks = [
        *([(one.place(value), value) for value in one.bounds()] for one in side.space),
        [(0.0, format_score(worst)), (1.0, format_score(best))],
    ]
    for row, place, value in ((row, *mark) for row, of_row in enumerate(marks) for mark in of_row):
        where, text = {0.0: "left", 1.0: "right"}.get(place, "center"), str(value) or "none"
        text = text if len(text) < 22 else f"{text[:19]}..."
        axes.text(place, row - 0.14, text, ha=where, fontsize=7.5, color=light_color("muted"))
    axes.set_yticks(rows, [*shorten_keys(side.space), "score"])
    axes.set(ylim=(rows[-1] + 0.4, -0.6), xlim=(-0.03, 1.03), xticks=[])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y")
