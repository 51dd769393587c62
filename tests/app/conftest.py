"""What the tests of the window wait with."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtWidgets import QApplication

from tests.support.real_runs import make_runs
from tests.support.windows import PatientQtBot


@pytest.fixture
def qtbot(qapp: QApplication, request: pytest.FixtureRequest) -> PatientQtBot:
    return PatientQtBot(request)


@pytest.fixture(scope="session")
def real_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs folder with runs of every kind, made by the real trainer. Tests that change it copy it first."""
    return make_runs(tmp_path_factory.mktemp("real"))
