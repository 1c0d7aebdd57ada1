"""A server of the shared model in this process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gmeta.serving.served_model import ServedModel
from gmeta.serving.server.inference_service import InferenceService
from tests.serving.server.serving import service_of


@pytest.fixture(scope="session")
def model(served: ServedModel) -> ServedModel:
    return served


@pytest.fixture
def service(exported: Path) -> Iterator[InferenceService]:
    with service_of(exported) as found:
        yield found
