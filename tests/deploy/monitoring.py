"""Alerts and dashboards: the same in every form, expressions that parse, each alert explained."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import yaml

from tests.deploy.rendering import ROOT

ALERTS = ROOT / "deploy/monitoring/alerts.yml"
OPERATOR_ALERTS = ROOT / "deploy/k8s/components/monitoring/alerts.yaml"
DASHBOARDS = sorted((ROOT / "deploy/grafana").glob("*.json"))


def monitoring_problems(alerts: Path = ALERTS, operator: Path = OPERATOR_ALERTS) -> list[str]:
    """What is wrong with the alerts of Prometheus with and without its operator, a line each."""
    groups = yaml.safe_load(alerts.read_text())["groups"]
    guide = (ROOT / "docs/operations.md").read_text()
    problems = []
    for rule in (rule for group in groups for rule in group["rules"]):
        name = rule["alert"]
        if f"## {name}\n" not in guide:
            problems.append(f"{name} has no section in docs/operations.md")
        problems += [f"{name}: {found}" for found in expression_problems(rule["expr"])]
        wanted = {"severity": rule.get("labels", {}), "summary": rule.get("annotations", {})}
        problems += [f"{name} has no {key}" for key, held in wanted.items() if key not in held]
        runbook = rule.get("annotations", {}).get("runbook")
        if runbook != f"docs/operations.md#{name.lower()}":
            problems.append(f"{name}: its runbook {runbook} is not its section")
    if yaml.safe_load(operator.read_text())["spec"]["groups"] != groups:
        problems.append(f"{operator.name} and {alerts.name} differ: they must hold the same groups")
    return problems + _promtool_problems(alerts)


def dashboard_problems(path: Path) -> list[str]:
    """Expressions of a dashboard that are none."""
    return [
        f"{path.name}: {found}"
        for expression in iterate_expressions(json.loads(path.read_text()))
        for found in expression_problems(expression)
    ]


def expression_problems(expression: str) -> list[str]:
    """Why PromQL does not know the expression, if it does not."""
    for variable in ("$__rate_interval", "$__range", "$__interval"):
        expression = expression.replace(variable, "5m")
    try:
        promql_parser.parse(expression)
    except ValueError as error:
        return [f"{' '.join(expression.split())}: {error}"]
    return []


def iterate_expressions(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("expr"), str):
            yield value["expr"]
        for each in value.values():
            yield from iterate_expressions(each)
    elif isinstance(value, list):
        for each in value:
            yield from iterate_expressions(each)


def _promtool_problems(alerts: Path) -> list[str]:
    """What Prometheus' own tool says of rules and their unit tests, where it is installed."""
    promtool = shutil.which("promtool")
    problems = []
    commands = [["check", "rules", alerts], ["test", "rules", alerts.with_name("alerts_test.yml")]]
    for command in commands if promtool else []:
        done = subprocess.run(
            [str(promtool), *map(str, command)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            problems.append(f"promtool {command[0]}: {done.stdout}{done.stderr}")
    return problems
