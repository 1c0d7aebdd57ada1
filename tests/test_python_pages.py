"""The Python that pages and notebooks show, run from top to bottom as a reader would."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from gmeta.library import verbs
from tests.support.commands import evaluate, gmeta

ROOT = Path(__file__).parents[1]
NOTEBOOK = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())


@pytest.fixture(autouse=True)
def _forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have commands be forked, since interpreters that start take most of a page's time."""

    def run_forked_command(*words: str, show: bool = True, has_json: bool = True) -> Any:
        options = ["--json"] if has_json else []
        done = evaluate(*words[1:], *options) if words[0] == "evaluate" else gmeta(*words, *options)
        assert done.returncode in (0, 3), done.stderr
        return json.loads(done.stdout) if has_json else {}

    monkeypatch.setattr(verbs, "run_command", run_forked_command)
    monkeypatch.chdir(tmp_path)


@pytest.mark.distributed
def test_the_ten_tasks_of_a_data_scientist_are_ten_lines_each(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "ten-tasks.md").read_text()
    assert len(text.split()) <= 900
    blocks = re.findall(r"^## \d+\. .*?```python\n(.*?)```", text, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 10
    found: dict[str, Any] = {}
    for block in blocks:
        assert len([line for line in block.splitlines() if line]) <= 10
        exec(block, found)
    before, after = (found["report"].evaluation["groups"][0]["results"][at] for at in (0, 1))
    assert after["metrics"]["auc"]["value"] > before["metrics"]["auc"]["value"] + 0.1
    assert (tmp_path / "new-users.png").stat().st_size > 10_000
    assert (len(found["losses"]), found["run"].valid["auc"] > 0.7) == (20, True)
    assert found["predicted"].after_N.tolist() == pytest.approx(
        found["alone"].predict(found["new"]).tolist()
    )
    assert all(0 < value < 1 for value in found["served"])
    assert found["served"][0] > found["served"][1]  # who clicked an even item
    assert found["first"] == 1


def show_cells(notebook: dict[str, Any]) -> str:
    """What a notebook shows of all cells that end in a value, run one behind the other."""
    names: dict[str, Any] = {}
    shown = ""
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert (cell["outputs"], cell["execution_count"]) == ([], None), "clear its outputs"
        *lines, last = ast.parse("".join(cell["source"])).body
        ends_in_value = isinstance(last, ast.Expr)
        exec(compile(ast.Module([*lines, *[last][ends_in_value:]], []), "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
            if hasattr(value, "_repr_png_"):
                shown += f"<{value._repr_png_()[:4]}>"
            else:
                shown += value._repr_html_() if hasattr(value, "_repr_html_") else repr(value)
    return shown


@pytest.mark.distributed
def test_the_notebook_runs_and_shows_its_results() -> None:
    shown = show_cells(NOTEBOOK)
    assert "<td>user-cold</td><td>maml</td><td>after</td>" in shown
    assert "<b'\\x89PNG'>" in shown
    assert "after_N=tensor([" in shown
