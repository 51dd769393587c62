"""The archive of runs as a table: a row for each run, columns to choose, several rows to select, filtered by a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from PySide6.QtCore import (
    QAbstractTableModel,
    QModelIndex,
    QObject,
    QPersistentModelIndex,
    QPointF,
    QRectF,
    QSortFilterProxyModel,
    Qt,
    Signal,
)
from PySide6.QtGui import QKeyEvent, QPainter, QPen, QPolygonF, QResizeEvent
from PySide6.QtWidgets import QAbstractItemView, QHeaderView, QStyledItemDelegate, QStyleOptionViewItem

from app import theme
from app.pages.runs import run_columns
from app.pages.runs.run_columns import CURVE_KEY, DEFAULT_COLUMNS, FAVOURITE, NAME
from app.widgets.basic import icons
from app.widgets.basic.labels import plain_tip
from app.widgets.basic.tables import BaseTable
from backend.runs.run_record import RunRecord
from backend.runs.run_search import RunField

# The cell of a table that shows a few numbers as a small curve.

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


# ── run table ────────────────────────────────────────────────────────────────────────────────────────────────────────

Index = QModelIndex | QPersistentModelIndex
SORT = Qt.ItemDataRole.UserRole
_RIGHT = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
_LEFT = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter


class RunModel(QAbstractTableModel):
    """Runs as rows. A row that changes is replaced in place, so that the selection and the scroll position survive.

    Attributes:
        rows – unsorted; the view sorts.
        columns – the fields shown, in order.
    """

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.rows: list[RunRecord] = []
        self.columns: list[RunField] = run_columns.columns_of(list(DEFAULT_COLUMNS))
        self._row_of: dict[str, int] = {}
        theme.signals.changed.connect(self._recolour)

    def set_columns(self, keys: Sequence[str]) -> None:
        self.beginResetModel()
        self.columns = run_columns.columns_of(list(keys))
        self.endResetModel()

    def keep_only(self, paths: set[Path]) -> None:
        """Remove the runs that are not among `paths`."""
        names = {str(path) for path in paths}
        for i in reversed(range(len(self.rows))):
            if self.rows[i].summary.path not in names:
                self.beginRemoveRows(QModelIndex(), i, i)
                del self.rows[i]
                self.endRemoveRows()
        self._row_of = {record.summary.path: i for i, record in enumerate(self.rows)}

    def set_rows(self, records: Sequence[RunRecord]) -> None:
        """Replace the rows of these runs, and add those of runs that have none."""
        new = []
        for record in records:
            i = self._row_of.get(record.summary.path)
            if i is None:
                new.append(record)
            elif self.rows[i] != record:
                self.rows[i] = record
                self.dataChanged.emit(self.index(i, 0), self.index(i, len(self.columns) - 1))
        if new:
            first = len(self.rows)
            self.beginInsertRows(QModelIndex(), first, first + len(new) - 1)
            self.rows += new
            self._row_of |= {record.summary.path: first + i for i, record in enumerate(new)}
            self.endInsertRows()

    def record_at(self, path: Path) -> RunRecord | None:
        i = self._row_of.get(str(path))
        return None if i is None else self.rows[i]

    def _recolour(self) -> None:
        if self.rows:
            self.dataChanged.emit(self.index(0, 0), self.index(len(self.rows) - 1, len(self.columns) - 1))

    def rowCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else len(self.rows)

    def columnCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else len(self.columns)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if orientation != Qt.Orientation.Horizontal:
            return None
        field = self.columns[section]
        if role == Qt.ItemDataRole.DisplayRole:
            return "" if field.kind == "flag" else field.title
        if role == Qt.ItemDataRole.ToolTipRole:
            return f"<p>{escape(field.help or field.title)}</p>"
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return _RIGHT if run_columns.is_right_aligned(field) else _LEFT
        return field.title if role == Qt.ItemDataRole.AccessibleTextRole else None

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        record, field = self.rows[index.row()], self.columns[index.column()]
        if role == Qt.ItemDataRole.DisplayRole:
            return run_columns.cell_text(field, record)
        if role == SORT:
            return run_columns.sort_key(field, record)
        if role == CURVE:
            return record.curve if field.key == CURVE_KEY else None
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return _RIGHT if run_columns.is_right_aligned(field) else _LEFT
        if role == Qt.ItemDataRole.FontRole:
            return theme.figures_font()
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tip(_tip(field, record) or "")
        if field.key == FAVOURITE:
            return _star(record, role)
        return run_columns.cell_colour(field, record) if role == Qt.ItemDataRole.ForegroundRole else None


class _TestedRows(QSortFilterProxyModel):
    """Sorts by role SORT, and leaves out the rows that do not pass a test."""

    test: Callable[[RunRecord], bool] = staticmethod(lambda record: True)

    def filterAcceptsRow(self, row: int, parent: Index) -> bool:
        model = self.sourceModel()
        assert isinstance(model, RunModel)
        return self.test(model.rows[row])


class RunTable(BaseTable):
    """The table view, through a proxy model that sorts and filters; newest first at the start.

    Attributes:
        sorted – the proxy model.

    Signals:
        opened – Enter, or a double click.
        star_pressed(path) – the star of a run was clicked.
        columns_changed([(key, width), …]) – the user has moved or resized a column.
    """

    opened = Signal()
    star_pressed = Signal(object)
    columns_changed = Signal(list)

    def __init__(self, model: RunModel) -> None:
        super().__init__()
        self._rows = model
        self.sorted = _TestedRows(self, sortRole=SORT)
        self.sorted.setSourceModel(model)
        self.setModel(self.sorted)
        self.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        self.setTextElideMode(Qt.TextElideMode.ElideMiddle)  # names of runs differ at the end
        self.setItemDelegate(SparklineDelegate(self))
        self.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        self.setAccessibleName("Runs")
        head = self.horizontalHeader()
        head.setSectionResizeMode(QHeaderView.ResizeMode.Interactive)
        head.setMinimumSectionSize(theme.scaled(run_columns.WIDTHS["flag"]))
        head.setSectionsMovable(True)
        head.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        head.sectionMoved.connect(lambda *_: self._tell_columns())
        head.sectionResized.connect(lambda *_: self._tell_columns())
        self._is_laying_out = False
        self.setSortingEnabled(True)
        self.show_columns([])
        self.sort_by("began", Qt.SortOrder.DescendingOrder)
        self.clicked.connect(self._on_clicked)
        self.doubleClicked.connect(lambda index: self._field_at(index).key != FAVOURITE and self.opened.emit())

    def show_columns(self, columns: Sequence[tuple[str, int]]) -> None:
        """Show these columns with these widths; none at all means the default ones. The sorting column stays, if it is there."""
        sorted_by = self._rows.columns[min(self.sorted.sortColumn(), len(self._rows.columns) - 1)].key
        order = self.sorted.sortOrder()
        widths = dict(columns)
        self._is_laying_out = True
        self._rows.set_columns([key for key, _ in columns] or DEFAULT_COLUMNS)
        head = self.horizontalHeader()
        for i, field in enumerate(self._rows.columns):
            head.moveSection(head.visualIndex(i), i)
            self.setColumnWidth(i, widths.get(field.key, 0) or run_columns.width_of(field))
        self._is_laying_out = False
        self.sort_by(sorted_by, order)
        self._fill_width()

    def sort_by(self, key: str, order: Qt.SortOrder) -> None:
        """Sort by a column; by the name where it is not shown."""
        keys = [field.key for field in self._rows.columns]
        self.sortByColumn(keys.index(key if key in keys else NAME), order)

    def columns(self) -> list[tuple[str, int]]:
        """(key, width) of the columns as the user has arranged them."""
        head = self.horizontalHeader()
        logical = [head.logicalIndex(place) for place in range(len(self._rows.columns))]
        return [(self._rows.columns[i].key, self.columnWidth(i)) for i in logical]

    def set_test(self, test: Callable[[RunRecord], bool]) -> None:
        """Show only the runs that pass."""
        self.sorted.test = test
        self.sorted.invalidateFilter()

    def _tell_columns(self) -> None:
        if not self._is_laying_out:
            self.columns_changed.emit(self.columns())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fill_width()

    def _fill_width(self) -> None:
        """Give the name the width that the other columns leave; where they leave too little, the table scrolls sideways."""
        keys = [field.key for field in self._rows.columns]
        name = keys.index(NAME)
        used = sum(self.columnWidth(i) for i in range(len(keys)) if i != name)
        self._is_laying_out = True
        least = run_columns.width_of(self._rows.columns[name])
        self.setColumnWidth(name, max(least, self.viewport().width() - used))
        self._is_laying_out = False

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            self.opened.emit()
        else:
            super().keyPressEvent(event)

    def selected_runs(self) -> list[RunRecord]:
        """The selected runs, in the order of the table."""
        return [self._record(row) for row in self.selected_rows()]

    def choose(self, *paths: Path) -> None:
        """Select the runs in these folders, as far as the table shows them."""
        wanted = {str(path) for path in paths}
        self.clearSelection()
        mode = self.selectionMode()
        self.setSelectionMode(QAbstractItemView.SelectionMode.MultiSelection)
        for row in range(self.sorted.rowCount()):
            if self._record(row).summary.path in wanted:
                self.selectRow(row)
        self.setSelectionMode(mode)

    def _record(self, row: int) -> RunRecord:
        return self._rows.rows[self.sorted.mapToSource(self.sorted.index(row, 0)).row()]

    def _field_at(self, index: QModelIndex) -> RunField:
        return self._rows.columns[index.column()]

    def _on_clicked(self, index: QModelIndex) -> None:
        if self._field_at(index).key == FAVOURITE:
            self.star_pressed.emit(Path(self._record(index.row()).summary.path))


def _tip(field: RunField, record: RunRecord) -> str | None:
    if field.key == NAME:
        problem = f"\n{record.notes_problem}" if record.notes_problem else ""
        return record.summary.path + problem
    if field.key == "model":
        return record.summary.model
    if field.key == "note":
        return record.notes.note
    return record.summary.sentence if field.key == "state" and record.summary.sentence else None


def _star(record: RunRecord, role: int) -> Any:
    starred, colours = record.notes.favourite, theme.palette()
    if role == Qt.ItemDataRole.DecorationRole:
        return icons.icon("star-filled" if starred else "star", colours.clip if starred else colours.faint, 16)
    return ("favourite" if starred else "no favourite") if role == Qt.ItemDataRole.AccessibleTextRole else None
