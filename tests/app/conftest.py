"""What the tests of the window wait with."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtWidgets import QApplication

from app import theme
from app.state.prefs import Prefs
from app.state.processes import Service
from app.state.session import Session
from app.window import Window
from tests.support.windows import PatientQtBot


@pytest.fixture
def helper() -> None:
    """For a test that waits for answers of the window's helper process, which takes a second to start."""


@pytest.fixture(autouse=True)
def silent_helper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions are taken and never answered, unless the test asks for `helper`."""
    if "helper" not in request.fixturenames:
        monkeypatch.setattr(Service, "_start", lambda service: setattr(service, "_process", None) or True)


@pytest.fixture
def qtbot(qapp: QApplication, request: pytest.FixtureRequest) -> PatientQtBot:
    """It finds the light theme, whatever an earlier test has set."""
    if theme.mode() != "light":
        theme.apply(qapp, "light")
    return PatientQtBot(request)


@pytest.fixture
def window(tmp_path: Path, qtbot) -> Window:
    """A window with preferences of its own, not yet shown."""
    window = Window(Session(Prefs(tmp_path / "prefs")))
    qtbot.addWidget(window)
    return window
