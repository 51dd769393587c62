"""The Help menu's slots: help on a field, the guide, the glossary, the shortcuts, what is stored where, About, and the report of a problem.

The base class of `app.file_menu.FileWindow`'s heir, `app.window.Window`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from html import escape
from typing import TYPE_CHECKING

from PySide6.QtCore import Qt
from PySide6.QtGui import QAction
from PySide6.QtWidgets import QApplication, QDialog, QDialogButtonBox, QTextBrowser, QVBoxLayout, QWidget

from app import theme
from app.file_menu import FileWindow
from app.state.guide import CONTENTS, place_of_setting
from app.widgets.basic.labels import key_name, place_about
from app.widgets.basic.layout import on_screen
from app.widgets.form.field import field_of
from app.widgets.menu_dialogs import AboutDialog, GlossaryDialog, ProblemDialog
from backend.runs.archive import raw_settings
from backend.utils import machine
from backend.utils.about import EMPTY, LOG_LINES, ProblemFacts, report
from backend.utils.places import project_root

if TYPE_CHECKING:
    from app.state.run import Run


# A page of text in a window of its own: the guide, the list of shortcuts, what is stored where.

SIZE = (640, 560)


class TextDialog(QDialog):
    """Shows Markdown, or HTML that our own code made. It is not modal: a guide is read while the window is used.

    Attributes:
        text – the browser that shows it.
    """

    def __init__(self, title: str, text: str, parent: QWidget | None = None, *, is_html: bool = False) -> None:
        super().__init__(parent)
        self.resize(on_screen(self, *SIZE))
        self.setWindowTitle(title)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.text = QTextBrowser()
        self.text.setOpenLinks(False)  # links between documents of ours lead nowhere here
        self.text.setAccessibleName(title)
        self.text.setFont(theme.body_font())
        self.text.document().setDocumentMargin(2 * theme.SPACE)
        self.text.setHtml(text) if is_html else self.text.setMarkdown(text)
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
        buttons.rejected.connect(self.reject)
        column = QVBoxLayout(self)
        column.setContentsMargins(*(2 * theme.SPACE,) * 4)
        column.addWidget(self.text, 1)
        column.addWidget(buttons)


# ── help menu ────────────────────────────────────────────────────────────────────────────────────────────────────────

DOCUMENTS = {"What is stored where": "files.md"}
"""Title → file in docs/."""


class HelpWindow(FileWindow):
    """The part of the main window that explains itself.

    Attributes:
        qt_messages – the last warnings of Qt, for a report; the program's start sets them.
    """

    qt_messages: Collection[str] = ()

    def show_guide(self, place: str = CONTENTS) -> None:
        """Show a place of the guide; Back there leads to the page that is shown now."""
        origin = self.current_page
        self.show_page("guide")
        guide = self.pages["guide"]
        guide.show_place(place, origin if origin != "guide" else "")
        guide.view.setFocus()

    def show_glossary(self) -> None:
        """The glossary, with a line that searches it; it is opened once."""
        from app.state.guide import found_terms, glossary

        dialog = self.findChild(GlossaryDialog)
        if dialog is None:
            entries = glossary()
            dialog = GlossaryDialog(lambda typed: found_terms(entries, typed), self)
        dialog.show()
        dialog.raise_()
        dialog.activateWindow()

    def show_help_here(self) -> None:
        """Show what the guide says about the field, the chart or the finding that has the focus; its contents where there is none."""
        focused = QApplication.focusWidget()
        field = field_of(focused)
        self.show_guide(place_of_setting(field.setting.key) if field is not None else place_about(focused) or CONTENTS)

    def show_files(self) -> None:
        self._show_document("What is stored where")

    def show_shortcuts(self) -> None:
        """Every shortcut, by menu, as the desktop writes it."""
        TextDialog("Keyboard shortcuts", "".join(self._shortcuts()), self, is_html=True).show()

    def check_for_updates(self) -> None:
        self.session.updates.check_now()

    def set_update_checks(self) -> None:
        """Check for updates at every start, or no longer; says which."""
        from backend.utils.about import NO_FEED, feed

        prefs = self.session.prefs
        prefs.check_updates = not prefs.check_updates
        will = (
            "A newer version is asked for at start, once a day; nothing is downloaded."
            if prefs.check_updates
            else "No newer version is asked for."
        )
        self.session.messages.note(f"{will} {NO_FEED}" if prefs.check_updates and not feed() else will)

    def show_about(self) -> None:
        # Reads the metadata of every package, which the first paint does not wait for.
        from backend.utils import about

        AboutDialog(facts(), about.components(), self).open()

    def report_problem(self, problem: ProblemFacts | None = None) -> None:
        """Show the report of a problem: of this one, else of the last fault of the helper process, else an empty one to be filled in."""
        if self.findChild(ProblemDialog) is not None:
            return  # the first of several faults that follow from each other is the one to report
        problem = problem or self.session.last_fault or ProblemFacts(settings=self.session.draft.values())
        ProblemDialog(problem.sentence if problem.sentence != EMPTY else "What happened?", report(problem), self).show()

    def report_caught(self, sentence: str, trace: str) -> None:
        """Show the report of an exception in the window, or of the crash of the one before."""
        self.report_problem(ProblemFacts(sentence, trace, list(self.qt_messages), self.session.draft.values()))

    def report_run(self, run: Run) -> None:
        """Show the report of a run that ended by a fault of the program."""
        trace = str((run.ending or {}).get("traceback") or "")
        self.report_problem(ProblemFacts(run.problem, trace, run.log_tail(LOG_LINES), raw_settings(run.folder)))

    def _show_document(self, title: str) -> None:
        text = (project_root() / "docs" / DOCUMENTS[title]).read_text(encoding="utf-8")
        TextDialog(title, text, self).show()

    def _shortcuts(self) -> Iterator[str]:
        for top in self.menuBar().actions():
            rows = [action for action in _leaves(top) if not action.shortcut().isEmpty()]
            if rows:
                yield f"<h3>{escape(top.text())}</h3><table width='100%' cellpadding='3'>"
                yield from (
                    f"<tr><td>{escape(row.text())}</td><td align='right'>{_keys(row)}</td></tr>" for row in rows
                )
                yield "</table>"


def facts() -> dict[str, str]:
    """What About shows beside the icon; our own version first."""
    from backend.utils import about

    computes = machine.chip() if machine.has_gpu() else ""
    device = f"GPU of {computes}" if computes else "GPU" if machine.has_gpu() else "CPU"
    return about.versions() | {"Computes on": device}


def _leaves(action: QAction) -> Iterator[QAction]:
    menu = action.menu()
    if menu is None:
        yield action
        return
    for entry in menu.actions():  # pyright: ignore[reportAttributeAccessIssue]
        yield from _leaves(entry)


def _keys(action: QAction) -> str:
    return f"<b>{escape(key_name(action.shortcut()))}</b>"
