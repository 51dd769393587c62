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


def test_a_sound_page_has_no_fault(window: Window) -> None:
    assert draw_page(window, "monitor", "Monitor")["fault"] == ""


def test_an_empty_page_is_a_fault(window: Window, monkeypatch) -> None:
    monkeypatch.setattr(PageEntry, "build", lambda entry, session, parent: QWidget(parent))
    assert "picture is empty" in draw_page(window, "runs", "Runs")["fault"]


def test_a_page_that_cannot_be_built_is_a_fault(window: Window, monkeypatch) -> None:
    def build(entry: PageEntry, session: Session, parent: QWidget) -> QWidget:
        raise ImportError("no such module")

    monkeypatch.setattr(PageEntry, "build", build)
    assert draw_page(window, "runs", "Runs")["fault"] == "ImportError: no such module"
