"""The model that answers: one version at a time, swapped whole for a newer one."""

import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from gmeta.errors import GMetaError, UserError
from gmeta.server.columns import ModelColumns, columns_of
from gmeta.serving.folder import CONFIG_FILE, ExportedConfig
from gmeta.serving.load import load
from gmeta.serving.model import ServedModel
from metaio.format.manifest import xxh3_hex

VERSION_CHARS = 12
_TRIES = 3


@dataclass(frozen=True)
class Loaded:
    """One version of a model; `version` names its content: a part of config.json's hash, which
    holds the checksum of every other file."""

    model: ServedModel
    version: str
    columns: ModelColumns
    loaded_at_s: float = field(default_factory=time.time)

    @property
    def exported_at_s(self) -> float:
        """Return when it was exported, in seconds since 1970; when it was loaded if it does not
        say."""
        try:
            return datetime.fromisoformat(str(self.model.config.source["exported_at"])).timestamp()
        except (KeyError, ValueError):
            return self.loaded_at_s


def version_in(folder: Path) -> str:
    """Return the version that stands in a folder now. Raise UserError where there is none."""
    try:
        return xxh3_hex((folder / CONFIG_FILE).read_bytes())[:VERSION_CHARS]
    except OSError as error:
        raise UserError(
            f"{folder} is no exported model: it has no {CONFIG_FILE}. "
            "Give a folder that `gmeta export` wrote"
        ) from error


def load_version(folder: Path, verify: bool = True) -> Loaded:
    """Return the model in a folder, all of its files from one export even while the folder is being
    replaced.

    Raises:
        UserError: there is no exported model.
        GMetaError: it is damaged, or another release wrote it.
    """
    for last in (False,) * (_TRIES - 1) + (True,):
        version = version_in(folder)
        try:
            model = load(folder, verify)
        except GMetaError:
            if last or version_in(folder) == version:
                raise
            continue
        if version_in(folder) == version:
            return Loaded(model, version, columns_of(model.config))
    raise GMetaError(f"{folder} was replaced {_TRIES} times while it was read. Export less often")


def check_successor(before: Loaded, config: ExportedConfig, version: str) -> None:
    """Raise UserError for a version that does not take the requests of the one before."""
    old, new = before.columns.signature, columns_of(config).signature
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if changed or before.model.config.loss != config.loss:
        what = f"column {changed[0]}" if changed else "loss"
        raise UserError(
            f"version {version} has another {what} than version {before.version}, which serves: "
            "its callers' requests would fail. Serve it with a server of its own"
        )
