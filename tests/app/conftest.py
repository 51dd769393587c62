"""What the tests of the window wait with."""

from __future__ import annotations

import pytest
from PySide6.QtWidgets import QApplication

from tests.support.windows import PatientQtBot


@pytest.fixture
def qtbot(qapp: QApplication, request: pytest.FixtureRequest) -> PatientQtBot:
    return PatientQtBot(request)
