"""The glossary in a window of its own, with a line that searches it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from itertools import groupby
from typing import Protocol

from PySide6.QtWidgets import QDialog, QDialogButtonBox, QLineEdit, QTextBrowser, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic import icons
from app.widgets.basic.layout import on_screen

SIZE = (680, 620)


class Term(Protocol):
    """What the dialog shows of an entry; `app.state.glossary.GlossaryEntry` is one."""

    @property
    def term(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def section(self) -> str: ...


class GlossaryDialog(QDialog):
    """Terms by section; typing leaves those that `find(words)` returns. It is not modal.

    Attributes:
        search – the line.
        text – the browser that shows the terms.
    """

    def __init__(self, find: Callable[[str], Sequence[Term]], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.resize(on_screen(self, *SIZE))
        self._find = find
        self.setWindowTitle("Glossary")
        self.search = QLineEdit(placeholderText="Find a word")
        self.search.setAccessibleName("Find a word in the glossary")
        self.search.setClearButtonEnabled(True)
        self.search.setProperty("role", "search")
        icon = icons.icon("search", theme.palette().muted, 16)
        self.search.addAction(icon, QLineEdit.ActionPosition.LeadingPosition)
        self.search.textChanged.connect(self._show)
        self.text = QTextBrowser()
        self.text.setAccessibleName("Glossary")
        self.text.setFont(theme.body_font())
        self.text.document().setDocumentMargin(2 * theme.SPACE)
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
        buttons.rejected.connect(self.reject)
        column = QVBoxLayout(self)
        column.setContentsMargins(*(2 * theme.SPACE,) * 4)
        for part in (self.search, self.text, buttons):
            column.addWidget(part)
        self._show("")
        self.search.setFocus()

    def _show(self, typed: str) -> None:
        terms = self._find(typed)
        # What was found is in the order of how well it fits, across the sections.
        sections = [("", terms)] if typed.strip() else groupby(terms, key=lambda term: term.section)
        nothing = f"<p>No term has “{escape(typed)}” in it.</p>"
        self.text.setHtml("".join(_section(title, list(of)) for title, of in sections) if terms else nothing)


def _section(title: str, terms: Sequence[Term]) -> str:
    """The terms below their heading; without one, each with the section that it is from."""
    heading = f"<h3>{escape(title)}</h3>" if title else ""
    origin = "" if title else "<i> &nbsp;{}</i>"
    return heading + "".join(
        f"<p><b>{escape(term.term)}</b>{origin.format(escape(term.section))}<br>{escape(term.text)}</p>"
        for term in terms
    )
