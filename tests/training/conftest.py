from pathlib import Path

import pytest

from tests.support import random_models


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of one layer."""
    return random_models.tiny_model(tmp_path_factory.mktemp("models") / "qwen3", layers=1)
