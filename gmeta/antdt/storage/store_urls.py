"""Which store a URL names: what --store of the service takes."""

from pathlib import Path

from gmeta.antdt.errors import StoreNameError
from gmeta.antdt.storage.sqlite_store import SqliteStore
from gmeta.antdt.storage.store import MemoryStore, Store

URL_FORMS = "sqlite:///relative/path, sqlite:////absolute/path or memory:"


def open_store(url: str) -> Store:
    """Return the store of a URL. Raise StoreError."""
    if url == "memory:":
        return MemoryStore()
    prefix = "sqlite:///"
    if not url.startswith(prefix) or len(url) == len(prefix):
        raise StoreNameError(
            f"the store {url!r} is of no known kind; allowed are {URL_FORMS}. Correct --store."
        )
    return SqliteStore(Path(url[len(prefix) :]))
