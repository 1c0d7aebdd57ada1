"""`make deploy-check`: everything under deploy/ that can be checked without a cluster, offline."""

import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from tests.deploy.images import COMPOSE_FILE, DOCKERFILES, compose_problems, dockerfile_problems
from tests.deploy.policy import exposure_problems, pod_problems, reference_problems
from tests.deploy.rendering import OVERLAYS, ROOT, CannotRenderError, Manifest, render
from tests.deploy.schema_check import schema_problems

ALERTS = ROOT / "deploy/monitoring/alerts.yml"


def overlay_problems(folder: Path) -> list[str]:
    """Every problem of an overlay, one line each."""
    try:
        manifests = render(folder)
    except CannotRenderError as error:
        return [str(error)]
    return [f"{folder.name}: {problem}" for problem in manifest_problems(manifests)]


def manifest_problems(manifests: list[Manifest]) -> list[str]:
    """Every problem of rendered objects."""
    problems = [found for each in manifests for found in schema_problems(each)]
    if problems:  # the other checks take the shape for granted
        return problems
    problems = [found for each in manifests for found in pod_problems(each)]
    return problems + reference_problems(manifests) + exposure_problems(manifests)


def monitoring_problems() -> list[str]:
    """The alerts: the same groups for Prometheus with and without the operator, each explained."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    operator = ROOT / "deploy/k8s/components/monitoring/alerts.yaml"
    guide = (ROOT / "docs/operations.md").read_text()
    problems = [
        f"{rule['alert']} has no section in docs/operations.md"
        for group in groups
        for rule in group["rules"]
        if f"## {rule['alert']}\n" not in guide
    ]
    if yaml.safe_load(operator.read_text())["spec"]["groups"] != groups:
        problems.append(f"{operator.name} and {ALERTS.name} differ: they must hold the same groups")
    if promtool := shutil.which("promtool"):
        for command in (["check", "rules", str(ALERTS)], ["test", "rules", _alert_tests()]):
            done = subprocess.run([promtool, *command], capture_output=True, text=True, check=False)
            if done.returncode:
                problems.append(f"promtool {command[0]}: {done.stdout}{done.stderr}")
    return problems


def _alert_tests() -> str:
    return str(ALERTS.with_name("alerts_test.yml"))


def main() -> int:
    """Prints what was checked and what is wrong; 1 if anything is."""
    checks = [(f"overlay {path.name}", overlay_problems, path) for path in OVERLAYS]
    checks += [(path.name, dockerfile_problems, path) for path in DOCKERFILES]
    checks += [(COMPOSE_FILE.name, compose_problems, COMPOSE_FILE)]
    found = 0
    for name, check, path in checks:
        found += _tell(name, check(path))
    found += _tell("alerts", monitoring_problems())
    if not shutil.which("promtool"):
        print("note: no promtool on PATH (Debian: prometheus): expressions of alerts not checked")
    return 1 if found else 0


def _tell(name: str, problems: list[str]) -> int:
    print(f"{'FAIL' if problems else 'ok  '} {name}")
    for problem in problems:
        print(f"     {problem}")
    return len(problems)


if __name__ == "__main__":
    sys.exit(main())
