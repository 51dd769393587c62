"""Drawing every page for the self-test: a page that is empty, or cannot be built, is reported with its title."""

from __future__ import annotations

import pytest
from PySide6.QtWidgets import QWidget

from app import page_drawing
from app.page_drawing import draw_page
from app.pages import PageEntry
from app.state.session import Session
from app.window import Window


@pytest.fixture
def window(window: Window) -> Window:
    window.resize(*page_drawing.SIZE)
    window.show()
    return window


def broken(entry: PageEntry, session: Session, parent: QWidget) -> QWidget:
    raise ImportError("no such module")


def test_faults_of_a_page(window: Window, monkeypatch) -> None:
    assert draw_page(window, "monitor", "Monitor")["fault"] == ""
    monkeypatch.setattr(PageEntry, "build", lambda entry, session, parent: QWidget(parent))
    assert "picture is empty" in draw_page(window, "runs", "Runs")["fault"]
    monkeypatch.setattr(PageEntry, "build", broken)
    assert draw_page(window, "sweeps", "Sweeps")["fault"] == "ImportError: no such module"
