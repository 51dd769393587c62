"""Shared by the tests of the verbs."""

from pathlib import Path

import pytest

from tests.support import small_run


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and rows, shared by all tests of a file."""
    folder = tmp_path_factory.mktemp("inputs")
    small_run.settings_for(folder)
    return folder
