"""Delegates of the editable cells of the reward table: the check box, painted in the theme's colours, and the weight."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import QEvent, QModelIndex, QPersistentModelIndex, QRect, QRectF, QRegularExpression, Qt
from PySide6.QtGui import QKeyEvent, QPainter, QPen, QRegularExpressionValidator
from PySide6.QtWidgets import QStyle, QStyledItemDelegate, QStyleOptionViewItem, QWidget

from app import theme
from app.widgets.basic.controls import NumberEdit, check_box_side, draw_check_box
from app.widgets.form import value_text

Index = QModelIndex | QPersistentModelIndex
USE, LABEL, FUNCTION, SCORES, SOURCE, MEAN, WEIGHT = range(7)
"""The table's columns."""
_FRAME = (2.5, 5.5, -1.5, -5.5)
"""From a cell to the frame of its weight: lower than the cell, so that it does not touch those above and below."""
DECIMALS = 3
"""Decimals of a weight."""
NUMBER = QRegularExpression(r"[-−]?\d{0,3}(\.\d{0,3})?")


class TickDelegate(QStyledItemDelegate):
    """A centred check box in the theme's colours; a click anywhere in the cell toggles it.

    Qt's own delegate paints the style's indicator at the left edge, and toggles it only there.
    """

    def paint(self, painter: QPainter, option: Any, index: Index) -> None:
        box = QRect(0, 0, check_box_side(), check_box_side())
        box.moveCenter(option.rect.center())
        painter.save()  # the view paints every cell with this painter: a pen or hint left behind would show in the next
        if option.state & QStyle.StateFlag.State_Selected:
            painter.fillRect(option.rect, theme.palette().selection)
        draw_check_box(painter, box, index.data(Qt.ItemDataRole.CheckStateRole) == Qt.CheckState.Checked)
        painter.restore()

    def editorEvent(self, event: QEvent, model: Any, option: Any, index: Index) -> bool:
        if event.type() == QEvent.Type.MouseButtonRelease:
            toggle_tick(model, index.row())
            return True
        # Presses and double clicks count as handled too, or the view would start editing or dragging the row.
        return event.type() in (QEvent.Type.MouseButtonPress, QEvent.Type.MouseButtonDblClick)


class WeightEdit(NumberEdit):
    """A line edit for a weight; Up and Down change it by 0.1. (The cell is too small for a spin box's buttons.)"""

    def keyPressEvent(self, event: QKeyEvent) -> None:
        by = {Qt.Key.Key_Up: 0.1, Qt.Key.Key_Down: -0.1}.get(Qt.Key(event.key()))
        weight = self.weight()
        if by is None or weight is None:
            super().keyPressEvent(event)
        else:
            self.setText(value_text.number_text(round(weight + by, DECIMALS)))
            self.selectAll()

    def weight(self) -> float | None:
        """The weight as typed, None while it is not a number."""
        try:
            return round(float(self.text().replace("−", "-")), DECIMALS)
        except ValueError:
            return None


class WeightDelegate(QStyledItemDelegate):
    """Edits a weight in place; text that is not a number leaves it unchanged. The weight of a ticked row is framed like a field: else
    nothing shows that it can be edited."""

    def paint(self, painter: QPainter, option: Any, index: Index) -> None:
        ticked = index.model().index(index.row(), USE).data(Qt.ItemDataRole.CheckStateRole)
        super().paint(painter, option, index)
        if ticked == Qt.CheckState.Checked:
            painter.save()
            painter.setRenderHint(QPainter.RenderHint.Antialiasing)
            painter.setPen(QPen(theme.palette().outline, 1))
            painter.drawRoundedRect(QRectF(option.rect).adjusted(*_FRAME), 5, 5)
            painter.restore()

    def createEditor(self, parent: QWidget, option: QStyleOptionViewItem, index: Index) -> QWidget:
        edit = WeightEdit(parent=parent)
        edit.setMinimumWidth(0)  # that of a NumberEdit in a form is wider than the column
        edit.setValidator(QRegularExpressionValidator(NUMBER, edit))
        edit.setAlignment(Qt.AlignmentFlag.AlignRight)
        edit.setAccessibleName(f"Weight of {index.model().index(index.row(), LABEL).data()}")
        return edit

    def updateEditorGeometry(self, editor: QWidget, option: Any, index: Index) -> None:
        # Lower than the cell, so that its frame does not touch those of the rows above and below.
        editor.setGeometry(option.rect.adjusted(2, 5, -1, -5))

    def setEditorData(self, editor: QWidget, index: Index) -> None:
        assert isinstance(editor, WeightEdit)
        weight = index.data(Qt.ItemDataRole.EditRole)
        editor.setText(value_text.number_text(1.0 if weight is None else weight))
        editor.selectAll()

    def setModelData(self, editor: QWidget, model: Any, index: Index) -> None:
        assert isinstance(editor, WeightEdit)
        weight = editor.weight()
        # Leaving a cell unchanged must not reach the draft: it would be an empty step of undo.
        if weight is not None and weight != index.data(Qt.ItemDataRole.EditRole):
            model.setData(index, weight, Qt.ItemDataRole.EditRole)


def toggle_tick(model: Any, row: int) -> None:
    """Tick the row, or untick it."""
    index = model.index(row, USE)
    ticked = index.data(Qt.ItemDataRole.CheckStateRole) == Qt.CheckState.Checked
    toggled = Qt.CheckState.Unchecked if ticked else Qt.CheckState.Checked
    model.setData(index, toggled, Qt.ItemDataRole.CheckStateRole)
