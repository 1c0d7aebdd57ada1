"""Renders an overlay as `kubectl apply -k` would: by kubectl's own kustomize, offline."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = sorted(path for path in (ROOT / "deploy/k8s/overlays").iterdir() if path.is_dir())
Manifest = dict[str, Any]


class CannotRenderError(Exception):
    """The overlay is no valid kustomization, or there is no kubectl."""


def find_kubectl() -> str | None:
    """The one on PATH, or the one that `make deploy-tools` put beside this Python."""
    return shutil.which("kubectl", path=str(Path(sys.executable).parent)) or shutil.which("kubectl")


def render(folder: Path) -> list[Manifest]:
    """The objects of a kustomization. Raises CannotRenderError."""
    kubectl = find_kubectl()
    if kubectl is None:
        raise CannotRenderError("no kubectl on PATH. Run: make deploy-tools")
    done = subprocess.run(
        [kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no message"]
        raise CannotRenderError(f"{folder.name}: {said[-1]}")
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def name_of(manifest: Manifest) -> str:
    """Kind/name, as messages call an object."""
    return f"{manifest.get('kind')}/{manifest.get('metadata', {}).get('name')}"


def embedded_pods(manifests: list[Manifest]) -> list[Manifest]:
    """Pods that a ConfigMap holds as a template: somebody in the cluster makes pods of them."""
    texts = [
        text
        for manifest in manifests
        if manifest.get("kind") == "ConfigMap"
        for name, text in manifest.get("data", {}).items()
        if name.endswith(".yaml")
    ]
    return [pod for pod in map(yaml.safe_load, texts) if pod.get("kind") == "Pod"]


def pod_specs(manifest: Manifest) -> list[tuple[dict[str, str], dict[str, Any]]]:
    """(labels, spec) of every pod template in an object, however deep."""
    found: list[tuple[dict[str, str], dict[str, Any]]] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            template = value.get("template")
            spec = template.get("spec", {}) if isinstance(template, dict) else {}
            if isinstance(spec, dict) and "containers" in spec:
                found.append((template.get("metadata", {}).get("labels", {}), spec))
            for each in value.values():
                walk(each)
        elif isinstance(value, list):
            for each in value:
                walk(each)

    if manifest.get("kind") == "InferenceService":
        # KServe makes pods of the predictor, with the object's labels.
        found.append((manifest["metadata"].get("labels", {}), manifest["spec"]["predictor"]))
        return found
    # A pod is its own template.
    walk({"template": manifest} if manifest.get("kind") == "Pod" else manifest)
    return found
