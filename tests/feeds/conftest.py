"""What makes batches beside a rank is forked."""

from collections.abc import Iterator

import pytest

from tests.feeds.forked_workers import forking


@pytest.fixture(autouse=True)
def forked_workers() -> Iterator[None]:
    """Of the rank that a test is itself."""
    with forking():
        yield
