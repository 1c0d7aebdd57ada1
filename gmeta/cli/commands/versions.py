"""`gmeta --version --json`: the packages that decide results, and the formats that are written."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from gmeta.antdt.manifests.shard_manifest import SCHEMA_VERSION
from gmeta.evaluation.report.evaluation_schema import SCHEMA
from gmeta.serving import exported_folder, state_bytes
from metaio.format import checked_json, layout

PACKAGES = (
    *("gmeta", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "pyarrow", "numpy", "duckdb"),
    *("grpcio", "protobuf", "fsspec", "lightgbm", "optuna", "fastapi"),
)


def describe_versions() -> dict[str, Any]:
    """Return the versions of Python and packages, None where not installed, and of formats."""
    return {
        "python": platform.python_version(),
        "packages": {name: _find_version(name) for name in PACKAGES},
        "formats": list_formats(),
    }


def list_formats() -> dict[str, int]:
    """Return the version of each format that this release writes (docs/release.md)."""
    return {
        "dataset": layout.FORMAT_VERSION,
        "stream": checked_json.VERSION,
        "export": exported_folder.FORMAT_VERSION,
        "channel": checked_json.VERSION,
        "task state": state_bytes.VERSION,
        "evaluation": int(SCHEMA.rpartition("/")[2]),
        "shard manifest": SCHEMA_VERSION,
    }


def _find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
