"""Modules that users' packages import and that have moved: a former path works, with a warning."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# What docs/extending.md named before. "": a folder that is gone, on the way to its modules.
# They go in this release; so do the keys of gmeta/config/former_keys.py.
GONE_IN = "0.3.0"
FORMER_PATHS = {
    "gmeta.adaptation.config": "gmeta.config.algorithm",
    "gmeta.guards": "gmeta.runs.guards",
    "gmeta.hooks": "",
    "gmeta.hooks.callback": "gmeta.runs.logging.callback",
    "gmeta.hooks.logger": "gmeta.runs.logging.logger",
    "gmeta.metrics.own": "gmeta.metrics.custom_metrics",
    "gmeta.rows": "",
    "gmeta.rows.sides": "gmeta.adaptation.layout.sides",
}


class FormerPathFinder(MetaPathFinder, Loader):
    """Finds a module by its former path."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for a former path, None for any other name."""
        if fullname not in FORMER_PATHS:
            return None
        return ModuleSpec(fullname, self, is_package=not FORMER_PATHS[fullname])

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module of the former path with the objects of the new one."""
        if path := FORMER_PATHS[module.__name__]:
            moved = importlib.import_module(path)
            names = {name: value for name, value in vars(moved).items() if name[:2] != "__"}
            vars(module).update(names)
            # 4: the user's own import, behind three frames of the import system.
            told = f"{module.__name__} has moved: import {path}. This path goes in gmeta {GONE_IN}"
            warnings.warn(told, FutureWarning, 4)


def install() -> None:
    """Let former paths be imported, once a process."""
    if not any(isinstance(finder, FormerPathFinder) for finder in sys.meta_path):
        # Last, so that a module that exists wins.
        sys.meta_path.append(FormerPathFinder())
