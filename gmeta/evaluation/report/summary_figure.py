"""One picture of an evaluation: the headline metric before and after, with rivals as ticks."""

from io import BytesIO
from typing import Any

from matplotlib.figure import Figure

from gmeta.platform.pages.palette import PALETTE


class _ShownFigure(Figure):
    def _repr_png_(self) -> bytes:
        # A notebook shows matplotlib's own figures only once pyplot is imported.
        self.savefig(file := BytesIO(), format="png", facecolor=self.get_facecolor())
        return file.getvalue()


def draw_summary(evaluation: dict[str, Any], theme: int = 0) -> Figure:
    """Return the picture of an evaluation.json; `theme` 0 is light, 1 dark."""
    colors = {name: both[theme] for name, both in PALETTE.items()}
    groups, name = evaluation["groups"], evaluation["headline"]
    run = evaluation["runs"][0]["name"]
    size = 6.4, 0.9 + 0.9 * len(groups)
    figure = _ShownFigure(size, facecolor=colors["page"], layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor(colors["page"])
    for row, group in enumerate(groups):
        found = {
            (one["run"], one["stage"]): one["metrics"][name]["value"] for one in group["results"]
        }
        before, after = found.get((run, "before")), found.get((run, "after"))
        if before is not None and after is not None:
            arrow = {"arrowstyle": "-|>", "color": colors["series-0"], "linewidth": 2.5}
            axes.annotate("", (after, row), (before, row), arrowprops=arrow)
            axes.plot([before, after], [row, row], alpha=0)  # annotations move no limits
            axes.annotate(
                f"{after:.4f}",
                (after, row),
                xytext=(0, 9),
                textcoords="offset points",
                ha="center",
                color=colors["ink"],
                fontweight="bold",
            )
        rivals = [key for key in found if key[0] != run and key[1] == "after"]
        for at, key in enumerate(rivals):
            if found[key] is not None:
                color = colors[f"series-{1 + at % 3}"]
                axes.plot(
                    found[key], row, marker="|", markersize=18, markeredgewidth=2, color=color
                )
                axes.annotate(
                    key[0],
                    (found[key], row),
                    xytext=(0, -20 - 11 * (at % 3)),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8,
                    color=color,
                )
    axes.set_yticks(range(len(groups)), [group["name"] for group in groups])
    axes.set_ylim(len(groups) - 0.3, -0.6)
    axes.margins(x=0.12)
    info = evaluation["metrics"][name]
    better = "higher" if info["higher_is_better"] else "lower"
    axes.set_xlabel(f"{info['label']}: before \N{RIGHTWARDS ARROW} adapted ({better} is better)")
    for spine in ("top", "right", "left"):
        axes.spines[spine].set_visible(False)
    axes.spines["bottom"].set_color(colors["line"])
    axes.tick_params(colors=colors["muted"], length=0)
    axes.xaxis.label.set_color(colors["muted"])
    return figure
