"""The exported model that the tests of the server share, and its server in this process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import gmeta
from gmeta.serving.served_model import ServedModel
from gmeta.serving.server.inference_service import InferenceService
from tests.serving.server.serving import service_of
from tests.support.exported import write_random_model


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("server") / "model"
    write_random_model(folder)
    return folder


@pytest.fixture(scope="session")
def model(exported: Path) -> ServedModel:
    return gmeta.load(exported)


@pytest.fixture
def service(exported: Path) -> Iterator[InferenceService]:
    with service_of(exported) as found:
        yield found
