"""Delegates of the reward tables: the check box, painted in the theme's colours, and the weight."""

from typing import Any

from PySide6.QtCore import QEvent, QRect, QRectF, Qt
from PySide6.QtGui import QPainter, QPen
from PySide6.QtWidgets import QStyle, QStyledItemDelegate, QStyleOptionViewItem, QWidget

from app import theme
from app.widgets.basic.controls import CHECK_BOX, NumberEdit, draw_check_box
from app.widgets.basic.number_format import finite
from app.widgets.basic.tables import CHECKED, Index, is_ticked, toggle_tick
from app.widgets.form.value_text import float_value, number_text, number_value


class TickDelegate(QStyledItemDelegate):
    def paint(self, painter: QPainter, option: Any, index: Index) -> None:
        if index.data(CHECKED) is None:
            return
        box = QRect(0, 0, theme.scaled(CHECK_BOX), theme.scaled(CHECK_BOX))
        box.moveCenter(option.rect.center())
        painter.save()
        if option.state & QStyle.StateFlag.State_Selected:
            painter.fillRect(option.rect, theme.palette().selection)
        draw_check_box(painter, box, is_ticked(index))
        painter.restore()

    def editorEvent(self, event: QEvent, model: Any, option: Any, index: Index) -> bool:
        if event.type() == QEvent.Type.MouseButtonRelease:
            toggle_tick(model, index)
            return True
        # Presses and double clicks are handled too, or the view would edit or drag the row.
        return event.type() in (QEvent.Type.MouseButtonPress, QEvent.Type.MouseButtonDblClick)


def weight_of(text: str) -> float | None:
    """A weight as typed; None for what is not a number."""
    return finite(float_value(str(number_value(text, is_integer=False)).replace(",", ".")))


class WeightDelegate(QStyledItemDelegate):
    """Edits a weight in place. It is framed like a field, everywhere or in rows that are ticked in the first column."""

    def __init__(self, parent: QWidget, *, is_framed: bool = False) -> None:
        super().__init__(parent)
        self._is_framed = is_framed

    def paint(self, painter: QPainter, option: Any, index: Index) -> None:
        super().paint(painter, option, index)
        if self._is_framed or is_ticked(index.sibling(index.row(), 0)):
            painter.save()
            painter.setRenderHint(QPainter.RenderHint.Antialiasing)
            painter.setPen(QPen(theme.palette().outline, 1))
            painter.drawRoundedRect(QRectF(option.rect).adjusted(2.5, 5.5, -1.5, -5.5), 5, 5)
            painter.restore()

    def createEditor(self, parent: QWidget, option: QStyleOptionViewItem, index: Index) -> QWidget:
        name = f"Weight of {index.data(Qt.ItemDataRole.AccessibleDescriptionRole)}"
        return NumberEdit(parent=parent, name=name, minimumWidth=0, alignment=Qt.AlignmentFlag.AlignRight)

    def updateEditorGeometry(self, editor: QWidget, option: Any, index: Index) -> None:
        gap = 5 if option.rect.height() > theme.scaled(32) else 1
        editor.setGeometry(option.rect.adjusted(2, gap, -1, -gap))

    def setEditorData(self, editor: QWidget, index: Index) -> None:
        assert isinstance(editor, NumberEdit)
        weight = index.data(Qt.ItemDataRole.EditRole)
        editor.setText(number_text(1.0 if weight is None else weight))
        editor.selectAll()

    def setModelData(self, editor: QWidget, model: Any, index: Index) -> None:
        assert isinstance(editor, NumberEdit)
        weight = weight_of(editor.text())
        if weight is not None and weight != index.data(Qt.ItemDataRole.EditRole):  # no empty step of undo
            model.setData(index, weight, Qt.ItemDataRole.EditRole)
