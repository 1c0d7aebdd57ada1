"""Reads one version of a model from a folder that may be replaced meanwhile, or from a channel."""

from pathlib import Path

from gmeta.errors import GMetaError
from gmeta.platform.files.local_paths import is_url
from gmeta.serving.channel.channel import is_channel
from gmeta.serving.channel.materialize import materialize_version
from gmeta.serving.channel.remote_channel import channel_at
from gmeta.serving.exported_folder import check_files, read_config
from gmeta.serving.model_loader import load
from gmeta.serving.server.input_columns import MOST_EXAMPLES, describe_columns
from gmeta.serving.server.versions import LoadedModel, version_in

_TRIES = 3


def model_folder(folder: Path | str, verify: bool) -> Path:
    """Return the exported folder to serve, its files checked, from an export or a channel."""
    if _is_export(folder):
        check_files(Path(folder), read_config(Path(folder)), checksums=verify)
        return Path(folder)
    channel = channel_at(folder)
    return materialize_version(channel, channel.require_current().number, verify=verify)


def _is_export(folder: Path | str) -> bool:
    return not is_url(folder) and not is_channel(Path(folder))


def load_version(folder: Path | str, verify: bool = True) -> LoadedModel:
    """Return the model in a folder, or that a channel serves, with all files from one export."""
    for last in (False,) * (_TRIES - 1) + (True,):
        version = version_in(folder)
        try:
            if _is_export(folder):
                model = load(Path(folder), verify=verify)
            else:  # model_folder has compared the files already
                model = load(model_folder(folder, verify), verify=False)
        except GMetaError:
            # An error while the folder was replaced says nothing of either version.
            if last or version_in(folder) == version:
                raise
            continue
        if version_in(folder) == version:
            examples = model.example_values(MOST_EXAMPLES)
            return LoadedModel(model, version, describe_columns(model.config, examples))
    raise GMetaError(f"{folder} was replaced {_TRIES} times while it was read. Export less often")
