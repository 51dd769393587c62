"""Search over settings by label, key, other labels, block, name in other programs, labels of their choices, and help.

It emits the key of the chosen setting; the page scrolls to its field.
"""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QModelIndex, Qt, QTimer, Signal
from PySide6.QtGui import QAction, QStandardItem, QStandardItemModel
from PySide6.QtWidgets import QCompleter, QLineEdit, QWidget

from app import theme
from app.widgets.basic import icons
from backend.config.config import SECTIONS
from backend.config.other_programs.translation import other_names
from backend.config.setting import Setting

KEY = Qt.ItemDataRole.UserRole
"""Item role: the setting's key."""
WIDTH, POPUP_WIDTH = 220, 420
"""Of the line and of the list below it, in pixels before scaling."""
NARROWEST = 120
"""Width that the line keeps on a small screen."""


class SettingSearch(QLineEdit):
    """A line edit with a popup of matching settings.

    Signals:
        chosen(key of a setting) – the user chose a match.
    """

    chosen = Signal(str)

    def __init__(self, settings: Sequence[Setting], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._settings = list(settings)
        self.setPlaceholderText("Find a setting")
        self.setAccessibleName("Find a setting")
        self.setClearButtonEnabled(True)
        self.setProperty("role", "search")
        self.setMinimumWidth(theme.scaled(NARROWEST))  # fixed, it lay over the column beside it there
        self.setMaximumWidth(theme.scaled(WIDTH))
        self._icon_action: QAction = self.addAction(icons.icon("search"), QLineEdit.ActionPosition.LeadingPosition)
        self._update_icon()
        self._model = QStandardItemModel(self)
        # Connected before the completer connects to the line: it opens its popup with what the model then contains.
        self.textChanged.connect(self._update_matches)
        self._completer = QCompleter(self._model, self)
        # Unfiltered: the model is already reduced to the matches; a QCompleter compares only one role with the whole text.
        self._completer.setCompletionMode(QCompleter.CompletionMode.UnfilteredPopupCompletion)
        self._completer.setMaxVisibleItems(12)
        popup = self._completer.popup()
        assert popup is not None
        popup.setProperty("role", "matches")
        popup.setMinimumWidth(theme.scaled(POPUP_WIDTH))
        self.setCompleter(self._completer)
        self._completer.activated[QModelIndex].connect(self._choose_row)  # pyright: ignore[reportIndexIssue]
        self.returnPressed.connect(self._choose_first)
        theme.signals.changed.connect(self._update_icon)

    def take_focus(self) -> None:
        """Focus the line and select its text, so that typing replaces it."""
        self.setFocus(Qt.FocusReason.ShortcutFocusReason)
        self.selectAll()

    def matching_keys(self) -> list[str]:
        """Keys of the settings that match the text, best match first."""
        return [setting.key for setting in matching_settings(self.text(), self._settings)]

    def _update_matches(self, text: str) -> None:
        self._model.clear()
        for setting in matching_settings(text, self._settings):
            item = QStandardItem(f"{setting.label}  –  {setting.key}")
            item.setData(setting.key, KEY)
            item.setToolTip(f"<p>{setting.help}</p>")
            self._model.appendRow(item)

    def _choose_row(self, index: QModelIndex) -> None:
        self._choose(index.data(KEY))

    def _choose_first(self) -> None:
        keys = self.matching_keys()
        if keys:
            self._choose(keys[0])

    def _choose(self, key: str) -> None:
        # The completer writes its own text into the line after this signal; clear it once it has.
        QTimer.singleShot(0, self, self.clear)
        self.chosen.emit(key)

    def _update_icon(self) -> None:
        self._icon_action.setIcon(icons.icon("search", theme.palette().muted, 16))


def matching_settings(text: str, settings: Sequence[Setting]) -> list[Setting]:
    """Settings that contain every word of `text`, best match first (see `_rank`); none for an empty text."""
    words = [word for word in text.lower().replace("–", " ").split() if word]
    if not words:
        return []
    ranked = [(rank, setting) for setting in settings if (rank := _rank(words, setting)) is not None]
    return [setting for _, setting in sorted(ranked, key=lambda pair: pair[0])]  # stable: equals keep the form's order


def _rank(words: Sequence[str], setting: Setting) -> int | None:
    """How well a setting matches, 0 the best; None if a word occurs nowhere.

    0: the words are a label of it, its key or a name in another program; 1: a label or the key begins with them. From 2 on: every
    word occurs in the labels or key (2), or with its block (3), the names in other programs (4), the choices (5), the help (6) added.
    """
    phrase, key = " ".join(words), setting.key
    labels = [name.lower() for name in (setting.label, *setting.known_as)]
    other_programs = [name.lower() for name in other_names(setting.key)]
    entries = (f"{choice.label} {choice.value} {choice.sentence}" for choice in setting.choices)
    choices = " ".join((setting.default_entry, *entries)).lower()
    if phrase in (*labels, key, *other_programs):
        return 0
    if any(name.startswith(phrase) for name in (*labels, key)):
        return 1
    text = ""
    names = f"{' '.join(labels)} {key} {key.replace('_', ' ')}"
    block = f"{SECTIONS[setting.section]} {setting.group}".lower()
    for rank, part in enumerate((names, block, " ".join(other_programs), choices, setting.help.lower()), 2):
        text = f"{text} {part}"  # summed up: one word may be in the label and the next one in the help
        if all(word in text for word in words):
            return rank
    return None
