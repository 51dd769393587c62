"""The graphics items that draw one trace in a pyqtgraph ViewBox."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyqtgraph as pg
from PySide6.QtGui import QColor, QPen

from app.widgets.charts.curves import isolated_points

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
