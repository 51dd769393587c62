"""The Guide page: what does this setting, this curve, this finding mean, and what do I do about it?

At the left the contents and a line that searches them, at the right a chapter. Back leads to what was read before, and from the
first to the page that it was opened from.
"""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtGui import QKeySequence, QShortcut
from PySide6.QtWidgets import QHBoxLayout, QSplitter, QVBoxLayout, QWidget

from app import theme
from app.model import guide
from app.model.session import Session
from app.widgets.basic.key_names import with_key_names
from app.widgets.basic.labels_and_buttons import button, label
from app.widgets.basic.open_in_desktop import open_link
from app.widgets.help.guide_contents import GuideContents
from app.widgets.help.guide_view import GuideView

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
