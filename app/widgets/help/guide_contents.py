"""The contents of the guide beside its text: chapters with their sections, or what a search has found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QIcon
from PySide6.QtWidgets import QFrame, QLineEdit, QTreeWidget, QTreeWidgetItem, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic import icons

ROW = 24
"""Height of a line of the contents."""
PLACE = Qt.ItemDataRole.UserRole


class Heading(Protocol):
    """What the contents show; `app.model.guide.Passage` is one."""

    @property
    def title(self) -> str: ...
    @property
    def level(self) -> int: ...
    @property
    def place(self) -> str: ...


class GuideContents(QWidget):
    """A line that searches, and below it the chapters; while something is typed, the headings that `find(typed)` returns.

    Attributes:
        search – the line.
        tree – chapters, sections and entries.

    Signals:
        chosen(str) – show this place.
    """

    chosen = Signal(str)

    def __init__(
        self,
        chapters: Iterable[Sequence[Heading]],
        find: Callable[[str], Sequence[Heading]],
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self._chapters, self._find = [list(chapter) for chapter in chapters], find
        self._place = ""
        self._is_filling = False
        self._compose()
        self._fill("")

    def _compose(self) -> None:
        self.search = QLineEdit(placeholderText="Find in the guide")
        self.search.setAccessibleName("Find in the guide")
        self.search.setClearButtonEnabled(True)
        self.search.setProperty("role", "search")
        self._icon = self.search.addAction(QIcon(), QLineEdit.ActionPosition.LeadingPosition)
        self._recolour()
        self.search.textChanged.connect(self._fill)
        self.tree = QTreeWidget()
        self.tree.setAccessibleName("Contents of the guide")
        self.tree.setHeaderHidden(True)
        self.tree.setFrameShape(QFrame.Shape.NoFrame)
        self.tree.setProperty("role", "contents")
        self.tree.setUniformRowHeights(True)
        self.tree.setIndentation(theme.scaled(14))
        self.tree.setTextElideMode(Qt.TextElideMode.ElideRight)
        self.tree.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.tree.currentItemChanged.connect(self._choose)
        self.tree.itemClicked.connect(self._choose)  # also the one that is current, scrolled away from
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(theme.SPACE)
        column.addWidget(self.search)
        column.addWidget(self.tree, 1)
        theme.signals.changed.connect(self._recolour)

    def show_place(self, place: str) -> None:
        """Mark the place that is shown, and open its chapter."""
        self._place = place
        self._mark()

    def _recolour(self) -> None:
        self._icon.setIcon(icons.icon("search", theme.palette().muted, 16))

    def _fill(self, typed: str) -> None:
        self._is_filling = True
        self.tree.clear()
        if typed.strip():
            for heading in self._find(typed):
                self.tree.addTopLevelItem(_item(heading))
            self.tree.setRootIsDecorated(False)
        else:
            for chapter in self._chapters:
                self.tree.addTopLevelItem(_chapter_item(chapter))
            self.tree.setRootIsDecorated(True)
        self._is_filling = False
        self._mark()

    def _mark(self) -> None:
        self._is_filling = True
        item = next((item for item in self._items() if item.data(0, PLACE) == self._place), None)
        if item is None:
            self.tree.clearSelection()
        else:
            self.tree.setCurrentItem(item)
            self._open_only(item)
            self.tree.scrollToItem(item)
        self._is_filling = False

    def _open_only(self, item: QTreeWidgetItem) -> None:
        """Open what the item is in, and the item; close other chapters: two hundred settings hide what comes after them."""
        above = [item]
        while parent := above[-1].parent():
            above.append(parent)
        for chapter in self._chapter_items():
            chapter.setExpanded(chapter is above[-1])
        for each in above:
            each.setExpanded(True)

    def _chapter_items(self) -> list[QTreeWidgetItem]:
        return _children(self.tree.invisibleRootItem())

    def _items(self) -> list[QTreeWidgetItem]:
        found = self._chapter_items()
        for item in found:  # grows as it is read
            found.extend(_children(item))
        return found

    def _choose(self, item: QTreeWidgetItem | None) -> None:
        if item is not None and not self._is_filling:
            self.chosen.emit(item.data(0, PLACE))


def _children(item: QTreeWidgetItem) -> list[QTreeWidgetItem]:
    return [child for row in range(item.childCount()) if (child := item.child(row)) is not None]


def _item(heading: Heading) -> QTreeWidgetItem:
    item = QTreeWidgetItem([heading.title])
    item.setData(0, PLACE, heading.place)
    item.setSizeHint(0, QSize(0, theme.scaled(ROW)))
    item.setToolTip(0, heading.title)
    return item


def _chapter_item(chapter: Sequence[Heading]) -> QTreeWidgetItem:
    """The chapter with its sections below it, and their entries below them; a section without a place of its own is left out."""
    top = section = _item(chapter[0])
    for heading in chapter[1:]:
        if heading.place == chapter[0].place:
            continue
        item = _item(heading)
        if heading.level == 2:
            section = item
            top.addChild(item)
        else:
            section.addChild(item)
    return top
