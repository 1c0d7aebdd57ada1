"""Files appear whole or not at all, and equal runs give equal bytes."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from gmeta.config.losses import Loss
from gmeta.errors import UserError
from gmeta.evaluation.report import html_page as page
from gmeta.evaluation.report import report_files as files
from gmeta.evaluation.report.evaluation_schema import SCHEMA, Evaluation, GroupEvaluation
from tests.evaluation.report.sample import baseline_of, run_of, yardstick_of


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def names_of(kind: Any) -> list[str]:
    return [item.name for item in dataclasses.fields(kind)]


def draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have pictures be empty files: to draw them takes longer than all else of a report."""
    monkeypatch.setattr(
        files, "render_sheet", lambda chart: dict.fromkeys(files.SHEET_FILES, b"{}")
    )
    monkeypatch.setattr(page, "render_svg", lambda chart, index: "<svg></svg>")


def write(folder: Path, loss: Loss) -> files.ReportPaths:
    """The report of a run and its baseline; of ratings without pictures, see test_charts.py."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if loss == "mse":
            draw_nothing(monkeypatch)
        return files.write_report(folder, [run_of(loss), baseline_of(loss)])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[Loss, files.ReportPaths]:
    """The report for two losses."""
    folder = tmp_path_factory.mktemp("reports")
    losses: tuple[Loss, ...] = ("bce", "mse")
    return {loss: write(folder / loss, loss) for loss in losses}


FILES = ["evaluation.json", "predictions.parquet", "report.html"]


def list_pictures(*names: str) -> list[str]:
    """The files of charts, in order."""
    return sorted(f"charts/{name}.{end}" for name in names for end in files.SHEET_FILES)


def test_a_report_is_a_page_json_and_pictures(written: dict[Loss, files.ReportPaths]) -> None:
    paths = written["bce"]
    folder = paths.html.parent
    names = (
        "calibration",
        "groups",
        "learning_curve",
        "support_gain",
        "support_size",
        "task_gains",
    )
    assert sorted(contents(folder)) == [*list_pictures(*names), *FILES]
    drawn = json.loads((folder / "charts" / "groups.json").read_text())
    result = paths.evaluation.groups[0].results[0]
    assert result.metrics["auc"].value in [x for x, _ in drawn["panels"][0]["points"][0]]
    assert paths.html == folder / "report.html"
    assert all(path.exists() for path in (paths.html, paths.evaluation_json, *paths.charts))


def test_predictions_are_those_of_every_run(written: dict[Loss, files.ReportPaths]) -> None:
    table = pq.read_table(written["bce"].html.parent / "predictions.parquet")
    runs = [run_of("bce"), baseline_of("bce")]
    assert table["run"].unique().to_pylist() == [run.name for run in runs]
    for run in runs:
        own = table.filter(pc.equal(table["run"], run.name)).drop_columns("run")
        assert own.equals(run.predictions)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_nothing(monkeypatch)


@pytest.mark.usefixtures("undrawn")
def test_predictions_of_a_yardstick_have_no_stage_before(tmp_path: Path) -> None:
    run, model = run_of("mse"), yardstick_of("mse")
    files.write_report(tmp_path, [run], [model])
    table = pq.read_table(tmp_path / "predictions.parquet")
    own = table.filter(pc.equal(table["run"], "bias model"))
    assert own["before"].null_count == own.num_rows == model.predictions.num_rows
    assert own["after"].equals(model.predictions["prediction"])
    assert table.filter(pc.equal(table["run"], run.name))["before"].null_count == 0


@pytest.mark.parametrize("loss", ["bce", "mse"])
def test_equal_runs_give_equal_bytes(
    tmp_path: Path, written: dict[Loss, files.ReportPaths], loss: Loss
) -> None:
    write(tmp_path, loss)
    assert contents(tmp_path) == contents(written[loss].html.parent)


@pytest.mark.usefixtures("undrawn")
def test_the_json_is_the_documented_schema_without_nan(tmp_path: Path) -> None:
    paths = files.write_report(tmp_path, [run_of("mse", num_tasks=5)])

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    value = json.loads(paths.evaluation_json.read_text(), parse_constant=refuse)
    assert list(value) == names_of(Evaluation)
    assert value["schema"] == SCHEMA == "gmeta.evaluation/1"
    assert list(value["groups"][0]) == names_of(GroupEvaluation)
    estimate = value["groups"][0]["results"][1]["metrics"]["mae"]
    assert list(estimate) == ["value", "low", "high", "num_tasks", "reason"]
    assert estimate["low"] is None
    assert estimate["reason"] == "rests on only 5 tasks: too few to resample"


def test_json_numbers_are_those_of_the_evaluation(written: dict[Loss, files.ReportPaths]) -> None:
    paths = written["mse"]
    value = json.loads(paths.evaluation_json.read_text())
    for group, found in zip(paths.evaluation.groups, value["groups"], strict=True):
        for result, shown in zip(group.results, found["results"], strict=True):
            for name, estimate in result.metrics.items():
                assert shown["metrics"][name]["value"] == pytest.approx(estimate.value, rel=1e-8)


@pytest.mark.usefixtures("undrawn")
def test_pictures_of_an_earlier_evaluation_do_not_stay(
    tmp_path: Path, written: dict[Loss, files.ReportPaths]
) -> None:
    folder = Path(shutil.copytree(written["bce"].html.parent, tmp_path / "report"))
    files.write_report(folder, [run_of("mse", support_rows=5)])
    names = ("groups", "learning_curve", "task_gains")
    assert sorted(contents(folder)) == [*list_pictures(*names), *FILES]


def test_refused_runs_write_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        files.write_report(tmp_path / "run", [run_of("mse"), baseline_of("bce")])
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("undrawn")
def test_what_is_found_is_saved_whatever_a_stream_does_and_told_whatever_a_disk_does(
    tmp_path: Path,
) -> None:
    told: list[Evaluation] = []

    def tell(evaluation: Evaluation) -> None:
        assert (tmp_path / "out" / "evaluation.json").exists()
        told.append(evaluation)
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        files.write_report(tmp_path / "out", [run_of("bce")], show_progress=tell)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        files.write_report(tmp_path / "file" / "x", [run_of("bce")], show_progress=told.append)
    assert len(told) == 2
