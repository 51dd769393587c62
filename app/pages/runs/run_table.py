"""The archive of runs as a table: a row for each run, columns to choose and order, filtered by a test."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PySide6.QtCore import QModelIndex, QPointF, QRect, QRectF, QSignalBlocker, QSortFilterProxyModel, Qt, Signal
from PySide6.QtGui import QCursor, QFont, QKeyEvent, QPainter, QPen, QPixmap, QPolygonF, QShortcut
from PySide6.QtWidgets import QAbstractItemView, QHeaderView, QListWidget, QListWidgetItem, QWidget

from app import theme
from app.pages.runs.run_actions import ticked_data
from app.state.run_list import FoldedSweep
from app.widgets.basic import icons
from app.widgets.basic.controls import SearchEdit
from app.widgets.basic.dialogs import Dialog
from app.widgets.basic.icons import star_cell
from app.widgets.basic.labels import button, label, plain_tip
from app.widgets.basic.layout import column, configure, connect, row
from app.widgets.basic.number_format import DASH, duration, figure, file_size, moment, signed, ticks
from app.widgets.basic.tables import LEFT, RIGHT, BaseTable, CellDelegate, Index, RowsModel
from app.widgets.run_header import STATE_LABELS, STATE_ROLES
from backend.config.config import SETTINGS
from backend.runs.metric_names import MEASURES
from backend.runs.run_record import RunRecord, value_text
from backend.runs.run_search import FIELDS, RunField, field_of

ROLE = Qt.ItemDataRole
SORT, CURVE = ROLE.UserRole, ROLE.UserRole + 1  # item roles: the sort key, and the numbers of a small curve
NAME, FAVOURITE = "name", "favourite"
CHEVRON, INDENT = 12, " " * 6
DEFAULT_COLUMNS = (FAVOURITE, NAME, "state", "curve", "reward", "held_out", "steps", "began")
# Kind of a field → the first width of its column in pixels, and that of other kinds.
WIDTHS = {"text": 120, "steps": 120, "duration": 80, "time": 130, "bytes": 80, "curve": 64, "flag": 34}
NUMBER_WIDTH = 72
OWN_WIDTHS = {NAME: 152, "reward": 99, "held_out": 99, "state": 74, "model": 150, "note": 200}
WRITERS = {"change": signed, "duration": duration, "time": moment, "bytes": file_size}
OTHER_MEASURE: dict[str, Callable[[RunRecord], float | None]] = {  # reward column → what runs without rewards show
    "reward": lambda record: record.summary.reward_after,
    "held_out": lambda record: record.held_out.get(record.summary.measure),
}


def columns_of(keys: Sequence[str]) -> list[RunField]:
    wanted = keys if NAME in keys else (NAME, *keys)
    return [field for key in dict.fromkeys(wanted) if (field := field_of(key)) is not None]


def width_of(field: RunField) -> int:
    return theme.scaled(OWN_WIDTHS.get(field.key, WIDTHS.get(field.kind, NUMBER_WIDTH)))


def sort_key(field: RunField, record: RunRecord) -> Any:
    """Values of one kind for every run: a number that is missing sorts below all others."""
    value = field.value(record)
    if field.kind == "curve":
        return value[-1] if value else float("-inf")
    if field.kind == "text":
        return value_text(value).lower() if value not in (None, "") else ""
    return float(value) if isinstance(value, int | float) else float("-inf")


class RunModel(RowsModel):
    """Runs as rows. A row that changes is replaced in place, so that the selection and the scroll position survive."""

    renamed = Signal(object, str)  # record, title

    rows: list[RunRecord]
    columns: list[RunField] = columns_of(DEFAULT_COLUMNS)

    def __init__(self, parent: Any = None) -> None:
        super().__init__(parent)
        self.sweeps: dict[str, FoldedSweep] = {}
        self.unfolded: set[str] = set()
        self._sweep_of: dict[str, str] = {}

    def set_sweeps(self, sweeps: dict[str, FoldedSweep]) -> bool:
        """Fold these sweeps; returns if their runs are others than before."""
        before, self.sweeps = self._sweep_of, sweeps
        self._sweep_of = {path: key for key, sweep in sweeps.items() for path in sweep.members}
        return self._sweep_of != before

    def sweep_of(self, row: RunRecord) -> str:
        """Path of the sweep that a row stands for or belongs to, or ""."""
        path = row.summary.path
        return path if path in self.sweeps else self._sweep_of.get(path, "")

    def is_sweep(self, row: RunRecord) -> bool:
        return row.summary.path in self.sweeps

    def is_editable(self, row: int, column: int) -> bool:
        return self.columns[column].key == NAME and not self.is_sweep(self.rows[row])

    def setData(self, index: Index, value: Any, role: int = ROLE.EditRole) -> bool:
        row = self.rows[index.row()]
        if role == ROLE.EditRole and value.strip() != row.title:
            self.renamed.emit(row, value.strip())
        return role == ROLE.EditRole

    def set_columns(self, keys: Sequence[str]) -> None:
        self.beginResetModel()
        self.columns = columns_of(keys)
        self.endResetModel()

    def keep_only(self, paths: set[Path]) -> None:
        names = {str(path) for path in paths}
        for i in reversed(range(len(self.rows))):
            if self.rows[i].summary.path not in names:
                self.beginRemoveRows(QModelIndex(), i, i)
                del self.rows[i]
                self.endRemoveRows()

    def set_rows(self, rows: Sequence[RunRecord]) -> None:
        places = {record.summary.path: i for i, record in enumerate(self.rows)}
        new = [record for record in rows if record.summary.path not in places]
        for record in rows:
            i = places.get(record.summary.path)
            if i is not None and self.rows[i] != record:
                self.rows[i] = record
                self.dataChanged.emit(self.index(i, 0), self.index(i, len(self.columns) - 1))
        if new:
            self.beginInsertRows(QModelIndex(), len(self.rows), len(self.rows) + len(new) - 1)
            self.rows += new
            self.endInsertRows()

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = ROLE.DisplayRole) -> Any:
        field = self.columns[section]
        if orientation != Qt.Orientation.Horizontal:
            return None
        return {
            ROLE.DisplayRole: "" if field.kind == "flag" else field.title,
            ROLE.ToolTipRole: plain_tip(field.help or field.title),
            ROLE.AccessibleTextRole: field.title,
            ROLE.TextAlignmentRole: self.align(section),
        }.get(ROLE(role))

    def align(self, column: int) -> Qt.AlignmentFlag:
        return LEFT if self.columns[column].kind in ("text", "curve", "flag") else RIGHT

    def text(self, row: RunRecord, column: int) -> str:
        field = self.columns[column]
        value = field.value(row)
        if field.kind in ("curve", "flag"):  # which are drawn
            return ""
        if field.kind in WRITERS:
            return WRITERS[field.kind](value)
        if field.key == "state":
            return STATE_LABELS[value]
        if field.kind == "steps":
            total = row.summary.iterations
            of, unit = f" of {total:,}" if total and value != total else "", " runs" if self.is_sweep(row) else ""
            return f"{value:,}{of}{unit}"
        is_reward = row.summary.measure == "reward"
        if not is_reward and field.key in OTHER_MEASURE and (other := OTHER_MEASURE[field.key](row)) is not None:
            number = figure(other) if abs(other) >= 0.001 else ticks([other])[0]  # 0.000727 would not fit
            return f"{MEASURES[row.summary.measure].replace('divergence', 'div.')} {number}"
        if field.kind == "number" and field.key not in SETTINGS:
            return figure(value, field.unit)
        if field.key == NAME and self.sweep_of(row) and not self.is_sweep(row):
            return INDENT + value
        if value in (None, ""):
            return DASH if field.key in SETTINGS or field.key == "model" else ""
        return value_text(value)

    def colour(self, row: RunRecord, column: int) -> str:
        field = self.columns[column]
        if field.key == "state":
            return STATE_ROLES[row.summary.state]
        if field.kind == "change" and (change := field.value(row)):
            return "advantage_above" if change > 0 else "advantage_below"
        return "text" if field.key in (NAME, "reward", "held_out") else "muted"

    def font(self, row: RunRecord, column: int) -> QFont:
        return theme.figures_font()

    def tip(self, row: RunRecord, column: int) -> str:
        texts = {
            NAME: "\n".join(filter(None, (row.summary.path, row.notes_problem))),
            "model": row.summary.model,
            "note": row.notes.note,
            "state": row.summary.sentence,
        }
        return plain_tip(texts.get(self.columns[column].key) or "")

    def extra(self, row: RunRecord, index: Index, role: int) -> Any:
        field = self.columns[index.column()]
        if role == SORT:
            return sort_key(field, row)
        if field.key == NAME and role == ROLE.EditRole:
            return row.title
        if self.sweeps and field.key == NAME and role == ROLE.DecorationRole:
            if not self.is_sweep(row):  # a gap, so that all names begin in line
                gap = QPixmap(theme.scaled(CHEVRON), 1)
                gap.fill(Qt.GlobalColor.transparent)
                return gap
            name = "chevron-down" if row.summary.path in self.unfolded else "chevron-right"
            return icons.pixmap(name, theme.palette().muted, theme.scaled(CHEVRON))
        if role == CURVE:
            return row.curve or None if field.kind == "curve" else None
        is_star = field.key == FAVOURITE and not self.is_sweep(row)
        return star_cell(row.notes.favourite, role, theme.palette().faint) if is_star else None


def draw_curve(painter: QPainter, rect: QRect, values: Sequence[float]) -> None:
    box, low, high = QRectF(rect).adjusted(6, 6, -6, -6), min(values), max(values)
    step = box.width() / max(1, len(values) - 1)
    heights = [(value - low) / (high - low) if high > low else 0.5 for value in values]
    points = [QPointF(box.left() + i * step, box.bottom() - y * box.height()) for i, y in enumerate(heights)]
    painter.setPen(QPen(theme.palette().accent, 1.3))
    if len(points) == 1:
        painter.setBrush(theme.palette().accent)
        painter.drawEllipse(points[0], 1.5, 1.5)
    else:
        painter.drawPolyline(QPolygonF(points))


class _TestedRows(QSortFilterProxyModel):
    """Runs that pass `test`. While it `folds`, those of a sweep are below its row, and hidden where that is folded."""

    test: Callable[[RunRecord], bool] = staticmethod(lambda record: True)
    folds = True

    def __init__(self, model: RunModel, parent: QWidget) -> None:
        super().__init__(parent, sortRole=SORT)
        self._runs = model
        self.setSourceModel(model)

    def filterAcceptsRow(self, row: int, parent: Index) -> bool:
        model, record = self._runs, self._runs.rows[row]
        sweep = model.sweep_of(record)
        if model.is_sweep(record):
            return self.folds
        return self.test(record) and (not sweep or not self.folds or sweep in model.unfolded)

    def lessThan(self, left: Index, right: Index) -> bool:
        model = self._runs
        records = [model.rows[index.row()] for index in (left, right)]
        sweeps = [model.sweep_of(record) for record in records]
        if self.folds and sweeps[0] != sweeps[1]:
            leads = [model.sweeps[sweep].record if sweep else own for sweep, own in zip(sweeps, records, strict=True)]
            first, second = ((sort_key(model.columns[left.column()], one), one.summary.path) for one in leads)
            return first < second
        leads = [self.folds and model.is_sweep(record) for record in records]
        is_ascending = self.sortOrder() == Qt.SortOrder.AscendingOrder
        return leads[0] == is_ascending if any(leads) else super().lessThan(left, right)


class RunTable(BaseTable):
    opened = Signal()
    star_pressed = Signal(object)  # record
    columns_changed = Signal(list)  # (key, width) of each

    def __init__(self, model: RunModel) -> None:
        super().__init__(name="Runs", textElideMode=Qt.TextElideMode.ElideMiddle)  # names of runs differ at the end
        self._rows = model
        self._is_arranging = False
        self.sorted = _TestedRows(model, self)
        menu = Qt.ContextMenuPolicy.CustomContextMenu
        configure(self, model=self.sorted, itemDelegate=CellDelegate(CURVE, draw_curve, self), contextMenuPolicy=menu)
        head = configure(self.horizontalHeader(), sectionsMovable=True, contextMenuPolicy=menu)
        head.setSectionResizeMode(QHeaderView.ResizeMode.Interactive)
        head.setMinimumSectionSize(theme.scaled(WIDTHS["flag"]))

        def emit(*_: int) -> None:
            if not self._is_arranging:
                self.columns_changed.emit(self.columns())

        connect(emit, head.sectionMoved, head.sectionResized)
        self.setSortingEnabled(True)
        self.show_columns([])
        self.sort_by("began", Qt.SortOrder.DescendingOrder)

        def on_click(index: QModelIndex) -> None:
            record, key = self._record(index.row()), model.columns[index.column()].key
            path = record.summary.path
            at = self.viewport().mapFromGlobal(QCursor.pos()).x() - self.visualRect(index).left()
            if model.is_sweep(record) and key == NAME and at < theme.scaled(2 * CHEVRON):
                self.unfold(path, path not in model.unfolded)
            elif key == FAVOURITE and not model.is_sweep(record):
                self.star_pressed.emit(record)

        self.clicked.connect(on_click)
        self.doubleClicked.connect(lambda index: model.columns[index.column()].key == FAVOURITE or self.opened.emit())

    def show_columns(self, columns: Sequence[tuple[str, int]]) -> None:
        sorted_by = self._rows.columns[min(self.sorted.sortColumn(), len(self._rows.columns) - 1)].key
        order, widths, head = self.sorted.sortOrder(), dict(columns), self.horizontalHeader()
        self._is_arranging = True
        self._rows.set_columns([key for key, _ in columns] or DEFAULT_COLUMNS)
        for i, field in enumerate(self._rows.columns):
            head.moveSection(head.visualIndex(i), i)
            self.setColumnWidth(i, widths.get(field.key, 0) or width_of(field))
        self._is_arranging = False
        self.sort_by(sorted_by, order)
        self.fit_columns()

    def sort_by(self, key: str, order: Qt.SortOrder) -> None:
        keys = [field.key for field in self._rows.columns]
        self.sortByColumn(keys.index(key if key in keys else NAME), order)

    def columns(self) -> list[tuple[str, int]]:
        head = self.horizontalHeader()
        logical = [head.logicalIndex(place) for place in range(len(self._rows.columns))]
        return [(self._rows.columns[i].key, self.columnWidth(i)) for i in logical]

    def fit_columns(self) -> None:
        name = next(i for i, field in enumerate(self._rows.columns) if field.key == NAME)
        used = sum(self.columnWidth(i) for i in range(len(self._rows.columns)) if i != name)
        self._is_arranging = True
        self.setColumnWidth(name, max(width_of(self._rows.columns[name]), self.viewport().width() - used))
        self._is_arranging = False

    def unfold(self, sweep: str, on: bool) -> None:
        (self._rows.unfolded.add if on else self._rows.unfolded.discard)(sweep)
        self.sorted.invalidate()
        self.viewport().update()

    def rename(self) -> None:
        name = next(i for i, field in enumerate(self._rows.columns) if field.key == NAME)
        for place in self.selected_rows()[:1]:
            self.edit(self.sorted.index(place, name))

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if self.state() == QAbstractItemView.State.EditingState:
            return super().keyPressEvent(event)
        sweeps = [path for row in self.selected_rows() if (path := self._record(row).summary.path) in self._rows.sweeps]
        if event.key() in (Qt.Key.Key_Left, Qt.Key.Key_Right) and sweeps:
            for path in sweeps:
                self.unfold(path, event.key() == Qt.Key.Key_Right)
        elif event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            self.opened.emit()
        else:
            super().keyPressEvent(event)

    def selected_runs(self) -> list[RunRecord]:
        """The selected runs; for a sweep, all of its runs."""
        by_path = {record.summary.path: record for record in self._rows.rows}
        found: dict[str, RunRecord] = {}
        for record in map(self._record, self.selected_rows()):
            sweep = self._rows.sweeps.get(record.summary.path)
            paths = sweep.members if sweep is not None else (record.summary.path,)
            found |= {path: by_path[path] for path in paths if path in by_path}
        return list(found.values())

    def choose(self, *paths: Path) -> None:
        wanted = {str(path) for path in paths}
        for record in self._rows.rows:
            sweep = self._rows.sweep_of(record)
            if record.summary.path in wanted and sweep and sweep not in self._rows.unfolded:
                self.unfold(sweep, True)
        self.clearSelection()
        for place in range(self.sorted.rowCount()):
            if self._record(place).summary.path in wanted:
                self.selectRow(place, adds=True)

    def _record(self, row: int) -> RunRecord:
        return self._rows.rows[self.sorted.mapToSource(self.sorted.index(row, 0)).row()]


class ColumnDialog(Dialog):
    """Chooses columns: a list with check boxes, the shown ones first, in their order. A change applies at once."""

    chosen = Signal(list)

    def __init__(self, shown: Sequence[str], offered: Sequence[str], parent: QWidget | None = None) -> None:
        super().__init__("Columns", parent, (420, 520))
        self._offered = list(offered)
        self.search = SearchEdit("Find a setting or metric", "Find a column", textChanged=self._filter)
        self.list = configure(QListWidget(), name="Columns of the table of runs")
        self.list.setDragDropMode(QAbstractItemView.DragDropMode.InternalMove)
        connect(lambda *_: self._emit(), self.list.itemChanged, self.list.model().rowsMoved)
        up = button("Up", lambda: self.move(-1), tip="Alt+Up")
        down = button("Down", lambda: self.move(1), tip="Alt+Down")
        QShortcut("Alt+Up", self, lambda: self.move(-1))
        QShortcut("Alt+Down", self, lambda: self.move(1))
        defaults = button("Default columns", lambda: self._fill(DEFAULT_COLUMNS))
        hint = "Ticked columns are shown, in this order. Drag them, or use Alt+Up and Alt+Down."
        buttons = row(up, down, defaults, None, button("Close", self.close, primary=True))
        parts = (self.search, (self.list, 1), label(hint, role="muted", wrap=True), buttons)
        column(*parts, into=self, margins=2 * theme.SPACE)
        self._fill(shown)

    def _fill(self, shown: Sequence[str]) -> None:
        with QSignalBlocker(self.list):
            self.list.clear()
            for key in dict.fromkeys([*shown, *self._offered]):
                if (field := field_of(key)) is None:
                    continue
                item = QListWidgetItem(field.title if key in (field.title, *FIELDS) else f"{field.title}  –  {key}")
                item.setData(ROLE.UserRole, key)
                item.setToolTip(plain_tip(field.help))
                item.setCheckState(Qt.CheckState.Checked if key in shown else Qt.CheckState.Unchecked)
                if key == NAME:
                    item.setFlags(item.flags() & ~Qt.ItemFlag.ItemIsUserCheckable)
                self.list.addItem(item)
        self._emit()

    def move(self, by: int) -> None:
        place = self.list.currentRow()
        if place >= 0 and 0 <= place + by < self.list.count():
            self.list.insertItem(place + by, self.list.takeItem(place))
            self.list.setCurrentRow(place + by)
            self._emit()

    def _filter(self, text: str) -> None:
        for item in (self.list.item(i) for i in range(self.list.count())):
            item.setHidden(text.lower() not in item.text().lower())

    def _emit(self) -> None:
        self.chosen.emit(ticked_data(self.list))
