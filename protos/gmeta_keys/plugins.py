"""Resolves names in a config: parts of this project, or of a user's own package.

`dlrm` is built in or an entry point; `myrec.dcn:DCNv2` is an import path."""

from __future__ import annotations

import difflib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, packages_distributions, version
from typing import Any, Generic, TypeVar

from gmeta_keys.translate_errors import format_foreign_error, translate_errors

Part = TypeVar("Part")

# Every process resolves names by itself, so all ranks find the same part however they were started.
GROUPS = "gmeta."  # of entry points: gmeta.models, gmeta.algorithms, ...
NOT_INSTALLED = "not installed"  # in place of a version
TRUSTED = "GMETA_PLUGINS"


@dataclass(frozen=True)
class Registry(Generic[Part]):
    """The values that a config key can name; packages add to them by entry points of `group`."""

    key: str
    group: str  # of entry points
    known: Mapping[str, Part]
    wanted: str  # what a package's own must be, for people
    fits: Callable[[Any], bool]

    def names(self) -> list[str]:
        """Return the names that need no import path: built-in ones and entry points."""
        return sorted({*self.known, *self._entries()})

    def find(self, name: str) -> Part:
        """Return what `name` stands for; imports the package that has it."""
        if name in self.known:
            return self.known[name]
        self.check_named(name, self.key)
        path = name if ":" in name else self._entries()[name]
        part = _import_part(self.key, name, path)
        if not self.fits(part):
            raise ValueError(
                f"{self.key} = {name!r} is {_describe_part(part)}: {self.wanted} is needed. Name "
                "that (docs/extending.md)"
            )
        return part  # type: ignore[no-any-return]

    def check_named(self, name: str, key: str) -> None:
        """Raise ValueError for a value of `key` that names nothing; imports nothing."""
        if ":" in name or name in self.known or name in self._entries():
            return
        near = difflib.get_close_matches(name, self.names(), n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"{key} = {name!r} is unknown: known are {', '.join(self.names())}. {hint}"
            "Choose one of them, or name yours as package.module:Name (docs/extending.md)"
        )

    def check_trusted(self, name: str) -> None:
        """Raise ValueError for a name from somebody's files that would import untrusted code."""
        # Installed plug-ins declare entry points: who installed them trusts them. Any other package
        # must be listed in $GMETA_PLUGINS.
        package = name.partition(":")[0].partition(".")[0]
        if name in self.known or name in self._entries() or package in trusted_packages():
            return
        if ":" not in name:
            raise ValueError(
                f"{self.key} = {name!r}, which is not here: known are {', '.join(self.names())}. "
                "Use the release that made it, or install the package that has it"
            )
        raise ValueError(
            f"{self.key} = {name!r}, code of the package {package!r}, which is not installed as a "
            f"plug-in here: install the package if it declares entry points of gmeta, or set "
            f"{TRUSTED}={package} if you trust it"
        )

    def package_of(self, name: str) -> dict[str, str]:
        """Return name and version of the package that `name` comes from; nothing if built in."""
        if name in self.known:
            return {}
        package = self._entries().get(name, name).partition(":")[0].partition(".")[0]
        # A distribution may have another name than the package that it installs.
        owners = packages_distributions().get(package, [package])
        try:
            return {"package": owners[0], "version": version(owners[0])}
        except PackageNotFoundError:  # a folder on the path
            return {"package": owners[0], "version": NOT_INSTALLED}

    def _entries(self) -> dict[str, str]:
        entries = _entry_points(tuple(sys.path)).select(group=self.group)
        return {entry.name: entry.value for entry in entries}


# Reads a file of each installed package: once a process, and anew only if sys.path changed.
@functools.cache
def _entry_points(path: tuple[str, ...]) -> Any:  # of a class that Python 3.12 renamed
    """Return the entry points of all packages on this sys.path."""
    del path  # the key of the cache
    return entry_points()


def is_ours(part: object) -> bool:
    """Return whether a class, function or value comes from torch or gmeta's own packages."""
    return str(part.__module__).split(".")[0] in ("torch", "gmeta", "gmeta_models")


def is_subclass_of(kind: type) -> Callable[[Any], bool]:
    """Return a predicate: whether a value is a class of this kind."""
    return lambda found: isinstance(found, type) and issubclass(found, kind)


def describe_package(made_on: Mapping[str, Any], key: str) -> str:
    """Return a sentence on the package behind a key, by a run's `environment`; "" without one."""
    plugins = made_on.get("plugins")
    package = plugins.get(key) if isinstance(plugins, dict) else None
    if not isinstance(package, dict):
        return ""
    source = f"{package.get('package')} {package.get('version')}"
    source = source.replace(f" {NOT_INSTALLED}", ", which was only on the path")
    # The text comes from somebody's file: cut, and dropped if it could garble the terminal.
    return f" It was made with {source:.80}." if source.isprintable() else ""


def trusted_packages() -> set[str]:
    """Return the packages with entry points of gmeta, and those of $GMETA_PLUGINS."""
    named_packages = {name.strip() for name in os.environ.get(TRUSTED, "").split(",")} - {""}
    groups = _entry_points(tuple(sys.path))
    for group in groups.groups:
        if group.startswith(GROUPS):
            named_packages |= {
                entry.module.partition(".")[0] for entry in groups.select(group=group)
            }
    return named_packages


def _import_part(key: str, name: str, path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    where = f"{key} = {name!r}" if name == path else f"{key} = {name!r} ({path})"
    # Checked before importing: import_module would take a leading dot for a relative import.
    if not all(part.isidentifier() for part in [*module_name.split("."), *attribute.split(".")]):
        raise ValueError(
            f"{where} is no import path: package.module:Name is allowed, of letters, digits and _. "
            "Correct it"
        )
    try:
        with translate_errors(
            lambda error: ValueError(
                f"{where} cannot be imported: {format_foreign_error(error)}. Mend the package"
            ),
            ImportError,
        ):
            imported: Any = importlib.import_module(module_name)
    # Its own message: a missing module is a matter of the installation, while any other error is a
    # defect of the user's package.
    except ImportError as error:
        raise ValueError(
            f"{where} cannot be imported by {sys.executable}: {error}. Install its package where "
            "every rank runs, or set PYTHONPATH"
        ) from error
    for part in attribute.split("."):
        if not hasattr(imported, part):
            public = [one for one in vars(imported) if not one.startswith("_")]
            near = difflib.get_close_matches(part, public, n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{where}: {module_name} has no {part!r}. {hint}Correct the name")
        imported = getattr(imported, part)
    return imported


def _describe_part(part: Any) -> str:
    kind = part.__name__ if isinstance(part, type) else type(part).__name__
    return f"the class {kind}" if isinstance(part, type) else f"a value of {kind}"
