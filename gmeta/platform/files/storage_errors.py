"""Errors of places that are not this process's own: a disk, a mount, an object store."""

import re

from gmeta.errors import GMetaError
from gmeta_keys.translate_errors import translate_errors
from metaio.errors import MetaIOError


def translate_storage_errors(what: str, remedy: str) -> translate_errors:
    """Return a block in which foreign errors become a GMetaError of one line."""

    # Each client of an object store has errors of its own.
    def make_error(error: Exception) -> GMetaError:
        reason = re.sub(r"\s+", " ", str(error)) or type(error).__name__
        return GMetaError(f"{what}: {reason}. {remedy}")

    return translate_errors(make_error, GMetaError, MetaIOError)
