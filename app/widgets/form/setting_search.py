"""Search over settings: by label, key, what other programs call them, their menus' words, and their help; choosing one
leads to its field.
"""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QModelIndex, Qt, QTimer, Signal
from PySide6.QtGui import QAction, QStandardItem, QStandardItemModel
from PySide6.QtWidgets import QCompleter, QLineEdit, QWidget

from app import theme
from app.widgets.basic import icons
from backend.spec.aliases import other_names
from backend.spec.setting import Setting

KEY = Qt.ItemDataRole.UserRole
WIDTH = 220


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
        self.setFixedWidth(theme.scaled(WIDTH))
        self._glass: QAction = self.addAction(icons.icon("search"), QLineEdit.ActionPosition.LeadingPosition)
        self._draw()
        self._model = QStandardItemModel(self)
        self.textChanged.connect(self._look)  # before the completer, which shows what then stands in the model
        self._completer = QCompleter(self._model, self)
        self._completer.setCompletionMode(QCompleter.CompletionMode.UnfilteredPopupCompletion)
        self._completer.setMaxVisibleItems(12)
        popup = self._completer.popup()
        assert popup is not None
        popup.setMinimumWidth(theme.scaled(320))
        self.setCompleter(self._completer)
        self._completer.activated[QModelIndex].connect(self._choose)  # pyright: ignore[reportIndexIssue]
        self.returnPressed.connect(self._choose_first)
        theme.signals.changed.connect(self._draw)

    def take_focus(self) -> None:
        self.setFocus(Qt.FocusReason.ShortcutFocusReason)
        self.selectAll()

    def found(self) -> list[str]:
        """Keys of the settings that match what stands in the field, the best first."""
        return [setting.key for setting in matching_settings(self.text(), self._settings)]

    def _look(self, text: str) -> None:
        self._model.clear()
        for setting in matching_settings(text, self._settings):
            item = QStandardItem(f"{setting.label}  –  {setting.key}")
            item.setData(setting.key, KEY)
            item.setToolTip(f"<p>{setting.help}</p>")
            self._model.appendRow(item)

    def _choose(self, index: QModelIndex) -> None:
        self._go_to(index.data(KEY))

    def _choose_first(self) -> None:
        keys = self.found()
        if keys:
            self._go_to(keys[0])

    def _go_to(self, key: str) -> None:
        # The completer writes its own text into the line after this signal; clear it once it has.
        QTimer.singleShot(0, self, self.clear)
        self.chosen.emit(key)

    def _draw(self) -> None:
        self._glass.setIcon(icons.icon("search", theme.palette().muted, 16))


def matching_settings(text: str, settings: Sequence[Setting]) -> list[Setting]:
    """Settings that contain every word of `text`, best match first (see `_rank`); none for an empty text."""
    words = [word for word in text.lower().replace("–", " ").split() if word]
    if not words:
        return []
    ranked = [
        (rank, place, setting) for place, setting in enumerate(settings) if (rank := _rank(words, setting)) is not None
    ]
    return [setting for _, _, setting in sorted(ranked, key=lambda one: one[:2])]


def _rank(words: Sequence[str], setting: Setting) -> int | None:
    """0 for the name itself, then its beginning, names, other programs' names, menus, help; None for no match."""
    whole, label, key = " ".join(words), setting.label.lower(), setting.key
    elsewhere = [name.lower() for name in other_names(setting.key)]
    others = " ".join(elsewhere)
    menu = " ".join(f"{choice.label} {choice.value} {choice.sentence}" for choice in setting.choices).lower()
    if whole in (label, key, *elsewhere):
        return 0
    if label.startswith(whole) or key.startswith(whole):
        return 1
    text = ""
    for rank, more in enumerate((f"{label} {key} {key.replace('_', ' ')}", others, menu, setting.help.lower()), 2):
        text = f"{text} {more}"
        if all(word in text for word in words):
            return rank
    return None
