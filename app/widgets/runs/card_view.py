"""A model card as a page will show it: Markdown with its tables and pictures, the settings at the top as they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PySide6.QtCore import Qt, QUrl
from PySide6.QtGui import (
    QImage,
    QResizeEvent,
    QTextBlockFormat,
    QTextCursor,
    QTextDocument,
    QTextFormat,
    QTextFrameFormat,
    QTextTable,
)
from PySide6.QtWidgets import QFrame, QTextBrowser, QWidget

from app import theme
from app.widgets.basic.open_in_desktop import open_link

_MARGIN = 16
_TOP = (theme.SPACE, 2 * theme.SPACE, 3 * theme.SPACE)
"""Pixels above a paragraph, a title, a heading."""


class CardView(QTextBrowser):
    """Read-only. Links to the web are opened by the desktop; pictures are as wide as the text at most."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._folder, self._card = Path(), ""
        self.setOpenLinks(False)
        self.anchorClicked.connect(_open_web_link)
        self.setAccessibleName("Model card")
        self.setFont(theme.body_font())
        self.setProperty("role", "reading")
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.document().setDocumentMargin(_MARGIN)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)

    def show_card(self, card: str, folder: Path) -> None:
        """`folder` is where the card's pictures are."""
        self._folder, self._card = folder, card
        self._draw()

    def _draw(self) -> None:
        _, settings, body = self._card.split("---\n", 2) if self._card.startswith("---\n") else ("", "", self._card)
        top = f"```yaml\n{settings}```\n\n" if settings else ""
        self.document().clear()
        self.document().setMarkdown(top + body, QTextDocument.MarkdownFeature.MarkdownDialectGitHub)
        _space_blocks(self.document())
        for table in self.document().rootFrame().childFrames():
            if isinstance(table, QTextTable):
                _style_table(table)
        self.moveCursor(QTextCursor.MoveOperation.Start)

    def loadResource(self, kind: int, name: QUrl) -> Any:
        file = self._folder / Path(name.path()).name
        if kind != QTextDocument.ResourceType.ImageResource.value or not name.isRelative() or not file.is_file():
            return None  # nothing is fetched from the network
        picture, ratio = QImage(str(file)), self.devicePixelRatioF()
        room = round((self.viewport().width() - 2 * _MARGIN - 4) * ratio)
        if picture.width() > room > 0:
            picture = picture.scaledToWidth(room, Qt.TransformationMode.SmoothTransformation)
        picture.setDevicePixelRatio(ratio)
        return picture

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        if event.size().width() != event.oldSize().width():
            self._draw()  # pictures have the width of the text


def _space_blocks(document: QTextDocument) -> None:
    """Qt's Markdown leaves no room between paragraphs, and never breaks a line of code."""
    block, before = document.begin(), None
    while block.isValid():
        style, is_code = block.blockFormat(), block.blockFormat().nonBreakableLines()
        in_table = QTextCursor(block).currentTable() is not None
        style.setTopMargin(0 if in_table else _TOP[min(style.headingLevel(), 2)])
        if is_code:
            style.setNonBreakableLines(False)
            style.setBackground(theme.palette().window)
            style.setTopMargin(0 if before == _language(style) else theme.SPACE)
        QTextCursor(block).setBlockFormat(style)
        block, before = block.next(), _language(style) if is_code else None


def _language(style: QTextBlockFormat) -> str:
    """Of a block of code; two blocks in a row differ by it."""
    return str(style.property(QTextFormat.Property.BlockCodeLanguage))


def _style_table(table: QTextTable) -> None:
    """Hairlines instead of Qt's frames; a column's heading is aligned as its cells are."""
    for column in range(table.columns() if table.rows() > 1 else 0):
        below = table.cellAt(1, column).firstCursorPosition().blockFormat().alignment()
        heading = table.cellAt(0, column).firstCursorPosition()
        aligned = heading.blockFormat()
        aligned.setAlignment(below)
        heading.setBlockFormat(aligned)
    style = table.format()
    style.setBorder(1)
    style.setBorderStyle(QTextFrameFormat.BorderStyle.BorderStyle_Solid)
    style.setBorderBrush(theme.palette().hairline)
    style.setBorderCollapse(True)
    style.setCellPadding(4)
    style.setCellSpacing(0)
    style.setTopMargin(theme.SPACE)
    table.setFormat(style)


def _open_web_link(url: QUrl) -> None:
    if url.scheme() in ("http", "https"):
        open_link(url.toString())
