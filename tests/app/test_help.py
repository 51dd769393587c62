"""The Help menu: About with versions and licences, the guide, the shortcuts."""

from __future__ import annotations

from PySide6.QtGui import QGuiApplication

from app.help_menu import TextDialog
from app.menus import HELP, MENUS
from app.widgets.menu_dialogs import NO_TEXT, AboutDialog, GlossaryDialog
from app.window import Window
from backend import __version__
from backend.utils import about as components


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


def test_glossary_search(window: Window) -> None:
    window.menus["glossary"].trigger()
    dialog = window.findChild(GlossaryDialog)
    assert dialog.windowTitle() == "Glossary"
    for typed, term in (("hit_max_tokens", "Cut off at the limit"), ("num_generations", "Group"), ("kullback", "KL")):
        dialog.search.setText(typed)
        assert any(line.startswith(f"{term} ") for line in dialog.text.toPlainText().splitlines()), typed
    dialog.search.setText("advantage")
    assert dialog.text.toPlainText().startswith("Advantage"), "where the word is the term comes first"
    dialog.search.setText("no such thing")
    assert "No term has" in dialog.text.toPlainText()
    window.menus["glossary"].trigger()
    assert len(window.findChildren(GlossaryDialog)) == 1
