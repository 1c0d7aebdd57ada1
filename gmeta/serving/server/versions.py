"""The model that answers: one version at a time, named by its content."""

import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from gmeta.errors import UserError
from gmeta.platform.files.local_paths import is_url
from gmeta.serving.channel.channel import is_channel
from gmeta.serving.channel.current_version import current_at
from gmeta.serving.exported_folder import ExportedConfig, checksum_in
from gmeta.serving.served_model import ServedModel
from gmeta.serving.server.input_columns import ModelColumns, describe_columns

VERSION_CHARS = 12


@dataclass(frozen=True)
class LoadedModel:
    """One version of a model; `version` names its content."""

    model: ServedModel
    # The beginning of config.json's hash, which holds the checksum of every other file.
    version: str
    columns: ModelColumns
    loaded_at_s: float = field(default_factory=time.time)

    @property
    def exported_at_s(self) -> float:
        """Return when it was exported, in seconds since 1970; when it was loaded if unknown."""
        try:
            return datetime.fromisoformat(str(self.model.config.source["exported_at"])).timestamp()
        except (KeyError, ValueError):
            return self.loaded_at_s


def version_in(folder: Path | str) -> str:
    """Return the version in a folder, or that a channel serves. Raise UserError, GMetaError."""
    if is_url(folder) or is_channel(Path(folder)):
        return current_at(folder).checksum[:VERSION_CHARS]
    return checksum_in(Path(folder))[:VERSION_CHARS]


def check_successor(before: LoadedModel, config: ExportedConfig, version: str) -> None:
    """Raise UserError for a version that does not take the requests of the one before."""
    # Columns may stand in another order: callers name them.
    was, now = before.columns, describe_columns(config)
    old, new = was.signature, now.signature
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if changed or was.outputs != now.outputs:
        is_loss = before.model.config.losses != config.losses
        what = f"column {changed[0]}" if changed else "loss" if is_loss else "order of labels"
        raise UserError(
            f"version {version} has another {what} than version {before.version}, which serves: "
            "its callers' requests would fail. Serve it with a server of its own"
        )
