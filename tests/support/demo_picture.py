"""Draws the README's picture of the demo, light and dark, of what make demo has evaluated."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from gmeta.evaluation.report.chart_files import PALETTE, Axes, Chart, Panel, light_color, render_svg

EVALUATION = Path("runs/demo/maml/evaluation/evaluation.json")
IMAGES = Path("docs/images")
RIVALS = {
    "plain": "plain, fine-tuned",
    "boosted trees": "boosted trees",
    "bias model": "bias model",
}
GROUPS = {
    "user-cold": "new users", "item-cold": "new items", "user-item-cold": "new users,\nnew items",
}  # fmt: skip
TICK = {"marker": "|", "markersize": 17, "markeredgewidth": 2.5, "linestyle": "none"}
DOT = {"marker": "o", "markersize": 8, "markeredgewidth": 1.8, "linestyle": "none"}


def draw(evaluation: dict[str, Any], axes: Axes) -> None:
    """The AUC of each group: from before to after adaptation, rivals as ticks."""
    ours, *_ = evaluation["runs"]
    blue, page = light_color("series-0"), light_color("page")
    colors = {name: light_color(f"series-{index + 1}") for index, name in enumerate(RIVALS)}
    for row, group in enumerate(evaluation["groups"]):
        found = {(one["run"], one["stage"]): one["metrics"]["auc"] for one in group["results"]}
        before, after = (found[ours["name"], stage]["value"] for stage in ("before", "after"))
        for name, color in colors.items():
            axes.plot(found[name, "after"]["value"], row, color=color, **TICK)
        arrow = {"arrowstyle": "-|>", "color": blue, "linewidth": 2, "shrinkA": 5, "shrinkB": 4}
        axes.annotate("", (after, row), (before, row), arrowprops=arrow)
        axes.plot(before, row, color=blue, markerfacecolor=page, **DOT)
        axes.plot(after, row, color=blue, **DOT)
        for value, side, place in ((before, "right", -8), (after, "left", 8)):
            text = {"textcoords": "offset points", "ha": side, "va": "center", "color": blue}
            axes.annotate(f"{value:.3f}", (value, row), (place, 0), **text)
    axes.set_yticks(range(len(GROUPS)), [GROUPS[one["name"]] for one in evaluation["groups"]])
    axes.set_ylim(len(GROUPS) - 0.5, -0.5)
    axes.margins(x=0.1)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.grid(axis="x")
    axes.set_xlabel("AUC, unseen in training   (higher is better \N{RIGHTWARDS ARROW})")
    handles = [
        Line2D([], [], color=blue, markerfacecolor=page, label="before adapting", **DOT),
        Line2D([], [], color=blue, label="adapted", **DOT),
        *(
            Line2D([], [], color=colors[name], label=RIVALS[name], **TICK | {"markersize": 10})
            for name in RIVALS
        ),
    ]
    close = {"columnspacing": 0.8, "handletextpad": 0.1, "fontsize": 9.5}
    axes.figure.legend(handles=handles, loc="outside upper left", ncols=3, frameon=False, **close)


def main() -> None:
    """Write docs/images/demo-light.svg and -dark.svg."""
    evaluation = json.loads(EVALUATION.read_text())
    told = "AUC of the demo's new users and items before and after adaptation, and of its rivals"
    svg = render_svg(Chart("demo", "", "", [Panel("", told, partial(draw, evaluation), 2.9)]), 0)
    head = '<svg xmlns="http://www.w3.org/2000/svg" font-family="system-ui, sans-serif"'
    for index, theme in enumerate(("light", "dark")):
        colored = re.sub(r"var\(--([\w-]+)\)", lambda name: PALETTE[name[1]][index], svg)  # noqa: B023
        (IMAGES / f"demo-{theme}.svg").write_text(colored.replace("<svg", head, 1) + "\n")


if __name__ == "__main__":
    main()
