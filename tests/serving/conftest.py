"""The exported model of random values that most tests of serving share."""

from pathlib import Path

import pytest

import gmeta
from gmeta.serving.served_model import ServedModel
from tests.support.exported import write_random_model


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serving") / "model"
    write_random_model(folder)
    return folder


@pytest.fixture(scope="session")
def served(exported: Path) -> ServedModel:
    return gmeta.load(exported)
