"""Search over settings: by label, key or a word of the help; choosing one leads to its field."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QModelIndex, Qt, QTimer, Signal
from PySide6.QtGui import QAction, QStandardItem, QStandardItemModel
from PySide6.QtWidgets import QCompleter, QLineEdit, QWidget

from app import theme
from app.widgets import icons
from backend.spec.setting import Setting

KEY = Qt.ItemDataRole.UserRole
WORDS = Qt.ItemDataRole.UserRole + 1


class SettingSearch(QLineEdit):
    """Signals: chosen(key of a setting)."""

    chosen = Signal(str)

    def __init__(self, settings: Sequence[Setting], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setPlaceholderText("Find a setting")
        self.setAccessibleName("Find a setting")
        self.setClearButtonEnabled(True)
        self.setProperty("role", "search")
        self.setFixedWidth(220)
        self._glass: QAction = self.addAction(icons.icon("search"), QLineEdit.ActionPosition.LeadingPosition)
        self._draw()
        self._completer = self._build_completer(settings)
        self.setCompleter(self._completer)
        self._completer.activated[QModelIndex].connect(self._choose)  # pyright: ignore[reportIndexIssue]
        self.returnPressed.connect(self._choose_first)
        theme.signals.changed.connect(self._draw)

    def begin(self) -> None:
        self.setFocus(Qt.FocusReason.ShortcutFocusReason)
        self.selectAll()

    def found(self) -> list[str]:
        """Keys of the settings that match what stands in the field."""
        self._completer.setCompletionPrefix(self.text())
        matches = self._completer.completionModel()
        return [matches.index(row, 0).data(KEY) for row in range(matches.rowCount())]

    def _build_completer(self, settings: Sequence[Setting]) -> QCompleter:
        model = QStandardItemModel(self)
        for about in settings:
            item = QStandardItem(f"{about.label}  –  {about.key}")
            item.setData(about.key, KEY)
            item.setData(f"{about.label} {about.key} {about.help}", WORDS)
            model.appendRow(item)
        completer = QCompleter(model, self)
        completer.setCompletionRole(WORDS)
        completer.setFilterMode(Qt.MatchFlag.MatchContains)
        completer.setCaseSensitivity(Qt.CaseSensitivity.CaseInsensitive)
        completer.setMaxVisibleItems(12)
        return completer

    def _choose(self, index: QModelIndex) -> None:
        self._go_to(index.data(KEY))

    def _choose_first(self) -> None:
        keys = self.found() if self.text().strip() else []
        if keys:
            self._go_to(keys[0])

    def _go_to(self, key: str) -> None:
        # The completer writes its own text into the line after this signal; clear it once it has.
        QTimer.singleShot(0, self, self.clear)
        self.chosen.emit(key)

    def _draw(self) -> None:
        self._glass.setIcon(icons.icon("search", theme.palette().muted, 16))
