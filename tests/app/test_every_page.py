"""Every page of the window: that each setting is a stop of Tab, what the menus have of it, and how long showing it
blocks the event loop.

The walk through all of it by keyboard is in test_by_keyboard.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication, QLabel, QWidget

from app import page_drawing
from app.page_drawing import draw_page
from app.pages import PAGES, PageEntry
from app.state.prefs import Prefs
from app.state.session import Session
from app.window import Window
from tests.support.diaries import recording
from tests.support.windows import SilentService, active_window

PAGE_KEYS = [page.key for page in PAGES]


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory, qapp: QApplication) -> Iterator[Window]:
    """One window for all: making its pages is most of what these tests take."""
    session = Session(Prefs(tmp_path_factory.mktemp("pages") / "prefs"))
    session.service = SilentService()
    window = Window(session)
    session.restore()
    window.resize(1280, 800)
    window.show()
    yield window
    session.close_run()
    window.deleteLater()


@pytest.fixture
def new_window(tmp_path: Path, qtbot) -> Iterator[Window]:
    session = Session(Prefs(tmp_path / "prefs"))
    session.service = SilentService()
    with active_window(session, qtbot, restored=True) as window:
        yield window


def test_no_plain_label_shows_markup(window: Window):
    for key in PAGE_KEYS:
        window.show_page(key)
    plain = [label for label in window.findChildren(QLabel) if label.textFormat() == Qt.TextFormat.PlainText]
    assert "Trains every weight" in window.pages["train"].launch.details.text()
    assert [label.text() for label in plain if re.search(r"</?(p|b|br|a|span)\b|&nbsp;", label.text())] == []


def test_opening_makes_only_the_page(new_window: Window, apart: Path, qtbot):
    window = new_window
    window.session.open_run(recording("healthy-grpo").unpack(apart / "runs" / "healthy").path)
    window.show_page("monitor")
    plots, run = window.pages["monitor"].grid.plots, window.session.run
    assert not any(plot.is_built for plot in plots)
    qtbot.waitUntil(lambda: run is not None and run.read_share is None and run.step > 0)
    # What scrolls into view has its title at once.
    qtbot.waitUntil(lambda: all(plot.is_built for plot in plots if not plot.isHidden()))
    in_grid = [plot for plot in plots if not plot.isHidden()]
    assert 0 < sum(plot.view is not None for plot in plots) < len(in_grid) // 2, "curves are drawn in view alone"


def broken(entry: PageEntry, session: Session, parent: QWidget) -> QWidget:
    raise ImportError("no such module")


def test_faults_of_a_page(new_window: Window, monkeypatch) -> None:
    window = new_window
    window.resize(*page_drawing.SIZE)
    assert draw_page(window, "monitor", "Monitor")["fault"] == ""
    monkeypatch.setattr(PageEntry, "build", lambda entry, session, parent: QWidget(parent))
    assert "picture is empty" in draw_page(window, "runs", "Runs")["fault"]
    monkeypatch.setattr(PageEntry, "build", broken)
    assert draw_page(window, "sweeps", "Sweeps")["fault"] == "ImportError: no such module"
