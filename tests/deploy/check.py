"""`make deploy-check`: everything under deploy/ that can be checked without a cluster, offline."""

import shutil
import sys
from pathlib import Path

from tests.deploy.images import COMPOSE_FILE, DOCKERFILES, compose_problems, dockerfile_problems
from tests.deploy.monitoring import DASHBOARDS, dashboard_problems, monitoring_problems
from tests.deploy.policy import (
    caller_problems,
    end_problems,
    exposure_problems,
    pod_problems,
    reference_problems,
    size_problems,
)
from tests.deploy.rbac import rbac_problems
from tests.deploy.rendering import OVERLAYS, CannotRenderError, Manifest, embedded_pods, render
from tests.deploy.schema_check import schema_problems


def overlay_problems(folder: Path) -> list[str]:
    """Every problem of an overlay, one line each."""
    try:
        manifests = render(folder)
    except CannotRenderError as error:
        return [str(error)]
    return [f"{folder.name}: {problem}" for problem in manifest_problems(manifests)]


def manifest_problems(manifests: list[Manifest]) -> list[str]:
    """Every problem of rendered objects."""
    manifests = manifests + embedded_pods(manifests)
    problems = [found for each in manifests for found in schema_problems(each)]
    if problems:  # the other checks take the shape for granted
        return problems
    problems = [found for each in manifests for found in pod_problems(each)]
    problems += reference_problems(manifests) + exposure_problems(manifests)
    problems += size_problems(manifests) + end_problems(manifests) + caller_problems(manifests)
    return problems + rbac_problems(manifests)


def main() -> int:
    """Prints what was checked and what is wrong; 1 if anything is."""
    checks = [(f"overlay {path.name}", overlay_problems, path) for path in OVERLAYS]
    checks += [(path.name, dockerfile_problems, path) for path in DOCKERFILES]
    checks += [(COMPOSE_FILE.name, compose_problems, COMPOSE_FILE)]
    checks += [(f"dashboard {path.name}", dashboard_problems, path) for path in DASHBOARDS]
    found = 0
    for name, check, path in checks:
        found += _tell(name, check(path))
    found += _tell("alerts", monitoring_problems())
    if not shutil.which("promtool"):
        print("note: no promtool on PATH (Debian: prometheus): unit tests of alerts not run")
    return 1 if found else 0


def _tell(name: str, problems: list[str]) -> int:
    print(f"{'FAIL' if problems else 'ok  '} {name}")
    for problem in problems:
        print(f"     {problem}")
    return len(problems)


if __name__ == "__main__":
    sys.exit(main())
