"""Search over settings by label, key, block, names in other programs, choices and help."""

from collections.abc import Sequence

from PySide6.QtCore import QModelIndex, QPersistentModelIndex, Qt, QTimer, Signal
from PySide6.QtGui import QStandardItem, QStandardItemModel
from PySide6.QtWidgets import QCompleter, QLineEdit

from app import theme
from app.widgets.basic.controls import SearchEdit
from app.widgets.basic.layout import configure
from backend.config.config import SECTIONS
from backend.config.other_programs.translation import other_names
from backend.config.setting import Setting

KEY = Qt.ItemDataRole.UserRole  # item role: the setting's key


class SettingSearch(SearchEdit):
    chosen = Signal(str)  # key of a setting

    def __init__(self, settings: Sequence[Setting]) -> None:
        super().__init__("Find a setting", minimumWidth=theme.scaled(120), maximumWidth=theme.scaled(220))
        self._settings = list(settings)
        self._model = QStandardItemModel(self)
        # Connected before the completer connects to the line: it opens its popup with what the model then contains.
        self.textChanged.connect(self._update_matches)
        # The model holds the matches already; a filtering QCompleter would compare one role with the whole text.
        unfiltered = QCompleter.CompletionMode.UnfilteredPopupCompletion
        completer = Completer(self._model, self, completionMode=unfiltered, maxVisibleItems=12)
        popup = completer.popup()
        assert popup is not None
        configure(popup, role="matches", minimumWidth=theme.scaled(420))
        self.setCompleter(completer)
        completer.activated[QModelIndex].connect(lambda index: self._choose(index.data(KEY)))  # pyright: ignore
        self.returnPressed.connect(self._choose_first)

    def _update_matches(self, text: str) -> None:
        self._model.clear()
        for setting in matching_settings(text, self._settings):
            item = QStandardItem(f"{setting.label}  –  {setting.key}")
            item.setData(setting.key, KEY)
            item.setToolTip(f"<p>{setting.help}</p>")
            self._model.appendRow(item)
        if text.strip() and not self._model.rowCount():
            nothing = QStandardItem("No matching setting")
            nothing.setEnabled(False)
            self._model.appendRow(nothing)

    def _choose_first(self) -> None:
        popup = self.completer().popup()
        assert popup is not None
        reached = popup.currentIndex().data(KEY) if popup.isVisible() else None
        popup.hide()
        if key := reached or (self._model.rowCount() and self._model.item(0).data(KEY)):
            self._choose(key)

    def _choose(self, key: str) -> None:
        QTimer.singleShot(0, self, self.clear)  # the completer writes its text into the line after this signal
        self.chosen.emit(key)


class Completer(QCompleter):
    """Leaves the text of the line as it was typed: another text would replace the matches that are on show."""

    def pathFromIndex(self, index: QModelIndex | QPersistentModelIndex) -> str:
        line = self.widget()
        return line.text() if isinstance(line, QLineEdit) else super().pathFromIndex(index)


def matching_settings(text: str, settings: Sequence[Setting]) -> list[Setting]:
    """Settings that contain every word of `text`, best match first (see `_rank`)."""
    words = _plain(text).split()
    if not words:
        return []
    ranked = [(rank, setting) for setting in settings if (rank := _rank(words, setting)) is not None]
    return [setting for _, setting in sorted(ranked, key=lambda pair: pair[0])]  # stable: equals keep the form's order


def _rank(words: Sequence[str], setting: Setting) -> int | None:
    """The rank of a match, 0 the best; None if a word occurs nowhere."""
    phrase, key = " ".join(words), _plain(setting.key)
    labels = [_plain(name) for name in (setting.label, *setting.known_as)]
    others = [_plain(name) for name in other_names(setting.key)]
    if phrase in (*labels, key, *others):
        return 0
    listed = [choice for choice in setting.choices if not choice.is_hidden]
    if any(name.startswith(phrase) for name in (*labels, key, *(_plain(choice.value) for choice in listed))):
        return 1
    choices = [f"{choice.label} {choice.value} {choice.sentence}" for choice in listed]
    parts = (
        f"{' '.join(labels)} {key}",
        f"{SECTIONS[setting.section]} {setting.group}",
        " ".join(others),
        " ".join((setting.default_entry, *choices)),
        setting.help,
    )
    text = ""
    for rank, part in enumerate(parts, 2):
        text = f"{text} {_plain(part)}"
        if all(word in text for word in words):
            return rank
    return None


def _plain(text: str) -> str:
    return text.lower().translate(str.maketrans("-_–", "   "))
