"""The rules of the house: what may import what, how long files grow, what the docs promise."""

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TypeGuard

import grimp
import pytest
from rich.text import Text

from gmeta.cli.main import COMMANDS, GROUPS, load_command
from metaio.prepare.schema.schema_file import parse_schema
from tests.antdt.faults.mutants import MUTANTS, mutated
from tests.support.config_page import config_page

ROOT = Path(__file__).resolve().parents[1]
WORK = "gmeta.cli.commands.work"  # what loads torch
SHAPED = ("gmeta", "metaio", "models", "tests", "benchmarks")  # where arrays have suffixes
MARKDOWN = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


PACKAGES = {
    "gmeta": ROOT,
    "metaio": ROOT,
    "gmeta_models": ROOT / "models",
}  # and their source roots


def is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def is_own(module: str | None) -> bool:
    return (module or "").split(".")[0] in PACKAGES


def is_own_import(node: ast.AST) -> TypeGuard[ast.ImportFrom]:
    return isinstance(node, ast.ImportFrom) and is_own(node.module)


# Every module of ours, and its file.
MODULES = {
    ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
    for package, root in PACKAGES.items()
    for path in (root / package).rglob("*.py")
}


def imports_in(node: ast.AST) -> Iterator[ast.ImportFrom]:
    """The imports of our own modules."""
    return filter(is_own_import, ast.walk(node))


@cache
def late_imports(path: Path) -> list[ast.ImportFrom]:
    """Those inside functions."""
    functions = filter(is_function, ast.walk(ast.parse(path.read_text())))
    return [node for function in functions for node in imports_in(function)]


def test_training_stays_on_two_screens() -> None:
    assert len((ROOT / "gmeta" / "training.py").read_text().splitlines()) < 300


def test_the_readme_has_at_most_800_words() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 800


def test_imports_point_one_way() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([linter], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_every_mutant_of_the_service_has_its_place_in_the_code() -> None:
    assert all(mutant.new in mutated(mutant) for mutant in MUTANTS)


def deepest(imports: dict[str, set[str]]) -> tuple[int, str]:
    """The longest chain of imports, in modules, and the module on top of it."""

    @cache
    def depth(module: str) -> int:
        return 1 + max(map(depth, imports[module]), default=0)

    return max((depth(module), module) for module in imports)


def test_no_chain_of_imports_is_long() -> None:
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    depth, module = deepest(imports)
    assert depth <= 13, f"{module} stands {depth} imports deep"
    for name, path in MODULES.items():
        imports[name] -= {node.module or "" for node in late_imports(path)}
    depth, module = deepest(imports)
    assert depth <= 11, f"{module} loads {depth} imports deep"


def test_no_modules_import_each_other_not_even_for_annotations() -> None:
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    TopologicalSorter(imports).prepare()  # raises CycleError


def imported_names(path: Path) -> dict[str, str]:
    """Each name that a file imports from one of our modules, and from which."""
    froms = imports_in(ast.parse(path.read_text()))
    return {alias.name: node.module or "" for node in froms for alias in node.names}


def test_a_name_is_imported_from_the_module_that_defines_it() -> None:
    imports = {name: imported_names(path) for name, path in MODULES.items()}
    passed_on = [
        f"{module} has {name} from {source}, which has it from {imports[source][name]}"
        for module, names in imports.items()
        for name, source in names.items()
        if source != module and name in imports.get(source, {})
    ]
    assert passed_on == []


def test_own_modules_are_imported_late_only_to_start_without_torch() -> None:
    late = {str(path.relative_to(ROOT)) for path in MODULES.values() if late_imports(path)}
    own = "adapt config delivery evaluate export follow inspect plan runs score serve train tune"
    library = {"gmeta/library/results.py", "gmeta/library/verbs.py"}
    assert late == {*library, *(f"gmeta/cli/commands/{name}.py" for name in own.split())}


def test_a_command_loads_torch_with_nobody_looking_for_garbage() -> None:
    found = []
    for path in ROOT.glob("gmeta/cli/commands/*.py"):
        tree = ast.parse(path.read_text())
        loading = [one for one in imports_in(tree) if (one.module or "").startswith(WORK)]
        blocks = [one for one in ast.walk(tree) if isinstance(one, ast.With)]
        kept = [
            one
            for block in blocks
            if ast.unparse(block.items[0]).endswith("faster_import()")
            for one in block.body
        ]
        found += [f"{path.name}: {ast.unparse(one)}" for one in loading if one not in kept]
    assert found == [], "put it into a block of rank_launch.faster_import"


def test_what_may_raise_anything_is_met_in_one_place() -> None:
    broad = (None, "Exception", "BaseException")
    handlers = [
        (name, getattr(node.type, "id", node.type and ""))
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler)
    ]
    found = [name for name, caught in handlers if caught in broad]
    assert found == [], "use gmeta_keys.translate_errors.translate_errors"


NO_DATA = ("torch", "metaio", "matplotlib", "duckdb")
# Each with what it may not load. Those of a list are imported in this order by one interpreter,
# which asks behind each: whatever the ones before it have loaded counts against it, too.
FRESH_IMPORTS: dict[str, list[tuple[str, tuple[str, ...]]]] = {
    "metaio": [
        ("metaio", ("gmeta", "gmeta_models", "torch", "duckdb", "matplotlib")),
        ("metaio.prepare.engines.local", ("gmeta", "gmeta_models", "torch", "matplotlib")),
        ("metaio.format.inspection", ("gmeta", "gmeta_models", "torch", "matplotlib")),
    ],
    "gmeta": [
        ("gmeta.antdt.service.shard_server", ("numpy", "torch", "metaio", "gmeta_models")),
        ("gmeta.antdt.client.client", ("numpy", "torch", "metaio", "gmeta_models")),
        ("gmeta.feeds.service", ("torch", "metaio")),
        ("gmeta.cli.main", NO_DATA),
        ("gmeta.cli.commands.train", NO_DATA),
        ("gmeta.cli.commands.plan", NO_DATA),
        ("gmeta.cli.commands.adapt", NO_DATA),
        ("gmeta.cli.commands.evaluate", NO_DATA),
        ("gmeta.cli.commands.export", NO_DATA),
        ("gmeta.cli.commands.serve", NO_DATA),
        ("gmeta.cli.commands.shard_service", (*NO_DATA, "jinja2")),
        ("gmeta.cli.commands.shards", (*NO_DATA, "jinja2")),
        ("gmeta.cli.commands.sim_replay", NO_DATA),
        ("gmeta.cli.commands.tune", ("torch", "matplotlib", "duckdb", "optuna")),
        # They tell of a wrong option before they load more.
        ("gmeta.cli.commands.prepare", ("torch", "matplotlib")),
        ("gmeta.cli.commands.inspect", ("torch", "matplotlib")),
    ],
    "sim run": [("gmeta.cli.commands.sim_run", ("torch", "metaio", "duckdb"))],  # which draws
    "gmeta_models": [
        ("gmeta_models", ("gmeta", "metaio", "torch", "torchrec")),
        ("gmeta.runs.build", ("torchrec", "matplotlib", "duckdb")),
        (
            "gmeta.cli.commands.work.preflight",
            ("torchrec", "torch.distributed.checkpoint", "matplotlib", "duckdb"),
        ),
        ("gmeta.cli.commands.work.row_predictions", ("torchrec", "matplotlib")),
    ],
}
IMPORT_AND_ASK = """
import gc, importlib, sys
gc.disable()
for name, unwanted in eval(sys.argv[1]):
    importlib.import_module(name)
    print(name, *(one for one in unwanted if one in sys.modules))
names = list(sys.modules)
if "torch" in names and names.index("numpy") > names.index("torch.version"):
    print("torch imports numpy: a Ctrl-C meanwhile is lost, and numpy half there")
"""


@pytest.mark.parametrize("asked", FRESH_IMPORTS.values(), ids=FRESH_IMPORTS)
def test_a_fresh_import_loads_no_more_than_due(asked: list[tuple[str, tuple[str, ...]]]) -> None:
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_AND_ASK, repr(asked)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines() == [name for name, _ in asked]


def test_the_list_of_commands_loads_none_of_them() -> None:
    code = (
        "import sys, gmeta.cli.main; gmeta.cli.main.app(['--help'], standalone_mode=False); "
        "loaded = [m for m in sys.modules if m.startswith('gmeta.cli.commands.')]; "
        "sys.exit(set(loaded) != "
        "{'gmeta.cli.commands.verbosity_options', 'gmeta.cli.commands.error_messages'})"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


COMMANDS_WITHOUT_TORCH = """
import os, sys
sys.modules["torch"] = None
import gmeta.cli.main, gmeta.cli.commands.inspect, gmeta.cli.commands.prepare
for line in sys.stdin.read().splitlines():
    if not (child := os.fork()):
        sys.argv = ["gmeta", *line.split()]
        gmeta.cli.main.main()
    if status := os.waitpid(child, 0)[1]:
        sys.exit(f"{line} ended with status {status}")
"""


def test_a_dataset_is_prepared_and_inspected_without_torch(tmp_path: Path) -> None:
    lines = (
        "prepare --recipe synthetic --tasks 20 --items 20 data",
        "inspect data",
        "inspect data --verify",
    )
    result = subprocess.run(
        [sys.executable, "-c", COMMANDS_WITHOUT_TORCH],
        input="\n".join(lines), cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "prepared: data" in result.stderr
    assert "data is intact" in result.stdout


def test_the_docs_list_every_config_key_as_the_code_has_it() -> None:
    assert (ROOT / "docs" / "config.md").read_text() == config_page(), "run: make config-page"


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


def test_files_that_the_docs_name_exist() -> None:
    folders = "benchmarks|deploy|docs|examples|gmeta|metaio|models|protos|tests"
    path = re.compile(rf"\b(?:{folders})/[\w./-]+\.(?:conf|json|md|proto|py|toml|txt|ya?ml)\b")
    pages = [page for page in MARKDOWN if page.name != "extending.md"]  # it names files to write
    missing = {
        f"{page.name}: {name}"
        for page in pages
        for name in path.findall(page.read_text())
        if not (ROOT / name).exists()
    }
    assert missing == set()


# Columns of files and parameters of checkpoints, which were named before the legend was.
NAMES_IN_FILES = "centres_CZ dense_factors_KJ item_NI row_id_NR side_NS tables_BC weight_NW"


def identifiers_in(tree: ast.AST) -> set[str]:
    """The names of variables, attributes, arguments and functions."""
    kinds = ("id", "attr", "arg", "name")
    found = {getattr(node, kind, None) for node in ast.walk(tree) for kind in kinds}
    return {name for name in found if isinstance(name, str)}


def test_a_shape_letter_has_the_one_meaning_that_the_legend_gives_it() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## Shape letters")[1].split("\n## ")[0]
    legend = dict(re.findall(r"`([A-Z])` ([^,.`]+)[,.]", " ".join(text.split())))
    wrong, used = [], set[str]()
    for path in sorted(p for top in SHAPED for p in (ROOT / top).rglob("*.py")):
        tree = ast.parse(path.read_text())
        doc = ast.get_docstring(tree) or ""
        if not (line := re.search(r"^Shape suffix(?:es)?: ([^.]*)(?:\.$|\Z)", doc, re.M)):
            wrong += [f"{path}: not a line of letters"] if "Shape suffix" in doc else []
            continue
        listed = dict(entry.split(" ", 1) for entry in " ".join(line[1].split()).split(", "))
        wrong += [f"{path}: {each}" for each in listed.items() if each not in legend.items()]
        used |= set(listed)
        for name in identifiers_in(tree) - set(NAMES_IN_FILES.split()):
            suffix = re.fullmatch(r"_?[a-z]\w*_([A-Z\d]*[A-Z][A-Z\d]*)", name)
            if suffix and not set(re.sub(r"\d", "", suffix[1])) <= set(listed):
                wrong.append(f"{path}: {name}")
    assert wrong == []
    assert used == set(legend)


def names_in(node: ast.AST, outer: str = "") -> Iterator[str]:
    """Functions, classes and methods, by their qualified names."""
    for child in ast.iter_child_nodes(node):
        if is_function(child) or isinstance(child, ast.ClassDef):
            name = outer + child.name  # type: ignore[attr-defined]
            yield from (name, *names_in(child, f"{name}."))


def test_the_way_of_a_row_leads_over_functions_that_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## A support row's way")[1]
    tables = text.split("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+\.py)`, `([\w.]+)` \|", tables, re.MULTILINE)
    assert len(rows) == tables.count("\n| `") > 10
    missing = [
        (path, name)
        for path, name in rows
        if name not in set(names_in(ast.parse((ROOT / path).read_text())))
    ]
    assert missing == []


def test_the_schema_in_the_format_page_is_one_that_prepare_takes() -> None:
    page = (ROOT / "docs" / "format.md").read_text()
    (block,) = re.findall(r"```toml\n(.*?\[task\].*?)```", page, flags=re.DOTALL)
    assert parse_schema(tomllib.loads(block)).columns == [
        "user_id", "rating", "timestamp", "item_id", "query_item", "device_id", "genres", "price",
    ]  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_the_same_of_itself_in_the_list_and_in_its_help(name: str) -> None:
    first = inspect.cleandoc(load_command(name).help).split("\n\n")[0]
    assert COMMANDS[name] == " ".join(first.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_brackets_and_takes_them_for_no_markup(name: str) -> None:
    found = load_command(name)
    for command in getattr(found, "commands", {name: found}).values():
        for text in (command.help, *(getattr(option, "help", "") for option in command.params)):
            assert Text.from_markup(text or "").plain == (text or "").replace("\\[", "[")


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_the_docs_exist(page: Path) -> None:
    blocks = re.findall(r"```(?:bash|console|sh)\n(.*?)```", page.read_text(), flags=re.DOTALL)
    begins = rf"^(?:\$ )?gmeta ((?:{'|'.join(GROUPS)}) [a-z-]+|[a-z][a-z-]*)"
    known = set(re.findall(begins, "\n".join(blocks), flags=re.MULTILINE))
    assert known - set(COMMANDS) == set()
