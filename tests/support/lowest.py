"""Prints the lowest versions that pyproject.toml admits, as constraints for make lowest-check."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
# torch belongs to a triple with torchrec and fbgemm, which is tested by itself (docs/install.md).
APART = ("torch",)


def list_lowest() -> list[str]:
    """Return `name==version` for each package that is always installed, or serves."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["serve"]]
    found = []
    for requirement in map(Requirement, lines):
        lowest = [one.version for one in requirement.specifier if one.operator in (">=", "==")]
        if requirement.name not in APART and lowest:
            found.append(f"{requirement.name}=={lowest[0]}")
    return found


if __name__ == "__main__":
    print(*list_lowest(), sep="\n")
