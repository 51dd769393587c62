"""A chapter of the guide: headings, paragraphs, tables and code in the theme's colours, scrolled to a paragraph."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtGui import QResizeEvent, QTextCursor
from PySide6.QtWidgets import QFrame, QTextBrowser, QWidget

from app import theme

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
