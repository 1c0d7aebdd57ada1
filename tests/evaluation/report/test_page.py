"""The page says what the evaluation holds, asks no network, and shows markup as text."""

import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gmeta.config.losses import Loss
from gmeta.evaluation.report.charts import make_charts
from gmeta.evaluation.report.evaluated_runs import EvaluatedRun
from gmeta.evaluation.report.evaluation_schema import Evaluation
from gmeta.evaluation.report.headline import format_number, format_signed, make_headline
from gmeta.evaluation.report.html_page import render_page
from gmeta.evaluation.report.learning_curves import make_learning_curves
from gmeta.evaluation.report.summarise import summarise_evaluation
from tests.evaluation.report.sample import baseline_of, run_of, yardstick_of
from tests.support.browser import needs_browser, open_browser
from tests.support.page_outline import PageOutline, Picture, outline_page

VOID = {"meta", "link", "br", "input"}


class Outline(HTMLParser):
    """Collects text, attributes and unbalanced tags."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.links: list[str] = []
        self.broken: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.links += [value or "" for name, value in attrs if name in {"href", "src", "action"}]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in {"href", "src"}]

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.broken.append(tag)

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)


def html_of(*runs: EvaluatedRun) -> str:
    return _drawn(summarise_evaluation(runs), runs[0])


def _drawn(evaluation: Evaluation, first: EvaluatedRun) -> str:
    curves = make_learning_curves(first.history, first.scoring)
    return render_page(evaluation, make_charts(evaluation, curves))


@cache
def compared(loss: Loss) -> tuple[Evaluation, str]:
    """A run beside its baseline, and their page."""
    run = run_of(loss)
    evaluation = summarise_evaluation([run, baseline_of(loss)])
    return evaluation, _drawn(evaluation, run)


@cache
def alone() -> str:
    """The page of a run of ratings without a baseline."""
    return html_of(run_of("mse"))


def undrawn(run: EvaluatedRun) -> str:
    """The page of a run without its pictures."""
    return render_page(summarise_evaluation([run]), [])


def text_of(html: str) -> str:
    outline = Outline()
    outline.feed(html)
    return re.sub(r"\s+", " ", " ".join(outline.text))


@pytest.mark.parametrize("loss", ["bce", "mse"])
def test_the_page_is_balanced_and_asks_nothing_of_the_network(loss: Loss) -> None:
    _, html = compared(loss)
    outline = Outline()
    outline.feed(html)
    assert (outline.open, outline.broken) == ([], [])
    assert [link for link in outline.links if not link.startswith(("#", "data:", "charts/"))] == []
    assert "<script" not in html
    assert "@import" not in html
    assert "default-src 'none'" in html


def test_the_header_says_what_was_evaluated() -> None:
    text = text_of(compared("mse")[1])
    names = ("melu-maml", "movielens-1m", "maml")
    for fact in (*names, "1,000", "2026-11-21 04:05 UTC", "1,050 samples/s", "2.0%"):
        assert fact in text


def test_the_headline_holds_both_stages_the_change_and_the_better_baseline() -> None:
    evaluation, html = compared("mse")
    text = text_of(html)
    assert "MAE: does adapting help, and does it beat plain-dlrm?" in text
    for group in evaluation.groups:
        line = make_headline(evaluation, group, "mae")
        assert line.rivals[0].stage_label == "fine-tuned"
        assert format_number(line.before.value) in text
        assert f"{format_number(line.after.value)} [" in text
        assert f"{format_signed(line.change.value)} better" in text
        assert f"{format_signed(line.rivals[0].difference.value)} better" in text


def test_every_metric_of_every_stage_is_in_the_tables() -> None:
    evaluation, html = compared("mse")
    text = text_of(html)
    for group in evaluation.groups:
        for result in group.results:
            for estimate in result.metrics.values():
                assert format_number(estimate.value) in text


def test_the_direction_and_unit_of_the_headline_are_stated() -> None:
    assert "In rating points. Lower is better." in text_of(alone())
    assert "Higher is better." in text_of(compared("bce")[1])


def test_without_a_baseline_the_page_compares_nothing() -> None:
    text = text_of(alone())
    assert "MAE: does adapting help?" in text
    assert "no baseline" in text
    assert "Settings that differ" not in text


def test_settings_that_differ_are_listed_and_equal_ones_are_not() -> None:
    _, html = compared("mse")
    table = html[html.index("Settings that differ") : html.index("How to read this")]
    assert "algorithm.name" in table
    assert "outer.dense_lr" not in table


def test_config_and_environment_are_folded_in_the_form_of_overrides() -> None:
    html = alone()
    folded = html[html.index("Config and environment of melu-maml") :]
    assert "outer.dense_lr = 0.001\n" in folded
    assert "packages.torch = 2.13.0\n" in folded


def test_missing_pictures_are_explained() -> None:
    text = text_of(html_of(replace(run_of("mse", support_rows=5), history=[])))
    assert "No learning curve: the run logged no steps." in text
    found = "No picture against support size: the tasks of a group have equally large support sets."
    assert found in text


def test_missing_facts_are_said_to_be_missing() -> None:
    text = text_of(undrawn(replace(run_of("mse"), dataset="", evaluated_at="")))
    assert text.count("not recorded") == 2


def test_reasons_stand_where_a_number_is_missing() -> None:
    text = text_of(undrawn(run_of("mse", num_tasks=5)))
    assert "rests on only 5 tasks: too few to resample" in text


def test_names_with_markup_are_shown_as_text() -> None:
    name = "<img src=x onerror=alert(1)>"
    html = html_of(replace(run_of("mse"), name=name))
    assert "<img" not in html
    assert name in text_of(html)


def test_the_page_shows_the_yardstick_how_it_was_chosen_and_what_must_not_be_missed() -> None:
    run = run_of("mse", gain=-0.5)
    evaluation = summarise_evaluation(
        [run], [yardstick_of("mse", gain=0.9)], ["boosted trees: none here"]
    )
    html = _drawn(evaluation, run)
    outline = Outline()
    outline.feed(html)
    assert (outline.open, outline.broken) == ([], [])
    text = text_of(html)
    line = make_headline(evaluation, evaluation.groups[0], "mae")
    assert "does it beat bias model?" in text
    assert f"{format_signed(line.rivals[0].difference.value)} worse" in text
    assert "bias model bias, as it was chosen" in text
    assert "boosted trees none here" in text
    for caution in evaluation.cautions:
        told, _, command = caution.text.partition(".\nTo try next: ")
        assert told in text
        assert f"Next: {command}" in text or not command
    assert html.index("Next:") < html.index("<svg")
    assert len(evaluation.cautions) == 4


@needs_browser
def test_a_phone_shows_a_long_name_in_its_width(tmp_path: Path) -> None:
    run, path = run_of("bce", "a_run_of_one_long_word" * 4), tmp_path / "report.html"
    path.write_text(_drawn(summarise_evaluation([run]), run))
    with open_browser() as browser:
        browser.driver.set_window_size(400, 800)
        browser.open(path.as_uri())
        script = "const e = document.documentElement; return [e.scrollWidth, e.clientWidth]"
        needed, shown = browser.driver.execute_script(script)
    assert needed <= shown


@needs_browser
def test_a_laptop_shows_the_verdict_on_each_baseline(tmp_path: Path) -> None:
    run, path = run_of("bce"), tmp_path / "report.html"
    rivals = [yardstick_of("bce"), yardstick_of("bce", "boosted trees", "trees")]
    path.write_text(_drawn(summarise_evaluation([run, baseline_of("bce")], rivals), run))
    with open_browser() as browser:
        browser.open(path.as_uri())
        script = (
            "const e = document.querySelector('.scroll'); return [e.scrollWidth, e.clientWidth]"
        )
        needed, shown = browser.driver.execute_script(script)
    assert needed <= shown


def test_the_page_has_its_tiles_charts_and_folds() -> None:
    """Pictures are compared by structure: captions, words of the axes, series, marks."""
    four = ["melu-maml, before adaptation", "melu-maml, adapted"]
    four += ["plain-dlrm, as trained", "plain-dlrm, fine-tuned"]
    groups = ("user-cold", "item-cold")
    # Two groups, and two stages of two runs: a point with its interval for each.
    by_group = [
        Picture(name, (words, *groups), 2 * 8)
        for name, words in (
            ("AUC", "AUC (higher is better \N{RIGHTWARDS ARROW})"),
            ("GAUC", "GAUC (higher is better \N{RIGHTWARDS ARROW})"),
            ("Logloss", "Logloss, nats (\N{LEFTWARDS ARROW} lower is better)"),
        )
    ]
    gains = ("logloss before minus adapted; dashed: median", "tasks")
    better, support = "(higher is better)", "support rows; below, the number of tasks"
    calibration = ("mean predicted probability", "share of positives")
    assert outline_page(compared("bce")[1]) == PageOutline(
        verdicts=["good", "good"],
        tiles=["AUC, user-cold", "AUC, item-cold", "of tasks worse off, 2 groups together"],
        headings=[
            "Before and after adaptation, by group",
            "AUC: does adapting help, and does it beat plain-dlrm?",
            "What adapting gives each task",
            "How much each support row is worth",
            "AUC against support size",
            "Calibration",
            "Learning curve",
            "The details",
            "How to read this",
        ],
        legends=[four, four, [four[0], four[1], four[3]]],
        pictures=[
            *by_group,
            *(Picture(f"{group}: # of tasks worse off", gains, 30) for group in groups),
            # Six bins of sizes: a point, its interval, and a line each.
            *(Picture(group, (support, "AUC, change"), 3 * 6) for group in groups),
            # Of four series, with a line through each.
            *(Picture(group, (support, "AUC", better), 2 * 24 + 4) for group in groups),
            *(Picture(group, calibration, 2 * 30 + 3) for group in groups),
            Picture("Training loss", ("outer step", "loss (cross-entropy, nats)"), 2),
            Picture("Validation AUC", ("outer step", "AUC"), 10 + 1),
        ],
        folds=[
            "All metrics",
            "The run",
            "Settings that differ between the runs",
            "What the metrics are",
            "What the intervals cover, and what they do not",
            "Config and environment of melu-maml",
            "Config and environment of plain-dlrm",
        ],
    )


def test_a_page_of_200_groups_stays_below_a_megabyte_and_shows_the_worst() -> None:
    run = run_of("bce")
    evaluation = summarise_evaluation([run, baseline_of("bce")])
    (bad, *_) = summarise_evaluation([run_of("bce", gain=-0.8), baseline_of("bce")]).groups
    good = evaluation.groups[0]
    many = [replace(good, name=f"group-{number}") for number in range(199)]
    many.insert(150, replace(bad, name="the-worst"))
    evaluation = replace(evaluation, groups=tuple(many))
    page = _drawn(evaluation, run)
    assert len(page.encode()) < 1_000_000
    outline = outline_page(page)
    assert len(outline.verdicts) == 1 + 6
    assert outline.verdicts[0] == outline.verdicts[-1] == "bad"
    text = text_of(page)
    assert "Of 200 groups adapting improves 199 with no rival ahead; 1 are worse" in text
    assert "of tasks worse off, 200 groups together" in text
    assert "Pictures and all metrics are of 6 of 200 groups" in text
    assert [one.caption for one in outline.pictures if "worst" in one.caption] == [
        "the-worst: # of tasks worse off", *3 * ["the-worst"]
    ]  # fmt: skip


@needs_browser
def test_the_keyboard_reaches_what_folds_and_what_is_hidden(tmp_path: Path) -> None:
    from selenium.webdriver import Keys

    path = tmp_path / "report.html"
    path.write_text(compared("bce")[1])
    with open_browser() as browser:
        browser.open(path.as_uri())
        reached = []
        for _ in range(60):
            active = browser.driver.switch_to.active_element
            active.send_keys(Keys.TAB)
            active = browser.driver.switch_to.active_element
            reached.append(active.tag_name)
            if active.tag_name == "summary":
                break
            if active.get_attribute("id") == "intervals":
                active.send_keys(Keys.SPACE)
        assert {"input", "a", "summary"} <= set(reached)
        assert browser.find(".interval").is_displayed()
        active.send_keys(Keys.ENTER)
        assert browser.find("details").get_property("open")
