"""The list of machines as a table: name and address, which can be edited, and beside them what a check found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, Qt, QTimer, Signal
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QAbstractItemView, QHBoxLayout, QHeaderView, QVBoxLayout, QWidget

from app import theme
from app.pages.train.form import SettingsCard
from app.state.memory import amount
from app.state.session import Session
from app.widgets.basic.controls import ElidedLabel, LinkButton
from app.widgets.basic.dialogs import save_file
from app.widgets.basic.labels import PlainLabel, button, label, plain_tip
from app.widgets.basic.layout import FlowLayout, clear_layout, set_shown, set_style_property
from app.widgets.basic.number_format import DASH
from app.widgets.basic.tables import ROW_HEIGHT, BaseTable, alignment_of, header_data
from backend.config.config import SETTINGS
from backend.config.form import MACHINES
from backend.distributed.hosts_file import HERE, Host
from backend.distributed.machine_report import CheckedMachine, Level, MachineFacts, MachineFinding
from backend.utils.errors import UserError
from backend.utils.files import user_path

Index = QModelIndex | QPersistentModelIndex
NAME, ADDRESS = 1, 2
MOST_ROWS = 8
"""Rows that are shown without scrolling."""


@dataclass(frozen=True, slots=True)
class MachineRow:
    """A row: the entry of the hosts file, what was found, and what is being done."""

    host: Host
    is_here: bool
    checked: CheckedMachine | None = None
    stage: str = ""


@dataclass(frozen=True, slots=True)
class _MachineColumn:
    title: str
    tip: str
    width: int
    text: Callable[[MachineFacts], str] = lambda facts: ""
    is_figure: bool = False


def _free_of(facts: MachineFacts) -> str:
    free, of_all = amount(facts.memory_free), amount(facts.memory)
    unit = of_all[-3:]  # said once where both have it
    return f"{free.removesuffix(unit)} of {of_all}"


COLUMNS = (
    _MachineColumn("Rank", "The number of the process; rank 0 runs here and writes the run folder", 44, is_figure=True),
    _MachineColumn("Name for ssh", "As you would type it after ssh. 127.0.0.1 is this machine. Double-click to edit.", 120),
    _MachineColumn("Address", "An IPv4 address at which the others reach it, such as that of the Thunderbolt bridge. Double-click to edit.", 88),
    _MachineColumn("State", "What the check is doing, or found", 100),
    _MachineColumn("Chip", "", 108, lambda facts: facts.chip),
    _MachineColumn("Memory free", "Free now, of all there is", 134, _free_of, True),
    _MachineColumn("Disk free", "Where models are kept", 78, lambda facts: DASH if facts.disk_free is None else amount(facts.disk_free), True),
    _MachineColumn("Model", "Whether the form's model is there", 52, lambda facts: "Yes" if facts.model else "No"),
)  # fmt: skip


class MachineModel(QAbstractTableModel):
    """Attributes:
        rows – the machines, in the order of their ranks.

    Signals:
        edited(rank, column, text) – the user typed a name or an address.
    """

    edited = Signal(int, int, str)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.rows: list[MachineRow] = []
        theme.signals.changed.connect(self._changed)

    def show_rows(self, rows: Sequence[MachineRow]) -> None:
        if len(rows) != len(self.rows):
            self.beginResetModel()
            self.rows = list(rows)
            self.endResetModel()
        elif rows != self.rows:  # an open editor stays open
            self.rows = list(rows)
            self._changed()

    def _changed(self) -> None:
        if self.rows:
            self.dataChanged.emit(self.index(0, 0), self.index(len(self.rows) - 1, len(COLUMNS) - 1))

    def rowCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else len(self.rows)

    def columnCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else len(COLUMNS)

    def flags(self, index: Index) -> Qt.ItemFlag:
        flags = Qt.ItemFlag.ItemIsEnabled | Qt.ItemFlag.ItemIsSelectable
        is_editable = index.column() == ADDRESS or (index.column() == NAME and index.row() > 0)
        return flags | Qt.ItemFlag.ItemIsEditable if is_editable else flags

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        return header_data(COLUMNS[section], role) if orientation == Qt.Orientation.Horizontal else None

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        row, column = self.rows[index.row()], COLUMNS[index.column()]
        if role == Qt.ItemDataRole.DisplayRole:
            return self._text(row, index)
        if role == Qt.ItemDataRole.EditRole:
            return row.host.ssh if index.column() == NAME else ", ".join(row.host.ips)
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return alignment_of(column)
        if role == Qt.ItemDataRole.FontRole:
            return theme.figures_font()
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tip(_about(row))
        return self._colour(row, column) if role == Qt.ItemDataRole.ForegroundRole else None

    def setData(self, index: Index, value: Any, role: int = Qt.ItemDataRole.EditRole) -> bool:
        self.edited.emit(index.row(), index.column(), str(value))
        return True

    def _text(self, row: MachineRow, index: Index) -> str:
        column = index.column()
        if column == 0:
            return str(index.row())
        if column == NAME:
            return _name(row)
        if column == ADDRESS:
            return ", ".join(row.host.ips) or DASH
        if COLUMNS[column].title == "State":
            return _state(row)
        facts = row.checked.facts if row.checked is not None else None
        return (COLUMNS[column].text(facts) or DASH) if facts is not None else ""

    def _colour(self, row: MachineRow, column: _MachineColumn) -> Any:
        colours = theme.palette()
        if column.title == "State" and row.checked is not None and not row.stage:
            return colours.good if row.checked.facts is not None else colours.bad
        is_missing = column.title == "Name for ssh" and not row.host.ssh
        return colours.placeholder if is_missing else colours.text


def _name(row: MachineRow) -> str:
    if row.host.ssh in HERE:
        return "This machine"
    return f"{row.host.ssh} (here)" if row.is_here else row.host.ssh or "name it"


def _state(row: MachineRow) -> str:
    if row.stage:
        return row.stage
    if row.checked is None:
        return DASH
    return "Answered" if row.checked.facts is not None else "Not reached"


def _about(row: MachineRow) -> str:
    """The tool tip: everything that is known."""
    if row.checked is None:
        return ""
    if (facts := row.checked.facts) is None:
        return row.checked.problem
    lines = [facts.machine, facts.system, facts.chip, f"Memory: {_free_of(facts)}; a run may use {amount(facts.memory_usable)}",
             f"Python {facts.python}, mlx {facts.mlx}, mlx-lm {facts.mlx_lm}, GRPO Studio {facts.grpo_studio}"]  # fmt: skip
    return "\n".join(filter(None, lines))


class MachineTable(BaseTable):
    """Signals:
    edited(rank, column, text) – the user typed a name or an address.
    """

    edited = Signal(int, int, str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.machines = MachineModel(self)
        self.setModel(self.machines)
        self.machines.edited.connect(self.edited)
        self.setAccessibleName("Machines")
        triggers = QAbstractItemView.EditTrigger
        self.setEditTriggers(triggers.DoubleClicked | triggers.EditKeyPressed | triggers.AnyKeyPressed)
        self.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
        header = self.horizontalHeader()
        header.setSectionResizeMode(QHeaderView.ResizeMode.Interactive)
        header.setStretchLastSection(True)
        for number, column in enumerate(COLUMNS):
            self.setColumnWidth(number, theme.scaled(column.width))
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAsNeeded)

    def show_rows(self, rows: Sequence[MachineRow]) -> None:
        """Show these, in a height that fits them."""
        self.machines.show_rows(rows)
        shown = max(1, min(len(rows), MOST_ROWS))
        scroll_bar = self.horizontalScrollBar().sizeHint().height()
        self.setFixedHeight(
            self.horizontalHeader().sizeHint().height() + theme.scaled(ROW_HEIGHT) * shown + scroll_bar + 4
        )

    def edit_name(self, rank: int) -> None:
        """Begin to type a machine's name."""
        index = self.machines.index(rank, NAME)
        self.setCurrentIndex(index)
        self.edit(index)


# What the form's Machines card shows besides its settings: one line, or the list of machines with its check and what
# that found.

LEVEL_WORDS: dict[Level, str] = {"refuse": "Refused", "warn": "Warning", "info": "Note"}
ROLES: dict[Level, str] = {"refuse": "problem", "warn": "", "info": "muted"}
FINE = "Nothing keeps these machines from training together."
COPY_TIP = "Sends the form's model over ssh to the machines that lack it, up to 8 GB"


@dataclass(frozen=True, slots=True)
class MachinesView:
    """Everything that the panel shows."""

    summary: str
    problem: str = ""
    rows: Sequence[MachineRow] = ()
    can_save: bool = False
    is_checking: bool = False
    is_checked: bool = False
    can_copy: bool = False
    link: str = ""
    findings: Sequence[MachineFinding] = ()
    command: str = ""
    short_command: str = ""


class MachinePanel(QWidget):
    """The panel.

    Attributes:
        summary – the one line.
        table – the list of machines.
        add, remove, save, check, copy_model, stop, copy_command – its buttons.

    Signals:
        add_pressed, save_pressed, check_pressed, copy_pressed, stop_pressed – a button was clicked.
        remove_pressed(rank) – the selected machine should go.
        edited(rank, column, text) – a cell was typed in.
    """

    add_pressed = Signal()
    remove_pressed = Signal(int)
    save_pressed = Signal()
    check_pressed = Signal()
    copy_pressed = Signal()
    stop_pressed = Signal()
    edited = Signal(int, int, str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.summary = label(wrap=True, role="muted")
        self.table = MachineTable(self)
        self.table.edited.connect(self.edited)
        self._command_text = ""
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(theme.SPACE)
        column.addWidget(self.summary)
        self._details = QWidget(self)
        inside = QVBoxLayout(self._details)
        inside.setContentsMargins(0, 0, 0, 0)
        inside.setSpacing(theme.SPACE)
        inside.addWidget(self.table)
        inside.addWidget(self._buttons())
        self._link, self._findings = label(wrap=True, selectable=True), QVBoxLayout()
        self._findings.setSpacing(4)
        inside.addWidget(self._link)
        inside.addLayout(self._findings)
        inside.addWidget(self._command())
        column.addWidget(self._details)

    def _buttons(self) -> QWidget:
        self.add = button("Add a machine", self.add_pressed.emit, tip="One more entry of the hosts file")
        self.remove = button("Remove", self._remove_selected, tip="Take the selected machine off the list")
        self.save = button(
            "Save hosts file…", self.save_pressed.emit, tip="Write the list as a hosts file of mlx.launch"
        )
        self.check = button(
            "Check",
            self.check_pressed.emit,
            tip="Reaches every machine, compares versions and memory, and measures how fast they sum",
        )
        self.copy_model = button("Copy the model", self.copy_pressed.emit, tip=COPY_TIP)
        self.stop = button("Stop", self.stop_pressed.emit, tip="Give the check up")
        row = QWidget(self)
        flow = FlowLayout(row)  # a narrow form has no room for all of them side by side
        for each in (self.check, self.stop, self.copy_model, self.add, self.remove, self.save):
            flow.addWidget(each)
        return row

    def _command(self) -> QWidget:
        self._command_row, self._command_line = QWidget(self), ElidedLabel(Qt.TextElideMode.ElideMiddle)
        self._command_line.setFont(theme.mono_font(theme.CAPTION))
        self.copy_command = LinkButton("Copy")
        self.copy_command.setAccessibleName("Copy the command of all ranks")
        self.copy_command.clicked.connect(self._copy_command)
        across = QHBoxLayout(self._command_row)
        across.setContentsMargins(0, 0, 0, 0)
        across.addWidget(label("By hand", role="muted"))
        across.addWidget(self._command_line, 1)
        across.addWidget(self.copy_command)
        return self._command_row

    def tab_stops(self) -> list[QWidget]:
        """The widgets that Tab visits, in order."""
        return [self.table, self.check, self.stop, self.copy_model, self.add, self.remove, self.save, self.copy_command]

    # Showing

    def show_details(self, shown: bool) -> None:
        """Show the list, or the one line alone."""
        set_shown(self._details, shown)

    def show_machines(self, view: MachinesView) -> None:
        self.summary.setText(view.problem or view.summary)
        set_style_property(self.summary, "role", "problem" if view.problem else "muted")
        self.table.show_rows(view.rows)
        set_shown(self.table, bool(view.rows))
        for each in (self.remove, self.save):
            set_shown(each, bool(view.rows))
        self.add.setText("Add a machine" if view.rows else "Add a second machine")
        self.save.setEnabled(view.can_save)
        for each in (self.add, self.remove):
            each.setEnabled(not view.is_checking)
        set_shown(self.check, bool(view.rows) and not view.is_checking)
        self.check.setEnabled(not view.problem and all(row.host.ssh for row in view.rows))
        set_shown(self.stop, view.is_checking)
        set_shown(self.copy_model, view.can_copy and not view.is_checking)
        self._link.setText(view.link)
        set_shown(self._link, bool(view.link))
        self._show_findings(view)
        self._command_text = view.command
        self._command_line.setText(view.short_command)
        self._command_line.setToolTip(f"<p>{escape(view.command)}</p>")
        set_shown(self._command_row, bool(view.command))

    def _show_findings(self, view: MachinesView) -> None:
        clear_layout(self._findings)
        for finding in view.findings:
            line = PlainLabel(f"{LEVEL_WORDS[finding.level]}: {finding.sentence}", wordWrap=True)
            line.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
            line.setProperty("role", ROLES[finding.level])
            self._findings.addWidget(line)
        if view.is_checked and not view.findings:
            self._findings.addWidget(label(FINE, wrap=True))

    def _remove_selected(self) -> None:
        if rows := self.table.selected_rows():
            self.remove_pressed.emit(rows[0])

    def _copy_command(self) -> None:
        QGuiApplication.clipboard().setText(self._command_text)
        self.copy_command.setText("Copied")
        QTimer.singleShot(1500, self.copy_command, lambda: self.copy_command.setText("Copy"))


# ── machines part ────────────────────────────────────────────────────────────────────────────────────────────────────

KEY, TITLE = "machines", "Machines"
FIELDS = tuple(key for key, about in SETTINGS.items() if about.group == MACHINES)
"""Settings of this card, and of no other."""


class MachinesPart(QObject):
    """The card, wired to the session.

    Attributes:
        card, panel – its widgets.
    """

    def __init__(self, session: Session, parent: QWidget) -> None:
        super().__init__(parent)
        self._session, self._machines = session, session.machines
        # Without the heading of their group, which is the card's title.
        settings = [replace(SETTINGS[key], group="") for key in FIELDS]
        self.card = SettingsCard(KEY, TITLE, settings, (), (), parent)
        panel = self.panel = MachinePanel(self.card)
        self.card.middle.addWidget(panel)
        self.card.more.toggled.connect(lambda _: self._show())
        panel.add_pressed.connect(self._add)
        panel.remove_pressed.connect(self._machines.remove)
        panel.save_pressed.connect(self._save)
        panel.check_pressed.connect(self._machines.check)
        panel.copy_pressed.connect(lambda: self._machines.check(copies=True))
        panel.stop_pressed.connect(self._machines.stop)
        panel.edited.connect(self._edit)
        self._machines.changed.connect(self._show)
        self._show()

    def _show(self) -> None:
        machines = self._machines
        self.panel.show_details(self.card.is_open or bool(machines.hosts))
        report = machines.report
        self.panel.show_machines(
            MachinesView(
                summary=machines.summary(),
                problem=machines.problem,
                rows=[self._row(rank) for rank in range(len(machines.hosts))],
                can_save=machines.can_save,
                is_checking=machines.is_checking,
                is_checked=report is not None and not machines.is_checking,
                can_copy=machines.can_copy,
                link=report.link_sentence() if report is not None else "",
                findings=report.findings if report is not None else (),
                command=machines.command(),
                short_command=machines.short_command(),
            )
        )

    def _row(self, rank: int) -> MachineRow:
        stage = self._machines.stages.get(rank)
        return MachineRow(
            self._machines.hosts[rank],
            self._machines.is_here(rank),
            self._machines.machine(rank),
            str(stage) if stage else "",
        )

    def _add(self) -> None:
        self._machines.add()
        self.panel.table.edit_name(len(self._machines.hosts) - 1)

    def _edit(self, rank: int, column: int, text: str) -> None:
        change = self._machines.rename if column == NAME else self._machines.move_to
        change(rank, text)

    def _save(self) -> None:
        """Write the file that the form names; where it names none, ask for a place."""
        known = self._machines.path
        try:
            if known:
                path = user_path(known, "hosts")
            else:
                path = save_file(self.panel, "hosts", "Save hosts file", "hosts.json", "Hosts (*.json)")
            if path is not None:
                self._machines.save(path)
        except UserError as mistake:
            self._session.message.emit(mistake.faults[0].sentence)
