"""The preferences: what the desktop is told, and what becomes of a training when the window is closed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import date
from html import escape
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import (
    QDialog,
    QDialogButtonBox,
    QFormLayout,
    QGridLayout,
    QHBoxLayout,
    QHeaderView,
    QLineEdit,
    QListWidget,
    QListWidgetItem,
    QPlainTextEdit,
    QTableWidget,
    QTableWidgetItem,
    QTextBrowser,
    QVBoxLayout,
    QWidget,
)

from app import theme
from app.state.presets import Preset
from app.widgets.basic import icons
from app.widgets.basic.controls import CheckBox, ComboBox
from app.widgets.basic.dialogs import save_file
from app.widgets.basic.icons import app_icon
from app.widgets.basic.labels import PlainLabel, button, label, plain_tip
from app.widgets.basic.layout import TabArea, on_screen, wrap_in_card
from app.widgets.form import value_text
from backend.config.setting import Setting
from backend.utils.disk_faults import DiskError
from backend.utils.whole_file import save_as

if TYPE_CHECKING:
    from backend.utils.about import Component

CLOSING = {"ask": "Ask", "keep": "Keep training", "stop": "Stop and save"}
"""What becomes of a training when the window is closed → its words."""


class PreferencesDialog(QDialog):
    """Every choice takes effect at once.

    Attributes:
        notifies, shows_progress – check boxes.
        closing – the choice among CLOSING.

    Signals:
        notifies_changed(bool), shows_progress_changed(bool), closing_changed(str) – the user has chosen.
    """

    notifies_changed = Signal(bool)
    shows_progress_changed = Signal(bool)
    closing_changed = Signal(str)

    def __init__(self, *, notifies: bool, shows_progress: bool, closing: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle("Preferences")
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.notifies = CheckBox("Notify me when a run ends or is in trouble")
        self.notifies.setToolTip("Only while the window is not in front")
        self.notifies.setChecked(notifies)
        self.notifies.clicked.connect(self.notifies_changed)
        self.shows_progress = CheckBox("Show the percent of the run on the app's icon")
        self.shows_progress.setChecked(shows_progress)
        self.shows_progress.clicked.connect(self.shows_progress_changed)
        self.closing = ComboBox()
        for value, text in CLOSING.items():
            self.closing.addItem(text, value)
        self.closing.choose(closing)
        self.closing.setAccessibleName("When the window is closed while a run trains")
        self.closing.activated.connect(lambda _: self.closing_changed.emit(self.closing.currentData()))
        self._lay_out()

    def _lay_out(self) -> None:
        choices = QFormLayout()
        choices.setHorizontalSpacing(2 * theme.SPACE)
        choices.addRow(label("Closed while a run trains"), self.closing)
        done = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
        done.rejected.connect(self.reject)
        column = QVBoxLayout(self)
        column.setContentsMargins(*(3 * theme.SPACE,) * 4)
        column.setSpacing(2 * theme.SPACE)
        for part in (self.notifies, self.shows_progress):
            column.addWidget(part)
        column.addLayout(choices)
        column.addStretch(1)
        column.addWidget(done)


NAME = "GRPO Studio"
ABOUT_SIZE = (900, 640)
ICON, PACKAGES_WIDTH, LEAST_LIST = 88, 232, 160
NO_TEXT = "This package names its licence and ships no text of it."


class AboutDialog(QDialog):
    """`facts` are shown as name and value; `components` with the licence of the one that is chosen. The first is GRPO Studio itself.

    Attributes:
        list, text – the components, and the licence of the current one.
        facts – what *Copy* puts into the clipboard, a line each.
    """

    def __init__(
        self, facts: Mapping[str, str], components: Sequence[Component], parent: QWidget | None = None
    ) -> None:
        super().__init__(parent)
        self.setWindowTitle(f"About {NAME}")
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self._components = list(components)
        self.facts = "\n".join(f"{name}: {value}" for name, value in facts.items())
        self.list, self.text = QListWidget(), QPlainTextEdit(readOnly=True)
        self.list.setAccessibleName("Packages")
        self.list.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)  # a long name is elided
        self.list.addItems([f"{part.name}  {part.version}" for part in self._components])
        self.text.setAccessibleName("Licence")
        self.text.setFont(theme.mono_font(theme.CAPTION))
        self._licence = label(role="muted", wrap=True)
        self.list.setMinimumHeight(theme.scaled(LEAST_LIST))
        content = QWidget()
        content.setObjectName("page")
        column = QVBoxLayout(content)
        column.setContentsMargins(*(3 * theme.SPACE,) * 4)
        column.setSpacing(2 * theme.SPACE)
        column.addLayout(self._head(facts))
        column.addWidget(label("Licences of what it consists of", theme.heading_font()))
        column.addLayout(self._licences(), 1)
        scrolled = TabArea()  # on a screen with little room, as one at 200 %
        scrolled.setWidget(content)
        whole = QVBoxLayout(self)
        whole.setContentsMargins(0, 0, 0, 0)
        whole.addWidget(scrolled, 1)
        buttons = self._buttons()
        buttons.setContentsMargins(3 * theme.SPACE, 0, 3 * theme.SPACE, 3 * theme.SPACE)
        whole.addWidget(buttons)
        self.resize(on_screen(self, *ABOUT_SIZE))
        self.list.currentRowChanged.connect(self._show)
        self.list.setCurrentRow(0)

    def _head(self, facts: Mapping[str, str]) -> QHBoxLayout:
        picture = PlainLabel()
        picture.setPixmap(app_icon().pixmap(theme.scaled_size(QSize(ICON, ICON))))
        picture.setAlignment(Qt.AlignmentFlag.AlignTop)
        ours, *others = facts.items()
        column = QVBoxLayout()
        column.setSpacing(theme.SPACE // 2)
        column.addWidget(label(f"{NAME} {ours[1]}", theme.title_font()))
        column.addWidget(
            label(
                "Fine-tunes language models with GRPO, on this machine. Nothing leaves it unless you send it.",
                role="muted",
                wrap=True,
            )
        )
        grid = QGridLayout()
        grid.setHorizontalSpacing(2 * theme.SPACE)
        grid.setVerticalSpacing(2)
        grid.setColumnStretch(1, 1)
        for row, (name, value) in enumerate(others):
            grid.addWidget(label(name, role="muted"), row, 0, Qt.AlignmentFlag.AlignTop)
            grid.addWidget(label(value, theme.figures_font(), wrap=True, selectable=True), row, 1)
        column.addSpacing(theme.SPACE)
        column.addLayout(grid)
        across = QHBoxLayout()
        across.setSpacing(3 * theme.SPACE)
        across.addWidget(picture)
        across.addLayout(column, 1)
        return across

    def _licences(self) -> QHBoxLayout:
        packages = wrap_in_card(self.list)
        packages.setFixedWidth(theme.scaled(PACKAGES_WIDTH))
        right = QVBoxLayout()
        right.setSpacing(theme.SPACE)
        right.addWidget(self._licence)
        right.addWidget(self.text, 1)
        across = QHBoxLayout()
        across.setSpacing(2 * theme.SPACE)
        across.addWidget(packages)
        across.addLayout(right, 1)
        return across

    def _buttons(self) -> QDialogButtonBox:
        box = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
        box.addButton(button("Copy versions", self.copy), QDialogButtonBox.ButtonRole.ActionRole)
        box.rejected.connect(self.reject)
        return box

    def copy(self) -> None:
        """Put the versions into the clipboard."""
        QGuiApplication.clipboard().setText(self.facts)

    def _show(self, row: int) -> None:
        part = self._components[max(0, row)]
        self._licence.setText(f"{part.name} {part.version}: {part.licence}")
        self.text.setPlainText(part.text or NO_TEXT)


GLOSSARY_SIZE = (680, 620)


class Term(Protocol):
    """What the dialog shows of an entry; `app.state.guide.GlossaryEntry` is one."""

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
        self.resize(on_screen(self, *GLOSSARY_SIZE))
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


PROBLEM_SIZE = (680, 560)
EXPLANATION = (
    "Nothing is sent. Read the report, take out what you would rather keep, and paste it into a message or an issue yourself. "
    "Your home folder, user name and access tokens were left out, and the paths and prompts of your settings."
)


class ProblemDialog(QDialog):
    """Shows one report, which can be edited. Not modal: the window may still be needed to say what was done.

    Attributes:
        text – the editor with the report.
        done_label – says what became of it.
    """

    def __init__(self, title: str, report: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.resize(on_screen(self, *PROBLEM_SIZE))
        self.setWindowTitle("Report a problem")
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.text = QPlainTextEdit(report)
        self.text.setTabChangesFocus(True)
        self.text.setFont(theme.mono_font())
        self.text.setAccessibleName("Report")
        self.done_label = label(role="muted", wrap=True)
        self.done_label.hide()
        column = QVBoxLayout(self)
        column.setContentsMargins(*(3 * theme.SPACE,) * 4)
        column.setSpacing(2 * theme.SPACE)
        column.addWidget(label(title, theme.heading_font(), wrap=True))
        column.addWidget(label(EXPLANATION, role="muted", wrap=True))
        column.addWidget(self.text, 1)
        column.addWidget(self.done_label)
        column.addWidget(self._buttons())

    def copy(self) -> None:
        """Put the report, as edited, into the clipboard."""
        QGuiApplication.clipboard().setText(self.text.toPlainText())
        self._tell("Copied.")

    def save(self) -> None:
        """Write the report, as edited, to a file that the user chooses."""
        path = self.choose_path()
        if path is None:
            return
        try:
            save_as(path, self.text.toPlainText())
        except DiskError as fault:
            self._tell(fault.faults[0].sentence)
        else:
            self._tell(f"Saved as {path.name}.")

    def _tell(self, sentence: str) -> None:
        self.done_label.setText(sentence)
        self.done_label.show()

    def choose_path(self) -> Path | None:
        name = f"grpo-studio-problem-{date.today():%Y-%m-%d}.txt"
        return save_file(self, "report", "Save the report", name, "Text (*.txt)")

    def _buttons(self) -> QDialogButtonBox:
        box, role = QDialogButtonBox(QDialogButtonBox.StandardButton.Close), QDialogButtonBox.ButtonRole
        box.addButton(button("Copy", self.copy, primary=True), role.ActionRole)
        box.addButton(button("Save…", self.save), role.ActionRole)
        box.rejected.connect(self.reject)
        return box


PRESETS_SIZE = (720, 480)
PRESETS_WIDTH = 176
MAX_CHARS = 60
"""Most characters of a value in the table."""


class PresetPanel(QDialog):
    """The dialog over `presets`; `values` are the form's present ones, which the preview compares with.

    Attributes:
        list, table – the presets, and the changes of the selected one: setting, value now, value then.
        title, sentence, keeps – labels: its title, its sentence, and what it leaves unchanged.
        buttons, apply – the button box, and its Apply button.

    Signals:
        taken(Preset) – the user applies it.
    """

    taken = Signal(object)

    def __init__(self, presets: Sequence[Preset], values: dict[str, Any], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.resize(on_screen(self, *PRESETS_SIZE))
        self.setWindowTitle("Presets")
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)  # else every dialog lives on as a child of the window
        self._presets, self._values = list(presets), values
        self.list = QListWidget()
        self.list.setAccessibleName("Presets")
        self.list.setSpacing(3)
        self.list.addItems([preset.title for preset in presets])
        self.title, self.sentence = label(font=theme.title_font()), label(wrap=True, role="muted")
        self.keeps = label(wrap=True, role="muted")
        self.table = _change_table()
        self.buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Cancel)
        self.apply = self.buttons.addButton("Apply", QDialogButtonBox.ButtonRole.AcceptRole)
        self.apply.setProperty("role", "primary")
        self.apply.setDefault(True)
        self._lay_out()
        self._connect()
        self.list.setCurrentRow(0)

    @property
    def chosen(self) -> Preset:
        """The selected preset."""
        return self._presets[max(0, self.list.currentRow())]  # −1 while nothing is selected

    def _lay_out(self) -> None:
        choices, changes = wrap_in_card(self.list), wrap_in_card(self.table)
        choices.setFixedWidth(theme.scaled(PRESETS_WIDTH))
        preview = QVBoxLayout()
        preview.setSpacing(theme.SPACE)
        for part in (self.title, self.sentence, changes, self.keeps):
            preview.addWidget(part, 1 if part is changes else 0)
        across = QHBoxLayout()
        across.setSpacing(2 * theme.SPACE)
        across.addWidget(choices)
        across.addLayout(preview, 1)
        column = QVBoxLayout(self)
        column.setContentsMargins(*(2 * theme.SPACE,) * 4)
        column.setSpacing(2 * theme.SPACE)
        column.addLayout(across, 1)
        column.addWidget(self.buttons)

    def _connect(self) -> None:
        self.list.currentRowChanged.connect(self._show_chosen)
        self.list.itemActivated.connect(self._apply)
        self.buttons.accepted.connect(self._apply)
        self.buttons.rejected.connect(self.reject)

    def _show_chosen(self, _row: int = 0) -> None:
        preset = self.chosen
        changes = preset.changes(self._values)
        self.title.setText(preset.title)
        self.sentence.setText(preset.sentence)
        self.table.setRowCount(len(changes))
        for row, (setting, before, after) in enumerate(changes):
            for column, text in enumerate((setting.label, value_label(setting, before), value_label(setting, after))):
                item = QTableWidgetItem(text)
                item.setToolTip(plain_tip(text))  # the view elides what is wider than its column
                self.table.setItem(row, column, item)
        self.apply.setEnabled(bool(changes))
        self.keeps.setText(_kept_sentence(preset, len(changes)))

    def _apply(self, _item: QListWidgetItem | None = None) -> None:
        if (
            self.apply.isEnabled()
        ):  # activating a row of the list, by Return or a double click, does not go through the button
            self.taken.emit(self.chosen)
            self.accept()


def _change_table() -> QTableWidget:
    table = QTableWidget(0, 3)
    table.setHorizontalHeaderLabels(["Setting", "Now", "Then"])
    table.setAccessibleName("What the preset changes")
    table.verticalHeader().hide()
    table.setShowGrid(False)
    table.setEditTriggers(QTableWidget.EditTrigger.NoEditTriggers)
    table.setSelectionMode(QTableWidget.SelectionMode.NoSelection)
    # Reachable by Tab, to scroll it with the arrows; but Tab leads out of it again and not from cell to cell.
    table.setFocusPolicy(Qt.FocusPolicy.TabFocus)
    table.setTabKeyNavigation(False)
    header = table.horizontalHeader()
    header.setDefaultAlignment(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter)
    header.setSectionResizeMode(QHeaderView.ResizeMode.Stretch)
    header.setHighlightSections(False)
    return table


def _kept_sentence(preset: Preset, changes: int) -> str:
    if not changes:
        return "The form is like this already."
    if preset.replaces:
        return "It replaces the whole form: model, data and rewards too. Undo brings everything back."
    return "Model, data, columns and rewards stay as they are. Undo brings everything back."


def value_label(setting: Setting, value: Any) -> str:
    """A value as the form shows it, on one line of at most MAX_CHARS characters."""
    if setting.kind == "choice":
        text = next((choice.label for choice in setting.choices if choice.value == value), str(value))
    elif setting.kind == "bool":
        text = "On" if value is True else "Off"
    elif isinstance(value, list):
        text = value_text.list_text([str(item) for item in value])
    elif setting.kind in ("int", "float"):
        text = value_text.number_text(value)
    else:
        text = value_text.path_text(value) if value is not None else ""
    line = " ".join(text.split())
    return (line if len(line) <= MAX_CHARS else f"{line[: MAX_CHARS - 1]}…") or "empty"
