"""The Guide page: the contents with a search, and a chapter in the theme's colours, scrolled to a paragraph."""

from PySide6.QtCore import QSignalBlocker, QSize, Qt, Signal
from PySide6.QtGui import QResizeEvent, QShortcut, QTextCursor
from PySide6.QtWidgets import QFrame, QTextBrowser, QTreeWidget, QTreeWidgetItem, QWidget

from app import theme
from app.state import guide
from app.state.session import Session
from app.widgets.basic.controls import SearchEdit
from app.widgets.basic.dialogs import open_link
from app.widgets.basic.labels import button, label
from app.widgets.basic.layout import column, configure, connect, holder, row, splitter

PLACE = Qt.ItemDataRole.UserRole
CONTENTS_WIDTH = 264
WHOLE_LINE = 40  # pixels at the end of a chapter that always stay in sight: its last heading can be scrolled to the top


class GuideContents(QWidget):
    chosen = Signal(str)  # place

    def __init__(self) -> None:
        super().__init__()
        self._place = ""
        first = lambda: self._choose(self.tree.topLevelItem(0))  # noqa: E731
        self.search = SearchEdit("Find in the guide", textChanged=self._fill, returnPressed=first)
        elide, no_bar = Qt.TextElideMode.ElideRight, Qt.ScrollBarPolicy.ScrollBarAlwaysOff
        self.tree = configure(QTreeWidget(), name="Contents of the guide", role="contents", headerHidden=True)
        configure(self.tree, frameShape=QFrame.Shape.NoFrame, uniformRowHeights=True, indentation=theme.scaled(14))
        configure(self.tree, textElideMode=elide, horizontalScrollBarPolicy=no_bar)
        connect(self._choose, self.tree.currentItemChanged, self.tree.itemClicked)  # a click on the current one scrolls
        column(self.search, (self.tree, 1), into=self)
        self._fill("")

    def show_place(self, place: str) -> None:
        self._place = place
        tree, flags = self.tree, Qt.MatchFlag.MatchExactly | Qt.MatchFlag.MatchRecursive
        with QSignalBlocker(tree):
            found = tree.model().match(tree.model().index(0, 0), PLACE, place, 1, flags)
            part = item = tree.itemFromIndex(found[0]) if found else None
            if item is None:
                tree.clearSelection()
                return
            tree.setCurrentItem(item)
            tree.collapseAll()  # an open chapter with two hundred settings would hide the chapters after it
            while part is not None:
                part.setExpanded(True)
                part = part.parent()
            tree.scrollToItem(item)

    def _fill(self, typed: str) -> None:
        is_search = bool(typed.strip())
        with QSignalBlocker(self.tree):
            self.tree.clear()
            self.tree.setRootIsDecorated(not is_search)
            for chapter in [[found] for found in guide.found(typed)] if is_search else guide.chapters():
                top: QTreeWidgetItem | None = None
                section: QTreeWidgetItem | None = None
                for heading in chapter:
                    if top is not None and heading.place == chapter[0].place:
                        continue
                    item = QTreeWidgetItem([heading.title])
                    item.setData(0, PLACE, heading.place)
                    item.setSizeHint(0, QSize(0, theme.scaled(24)))
                    item.setToolTip(0, heading.title)
                    if top is None or section is None:
                        top = section = item
                        self.tree.addTopLevelItem(item)
                    elif heading.level == 2:
                        section = item
                        top.addChild(item)
                    else:
                        section.addChild(item)
        self.show_place(self._place)

    def _choose(self, item: QTreeWidgetItem | None) -> None:
        if item is not None:
            self.chosen.emit(item.data(0, PLACE))


class GuideView(QTextBrowser):
    link_chosen = Signal(str)

    def __init__(self) -> None:
        super().__init__()
        self._html = ""
        self.position = 0  # the character at the top of the view, counted from the chapter's beginning
        self._is_fitting = False
        frame = QFrame.Shape.NoFrame
        configure(self, name="Guide", role="reading", openLinks=False, frameShape=frame, font=theme.body_font())
        self.document().setDocumentMargin(theme.SPACE)
        self.anchorClicked.connect(lambda url: self.link_chosen.emit(url.toString()))
        self.verticalScrollBar().valueChanged.connect(self.keep_top)
        theme.signals.changed.connect(self._restyle)

    def show_html(self, html: str) -> None:
        self._html = html
        self.document().setDefaultStyleSheet(theme.style_sheet("guide.css"))
        self.setHtml(html)
        self._fit()
        self.show_position(0)

    def show_position(self, position: int) -> None:
        self.document().size()
        cursor = QTextCursor(self.document())
        cursor.setPosition(min(position, self.document().characterCount() - 1))
        bar = self.verticalScrollBar()
        bar.setValue(bar.value() + self.cursorRect(cursor).top() if position else 0)
        self.position = position

    def resizeEvent(self, event: QResizeEvent) -> None:
        top = self.position
        self._is_fitting = True
        super().resizeEvent(event)
        self._fit()
        self._is_fitting = False
        self.show_position(top)

    def _fit(self) -> None:
        root = self.document().rootFrame()
        shape = root.frameFormat()
        shape.setBottomMargin(max(theme.SPACE, self.viewport().height() - theme.scaled(WHOLE_LINE)))
        root.setFrameFormat(shape)

    def keep_top(self) -> None:
        if not self._is_fitting:
            self.position = self.cursorForPosition(self.viewport().rect().topLeft()).position()

    def _restyle(self) -> None:
        top = self.position
        if self._html:
            self.show_html(self._html)
            self.show_position(top)


class GuidePage(QWidget):
    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self.place = ""
        self._earlier: list[tuple[str, int]] = []
        self.contents, self.view = GuideContents(), GuideView()
        self.search = self.contents.search
        self.contents.chosen.connect(self.show_place)
        self.view.link_chosen.connect(self.follow)
        self.back = button("Back", self.go_back, tip="Go back in the guide, or to the page before it (Ctrl+Alt+Left)")
        QShortcut(Qt.Key.Key_Backspace, self.view, self.go_back, context=Qt.ShortcutContext.WidgetShortcut)
        reading = holder(column((self.view, 1), margins=(theme.SPACE, 0, 0, 0)))
        sizes = (theme.scaled(CONTENTS_WIDTH), theme.scaled(4 * CONTENTS_WIDTH))
        parts = splitter(self.contents, reading, stretch=(0, 1), sizes=sizes)
        head = row((label("Guide", theme.title_font()), 1), self.back)
        margins = (theme.GUTTER, theme.GUTTER, theme.GUTTER, theme.SPACE)
        column(head, (parts, 1), into=self, spacing=12, margins=margins)
        self.show_place(guide.CONTENTS)

    def show_place(self, place: str, origin: str = "") -> None:
        if origin:
            self._earlier = [(guide.PAGE + origin, 0)]
        elif self.place and place != self.place:
            self._earlier.append((self.place, self.view.position))
        self._show(place)

    def go_back(self) -> None:
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
        place = guide.resolved(link, self.place.partition("#")[0])
        if place.startswith(guide.PAGE):
            self.session.page_requested.emit(place.removeprefix(guide.PAGE))
        elif ":" in place:
            open_link(place)
        else:
            self.show_place(place)

    def _show(self, place: str) -> None:
        chapter, _, anchor = place.partition("#")
        if chapter != self.place.partition("#")[0]:
            self.view.show_html(guide.chapter_html(chapter))
        if anchor:
            self.view.document().size()  # lays all of it out: a part of it has no place to scroll to
            self.view.scrollToAnchor(anchor)
            self.view.keep_top()
        else:
            self.view.show_position(0)
        self.place = place
        self.contents.show_place(place)
        self.back.setEnabled(bool(self._earlier))
