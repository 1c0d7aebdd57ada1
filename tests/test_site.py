"""The site of the docs: it builds without a warning, and nothing in it needs a network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gmeta
import gmeta_models
import metaio
from tests.support.waiting import PATIENCE_S

pytest.importorskip("mkdocs", reason="the extra gmeta[docs] is not installed")
ROOT = Path(__file__).resolve().parents[1]


def build(config: Path, site: Path) -> str:
    """What a build prints that fails; nothing else."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", site],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    return done.stderr if done.returncode else ""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, of which every link, anchor and name of the reference leads somewhere."""
    folder = tmp_path_factory.mktemp("site")
    assert build(ROOT / "mkdocs.yml", folder) == ""
    return folder


def test_pages_load_nothing_from_another_host(site: Path) -> None:
    host = r"[^>]*?=\"?((?:https?:)?//[^\s\">]+)"
    pages = "".join(page.read_text() for page in site.rglob("*.html"))
    assert pages.count("</html>") > 30
    assert re.findall(f"<(?:script|img|iframe|source|link){host}", pages) == []
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//", styles) == []


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    told = "".join(page.read_text() for page in (site / "reference").rglob("*.html"))
    public = {
        f"{one.__name__}.{name}" for one in (gmeta, metaio, gmeta_models) for name in one.__all__
    }
    assert {name for name in public if f'id="{name}"' not in told} == {"gmeta.__version__"}


PAGE = """# Few

[code](../code.py#L1)

- An item with a block:

  ```text
  in it
  ```

  and a paragraph.
- The next item.
"""


@pytest.mark.parametrize(
    ("repo_url", "told"),
    [
        ("", "<p>code</p>"),
        ("repo_url: https://host/of/it", 'href="https://host/of/it/blob/main/code.py#L1"'),
    ],
)
def test_a_page_looks_as_in_the_repository(tmp_path: Path, repo_url: str, told: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "README.md").write_text(PAGE)
    config = tmp_path / "mkdocs.yml"
    config.write_text(f"site_name: few\nhooks: [{ROOT / 'docs/site/hooks.py'}]\n{repo_url}\n")
    assert build(config, tmp_path / "site") == ""
    shown = (tmp_path / "site" / "index.html").read_text()
    assert told in shown
    items = re.findall(r"<li>(.*?)</li>", shown.split('role="main"')[1], flags=re.DOTALL)
    assert ["in it" in item for item in items] == [True, False]
    assert "The next item." in items[1]
