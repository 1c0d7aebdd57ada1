"""Two days that were followed, for all tests of the loop."""

from pathlib import Path

import pytest

from gmeta.serving.channel.version_cache import CACHE_VARIABLE
from tests.pipeline.days import write_day, write_loop
from tests.pipeline.following import loop_of, stages_of


@pytest.fixture(scope="session")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two days from a log to a served model, without a kill."""
    root = tmp_path_factory.mktemp("followed")
    for day in range(2):
        write_day(root / "logs", day)
    config = write_loop(root, margin=9)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(CACHE_VARIABLE, str(root / "cache"))
        found = stages_of(loop_of(config))
    expected = [
        (stage, number)
        for number in (1, 2)
        for stage in ("prepare", "train", "export", "judge", "promote")
    ]
    assert found == [*expected, ("score", 2)]
    return root
