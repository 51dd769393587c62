"""The cell of a table that shows a few numbers as a small curve."""

from __future__ import annotations

from PySide6.QtCore import QModelIndex, QPersistentModelIndex, QPointF, QRectF, Qt
from PySide6.QtGui import QPainter, QPen, QPolygonF
from PySide6.QtWidgets import QStyledItemDelegate, QStyleOptionViewItem

from app import theme

CURVE = Qt.ItemDataRole.UserRole + 1
"""Item role: the numbers, in order."""
_MARGIN = 6


class SparklineDelegate(QStyledItemDelegate):
    """Draws the numbers of role CURVE over the cell's background, scaled to their own range; a single number is a dot."""

    def paint(
        self, painter: QPainter, option: QStyleOptionViewItem, index: QModelIndex | QPersistentModelIndex
    ) -> None:
        super().paint(painter, option, index)
        values = index.data(CURVE)
        if not values:
            return
        box = QRectF(option.rect).adjusted(_MARGIN, _MARGIN, -_MARGIN, -_MARGIN)  # type: ignore[attr-defined]
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(QPen(theme.palette().accent, 1.3))
        points = _points(values, box)
        if len(points) == 1:
            painter.setBrush(theme.palette().accent)
            painter.drawEllipse(points[0], 1.5, 1.5)
        else:
            painter.drawPolyline(QPolygonF(points))
        painter.restore()


def _points(values: tuple[float, ...], box: QRectF) -> list[QPointF]:
    low, high = min(values), max(values)
    scale = box.height() / (high - low) if high > low else 0.0
    step = box.width() / max(1, len(values) - 1)
    middle = 0.0 if scale else box.height() / 2
    return [
        QPointF(box.left() + i * step, box.bottom() - middle - (value - low) * scale) for i, value in enumerate(values)
    ]
