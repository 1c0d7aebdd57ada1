"""A shard service in the test's own process."""

from collections.abc import Iterator

import pytest

from gmeta.antdt.server import ServiceConfig, ShardServer


@pytest.fixture
def address() -> Iterator[str]:
    """Of a service on a free port, with its store in memory."""
    server = ShardServer(ServiceConfig("127.0.0.1:0"))
    yield server.address
    server.stop(0.0)
