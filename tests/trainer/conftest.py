"""What the tests of whole runs share."""

from pathlib import Path

import pytest

from tests.support.random_models import tiny_model


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the model, rows and reward functions that the tests of a file share."""
    return tmp_path_factory.mktemp("inputs")


@pytest.fixture(scope="module")
def model(inputs: Path) -> str:
    """A model of one layer."""
    return str(tiny_model(inputs / "model", layers=1))
