"""The page of a dataset counts what the table of `gmeta inspect` counts."""

from pathlib import Path

from gmeta.evaluation.report.dataset_page import render_dataset
from metaio import Provenance, open_dataset, write_dataset
from metaio.format.inspection import summarise
from tests.metaio.conftest import FEATURES, make_rows
from tests.support.commands import succeed
from tests.support.page_outline import PageOutline, Picture, outline_page


def test_the_page_has_each_split_and_table(tmp_path: Path) -> None:
    with write_dataset(str(tmp_path / "data"), FEATURES, Provenance("user", "click")) as writer:
        for name, seed in (("train", 0), ("valid", 1)):
            writer.split(name).write(make_rows(40, seed))
        writer.report = {"dropped": {"short_tasks": 1234, "long_rows": 0}}
    page_path = tmp_path / "data.html"
    succeed("inspect", tmp_path / "data", "--picture", page_path)
    page = page_path.read_text()
    summaries = summarise(open_dataset(str(tmp_path / "data")))
    for one in summaries:
        assert f"episodes of {one.name}" in page
        assert f"{one.num_rows:,} rows" in page
    assert page.count("<svg role") == 4  # sizes of two splits, ids, unknown ones
    assert "40 episodes to train on" in page
    assert '<dt>short tasks</dt><dd class="">1,234</dd>' in page
    assert "long rows" not in page
    tables = ("item", "tag", "age")
    assert outline_page(page) == PageOutline(
        verdicts=[""],
        tiles=["episodes of train", "episodes of valid", "short tasks"],
        headings=["Rows of an episode", "Ids"],
        legends=[],
        pictures=[
            # Thirteen sizes, of support and query rows and of support alone.
            *(Picture(name, ("rows", "episodes"), 2 * 13) for name in ("train", "valid")),
            Picture("Ids in use", tables, 3),
            Picture("Unknown in valid", tables, 3),
        ],
        folds=[],
    )
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_a_dataset_of_an_empty_split_has_a_page(tmp_path: Path) -> None:
    with write_dataset(str(tmp_path / "data"), FEATURES, Provenance("user", "click")) as writer:
        writer.split("train").write(make_rows(0, 0))
    dataset = open_dataset(str(tmp_path / "data"))
    outline = outline_page(render_dataset(dataset, summarise(dataset)))
    assert outline.tiles == ["episodes of train"]
    assert [picture.caption for picture in outline.pictures] == ["Ids in use"]
