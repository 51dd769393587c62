"""A run's family as a tree: the run that all were cloned from at the top, each clone below its parent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QTreeWidget, QTreeWidgetItem, QWidget

from app import theme
from app.widgets.basic.labels_and_buttons import plain_tip

MOST_ROWS = 8
"""Rows that are visible without scrolling."""


class LineageTree(QTreeWidget):
    """Signals:
    run_chosen(name) – a run of the family was clicked, or chosen with Enter.
    """

    run_chosen = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setHeaderHidden(True)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setAccessibleName("Parents and clones of the run")
        self.setIndentation(theme.scaled(16))
        self.setItemsExpandable(False)
        self.setTextElideMode(Qt.TextElideMode.ElideMiddle)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.itemClicked.connect(lambda item, _column: self.run_chosen.emit(item.data(0, Qt.ItemDataRole.UserRole)))
        self.itemActivated.connect(lambda item, _column: self.run_chosen.emit(item.data(0, Qt.ItemDataRole.UserRole)))

    def show_family(self, family: Mapping[str, Sequence[str]], titles: Mapping[str, str], current: str) -> None:
        """`family`: run → its clones, the oldest first (`RunList.family_of`); `titles`: run → its title. A run without a title is no
        longer there."""
        self.clear()
        items: dict[str, QTreeWidgetItem] = {}
        for name, children in family.items():
            item = items.get(name) or self._item(name, titles, current)
            if name not in items:
                self.addTopLevelItem(item)
            for child in children:
                if child not in items:  # a hand-edited parent.json could close a circle
                    items[child] = self._item(child, titles, current)
                    item.addChild(items[child])
            items[name] = item
        self.expandAll()
        self.setFixedHeight(min(len(items), MOST_ROWS) * self.sizeHintForRow(0) + 2 * self.frameWidth() + 2)

    def _item(self, name: str, titles: Mapping[str, str], current: str) -> QTreeWidgetItem:
        item = QTreeWidgetItem([titles.get(name, f"{name} (not here)")])
        item.setData(0, Qt.ItemDataRole.UserRole, name)
        item.setToolTip(0, plain_tip(name))
        font = theme.heading_font() if name == current else theme.body_font()
        item.setFont(0, font)
        if name not in titles:
            item.setForeground(0, theme.palette().muted)
        return item
