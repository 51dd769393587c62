"""The Help menu: About with versions and licences, the guide, the shortcuts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtGui import QAction, QGuiApplication

from app.help_menu import GUIDES, facts
from app.menus import HELP, MENUS
from app.model.prefs import Prefs
from app.model.session import Session
from app.widgets.help.about_dialog import NO_TEXT, AboutDialog
from app.widgets.help.text_dialog import TextDialog
from app.window import Window
from backend import __version__
from backend.spec import components
from backend.spec.components import Component


@pytest.fixture
def window(tmp_path: Path, qtbot) -> Iterator[Window]:
    window = Window(Session(Prefs(tmp_path / "prefs")))
    qtbot.addWidget(window)
    yield window


def test_about_is_where_macos_looks_for_it_and_help_is_the_last_menu(window: Window) -> None:
    assert window.menus["about"].menuRole() == QAction.MenuRole.AboutRole
    assert window.menuBar().actions()[-1].text() == "Help"


def test_about_shows_versions_and_every_licence(window: Window) -> None:
    window.menus["about"].trigger()
    dialog = window.findChild(AboutDialog)
    assert dialog.windowTitle() == "About GRPO Studio" and dialog.list.count() == len(components.components())
    assert "Permission is hereby granted" in dialog.text.toPlainText(), "ours is shown first"
    for row, part in enumerate(components.components()):
        dialog.list.setCurrentRow(row)
        assert dialog.text.toPlainText().split() == (part.text or NO_TEXT).split(), part.name
    dialog.copy()
    copied = QGuiApplication.clipboard().text()
    assert f"grpo-studio: {__version__}" in copied and "Computes on: " in copied and "mlx: " in copied


def test_a_package_without_a_text_says_so(qtbot) -> None:
    dialog = AboutDialog(facts(), [Component("one", "1", "MIT", "text of one"), Component("two", "2", "BSD", "")])
    qtbot.addWidget(dialog)
    assert dialog.text.toPlainText() == "text of one"
    dialog.list.setCurrentRow(1)
    assert dialog.text.toPlainText() == NO_TEXT


@pytest.mark.parametrize("name", ["guide", "files"])
def test_documents_are_shown(window: Window, name: str) -> None:
    window.menus[name].trigger()
    dialog = window.findChild(TextDialog)
    assert dialog.windowTitle() in GUIDES and len(dialog.text.toPlainText()) > 500


def test_the_list_of_shortcuts_has_every_one(window: Window) -> None:
    window.menus["shortcuts"].trigger()
    text = window.findChild(TextDialog).text.toPlainText()
    entries = [entry for entries in (*MENUS.values(), HELP) for entry in entries if entry and entry.keys]
    for entry in entries:
        if (
            not window.menus[entry.name].shortcut().isEmpty()
        ):  # Quit has none on platforms where the system gives it one
            assert window.menus[entry.name].text() in text
    for action in window.menus.by_name.values():
        assert action.shortcut().toString() in text
