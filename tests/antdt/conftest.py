"""A shard service in the test's own process, and who may call it."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from gmeta.antdt.service.shard_server import ServiceConfig, ShardServer
from gmeta_protos.antdt.v1 import shard_service_pb2_grpc as pb_grpc
from tests.antdt.pki import Authority


@pytest.fixture
def server() -> Iterator[ShardServer]:
    """On a free port, with its store in memory and a page beside it."""
    made = ShardServer(ServiceConfig("127.0.0.1:0", metrics_listen="127.0.0.1:0"))
    yield made
    made.stop(0.0)


@pytest.fixture
def address(server: ShardServer) -> str:
    """Where `server` answers."""
    return server.address


@pytest.fixture
def stub(server: ShardServer) -> Iterator[Any]:
    """Calls `server` without a ShardClient."""
    with grpc.insecure_channel(server.address) as channel:
        yield pb_grpc.ShardServiceStub(channel)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Certificates for one file of tests."""
    return Authority(tmp_path_factory.mktemp("pki"))
