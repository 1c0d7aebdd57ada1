"""Reads one version of a model from a folder that may be replaced meanwhile, or from a channel."""

from pathlib import Path

from gmeta.delivery.channel import is_channel
from gmeta.delivery.remote import channel_at
from gmeta.delivery.whole import whole_version
from gmeta.errors import GMetaError
from gmeta.files.local import is_url
from gmeta.server.columns import columns_of
from gmeta.server.versions import Loaded, version_in
from gmeta.serving.folder import check_files, read_config
from gmeta.serving.load import load

_TRIES = 3


def model_folder(folder: Path | str, verify: bool) -> Path:
    """Return the exported folder to serve, its files checked: this one, or where it is a channel,
    as each URL is, that of the version it serves. Without `verify` checksums are left alone."""
    if not is_url(folder) and not is_channel(Path(folder)):
        check_files(Path(folder), read_config(Path(folder)), checksums=verify)
        return Path(folder)
    channel = channel_at(folder)
    return whole_version(channel, channel.served().number, verify=verify)


def load_version(folder: Path | str, verify: bool = True) -> Loaded:
    """Return the model in a folder, or that a channel serves, all of its files from one export even
    while the folder is being replaced."""
    for last in (False,) * (_TRIES - 1) + (True,):
        version = version_in(folder)
        try:
            model = load(model_folder(folder, verify), verify=False)
        except GMetaError:
            if last or version_in(folder) == version:
                raise
            continue
        if version_in(folder) == version:
            return Loaded(model, version, columns_of(model.config))
    raise GMetaError(f"{folder} was replaced {_TRIES} times while it was read. Export less often")
