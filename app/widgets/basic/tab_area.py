"""A scroll area for things that Tab goes through: no stop of its own, and what gets the focus is scrolled into view."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication, QFrame, QScrollArea, QWidget

from app import theme


class TabArea(QScrollArea):
    """Without a frame, as wide as its content is made. Qt scrolls to what Tab reaches from within such an area, and not when Tab or
    Shift+Tab enters it."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWidgetResizable(True)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        app = QApplication.instance()
        assert isinstance(app, QApplication)
        app.focusChanged.connect(self.follow_focus)

    def follow_focus(self) -> None:
        """Scroll to what has the focus, unless it fills half of the view: that is read from where the user has scrolled to."""
        # A slot that takes none of the signal's arguments: the widget that lost the focus may be half destroyed, and PySide must not wrap
        # it in a Python object.
        widget, page = QApplication.focusWidget(), self.widget()
        if widget is None or page is None or not page.isAncestorOf(widget):
            return
        if widget.height() < self.viewport().height() // 2:
            self.ensureWidgetVisible(widget, 0, theme.SPACE)
