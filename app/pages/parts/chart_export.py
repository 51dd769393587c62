"""Saving the charts of a grid as files: one of them, or all into a folder. The dialogs begin in the folder that was used last."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QObject, QTimer

from app.widgets.basic.file_dialogs import open_folder, save_file
from app.widgets.charts.chart_files import FORMATS, Format, write_csv, write_png, write_svg
from app.widgets.charts.chart_grid import ChartGrid
from app.widgets.charts.plot import Plot
from backend.spec.disk_faults import DiskFault

KIND = "charts"
"""What the preferences remember the folder for."""


class ChartExport(QObject):
    """Asks where to, and writes one chart per turn of the event loop.

    `run_name()` begins the files' names; `tell` shows one sentence about what was written, or why not.
    """

    def __init__(self, grid: ChartGrid, run_name: Callable[[], str], tell: Callable[[str], object]) -> None:
        super().__init__(grid)
        self._grid, self._run_name, self._tell = grid, run_name, tell
        self._queue: list[Plot] = []
        self._written = 0
        self._target: tuple[Path, Format] = (Path(), "png")
        self._turns = QTimer(self, interval=0)
        self._turns.timeout.connect(self._write_next)
        grid.save_requested.connect(self.save)

    def save(self, plot: Plot, format: Format) -> None:
        """Ask for a file, and write this chart to it."""
        name = self._file_name(plot, format)
        path = save_file(self._grid, KIND, f"Save {plot.title}", name, f"{FORMATS[format]} (*.{format})")
        if path is None:
            return
        target = path if path.suffix else path.with_suffix(f".{format}")
        if self._write(plot, target, format):
            self._tell(f"{plot.title} is in {target.name}.")

    def save_all(self, format: Format) -> None:
        """Ask for a folder, and write every chart that has data into it, in a file of its own."""
        folder = open_folder(self._grid, KIND, f"A folder for every chart as {FORMATS[format]}")
        if folder is not None:
            self.write_all(folder, format)

    def write_all(self, folder: Path, format: Format) -> None:
        """Begin to write every chart that has data into `folder`."""
        self._queue, self._written = self._grid.included_plots(), 0
        self._target = (folder, format)
        self._turns.start()

    def _write_next(self) -> None:
        folder, format = self._target
        if not self._queue:
            self._turns.stop()
            self._tell(f"{self._written} charts are in {folder.name}.")
            return
        plot = self._queue.pop(0)
        self._grid.draw(plot)
        if not any(trace.has_data for trace in plot.traces):
            return
        if self._write(plot, folder / self._file_name(plot, format), format):
            self._written += 1
        else:  # the others would fail alike, and the sentence says why
            self._turns.stop()

    def _write(self, plot: Plot, path: Path, format: Format) -> bool:
        try:
            if format == "csv":
                write_csv(plot.traces, path)
            elif format == "svg":
                write_svg(plot, path, plot.title)
            else:
                write_png(plot, path)
        except DiskFault as fault:
            self._tell(fault.faults[0].sentence)
            return False
        return True

    def _file_name(self, plot: Plot, format: Format) -> str:
        chart = re.sub(r"\W+", "-", plot.title.lower()).strip("-")
        return f"{self._run_name()}-{chart}.{format}"
