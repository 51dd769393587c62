"""The Guide page: what does this setting, this curve, this finding mean, and what do I do about it?

At the left the contents and a line that searches them, at the right a chapter. Back leads to what was read before, and from the
first to the page that it was opened from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QIcon, QKeySequence, QResizeEvent, QShortcut, QTextCursor
from PySide6.QtWidgets import (
    QFrame,
    QHBoxLayout,
    QLineEdit,
    QSplitter,
    QTextBrowser,
    QTreeWidget,
    QTreeWidgetItem,
    QVBoxLayout,
    QWidget,
)

from app import theme
from app.state import guide
from app.state.session import Session
from app.widgets.basic import icons
from app.widgets.basic.dialogs import open_link
from app.widgets.basic.labels import button, label, with_key_names

# The contents of the guide beside its text: chapters with their sections, or what a search has found.

ROW = 24
"""Height of a line of the contents."""
PLACE = Qt.ItemDataRole.UserRole


class Heading(Protocol):
    """What the contents show; `app.state.guide.Passage` is one."""

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


# ── guide view ───────────────────────────────────────────────────────────────────────────────────────────────────────

# A chapter of the guide: headings, paragraphs, tables and code in the theme's colours, scrolled to a paragraph.

STYLE = """
.h1 {{ font-size: {h1}px; font-weight: 600; margin-top: 0px; margin-bottom: {space}px; }}
.h2 {{ font-size: {h2}px; font-weight: 600; margin-top: {wide}px; margin-bottom: {space}px; }}
.h3 {{ font-size: {h3}px; font-weight: 600; margin-top: {wide}px; margin-bottom: {half}px; }}
p, li {{ line-height: 130%; }}
p {{ margin-top: 0px; margin-bottom: {space}px; }}
li {{ margin-bottom: {half}px; }}
a {{ color: {accent}; text-decoration: none; }}
code, pre {{ font-family: '{mono}'; font-size: {small}px; }}
pre {{ line-height: 130%; margin: 0px; white-space: pre-wrap; }}
table {{ margin-top: {half}px; margin-bottom: {space}px; border-collapse: collapse; border-color: {hairline}; border-style: solid; border-width: 1px; }}
th, td {{ padding: {half}px {space}px; border-color: {hairline}; border-style: solid; border-width: 1px; text-align: left; }}
table.code {{ border-width: 0px; margin-top: 0px; }}
table.code td {{ background-color: {card}; padding: {space}px; }}
th {{ background-color: {hover}; font-weight: 600; }}
"""
WHOLE_LINE = 40
"""Pixels at the end of a chapter that always stay in sight: its last heading can be scrolled to the top."""


class GuideView(QTextBrowser):
    """Shows HTML. Links are told, not followed.

    Signals:
        link_chosen(str) – a link was clicked, or chosen by the keyboard: where it leads, as it stands in the chapter.
    """

    link_chosen = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._html = ""
        self._top = 0
        self._is_fitting = False
        self.setAccessibleName("Guide")
        self.setOpenLinks(False)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setProperty("role", "reading")
        self.setFont(theme.body_font())
        self.document().setDocumentMargin(theme.SPACE)
        self.anchorClicked.connect(lambda url: self.link_chosen.emit(url.toString()))
        self.verticalScrollBar().valueChanged.connect(self._keep_top)
        theme.signals.changed.connect(self._restyle)

    def show_html(self, html: str) -> None:
        """Show a chapter from its beginning."""
        self._html = html
        self.document().setDefaultStyleSheet(_style())
        self.setHtml(html)
        self._fit()
        self.show_position(0)

    def show_anchor(self, name: str) -> None:
        """Scroll so that the paragraph with this anchor is at the top."""
        self.document().size()  # lays all of it out: a part of it has no place to scroll to
        self.scrollToAnchor(name)
        self._keep_top()

    @property
    def position(self) -> int:
        """The character at the top of the view, counted from the chapter's beginning."""
        return self._top

    def show_position(self, position: int) -> None:
        """Scroll so that this character is at the top."""
        self.document().size()
        cursor = QTextCursor(self.document())
        cursor.setPosition(min(position, self.document().characterCount() - 1))
        bar = self.verticalScrollBar()
        bar.setValue(bar.value() + self.cursorRect(cursor).top() if position else 0)
        self._top = position

    def resizeEvent(self, event: QResizeEvent) -> None:
        """Lines break elsewhere at another width, and what was at the top stays there."""
        top = self._top
        self._is_fitting = True
        super().resizeEvent(event)
        self._fit()
        self._is_fitting = False
        self.show_position(top)

    def _fit(self) -> None:
        """Leave room after the last paragraph, so that it can be at the top too."""
        root = self.document().rootFrame()
        shape = root.frameFormat()
        shape.setBottomMargin(max(theme.SPACE, self.viewport().height() - theme.scaled(WHOLE_LINE)))
        root.setFrameFormat(shape)

    def _keep_top(self) -> None:
        if not self._is_fitting:
            # Not at the very edge: there the text of the line above may still end.
            self._top = self.cursorForPosition(self.viewport().rect().topLeft()).position()

    def _restyle(self) -> None:
        top, html = self._top, self._html
        if html:
            self.show_html(html)
            self.show_position(top)


def _style() -> str:
    colours = theme.palette()
    sizes = {
        "h1": theme.TITLE,
        "h2": 17,
        "h3": 14,
        "small": 12,
        "space": theme.SPACE,
        "wide": 2 * theme.SPACE + 4,
        "half": 4,
    }
    return STYLE.format(
        card=colours.card.name(),
        accent=colours.accent.name(),
        hairline=colours.hairline.name(),
        hover=colours.hover.name(),
        mono=theme.mono_font().family(),
        **{name: theme.scaled(size) for name, size in sizes.items()},
    )


# ── guide page ───────────────────────────────────────────────────────────────────────────────────────────────────────

CONTENTS_WIDTH = 264


class GuidePage(QWidget):
    """The page.

    Attributes:
        contents, view – its two halves; back – the button above the text.
        place – what is shown.
    """

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self.place = ""
        self._earlier: list[tuple[str, int]] = []
        self._compose()
        self.show_place(guide.CONTENTS)

    def _compose(self) -> None:
        self.contents = GuideContents(guide.chapters(), guide.found)
        self.contents.chosen.connect(self.show_place)
        self.view = GuideView()
        self.view.link_chosen.connect(self.follow)
        self.back = button("Back", self.go_back)
        self.back.setToolTip(with_key_names("What was read before, or the page that led here (Ctrl+Alt+Left)"))
        backspace = QShortcut(QKeySequence(Qt.Key.Key_Backspace), self.view, self.go_back)
        backspace.setContext(Qt.ShortcutContext.WidgetShortcut)
        right = QWidget()
        column = QVBoxLayout(right)
        column.setContentsMargins(theme.SPACE, 0, 0, 0)
        column.setSpacing(theme.SPACE)
        column.addWidget(self.view, 1)
        parts = QSplitter(Qt.Orientation.Horizontal)
        parts.addWidget(self.contents)
        parts.addWidget(right)
        parts.setChildrenCollapsible(False)
        parts.setStretchFactor(1, 1)
        parts.setSizes([theme.scaled(CONTENTS_WIDTH), theme.scaled(4 * CONTENTS_WIDTH)])
        head = QHBoxLayout()
        head.addWidget(label("Guide", theme.title_font()), 1)
        head.addWidget(self.back)
        whole = QVBoxLayout(self)
        whole.setContentsMargins(theme.GUTTER, theme.GUTTER, theme.GUTTER, theme.SPACE)
        whole.setSpacing(12)
        whole.addLayout(head)
        whole.addWidget(parts, 1)

    def show_place(self, place: str, origin: str = "") -> None:
        """Show a chapter, at one of its paragraphs where the place has an anchor. `origin`: the page of the app that led here, to
        which Back returns."""
        if origin:
            self._earlier = [(guide.PAGE + origin, 0)]
        elif self.place and place != self.place:
            self._earlier.append((self.place, self.view.position))
        self._show(place)

    def go_back(self) -> None:
        """Show what was read before, as far as it was scrolled; or the page that led here."""
        if not self._earlier:
            return
        place, position = self._earlier.pop()
        if place.startswith(guide.PAGE):
            self.session.page_requested.emit(place.removeprefix(guide.PAGE))
        else:
            self._show(place)
            self.view.show_position(position)
        self.back.setEnabled(bool(self._earlier))

    def follow(self, link: str) -> None:
        """Do what a link in the text is for: show a place, a page of the app, or a page of the web in the browser."""
        place = guide.resolved(link, self.place.partition("#")[0])
        if place.startswith(guide.PAGE):
            self.session.page_requested.emit(place.removeprefix(guide.PAGE))
        elif ":" in place:
            open_link(place)
        else:
            self.show_place(place)

    def find_text(self) -> None:
        """For the menu: search the guide."""
        self.contents.search.setFocus()
        self.contents.search.selectAll()

    def _show(self, place: str) -> None:
        chapter, _, anchor = place.partition("#")
        if chapter != self.place.partition("#")[0]:
            self.view.show_html(guide.chapter_html(chapter))
        if anchor:
            self.view.show_anchor(anchor)
        else:
            self.view.show_position(0)
        self.place = place
        self.contents.show_place(place)
        self.back.setEnabled(bool(self._earlier))
