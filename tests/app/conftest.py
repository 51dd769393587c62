"""What the tests of the window wait with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtWidgets import QApplication

from app import theme
from app.state.prefs import Prefs
from app.state.session import Session
from app.window import Window
from tests.support.windows import PatientQtBot


@pytest.fixture
def qtbot(qapp: QApplication, request: pytest.FixtureRequest) -> PatientQtBot:
    """It finds the light theme, whatever an earlier test has set."""
    if theme.mode() != "light":
        theme.apply(qapp, "light")
    return PatientQtBot(request)


@pytest.fixture
def window(tmp_path: Path, qtbot) -> Iterator[Window]:
    """A window with preferences of its own, not yet shown."""
    window = Window(Session(Prefs(tmp_path / "prefs")))
    qtbot.addWidget(window)
    yield window
    if "service" in vars(window.session):
        window.session.service.close()
