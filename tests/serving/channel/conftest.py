"""A cache of its own for each test: versions made whole are no other test's."""

from pathlib import Path

import pytest

from gmeta.serving.channel.version_cache import CACHE_VARIABLE


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"
