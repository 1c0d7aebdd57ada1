"""The rules of the house: what may import what, how long files grow, what the docs promise."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.text import Text

from gmeta.cli import COMMANDS, app
from gmeta.config import describe_config
from metaio.schema import parse_schema
from tests.antdt.faults.mutants import MUTANTS, mutated

ROOT = Path(__file__).resolve().parents[1]
MARKDOWN = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
COMMAND_MODULES = sorted({module for module, _ in COMMANDS.values()})


def test_training_stays_on_two_screens() -> None:
    assert len((ROOT / "gmeta" / "train.py").read_text().splitlines()) < 300


def test_imports_point_one_way() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([linter], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_every_mutant_of_the_service_has_its_place_in_the_code() -> None:
    assert all(mutant.new in mutated(mutant) for mutant in MUTANTS)


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("gmeta.antdt", ("torch", "metaio", "models")),
        ("gmeta.cli", ("torch", "metaio", "matplotlib", "duckdb")),
        # All of them stand behind `gmeta --help`, and tell of a wrong option before they load more.
        *((module, ("torch", "metaio", "matplotlib", "duckdb")) for module in COMMAND_MODULES),
        ("gmeta.shard_service", ("torch", "metaio")),
        ("gmeta.build", ("torchrec", "matplotlib", "duckdb")),
        ("metaio", ("gmeta", "models", "torch", "duckdb", "matplotlib")),
        ("metaio.prepare", ("gmeta", "models", "torch", "matplotlib")),
        ("metaio.inspection", ("gmeta", "models", "torch", "matplotlib")),
        ("models", ("gmeta", "metaio", "torch", "torchrec")),
    ],
)
def test_a_fresh_import_loads_no_more_than_it_should(
    module: str, unwanted: tuple[str, ...]
) -> None:
    code = f"import sys, {module}; print(*(m for m in {unwanted!r} if m in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []


def test_the_readme_lists_every_config_key_with_its_default() -> None:
    rows = [f"| `{key}` | `{default}` | {text} |" for key, default, text in describe_config()]
    readme = (ROOT / "README.md").read_text()
    missing = [row for row in rows if row not in readme]
    assert missing == [], "run: python -m tests.test_house"


def anchors(page: Path) -> set[str]:
    """The names that a page's headings can be linked by."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    kept = [re.sub(r"[^\w\- ]", "", heading.lower()).strip() for heading in headings]
    return {heading.replace(" ", "-") for heading in kept}


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_in_the_docs_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)
    broken = []
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        target = page.parent / link if link else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{link}#{anchor}")
    assert broken == []


def test_the_schema_in_the_readme_is_one_that_prepare_takes() -> None:
    readme = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"```toml\n(\[task\].*?)```", readme, flags=re.DOTALL)
    assert parse_schema(tomllib.loads(block)).columns == [
        "user_id",
        "clicked",
        "timestamp",
        "item_id",
        "city",
        "tags",
        "price",
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_brackets_and_takes_them_for_no_markup(name: str) -> None:
    group: Any = typer.main.get_command(app)
    found = group.get_command(None, name)
    for command in getattr(found, "commands", {name: found}).values():
        for text in (command.help, *(getattr(option, "help", "") for option in command.params)):
            assert Text.from_markup(text or "").plain == (text or "").replace("\\[", "[")


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_the_docs_exist(page: Path) -> None:
    blocks = re.findall(r"```(?:bash|console|sh)\n(.*?)```", page.read_text(), flags=re.DOTALL)
    commands = set(re.findall(r"^(?:\$ )?gmeta ([a-z-]+)", "\n".join(blocks), flags=re.MULTILINE))
    assert commands - set(COMMANDS) == set()


if __name__ == "__main__":
    print("\n".join(f"| `{key}` | `{value}` | {text} |" for key, value, text in describe_config()))
