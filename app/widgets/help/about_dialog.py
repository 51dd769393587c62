"""About GRPO Studio: icon, version, what it runs on, and the licences of everything that it ships with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from PySide6.QtCore import QSize, Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import (
    QDialog,
    QDialogButtonBox,
    QGridLayout,
    QHBoxLayout,
    QListWidget,
    QPlainTextEdit,
    QVBoxLayout,
    QWidget,
)

from app import theme
from app.widgets.basic.icons import app_icon
from app.widgets.basic.labels_and_buttons import PlainLabel, button, label
from app.widgets.basic.layout import on_screen, wrap_in_card
from app.widgets.basic.tab_area import TabArea

if TYPE_CHECKING:
    from backend.utils.components import Component

NAME = "GRPO Studio"
SIZE = (900, 640)
ICON, LIST_WIDTH, LEAST_LIST = 88, 232, 160
NO_TEXT = "This package names its licence and ships no text of it."


class AboutDialog(QDialog):
    """`facts` are shown as name and value; `components` with the licence of the one that is chosen. The first is GRPO Studio itself.

    Attributes:
        list, text – the components, and the licence of the current one.
        facts – what *Copy* puts into the clipboard, a line each.
    """

    def __init__(
        self, facts: Mapping[str, str], components: Sequence[Component], parent: QWidget | None = None
    ) -> None:
        super().__init__(parent)
        self.setWindowTitle(f"About {NAME}")
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self._components = list(components)
        self.facts = "\n".join(f"{name}: {value}" for name, value in facts.items())
        self.list, self.text = QListWidget(), QPlainTextEdit(readOnly=True)
        self.list.setAccessibleName("Packages")
        self.list.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)  # a long name is elided
        self.list.addItems([f"{part.name}  {part.version}" for part in self._components])
        self.text.setAccessibleName("Licence")
        self.text.setFont(theme.mono_font(theme.CAPTION))
        self._licence = label(role="muted", wrap=True)
        self.list.setMinimumHeight(theme.scaled(LEAST_LIST))
        content = QWidget()
        content.setObjectName("page")
        column = QVBoxLayout(content)
        column.setContentsMargins(*(3 * theme.SPACE,) * 4)
        column.setSpacing(2 * theme.SPACE)
        column.addLayout(self._head(facts))
        column.addWidget(label("Licences of what it consists of", theme.heading_font()))
        column.addLayout(self._licences(), 1)
        scrolled = TabArea()  # on a screen with little room, as one at 200 %
        scrolled.setWidget(content)
        whole = QVBoxLayout(self)
        whole.setContentsMargins(0, 0, 0, 0)
        whole.addWidget(scrolled, 1)
        buttons = self._buttons()
        buttons.setContentsMargins(3 * theme.SPACE, 0, 3 * theme.SPACE, 3 * theme.SPACE)
        whole.addWidget(buttons)
        self.resize(on_screen(self, *SIZE))
        self.list.currentRowChanged.connect(self._show)
        self.list.setCurrentRow(0)

    def _head(self, facts: Mapping[str, str]) -> QHBoxLayout:
        picture = PlainLabel()
        picture.setPixmap(app_icon().pixmap(theme.scaled_size(QSize(ICON, ICON))))
        picture.setAlignment(Qt.AlignmentFlag.AlignTop)
        ours, *others = facts.items()
        column = QVBoxLayout()
        column.setSpacing(theme.SPACE // 2)
        column.addWidget(label(f"{NAME} {ours[1]}", theme.title_font()))
        column.addWidget(
            label(
                "Fine-tunes language models with GRPO, on this machine. Nothing leaves it unless you send it.",
                role="muted",
                wrap=True,
            )
        )
        grid = QGridLayout()
        grid.setHorizontalSpacing(2 * theme.SPACE)
        grid.setVerticalSpacing(2)
        grid.setColumnStretch(1, 1)
        for row, (name, value) in enumerate(others):
            grid.addWidget(label(name, role="muted"), row, 0, Qt.AlignmentFlag.AlignTop)
            grid.addWidget(label(value, theme.figures_font(), wrap=True, selectable=True), row, 1)
        column.addSpacing(theme.SPACE)
        column.addLayout(grid)
        across = QHBoxLayout()
        across.setSpacing(3 * theme.SPACE)
        across.addWidget(picture)
        across.addLayout(column, 1)
        return across

    def _licences(self) -> QHBoxLayout:
        packages = wrap_in_card(self.list)
        packages.setFixedWidth(theme.scaled(LIST_WIDTH))
        right = QVBoxLayout()
        right.setSpacing(theme.SPACE)
        right.addWidget(self._licence)
        right.addWidget(self.text, 1)
        across = QHBoxLayout()
        across.setSpacing(2 * theme.SPACE)
        across.addWidget(packages)
        across.addLayout(right, 1)
        return across

    def _buttons(self) -> QDialogButtonBox:
        box = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
        box.addButton(button("Copy versions", self.copy), QDialogButtonBox.ButtonRole.ActionRole)
        box.rejected.connect(self.reject)
        return box

    def copy(self) -> None:
        """Put the versions into the clipboard."""
        QGuiApplication.clipboard().setText(self.facts)

    def _show(self, row: int) -> None:
        part = self._components[max(0, row)]
        self._licence.setText(f"{part.name} {part.version}: {part.licence}")
        self.text.setPlainText(part.text or NO_TEXT)
