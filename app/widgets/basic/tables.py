"""Our tables: a model over a list of rows, and a view with plain headers whose rows can be copied."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from PySide6.QtCore import (
    QAbstractTableModel,
    QItemSelectionModel,
    QModelIndex,
    QObject,
    QPersistentModelIndex,
    QRect,
    Qt,
)
from PySide6.QtGui import QFont, QGuiApplication, QKeyEvent, QKeySequence, QPainter, QResizeEvent
from PySide6.QtWidgets import (
    QAbstractItemView,
    QFrame,
    QHeaderView,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QTableView,
    QWidget,
)

from app import theme
from app.widgets.basic.labels import plain_tip
from app.widgets.basic.layout import configure, wrap_in_card

Index = QModelIndex | QPersistentModelIndex
CHECKED = Qt.ItemDataRole.CheckStateRole
ROW_HEIGHT = 28
RIGHT = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
LEFT = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; `width` in pixels before scaling, 0 to stretch; `is_figure`: right-aligned numbers.

    `colour`, a role of the palette, and `font` are those of cells for which the model has no others.
    """

    title: str
    width: int = 0
    is_figure: bool = False
    tip: str = ""
    colour: str = "text"
    font: Callable[[], QFont] = theme.figures_font


class RowsModel(QAbstractTableModel):
    """A list of rows under fixed columns. Subclasses implement `text`, and the other methods where they differ."""

    columns: Sequence[Any] = ()

    def __init__(self, parent: Any = None, columns: Sequence[Any] = ()) -> None:
        super().__init__(parent)
        self.rows: Sequence[Any] = []
        self.columns = columns or self.columns

    def set_rows(self, rows: Sequence[Any]) -> None:
        self.beginResetModel()
        self.rows = list(rows)
        self.endResetModel()

    def repaint(self) -> None:
        if self.rows:
            self.dataChanged.emit(self.index(0, 0), self.index(len(self.rows) - 1, self.columnCount() - 1))

    def text(self, row: Any, column: int) -> str | None:
        raise NotImplementedError

    def colour(self, row: Any, column: int) -> Any:
        """A role of the palette, or a colour."""
        return self.columns[column].colour

    def font(self, row: Any, column: int) -> QFont | None:
        return self.columns[column].font()

    def tip(self, row: Any, column: int) -> str | None:
        return None

    def extra(self, row: Any, index: Index, role: int) -> Any:
        return None

    def align(self, column: int) -> Qt.AlignmentFlag:
        return RIGHT if self.columns[column].is_figure else LEFT

    def is_editable(self, row: int, column: int) -> bool:
        return False

    def flags(self, index: Index) -> Qt.ItemFlag:
        flags = super().flags(index)
        is_editable = index.isValid() and self.is_editable(index.row(), index.column())
        return flags | Qt.ItemFlag.ItemIsEditable if is_editable else flags

    def rowCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else len(self.rows)

    def columnCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else len(self.columns)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if orientation != Qt.Orientation.Horizontal:
            return None
        column = self.columns[section]
        match role:
            case Qt.ItemDataRole.DisplayRole:
                return column.title
            case Qt.ItemDataRole.TextAlignmentRole:
                return self.align(section)
            case Qt.ItemDataRole.ToolTipRole:
                return plain_tip(column.tip) or None
        return None

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        row, column = self.rows[index.row()], index.column()
        match role:
            case Qt.ItemDataRole.DisplayRole:
                return self.text(row, column)
            case Qt.ItemDataRole.ForegroundRole:
                colour = self.colour(row, column)
                return getattr(theme.palette(), colour) if isinstance(colour, str) else colour
            case Qt.ItemDataRole.FontRole:
                return self.font(row, column)
            case Qt.ItemDataRole.TextAlignmentRole:
                return self.align(column)
            case Qt.ItemDataRole.ToolTipRole:
                return self.tip(row, column)
        return self.extra(row, index, role)


class TextsModel(RowsModel):
    """Rows of texts, each whole in its tool tip: the view elides wide ones."""

    def text(self, row: Sequence[str], column: int) -> str:
        return row[column]

    def tip(self, row: Sequence[str], column: int) -> str:
        return plain_tip(row[column])


class CellDelegate(QStyledItemDelegate):
    """Paints a cell, and on it `draw(painter, rect, data)` what the item has as `role`."""

    def __init__(self, role: int, draw: Callable[[QPainter, QRect, Any], None], parent: QObject) -> None:
        super().__init__(parent)
        self._role, self._draw = role, draw

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        super().paint(painter, option, index)
        if (data := index.data(self._role)) is not None:
            painter.save()
            painter.setRenderHint(QPainter.RenderHint.Antialiasing)
            self._draw(painter, option.rect, data)  # pyright: ignore[reportAttributeAccessIssue]
            painter.restore()


class BaseTable(QTableView):
    """A table view. Selected rows are copied as tab-separated text, headers first; Space ticks the first column."""

    def __init__(
        self,
        parent: QWidget | None = None,
        *,
        model: RowsModel | None = None,
        single: bool = False,
        resizable: bool = False,
        **settings: Any,
    ) -> None:
        """`single`: one row can be selected; `resizable`: the user can change the columns' widths."""
        super().__init__(parent, showGrid=False, wordWrap=False)
        self.setTabKeyNavigation(False)
        self.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
        modes = QAbstractItemView.SelectionMode
        self.setSelectionMode(modes.SingleSelection if single else modes.ExtendedSelection)
        self.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        self.setHorizontalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        configure(self, role="table", **settings)
        self.verticalHeader().hide()
        self.verticalHeader().setDefaultSectionSize(theme.scaled(ROW_HEIGHT))
        header = self.horizontalHeader()
        header.setHighlightSections(False)
        header.setMinimumSectionSize(theme.scaled(28))
        header.setFont(theme.caption_font())
        if model is not None:
            self.setModel(model)
            modes = QHeaderView.ResizeMode
            given = modes.Interactive if resizable else modes.Fixed
            for place, column in enumerate(model.columns):
                header.setSectionResizeMode(place, given if column.width else modes.Stretch)
                self.setColumnWidth(place, theme.scaled(column.width))

    def fit_rows(self, most: int, extra: int = 2) -> None:
        """Make the table as high as its rows, `most` of them at most, and `extra` pixels."""
        rows, height = max(1, min(self.model().rowCount(), most)), self.verticalHeader().defaultSectionSize()
        self.setFixedHeight(self.horizontalHeader().sizeHint().height() + rows * height + extra)

    def fit_columns(self) -> None:
        """Called for each size of the table."""

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.fit_columns()

    def in_card(self) -> QFrame:
        return wrap_in_card(self)

    def selected_rows(self) -> list[int]:
        return sorted(index.row() for index in self.selectionModel().selectedRows()) if self.selectionModel() else []

    @property
    def selected_row(self) -> Any:
        """The row of its `RowsModel` that is selected, the first of several; None without one."""
        places, model = self.selected_rows(), cast("RowsModel", self.model())
        return model.rows[places[0]] if places else None

    def selectRow(self, row: int, *, adds: bool = False) -> None:
        """`adds`: what is selected stays so."""
        flags = QItemSelectionModel.SelectionFlag
        command = flags.Select if adds else flags.ClearAndSelect
        column = max(self.horizontalHeader().logicalIndexAt(0), 0)  # the leftmost in view: nothing scrolls sideways
        self.selectionModel().setCurrentIndex(self.model().index(row, column), command | flags.Rows)

    def as_text(self, rows: list[int]) -> str:
        model, columns = self.model(), range(self.model().columnCount())
        roles, across = Qt.ItemDataRole, Qt.Orientation.Horizontal
        heads = [model.headerData(i, across, roles.AccessibleTextRole) or model.headerData(i, across) for i in columns]

        def text(index: QModelIndex) -> object:
            return index.data() if index.data(CHECKED) is None else "yes" if is_ticked(index) else "no"

        lines = [heads, *([text(model.index(row, column)) for column in columns] for row in rows)]
        return "\n".join("\t".join(" ".join(str(cell or "").split()) for cell in cells) for cells in lines)

    def copy(self) -> None:
        QGuiApplication.clipboard().setText(self.as_text(self.selected_rows()))

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.matches(QKeySequence.StandardKey.Copy):
            self.copy()
        elif event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter) and self.currentIndex().isValid():
            self.activated.emit(self.currentIndex())  # on macOS Qt would start editing
        elif event.key() == Qt.Key.Key_Space and self.currentIndex().siblingAtColumn(0).data(CHECKED) is not None:
            toggle_tick(self.model(), self.currentIndex().siblingAtColumn(0))
        else:
            super().keyPressEvent(event)


def is_ticked(index: Index) -> bool:
    return index.data(CHECKED) == Qt.CheckState.Checked


def toggle_tick(model: Any, index: Index) -> None:
    model.setData(index, Qt.CheckState.Unchecked if is_ticked(index) else Qt.CheckState.Checked, CHECKED)
