"""The Help menu: help on a field, the guide, the glossary, shortcuts, documents, About, and problem reports."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from html import escape
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject
from PySide6.QtGui import QAction
from PySide6.QtWidgets import QApplication

from app.state.guide import CONTENTS, place_of_setting
from app.state.run_files import log_lines
from app.widgets.basic.dialogs import TextDialog
from app.widgets.basic.labels import key_name, place_about
from app.widgets.form.field import field_of
from app.widgets.menu_dialogs import AboutDialog, GlossaryDialog, ProblemDialog
from backend.runs.archive import raw_settings
from backend.utils import about, machine
from backend.utils.about import EMPTY, LOG_LINES, NO_FEED, ProblemFacts, feed, report
from backend.utils.places import project_root

if TYPE_CHECKING:
    from app.state.run import Run
    from app.window import Window

DOCUMENTS = {"What is stored where": "runs.md"}  # heading of a section → file in docs/


class HelpMenu(QObject):
    """`qt_messages`: the last warnings of Qt, for a report."""

    def __init__(self, window: Window) -> None:
        super().__init__(window)
        self._window, self.session = window, window.session
        self.qt_messages: Collection[str] = ()

    def show_guide(self, place: str = CONTENTS) -> None:
        origin = self._window.current_page
        self._window.show_page("guide")
        guide = self._window.pages["guide"]
        guide.show_place(place, origin if origin != "guide" else "")
        guide.view.setFocus()

    def show_help_here(self) -> None:
        """Show what the guide says about the field, chart or finding with the focus."""
        focused = QApplication.focusWidget()
        field = field_of(focused)
        self.show_guide(place_of_setting(field.setting.key) if field is not None else place_about(focused) or CONTENTS)

    def show_glossary(self) -> None:
        dialog = self._window.findChild(GlossaryDialog) or GlossaryDialog(self._window)
        dialog.show()
        dialog.raise_()
        dialog.activateWindow()

    def show_files(self) -> None:
        title = "What is stored where"
        text = (project_root() / "docs" / DOCUMENTS[title]).read_text(encoding="utf-8")
        section = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
        TextDialog(title, section, self._window).show()

    def show_shortcuts(self) -> None:
        parts = []
        for top in self._window.menuBar().actions():
            rows = [action for action in _leaves(top) if not action.shortcut().isEmpty()]
            if rows:
                parts.append(f"<h3>{escape(top.text())}</h3><table width='100%' cellpadding='3'>")
            for row in rows:
                keys = f"<b>{escape(key_name(row.shortcut()))}</b>"
                parts.append(f"<tr><td>{escape(row.text())}</td><td align='right'>{keys}</td></tr>")
            parts.append("</table>" if rows else "")
        TextDialog("Keyboard shortcuts", "".join(parts), self._window, is_html=True).show()

    def set_update_checks(self) -> None:
        prefs = self.session.prefs
        prefs.check_updates = not prefs.check_updates
        will = "No newer version is asked for."
        if prefs.check_updates:
            will = "A newer version is asked for at start, once a day; nothing is downloaded."
            will += "" if feed() else f" {NO_FEED}"
        self.session.messages.say(will)

    def show_about(self) -> None:
        computes = machine.chip() if machine.has_gpu() else ""
        device = f"GPU of {computes}" if computes else "GPU" if machine.has_gpu() else "CPU"
        facts = about.versions() | {"Computes on": device}
        AboutDialog(facts, about.components(), self._window).open()

    def report_problem(self, problem: ProblemFacts | None = None) -> None:
        """Show the report of this problem, or of the helper process's last failure, or an empty one."""
        if self._window.findChild(ProblemDialog) is not None:
            return  # the first of several faults that follow from each other is the one to report
        problem = problem or self.session.last_fault or ProblemFacts(settings=self.session.draft.values())
        title = problem.sentence if problem.sentence != EMPTY else "What happened?"
        ProblemDialog(title, report(problem), self._window).show()

    def report_caught(self, sentence: str, trace: str) -> None:
        self.report_problem(ProblemFacts(sentence, trace, list(self.qt_messages), self.session.draft.values()))

    def report_run(self, run: Run) -> None:
        trace = str((run.data.ending or {}).get("traceback") or "")
        log = log_lines(run.folder.log, LOG_LINES)
        self.report_problem(ProblemFacts(run.problem, trace, log, raw_settings(run.folder)))


def _leaves(action: QAction) -> Iterator[QAction]:
    menu = action.menu()
    if menu is None:
        yield action
        return
    for entry in menu.actions():  # pyright: ignore[reportAttributeAccessIssue]
        yield from _leaves(entry)
