"""Are the objects what the API server takes? Kubernetes' own schemas, strict, at both ends of the
range of versions that we claim; operators' kinds by schemas taken from packages."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
from kubernetes_validate import utils as kubernetes_schemas
from kubernetes_validate.utils import SchemaNotFoundError, ValidationError

from tests.deploy.rendering import Manifest, name_of

VERSIONS = ("1.29", "1.37")
_SCHEMAS = Path(__file__).parent / "schemas"
_OPERATOR_KINDS = {"ServiceMonitor", "PrometheusRule"}
_TRAINER_KINDS = {
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "JobSet": "JobsetV1alpha2JobSet",
}

# It would parse the definitions of all kinds again for each object: 13 of 14 ms.
kubernetes_schemas.schema_contents = cache(kubernetes_schemas.schema_contents)


def schema_problems(manifest: Manifest) -> list[str]:
    """What the API server would refuse, one line each."""
    return list(_problems(json.dumps(manifest, sort_keys=True)))


@cache  # overlays share most of their objects
def _problems(text: str) -> tuple[str, ...]:
    manifest = json.loads(text)
    kind = manifest.get("kind", "")
    if kind in _OPERATOR_KINDS:
        return tuple(_by_json_schema(manifest))
    if kind == "InferenceService":
        return tuple(_by_inference_service(manifest))
    if kind in _TRAINER_KINDS:
        return tuple(_by_trainer_model(manifest))
    return tuple(found for version in VERSIONS for found in _by_kubernetes(manifest, version))


def _by_kubernetes(manifest: Manifest, version: str) -> list[str]:
    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.path)
        return [f"{name_of(manifest)} in {version}: {where}: {error.message}"]
    except SchemaNotFoundError:
        what = f"{manifest.get('apiVersion')} {manifest.get('kind')}"
        return [f"{name_of(manifest)}: Kubernetes {version} has no {what}"]
    return []


def _by_json_schema(manifest: Manifest) -> list[str]:
    schema = json.loads((_SCHEMAS / f"{manifest['kind'].lower()}.json").read_text())
    return [
        f"{name_of(manifest)}: {'.'.join(map(str, error.path))}: {error.message}"
        for error in jsonschema.Draft202012Validator(schema).iter_errors(manifest)
    ]


def _by_inference_service(manifest: Manifest) -> list[str]:
    """The fields of KServe's own that we use by a schema; the rest of a predictor is a pod's."""
    problems = _by_json_schema(manifest)
    if problems:
        return problems
    predictor = manifest["spec"]["predictor"]
    own = json.loads((_SCHEMAS / "inferenceservice.json").read_text())["$defs"]["own"]["properties"]
    pod = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": manifest["metadata"]["name"]},
        "spec": {name: value for name, value in predictor.items() if name not in own},
    }  # fmt: skip
    return [found for version in VERSIONS for found in _by_kubernetes(pod, version)]


def _by_trainer_model(manifest: Manifest) -> list[str]:
    """The models drop fields they do not know: what does not come back was unknown."""
    from kubeflow_trainer_api import models  # a second to import, of which most workers need none

    model = getattr(models, _TRAINER_KINDS[manifest["kind"]])
    try:
        known = model.from_dict(manifest).to_dict()
    except ValueError as error:
        return [f"{name_of(manifest)}: {error}"]
    problems = [f"{name_of(manifest)}: {path} is unknown" for path in _lost(manifest, known, "")]
    spec = manifest["spec"]
    if manifest["kind"] != "JobSet":
        spec = spec.get("template", {}).get("spec", {})
    replicated = spec.get("replicatedJobs", [])
    for job in replicated:
        # What is inside is a Job of Kubernetes.
        inner = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": f"{manifest['metadata']['name']}-{job['name']}"},
            "spec": job["template"]["spec"],
        }
        problems += [found for version in VERSIONS for found in _by_kubernetes(inner, version)]
    return problems


def _lost(given: Any, known: Any, path: str) -> list[str]:
    if isinstance(given, dict):
        known = known if isinstance(known, dict) else {}
        return [
            line
            for key, value in given.items()
            for line in (
                _lost(value, known[key], f"{path}.{key}")
                if key in known
                else [f"{path}.{key}".lstrip(".")]
            )
        ]
    if isinstance(given, list):
        return [
            line
            for i, (mine, theirs) in enumerate(zip(given, known, strict=True))
            for line in _lost(mine, theirs, f"{path}[{i}]")
        ]
    return []
