"""The environment of a run: machine, data and versions."""

import functools
import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any

import torch

PACKAGES = ("gmeta", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "pyarrow", "numpy")


@functools.cache
def package_versions() -> Mapping[str, str]:
    """Return the versions of the packages that decide the results of a run."""
    # Once a process: what it imported stays what it was.
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return MappingProxyType(versions)


def describe_environment(
    world_size: int, fingerprint: str, plugins: Mapping[str, dict[str, str]] = MappingProxyType({})
) -> dict[str, Any]:
    """Return machine, versions, the dataset's fingerprint and plugins' packages by config key."""
    return {
        "world_size": world_size,
        "dataset_fingerprint": fingerprint,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "packages": dict(package_versions()),
        "plugins": dict(plugins),
    }
