"""docs/benchmarks.md, made of the JSON lines with which benchmarks end."""

import json
from pathlib import Path

import pytest

from tests.support.benchmarks_page import RECORDED, TEMPLATE, benchmarks_page

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_is_what_the_recorded_figures_make_of_its_template() -> None:
    page = benchmarks_page(TEMPLATE.read_text(), RECORDED.read_text().splitlines())
    assert (DOCS / "benchmarks.md").read_text() == page, "run: make benchmarks-page"


def line(command: str, date: str, **figures: object) -> str:
    about = {"command": command, "processor": "Xeon", "date": date}
    return json.dumps({"benchmark": "serve", **figures, "environment": about})


def test_a_further_run_widens_what_the_page_says() -> None:
    lines = [
        line("python serve.py", "2026-11-01", per_s={"one": 1_234.5}, ratio=1.5),
        line("python serve.py", "2026-11-02", per_s={"one": [900, 1_000]}, ratio=1.5),
    ]
    page = benchmarks_page("{serve}: {serve:per_s.one} a second, {serve:ratio}x", lines)
    circumstances = "`python serve.py` (Xeon, 2026-11-01; Xeon, 2026-11-02)"
    assert page == f"{circumstances}: 900 to 1,234 a second, 1.5x"


def test_a_figure_that_no_line_has_is_named() -> None:
    with pytest.raises(KeyError, match=r"no line of figures.jsonl has ratio_of_nothing"):
        benchmarks_page(
            "{serve:ratio_of_nothing}", [line("python serve.py", "2026-11-01", ratio=1)]
        )
