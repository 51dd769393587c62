"""A page of text in a window of its own: the guide, the list of shortcuts, what is stored where."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QTextBrowser, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.layout import on_screen

SIZE = (640, 560)


class TextDialog(QDialog):
    """Shows Markdown, or HTML that our own code made. It is not modal: a guide is read while the window is used.

    Attributes:
        text – the browser that shows it.
    """

    def __init__(self, title: str, text: str, parent: QWidget | None = None, *, is_html: bool = False) -> None:
        super().__init__(parent)
        self.resize(on_screen(self, *SIZE))
        self.setWindowTitle(title)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.text = QTextBrowser()
        self.text.setOpenLinks(False)  # links between documents of ours lead nowhere here
        self.text.setAccessibleName(title)
        self.text.setFont(theme.body_font())
        self.text.document().setDocumentMargin(2 * theme.SPACE)
        self.text.setHtml(text) if is_html else self.text.setMarkdown(text)
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
        buttons.rejected.connect(self.reject)
        column = QVBoxLayout(self)
        column.setContentsMargins(*(2 * theme.SPACE,) * 4)
        column.addWidget(self.text, 1)
        column.addWidget(buttons)
