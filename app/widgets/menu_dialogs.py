"""The dialogs of the menus: presets, About with its licences, problem report, and preferences."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QAction, QGuiApplication
from PySide6.QtWidgets import QListWidget, QPlainTextEdit, QPushButton, QWidget

from app import theme
from app.state.messages import problems_to
from app.state.prefs import FOLDERS, Prefs
from app.state.presets import Preset
from app.state.processes import Service
from app.widgets.basic.controls import CheckBox, ComboBox, ElidedLabel
from app.widgets.basic.dialogs import Dialog, open_folder, open_path, save_file
from app.widgets.basic.icons import app_icon
from app.widgets.basic.labels import button, from_home, label, plain_tip, show_text
from app.widgets.basic.layout import TabArea, column, configure, grid, holder, row, wrap_in_card
from app.widgets.basic.tables import BaseTable, Column, TextsModel
from app.widgets.form.value_text import value_label
from app.widgets.hub_dialogs import HubAccount
from backend.utils.disk import save_as
from backend.utils.hub_cache import hub_cache
from backend.utils.places import runs_folder

if TYPE_CHECKING:
    from backend.utils.about import Component

NAME = "GRPO Studio"
CLOSING = {"ask": "Ask", "keep": "Keep training", "stop": "Stop and save"}  # what closing does while a run trains
FOLDER_HINT = "A folder that you choose is used from the next start of the window, by all that it starts."
ANONYMOUS = "Not logged in. Uploads and gated models need an account."
NO_TEXT = "This package names its licence and ships no text of it."
EXPLANATION = (
    "Nothing is sent. Read the report, remove what you want to keep private, and paste it into a message or an issue. "
    "Your home folder, user name, access tokens, and the paths and prompts of your settings are left out already."
)


class PresetPanel(Dialog):
    """The dialog over `presets`, with a preview of the changes to the form's `values`."""

    taken = Signal(object)  # Preset

    def __init__(self, presets: Sequence[Preset], values: dict[str, Any], parent: QWidget | None = None) -> None:
        super().__init__("Presets", parent, (720, 480))
        self._presets, self._values = list(presets), values
        self.list = configure(QListWidget(), name="Presets", spacing=3, itemActivated=self._apply)
        self.list.addItems([preset.title for preset in presets])
        self.title, self.sentence = label(font=theme.title_font()), label(wrap=True, role="muted")
        self.keeps = label(wrap=True, role="muted")
        self.model = TextsModel(self, (Column("Setting"), Column("Now"), Column("Then")))
        none, focus = BaseTable.SelectionMode.NoSelection, Qt.FocusPolicy.TabFocus  # to scroll it with the arrows
        self.table = BaseTable(model=self.model, name="Changes of the preset", selectionMode=none, focusPolicy=focus)
        self.apply = button("Apply", self._apply, primary=True)
        buttons = row(None, button("Cancel", self.reject), self.apply)
        choices = wrap_in_card(self.list, width=176)
        preview = column(self.title, self.sentence, (wrap_in_card(self.table), 1), self.keeps)
        space = 2 * theme.SPACE
        column((row(choices, (preview, 1), spacing=space), 1), buttons, into=self, spacing=space, margins=space)
        self.list.currentRowChanged.connect(self._show_chosen)
        self.list.setCurrentRow(0)

    @property
    def chosen(self) -> Preset:
        return self._presets[max(0, self.list.currentRow())]

    def _show_chosen(self) -> None:
        preset = self.chosen
        changes = preset.changes(self._values)
        self.title.setText(preset.title)
        self.sentence.setText(preset.sentence)
        self.model.set_rows(
            [(each.label, value_label(each, old), value_label(each, new)) for each, old, new in changes]
        )
        self.apply.setEnabled(bool(changes))
        keeps = "Model, data, columns and rewards stay as they are. You can undo it."
        if preset.replaces:
            keeps = "It replaces the whole form, including model, data and rewards. You can undo it."
        self.keeps.setText(keeps if changes else "The form is like this already.")

    def _apply(self) -> None:
        if self.apply.isEnabled():  # Return or a double click in the list does not go through the button
            self.taken.emit(self.chosen)
            self.accept()


class AboutDialog(Dialog):
    def __init__(
        self, facts: Mapping[str, str], components: Sequence[Component], parent: QWidget | None = None
    ) -> None:
        super().__init__(f"About {NAME}", parent, (900, 640))
        self._components = list(components)
        versions = "\n".join(f"{name}: {value}" for name, value in facts.items())
        never, top = Qt.ScrollBarPolicy.ScrollBarAlwaysOff, Qt.AlignmentFlag.AlignTop
        self.list = configure(
            QListWidget(),
            name="Packages",
            horizontalScrollBarPolicy=never,
            minimumHeight=theme.scaled(160),
            currentRowChanged=self._show,
        )
        self.list.addItems([f"{part.name}  {part.version}" for part in self._components])
        self.text = configure(QPlainTextEdit(readOnly=True), name="Licence", font=theme.mono_font(theme.CAPTION))
        self._licence = label(role="muted", wrap=True)
        picture = label(align=top, pixmap=app_icon().pixmap(theme.scaled_size(QSize(88, 88))))
        ours, *others = facts.items()
        figures = theme.figures_font()
        lines = [
            (label(name, role="muted", align=top), label(value, figures, wrap=True, selectable=True))
            for name, value in others
        ]
        facts_grid = grid(lines, stretch=1, spacing=(2 * theme.SPACE, 2))
        purpose = "Fine-tunes language models with GRPO, on this machine. Nothing leaves it unless you send it."
        texts = (label(f"{NAME} {ours[1]}", theme.title_font()), label(purpose, role="muted", wrap=True))
        head = row(picture, (column(*texts, theme.SPACE, facts_grid, spacing=4), 1), spacing=3 * theme.SPACE)
        licences = row(
            wrap_in_card(self.list, width=232), (column(self._licence, (self.text, 1)), 1), spacing=2 * theme.SPACE
        )
        heading = label("Licences of its components", theme.heading_font())
        content = holder(column(head, heading, (licences, 1), spacing=2 * theme.SPACE, margins=3 * theme.SPACE))
        scrolled = TabArea(content=content)
        box = self.close_box(button("Copy versions", lambda: QGuiApplication.clipboard().setText(versions)))
        box.setContentsMargins(3 * theme.SPACE, 0, 3 * theme.SPACE, 3 * theme.SPACE)
        column((scrolled, 1), box, into=self)
        self.list.setCurrentRow(0)

    def _show(self, place: int) -> None:
        part = self._components[max(0, place)]
        self._licence.setText(f"{part.name} {part.version}: {part.licence}")
        self.text.setPlainText(part.text or NO_TEXT)


class ProblemDialog(Dialog):
    def __init__(self, title: str, report: str, parent: QWidget | None = None) -> None:
        super().__init__("Report a problem", parent, (680, 560))
        self.text = configure(QPlainTextEdit(report, tabChangesFocus=True), name="Report", font=theme.mono_font())
        self.done_label = label(role="muted", wrap=True, shown=False)
        box = self.close_box(button("Copy", self.copy, role="primary"), button("Save…", self.save))
        texts = (label(title, theme.heading_font(), wrap=True), label(EXPLANATION, role="muted", wrap=True))
        parts = (*texts, (self.text, 1), self.done_label, box)
        column(*parts, into=self, spacing=2 * theme.SPACE, margins=3 * theme.SPACE)

    def copy(self) -> None:
        QGuiApplication.clipboard().setText(self.text.toPlainText())
        show_text(self.done_label, "Copied.")

    def save(self) -> None:
        name = f"grpo-studio-problem-{date.today():%Y-%m-%d}.txt"
        if path := save_file(self, "report", "Save the report", name, "Text (*.txt)"):
            with problems_to(partial(show_text, self.done_label)):
                save_as(path, self.text.toPlainText())
                show_text(self.done_label, f"Saved as {path.name}.")


class FolderLine:
    """A folder by its kind, one of FOLDERS: where it is, and buttons that open and change it."""

    def __init__(self, prefs: Prefs, kind: str, words: str, folder: Path) -> None:
        self._prefs, self._kind, self._words = prefs, kind, words
        self.place = ElidedLabel(colour="text")
        self.show_button = button("Show", lambda: open_path(self.folder), name=f"Show the folder of {words}")
        self.choose = button("Choose…", self._choose, name=f"Choose the folder of {words}")
        variable = FOLDERS[kind]
        is_given = bool(os.environ.get(variable)) and os.environ[variable] != prefs.folder_for(kind)
        configure(self.choose, enabled=not is_given, toolTip=f"Set by {variable}" if is_given else "")
        self._show(folder)

    def _choose(self) -> None:
        chosen = open_folder(self.choose, self._kind, f"Folder of {self._words}")
        if chosen is not None:
            self._prefs.set_folder_for(self._kind, chosen)
            self._show(chosen)

    def _show(self, folder: Path) -> None:
        self.folder = folder
        configure(self.place, text=from_home(str(folder)), toolTip=plain_tip(str(folder)))


class PreferencesDialog(Dialog):
    def __init__(
        self, prefs: Prefs, themes: Mapping[str, tuple[str, QAction]], service: Service, parent: QWidget | None = None
    ) -> None:
        """`themes`: the text of each, to which a desktop adds no “&” as to the action's, and the action."""
        super().__init__("Preferences", parent)
        self.setMinimumWidth(theme.scaled(560))
        self.theme = ComboBox(name="Theme", items={mode: text for mode, (text, _) in themes.items()})
        self.theme.choose(prefs.theme)
        self.theme.activated.connect(lambda: themes[self.theme.currentData()][1].trigger())
        self.closing = ComboBox(name="When the window is closed while a run trains", items=CLOSING)
        self.closing.choose(prefs.when_closing)
        self.closing.activated.connect(lambda: setattr(prefs, "when_closing", self.closing.currentData()))
        self.notifies = CheckBox(
            "Notify me when a run ends or is in trouble",
            tip="Only while the window is not in front",
            checked=prefs.notifies,
            clicked=lambda on: setattr(prefs, "notifies", on),
        )
        self.shows_progress = CheckBox(
            "Show the percent of the run on the app's icon",
            shown=sys.platform == "darwin",
            checked=prefs.shows_progress,
            clicked=lambda on: setattr(prefs, "shows_progress", on),
        )
        muted = partial(label, role="muted")
        window = grid(((muted("Theme"), self.theme), (muted("Closed while a run trains"), self.closing)), stretch=1)
        self.folders = {
            "runs": FolderLine(prefs, "runs", "runs", runs_folder()),
            "models": FolderLine(prefs, "models", "models and datasets", hub_cache()),
        }
        lines = [
            (muted(words), each.place, row(each.show_button, each.choose))
            for words, each in zip(("Runs", "Models and datasets"), self.folders.values(), strict=True)
        ]
        self.account = HubAccount(service, is_always_open=True)
        self.account.label.setMinimumHeight(2 * self.fontMetrics().lineSpacing())  # a problem may need both lines
        self.account.ask(ANONYMOUS, "A token is stored ({source}). {problem}")
        heading = partial(label, font=theme.heading_font())
        parts = (
            *(heading("Window"), window, self.notifies, self.shows_progress, theme.SPACE),
            *(heading("Folders"), grid(lines, stretch=1), muted(FOLDER_HINT, wrap=True), theme.SPACE),
            *(heading("Hugging Face"), self.account, None, self.close_box()),
        )
        column(*parts, into=self, spacing=12, margins=3 * theme.SPACE)
        for each in self.findChildren(QPushButton):
            configure(each, autoDefault=False, default=False)  # Return in the token only logs in
