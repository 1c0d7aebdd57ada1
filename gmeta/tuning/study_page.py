"""Draws a study as one HTML page: best so far, adapted against plain, and what the trials tried."""

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

from matplotlib.ticker import MaxNLocator

from gmeta.evaluation.report.chart_files import PALETTE, Axes, Chart, Panel, PlotSeries, light_color
from gmeta.evaluation.report.html_page import MARKS, draw_panels, load_template
from gmeta.runs.early_stop import EarlyStop
from gmeta.tuning.outcome import TunedSide, format_score, format_value, shorten_keys
from gmeta.tuning.study import Trial

# Trials that are drawn strongly among all that were tried: the best ones.
NUM_STRONG = 3
# Scores worse than the median by more than so many times its distance from the best stand at the
# edge: one trial that diverged would press all others into a line.
SHOWN = 2.0


def render_study(
    title: str,
    verdict: str,
    sides: Sequence[TunedSide],
    trees: float | None,
    splits: str,
    decides: EarlyStop,
) -> str:
    """Return the page of one study, or of two beside each other; `trees` is the trees' score."""
    return load_template("study.html", "gmeta.tuning").render(
        title=title,
        verdict=verdict,
        metric=decides.metric,
        splits=splits,
        sides=sides,
        charts=[draw_panels(chart) for chart in _make_charts(sides, trees, decides)],
        palette=PALETTE,
        marks=MARKS,
        names_of=shorten_keys,
        score_of=format_score,
        value_of=format_value,
    )


def _make_charts(
    sides: Sequence[TunedSide], trees: float | None, decides: EarlyStop
) -> list[Chart]:
    series = [
        PlotSeries(side.name, "after", f"{side.name}, a trial", f"series-{at}", "os"[at])
        for at, side in enumerate(sides)
    ]
    better = "higher" if decides.higher_is_better else "lower"
    label = f"{decides.metric} ({better} is better)"
    scores = [
        ("Best so far", "trial", False, "The line is the best score of all trials up to one."),
        ("From best to worst", "rank", True, "The trials of a study by their scores."),
    ]
    panels = [
        Panel(
            name,
            f"{label} of each trial against its {axis}",
            partial(_draw_scores, sides, series, trees, decides, is_ranked, axis, label),
        )
        for name, axis, is_ranked, _ in scores
    ]
    title = "Adapted against plain" if len(sides) > 1 else "Scores"
    caption = " ".join(text for *_, text in scores)
    dashed = " Dashed: boosted trees." if trees is not None else ""
    lines = [
        Panel(
            f"{side.name}, {len(_whole_trials(side))} whole trials",
            f"The values of each key that the trials of {side.name} training had",
            partial(_draw_values, side, series[at].color_name),
            0.8 + 0.42 * (len(side.space) + 1),
        )
        for at, side in enumerate(sides)
    ]
    how = (
        f"A line is a trial, down through its values to its score; strong: the best {NUM_STRONG}. "
        "A key whose strong lines meet matters; one where they are spread does not."
    )
    return [
        Chart("scores", title, f"{caption}{dashed}", panels, series),
        Chart("values", "What was tried", how, lines),
    ]


def _whole_trials(side: TunedSide) -> list[Trial]:
    """Return the complete trials, the best first."""
    return [trial for trial in side.study.rank_trials() if trial.state == "complete"]


def _scores_of(trials: Sequence[Trial]) -> list[float]:
    return [trial.score for trial in trials if trial.score is not None]


def measure_limits(scores: Sequence[float]) -> tuple[float, float]:
    """Return the best of ranked scores, and the worst that is shown."""
    best, middle = scores[0], median(scores)
    farthest = middle + SHOWN * (middle - best)
    return best, min(scores, key=lambda score: abs(score - farthest)) if middle != best else middle


def _draw_scores(
    sides: Sequence[TunedSide],
    series: Sequence[PlotSeries],
    trees: float | None,
    decides: EarlyStop,
    is_ranked: bool,
    axis: str,
    label: str,
    axes: Axes,
) -> None:
    better = max if decides.higher_is_better else min
    shown = [trees] if trees is not None else []
    for side, one in zip(sides, series, strict=True):
        ranked = _whole_trials(side)
        trials = ranked if is_ranked else sorted(ranked, key=lambda trial: trial.number)
        scores = _scores_of(trials)
        shown += measure_limits(_scores_of(ranked))
        places = list(range(1, len(scores) + 1))
        if not is_ranked:
            places = [trial.number for trial in trials]
            best = [better(scores[: at + 1]) for at in range(len(scores))]
            axes.step(places, best, where="post", color=one.style["color"], linewidth=1.8)
        axes.plot(places, scores, linestyle="-" if is_ranked else "none", **one.style)
    if trees is not None:
        axes.axhline(trees, color=light_color("muted"), linewidth=1.3, linestyle=(0, (4, 3)))
    low, high = min(shown), max(shown)
    room = 0.05 * (high - low or 1.0)
    axes.set(xlabel=axis, ylabel=label, ylim=(low - room, high + room))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(axis="y")


def _draw_values(side: TunedSide, color_name: str, axes: Axes) -> None:
    trials = _whole_trials(side)
    best, worst = measure_limits(scores := _scores_of(trials))
    rows = range(len(side.space) + 1)
    # The best last, above the others.
    for rank, trial in reversed(list(enumerate(trials))):
        values = [dimension.place(trial.values[dimension.key]) for dimension in side.space]
        share = (scores[rank] - worst) / (best - worst) if best != worst else 1.0
        style: dict[str, Any] = {"color": light_color("muted"), "alpha": 0.35, "linewidth": 0.9}
        if rank < NUM_STRONG:
            style = {"color": light_color(color_name), "linewidth": 2.4 - 0.6 * rank}
        axes.plot([*values, max(share, 0.0)], rows, **style)
    ends = [dimension.list_ends() for dimension in side.space]
    ends.append([(0.0, format_score(worst)), (1.0, format_score(best))])
    for row, marks in enumerate(ends):
        axes.axhline(row, color=light_color("line"), linewidth=0.8, zorder=0)
        for place, text in marks:
            where = "left" if place == 0 else "right" if place == 1 else "center"
            short = text if len(text) < 22 else f"{text[:19]}..."
            axes.text(place, row - 0.14, short, ha=where, fontsize=7.5, color=light_color("muted"))
    axes.set_yticks(rows, [*shorten_keys(side.space), "score"])
    axes.set(ylim=(rows[-1] + 0.4, -0.6), xlim=(-0.03, 1.03), xticks=[])
    axes.tick_params(axis="y", length=0)
