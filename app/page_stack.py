"""The stack of pages: each is built when first shown, and centred in a wide window."""

from __future__ import annotations

from PySide6.QtCore import QSize, Qt
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QApplication, QStackedWidget, QWidget
from shiboken6 import isValid

from app import theme
from app.pages import PAGES
from app.state.session import Session
from app.widgets.basic.layout import TabArea


class PageStack(QStackedWidget):
    """`pages`: those built so far, by key."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._entries = {entry.key: entry for entry in PAGES}
        self.pages: dict[str, QWidget] = {}
        self._focused: QWidget | None = None
        theme.application().focusChanged.connect(self._keep_focus_here)

    def show_page(self, key: str) -> QWidget:
        """Build it the first time. Raises KeyError."""
        if key not in self._entries:
            raise KeyError(f"There is no page {key}.")
        if key not in self.pages:
            self.pages[key] = self._entries[key].load()(self._session, self)
            self.addWidget(self.pages[key])
        self.setCurrentWidget(self.pages[key])
        self._fit()
        return self.pages[key]

    @property
    def current_key(self) -> str:
        return next((key for key, page in self.pages.items() if page is self.currentWidget()), "")

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def _keep_focus_here(self) -> None:  # away from pages that are not shown
        widget = QApplication.focusWidget()
        if widget is None:
            return
        page = next((page for page in self.pages.values() if page.isAncestorOf(widget)), None)
        if page is None or page is self.currentWidget():
            self._focused = widget
        elif self._focused is not None and isValid(self._focused) and self._focused.isVisible():
            self._focused.setFocus(Qt.FocusReason.OtherFocusReason)
        else:
            widget.clearFocus()

    def _fit(self) -> None:
        if self.current_key:
            side = max(0, self.width() - theme.scaled(self._entries[self.current_key].widest)) // 2
            self.setContentsMargins(side, 0, side, 0)


class PageArea(TabArea):
    """Scrolls the pages where the window has less room than `least`, in pixels."""

    def __init__(self, pages: QWidget, least: QSize) -> None:
        super().__init__()
        holder = _Holder(pages)
        holder.setMinimumSize(least)
        self.setWidget(holder)


class _Holder(QWidget):
    def __init__(self, content: QWidget) -> None:
        super().__init__()
        self._content = content
        content.setParent(self)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._content.resize(event.size())
