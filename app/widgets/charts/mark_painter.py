"""Marks along the upper edge of a plot: a small sign for each kind, and a faint line down for those that bend a curve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import QLineF, QPointF, QRectF, Qt
from PySide6.QtGui import QBrush, QColor, QPainter, QPen, QPolygonF

from app import theme
from app.state.run_state import Mark, MarkKind
from app.widgets.charts.curves import isolated_points

# The graphics items that draw one trace in a pyqtgraph ViewBox.

BAND_ALPHA, AREA_ALPHA, RAW_ALPHA = 44, 110, 80
"""Opacity of a band around a line, of a stacked area, and of the raw line of a smoothed curve."""


class CurveItems:
    """Line, dots for isolated points, the faint raw line of a smoothed curve, and a band or area."""

    def __init__(self, view: Any) -> None:
        self._view = view
        self.raw, self.line = (pg.PlotCurveItem(connect="finite") for _ in range(2))
        self.dots = pg.ScatterPlotItem(size=4, pen=None)
        self.low, self.high = (pg.PlotCurveItem(connect="finite", pen=None) for _ in range(2))
        self.band = pg.FillBetweenItem(self.low, self.high)
        self.band.setZValue(-10)
        self.raw.setZValue(-5)
        self._items = (self.band, self.raw, self.line, self.dots)
        for item in self._items:
            view.addItem(item, ignoreBounds=True)  # the range is set by us; pyqtgraph need not ask for bounds

    def remove(self) -> None:
        for item in self._items:
            self._view.removeItem(item)

    def draw(
        self,
        pen: QPen,
        x: np.ndarray,
        y: np.ndarray,
        raw: np.ndarray | None,
        edges: Any,
        *,
        fine: bool,
        area: bool = False,
    ) -> None:
        """Draw `y` over `x`, both `[n]`; `edges` are steps, low and high edge of the band, `[m]`. `fine`: thicker and antialiased."""
        pen = QPen(pen)
        pen.setCosmetic(True)  # the width is in pixels, not in steps
        pen.setWidthF(1.6 if fine else 1)
        self.line.setData(x, y, pen=pen, antialias=fine)
        isolated = isolated_points(y)
        self.dots.setData(x[isolated], y[isolated], brush=pen.color())
        if raw is None:
            self.raw.clear()
        else:
            self.raw.setData(x, raw, pen=pg.mkPen(faint(pen.color(), RAW_ALPHA)), antialias=fine)
        self.band.setVisible(edges is not None)
        if edges is not None:
            self.band.setBrush(faint(pen.color(), AREA_ALPHA if area else BAND_ALPHA))
            steps, low, high = edges
            self.low.blockSignals(True)  # the band is computed anew at the signal of each edge; once is enough
            self.low.setData(steps, low)
            self.low.blockSignals(False)
            self.high.setData(steps, high)


def faint(colour: QColor, alpha: int) -> QColor:
    """The colour with this opacity, 0 to 255."""
    copy = QColor(colour)
    copy.setAlpha(alpha)
    return copy


# ── mark painter ─────────────────────────────────────────────────────────────────────────────────────────────────────

ROLES: dict[MarkKind, str] = {
    "health": "warning", "change": "accent", "resume": "text", "checkpoint": "muted", "eval": "muted",
}  # fmt: skip
"""Kind → colour; where two marks would overlap, the one that comes first here is drawn."""
WITH_LINE: tuple[MarkKind, ...] = ("health", "change", "resume")
SIZE, ROUTINE_SIZE, APART = 7.0, 5.0, 12.0
"""Of a sign, of one for a routine event, and the width of the strips of which each has one sign at most, in pixels."""
NEAR = 6.0
"""How many pixels from a mark the pointer still shows its sentence."""
MOST_SENTENCES = 6
LINE_ALPHA = 120


class MarkPainter:
    """The marks of one plot. Where they are is computed with numpy: a long run has thousands, and is redrawn several times a second."""

    def __init__(self) -> None:
        self._marks: Sequence[Mark] = ()
        self._steps = np.empty(0)
        self._of_kind: dict[MarkKind, np.ndarray] = {}

    def set_marks(self, marks: Sequence[Mark]) -> bool:
        """Take these marks; returns whether they are others than before."""
        if len(marks) == len(self._marks) and marks == self._marks:
            return False
        self._marks = list(marks)
        self._steps = np.array([mark.step for mark in marks], dtype=float)
        kinds = np.array([mark.kind for mark in marks])
        self._of_kind = {kind: np.flatnonzero(kinds == kind) for kind in ROLES}
        return True

    def paint(self, painter: QPainter, span: tuple[float, float], area: QRectF) -> None:
        """Paint the marks whose steps lie in `span`, which the plot's `area` shows."""
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        for mark, x in self.placed(span, area):
            colour = getattr(theme.palette(), ROLES[mark.kind])
            if mark.kind in WITH_LINE:
                painter.setPen(QPen(faint(colour, LINE_ALPHA), 1, Qt.PenStyle.DashLine))
                painter.drawLine(QLineF(x, area.top() + SIZE, x, area.bottom()))
            painter.setPen(QPen(colour, 1))
            painter.setBrush(QBrush() if mark.kind == "eval" else QBrush(colour))
            _paint_sign(painter, mark.kind, QPointF(x, area.top() + SIZE / 2))

    def placed(self, span: tuple[float, float], area: QRectF) -> list[tuple[Mark, float]]:
        """The marks that are drawn and where, at most one in APART pixels: a hundred evaluations must not become a bar."""
        positions = self._positions(span, area)
        taken: set[int] = set()
        chosen: list[tuple[Mark, float]] = []
        for indices in self._of_kind.values():
            inside = indices[(self._steps[indices] >= span[0]) & (self._steps[indices] <= span[1])]
            buckets, firsts = np.unique(positions[inside] // APART, return_index=True)
            for bucket, index in zip(buckets.astype(int).tolist(), inside[firsts].tolist(), strict=True):
                if bucket not in taken:
                    taken.add(bucket)
                    chosen.append((self._marks[index], float(positions[index])))
        return chosen

    def sentences_near(
        self, span: tuple[float, float], area: QRectF, x: float, text: Callable[[int], str]
    ) -> list[str]:
        """What the marks within NEAR pixels of position `x` say, each with its step as `text` names it; the last line counts those left
        out."""
        near = np.flatnonzero(np.abs(self._positions(span, area) - x) <= NEAR).tolist()
        marks = [self._marks[index] for index in near[:MOST_SENTENCES]]
        lines = [f"{sentence_case(text(mark.step))}: {mark.sentence}" for mark in marks]
        return lines + ([f"and {len(near) - MOST_SENTENCES} more"] if len(near) > MOST_SENTENCES else [])

    def _positions(self, span: tuple[float, float], area: QRectF) -> np.ndarray:
        return area.left() + (self._steps - span[0]) / (span[1] - span[0]) * area.width()


def sentence_case(text: str) -> str:
    return text[:1].upper() + text[1:]


def _paint_sign(painter: QPainter, kind: MarkKind, centre: QPointF) -> None:
    half = (SIZE if kind in WITH_LINE else ROUTINE_SIZE) / 2
    if kind == "eval":
        painter.drawEllipse(centre, half, half)
        return
    if kind == "checkpoint":
        painter.drawRect(QRectF(centre.x() - half, centre.y() - half, 2 * half, 2 * half))
        return
    corners = {
        "change": ((0, -1), (1, 0), (0, 1), (-1, 0)),
        "health": ((0, -1), (1, 0.9), (-1, 0.9)),
        "resume": ((-0.8, -1), (1, 0), (-0.8, 1)),
    }[kind]
    painter.drawPolygon(QPolygonF([centre + QPointF(dx * half, dy * half) for dx, dy in corners]))
