"""Charts are there when there is data, follow the page's theme, and repeat byte for byte."""

import io
import re
import warnings
from dataclasses import replace
from xml.etree import ElementTree

import matplotlib.image
import numpy as np
import pytest

from gmeta.evaluation.report.chart_files import PALETTE, Chart, render_sheet, render_svg
from gmeta.evaluation.report.charts import make_charts, make_series
from gmeta.evaluation.report.evaluated_runs import EvaluatedRun
from gmeta.evaluation.report.learning_curves import make_learning_curves
from gmeta.evaluation.report.summarise import summarise_evaluation
from tests.evaluation.report.sample import baseline_of, run_of, with_column


def charts_for(*runs: EvaluatedRun) -> dict[str, Chart]:
    evaluation = summarise_evaluation(runs)
    curves = make_learning_curves(runs[0].history, runs[0].scoring)
    return {chart.name: chart for chart in make_charts(evaluation, curves)}


def panels_for(*runs: EvaluatedRun) -> list[str]:
    return [
        render_svg(chart, index)
        for chart in charts_for(*runs).values()
        for index in range(len(chart.panels))
    ]


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two #rrggbb colours, as WCAG 2.1 defines it."""

    def luminance(color: str) -> float:
        parts = np.array([int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)])
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_clicks_have_all_four_charts() -> None:
    charts = charts_for(run_of("bce"), baseline_of("bce"))
    assert {name: [panel.title for panel in chart.panels] for name, chart in charts.items()} == {
        "groups": ["AUC", "GAUC", "Logloss"],
        "task_gains": ["user-cold: 18% of tasks worse off", "item-cold: 38% of tasks worse off"],
        "support_gain": ["user-cold", "item-cold"],
        "support_size": ["user-cold", "item-cold"],
        "calibration": ["user-cold", "item-cold"],
        "learning_curve": ["Training loss", "Validation AUC"],
    }


def test_ratings_have_no_calibration_chart() -> None:
    assert list(charts_for(run_of("mse"))) == [
        "groups", "task_gains", "support_gain", "support_size", "learning_curve",
    ]  # fmt: skip


def test_what_there_is_no_data_for_is_not_drawn() -> None:
    assert list(charts_for(replace(run_of("mse", support_rows=5), history=[]))) == [
        "groups", "task_gains",
    ]  # fmt: skip


def test_series_tell_runs_by_colour_and_marker_and_stages_by_name() -> None:
    series = make_series(summarise_evaluation([run_of("mse"), baseline_of("mse")]).runs)
    assert [one.label for one in series] == [
        "melu-maml, before adaptation", "melu-maml, adapted", "plain-dlrm, as trained",
        "plain-dlrm, fine-tuned",
    ]  # fmt: skip
    assert series[0].style["markerfacecolor"] == PALETTE["page"][0]
    assert series[1].style["markerfacecolor"] == series[1].style["color"]
    assert series[1].color_name != series[2].color_name


def test_many_runs_never_share_colour_and_marker() -> None:
    runs = [run_of("mse", name=f"run-{index}", num_tasks=12) for index in range(9)]
    looks = {(one.color_name, one.marker) for one in make_series(summarise_evaluation(runs).runs)}
    assert len(looks) == 9


@pytest.mark.parametrize("theme", [0, 1])
def test_colours_stand_out_from_the_page_in_light_and_dark(theme: int) -> None:
    page = PALETTE["page"][theme]
    assert contrast(PALETTE["ink"][theme], page) >= 7
    assert contrast(PALETTE["muted"][theme], page) >= 4.5
    for name, colors in PALETTE.items():
        if name.startswith("series"):
            assert contrast(colors[theme], page) >= 3, name


@pytest.mark.parametrize("theme", [0, 1])
@pytest.mark.parametrize(
    ("words", "below"),
    [
        # Text of the kit on pages and on tiles; links, verdicts, and a button's text on its colour.
        *((words, "page") for words in ("good", "warn", "bad", "series-0", "series-3")),
        *((words, "panel") for words in ("ink", "muted", "good", "warn", "bad", "series-0")),
        ("page", "series-0"),
    ],
)
def test_words_have_the_contrast_that_wcag_asks_for(words: str, below: str, theme: int) -> None:
    assert contrast(PALETTE[words][theme], PALETTE[below][theme]) >= 4.5


def test_panels_take_every_colour_from_the_page() -> None:
    for svg in panels_for(run_of("bce"), baseline_of("bce")):
        assert not re.findall(r"#[0-9a-f]{6}\b", svg)
        assert "var(--series-0)" in svg or "var(--series-2)" in svg
        assert "DejaVu" not in svg


def test_panels_are_well_formed_and_name_what_they_show() -> None:
    for svg in panels_for(run_of("bce")):
        root = ElementTree.fromstring(svg)
        assert root.get("role") == "img"
        assert root.get("aria-label")


def test_ids_are_unique_over_all_panels_and_references_hold() -> None:
    panels = panels_for(run_of("bce"), baseline_of("bce"))
    ids = [name for svg in panels for name in re.findall(r'\bid="([^"]*)"', svg)]
    assert len(ids) == len(set(ids))
    used = {
        name
        for svg in panels
        for pair in re.findall(r'url\(#([^)]*)\)|href="#([^"]*)"', svg)
        for name in pair
    }
    assert used - {""} <= set(ids)


def test_a_group_name_with_markup_is_only_text() -> None:
    run = run_of("mse", groups=('<b>"cold"&',))
    for svg in panels_for(run):
        ElementTree.fromstring(svg)
        assert "<b>" not in svg


def test_panels_and_sheets_are_the_same_bytes_each_time() -> None:
    first, second = charts_for(run_of("mse")), charts_for(run_of("mse"))
    for name, chart in first.items():
        assert render_svg(chart, 0) == render_svg(second[name], 0)
        assert render_sheet(chart) == render_sheet(second[name])


def test_a_sheet_is_a_white_picture_with_something_on_it() -> None:
    pixels = matplotlib.image.imread(
        io.BytesIO(render_sheet(charts_for(run_of("bce"))["groups"])["png"])
    )
    assert pixels.shape[1] == 2160
    assert pixels[0, 0, :3].tolist() == [1.0, 1.0, 1.0]
    assert (pixels[..., :3].min(axis=2) < 0.9).mean() > 0.01


def test_undefined_metrics_leave_an_empty_panel_not_an_error() -> None:
    run = with_column(run_of("bce"), "label", np.zeros(640, np.float32))
    charts = charts_for(run)
    assert "AUC" in [panel.title for panel in charts["groups"].panels]
    assert render_svg(charts["groups"], 0).startswith("<svg")
    assert render_svg(charts["support_size"], 0).startswith("<svg")


def test_names_with_dollar_signs_are_shown_as_they_are() -> None:
    charts = charts_for(run_of("bce"), replace(baseline_of("bce"), name="runs/p$100_$"))
    assert any("p$100_$" in one.label for chart in charts.values() for one in chart.series)
    for chart in charts.values():
        assert render_sheet(chart)


def test_a_name_that_the_font_lacks_is_no_warning_on_the_terminal() -> None:
    chart = charts_for(run_of("bce", "模型"), baseline_of("bce"))["groups"]
    with warnings.catch_warnings(action="error"):
        render_sheet(chart)
    assert "模型, adapted" in [one.label for one in chart.series]
