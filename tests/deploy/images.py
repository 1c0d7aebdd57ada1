"""Dockerfiles and the compose file: linted, parsed strictly, held to the house rules."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from compose_spec import PyCompose

from tests.deploy.policy import image_problem
from tests.deploy.rendering import ROOT

DOCKERFILES = sorted((ROOT / "deploy/docker").glob("*.Dockerfile"))
COMPOSE_FILE = ROOT / "deploy/compose.yaml"
HADOLINT = Path(sys.executable).with_name("hadolint")
# One command gives new volumes to the user of all others, without a network.
MAY_BE_ROOT = {"volumes"}


def dockerfile_problems(path: Path) -> list[str]:
    """What hadolint says, and breaches of the house rules."""
    done = subprocess.run(
        [HADOLINT, "--no-color", str(path)], capture_output=True, text=True, check=False
    )
    problems = [line.removeprefix(f"{path}:") for line in done.stdout.splitlines()]
    if done.returncode and not problems:
        problems.append(done.stderr.strip())
    text = re.sub(r"\\\n", " ", path.read_text())
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    said = {
        instruction: [line[1:] for line in lines if line[0] == instruction]
        for instruction, *_ in lines
    }
    users = said.get("USER", [["0"]])
    bases = {line[0].partition("=")[2] for line in said.get("ARG", []) if "IMAGE=" in line[0]}
    rules = {
        "the image runs as root": users[-1][0].partition(":")[0] not in ("0", "root"),
        "the user has no number: Kubernetes cannot tell that it is not root": users[-1][0]
        .partition(":")[0]
        .isdecimal(),
        "there is no HEALTHCHECK": "HEALTHCHECK" in said,
        "one stage: build tools stay in the image": len(said.get("FROM", [])) > 1,
        "ADD may fetch and unpack: use COPY": "ADD" not in said,
    }
    problems += [rule for rule, kept in rules.items() if not kept]
    problems += [found for base in bases if (found := image_problem(base))]
    return [f"{path.name}: {problem}" for problem in problems]


def compose_problems(path: Path) -> list[str]:
    """What Compose would refuse, and breaches of the house rules."""
    composed: dict[str, Any] = yaml.safe_load(path.read_text())
    # Docker takes a tag beside a digest, for people to read; this parser does not.
    untagged = re.sub(r":[\w.-]+@sha256:", "@sha256:", json.dumps(composed))
    try:
        PyCompose.from_json(untagged).validate()
    except ValueError as error:
        return [f"{path.name}: {error}"]
    problems = []
    services = composed["services"]
    for name, service in services.items():
        rules = {
            "its root file system can be written": service.get("read_only") is True,
            "keeps capabilities": service.get("cap_drop") == ["ALL"],
            "may gain privileges": "no-new-privileges:true" in service.get("security_opt", []),
            "has no limits": {"mem_limit", "cpus"} <= service.keys(),
            "runs as root": not service.get("user", "0").startswith("0") or name in MAY_BE_ROOT,
            "opens a port to other machines": all(
                port.startswith("127.0.0.1:") for port in service.get("ports", [])
            ),
        }
        problems += [f"{name}: {rule}" for rule, kept in rules.items() if not kept]
        found = image_problem(service.get("image", ""))
        problems += [f"{name}: {found}"] if found else []
        for other in service.get("depends_on", {}):
            if other not in services:
                problems.append(f"{name}: waits for {other}, which is no service")
        for source in map(_source, service.get("volumes", [])):
            if source.startswith("."):
                if not (path.parent / source).exists():
                    problems.append(f"{name}: mounts {source}, which does not exist")
            elif source not in composed["volumes"]:
                problems.append(f"{name}: mounts {source}, which is no volume")
    return [f"{path.name}: {problem}" for problem in problems]


def _source(volume: str | dict[str, Any]) -> str:
    return volume.partition(":")[0] if isinstance(volume, str) else str(volume["source"])
