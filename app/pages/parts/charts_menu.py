"""The button above a grid of charts with what concerns all of them: marks, hidden curves, saving as files, the columns of tables."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtGui import QAction, QActionGroup
from PySide6.QtWidgets import QMenu, QPushButton

from app.model.chart_columns import NAMINGS, Naming
from app.pages.parts.chart_export import ChartExport
from app.widgets.charts.chart_files import FORMATS
from app.widgets.charts.chart_grid import ChartGrid


class ChartsMenu(QPushButton):
    """A button that opens the menu.

    Attributes:
        marks – the action that shows or hides the marks; checked while they are shown.

    Signals:
        naming_chosen(str) – tables shall call their columns so.
    """

    naming_chosen = Signal(str)

    def __init__(self, grid: ChartGrid, export: ChartExport) -> None:
        super().__init__("Charts")
        self.setProperty("menu", "true")
        self.setAccessibleName("What to do with the charts")
        menu = QMenu(self)
        self.marks: QAction = menu.addAction("Show marks")
        self.marks.setCheckable(True)
        self.marks.setToolTip("Evaluations, saves, changes of settings, findings and resumes")
        menu.addAction("Show all curves", lambda: _show_all_curves(grid))
        menu.addAction("Show all steps", lambda: grid.zoom(None))
        menu.addSeparator()
        for name, text in FORMATS.items():
            menu.addAction(f"Save all as {text}s…", lambda name=name: export.save_all(name))
        columns = menu.addMenu("Columns of CSV tables")
        names = QActionGroup(columns)
        self._namings: dict[Naming, QAction] = {}
        for naming, text in NAMINGS.items():
            action = self._namings[naming] = names.addAction(columns.addAction(text))
            action.setCheckable(True)
            action.triggered.connect(lambda _, naming=naming: self.naming_chosen.emit(naming))
        self.setMenu(menu)

    def choose_naming(self, naming: Naming) -> None:
        """Mark a naming as the chosen one."""
        self._namings[naming].setChecked(True)


def _show_all_curves(grid: ChartGrid) -> None:
    for plot in grid.plots:
        for name in list(plot.hidden):
            plot.toggle_curve(name)
