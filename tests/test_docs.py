"""What the pages tell to type, to set and to watch is there: options, keys, defaults, metrics."""

import dataclasses
import json
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gmeta.cli.main import COMMANDS, RENAMED, load_command
from gmeta.config.train_config import describe_config
from gmeta.pipeline.follow_config import FollowConfig
from metaio.prepare.schema.rules import StreamRule

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def code_of(page: Path) -> str:
    """What stands in blocks, but of Python, and between backticks; a command is on one line."""
    text = re.sub(r"```python\n.*?```", "", page.read_text(), flags=re.DOTALL)
    blocks = re.findall(r"```\w*\n(.*?)```", text, flags=re.DOTALL)
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    code = [*blocks, *(span.replace("\n", " ") for span in spans)]
    return "\n".join(code).replace("\\\n", " ")


@cache
def options_of(name: str) -> frozenset[str]:
    """The options of a command, and of those below it."""
    command = load_command(name)
    below = getattr(command, "commands", {}).values()
    params = [param for one in (command, *below) for param in one.params]
    found = {option for param in params for option in (*param.opts, *param.secondary_opts)}
    return frozenset(found | {"--help"})


@each_page
def test_options_of_commands_that_a_page_names_exist(page: Path) -> None:
    names = "|".join([*COMMANDS, *RENAMED])
    commands = re.findall(rf"\bgmeta ({names})\b(?!-)([^\n|#;>]*)", code_of(page))
    unknown = {
        f"gmeta {name} {option}"
        for name, rest in commands
        for option in re.findall(r"(?<!\S)(--?[a-z][\w-]*)", rest)
        if option not in options_of(name)
    }
    assert unknown == set()


@each_page
def test_config_keys_that_a_page_names_exist(page: Path) -> None:
    keys = {key for key, _, _ in describe_config()}
    sections = "|".join(sorted({key.partition(".")[0] for key in keys} - {"model", "data"}))
    named = re.findall(rf"(?<![\w./-])((?:{sections})\.[a-z_]+)\b(?![./(])", code_of(page))
    assert set(named) - keys - {"evaluation.json", "neighbours.safetensors"} == set()


def defaults(kind: Any) -> dict[str, Any]:
    """The default of each field of a dataclass, sections as dicts."""
    return dataclasses.asdict(kind())


def block_with(page: str, line: str) -> dict[str, Any]:
    """The TOML block of a page in which a line stands, from that line on."""
    text = (ROOT / "docs" / page).read_text()
    (block,) = re.findall(rf"```toml\n(?:# \S+\n)?({re.escape(line)}.*?)```", text, flags=re.DOTALL)
    return tomllib.loads(block)


def test_defaults_of_a_stream_are_those_of_the_page() -> None:
    assert block_with("format.md", "[stream]")["stream"] == defaults(StreamRule)


def test_defaults_of_the_loop_are_those_of_the_page() -> None:
    page, code = block_with("continuous.md", "[follow]"), defaults(FollowConfig)
    for section, values in code.items():
        assert page[section].keys() == values.keys()
        chosen = [name for name, value in values.items() if value == "" and page[section][name]]
        for name in chosen:  # paths, which have no default
            del page[section][name], values[name]
        assert page[section] == json.loads(json.dumps(values))  # its tuples are lists


def test_limits_of_a_server_are_those_of_the_page() -> None:
    table = re.findall(
        r"^\| `(--[\w-]+)` \| ([\d,]+)( MiB)?", (ROOT / "docs/serving.md").read_text(), re.MULTILINE
    )
    told = {(name, int(n.replace(",", "")) << (20 if unit else 0)) for name, n, unit in table}
    options = {option: one.default for one in load_command("serve").params for option in one.opts}
    assert len(told) >= 6
    assert told == {(name, options[name]) for name, _ in told}


@cache
def source() -> str:
    """The code of the packages, in one text."""
    folders = ("gmeta", "metaio", "models", "protos")
    return "".join(path.read_text() for one in folders for path in (ROOT / one).rglob("*.py"))


@each_page
def test_metrics_and_variables_that_a_page_names_exist(page: Path) -> None:
    named = set(re.findall(r"\b((?:antdt|gmeta_follow|gmeta_serve)_[a-z_]+)\b", code_of(page)))
    variables = set(re.findall(r"\bGMETA_[A-Z_]*[A-Z]\b", code_of(page)))
    # Their prefixes, and Prometheus' endings, are put before and behind in one place.
    metrics = {re.sub("^(antdt|gmeta_follow|gmeta_serve)_|_total$", "", one): one for one in named}
    assert {name for name in variables if name not in source()} == set()
    assert {metrics[core] for core in metrics if core not in source()} == set()


def test_the_readme_says_in_words_what_its_picture_shows() -> None:
    (told,) = re.findall(r'<img [^>]*alt="([^"]*)"', (ROOT / "README.md").read_text())
    figures = re.compile(r"\b0\.\d{3}\b")
    for theme in ("light", "dark"):
        drawn = (ROOT / f"docs/images/demo-{theme}.svg").read_text()
        assert sorted(figures.findall(told)) == sorted(figures.findall(drawn))
