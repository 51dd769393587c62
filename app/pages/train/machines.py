"""The Machines card of the Train page: the settings of a run on several machines, their list, and its check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from PySide6.QtCore import QObject, Qt, Signal
from PySide6.QtWidgets import QAbstractItemView, QVBoxLayout, QWidget

from app import theme
from app.pages.train.form import SettingsCard
from app.state.machines import Machines
from app.state.memory import amount
from app.state.session import Session
from app.widgets.basic.controls import CopyLink, ElidedLabel
from app.widgets.basic.dialogs import save_file
from app.widgets.basic.labels import button, label, plain_tip
from app.widgets.basic.layout import FlowLayout, clear_layout, column, row, set_shown, set_style_property
from app.widgets.basic.number_format import DASH
from app.widgets.basic.tables import ROW_HEIGHT, BaseTable, Index, RowsModel
from backend.config.config import SETTINGS
from backend.config.form import MACHINES
from backend.distributed.hosts_file import HERE, Host
from backend.distributed.machine_report import CheckedMachine, Level, MachineFacts
from backend.utils.errors import UserError
from backend.utils.files import user_path

KEY = "machines"
FIELDS = tuple(key for key, setting in SETTINGS.items() if setting.group == MACHINES)
NAME, ADDRESS, STATE = 1, 2, 3
MOST_ROWS = 8
"""Rows that are shown without scrolling."""
LEVELS: dict[Level, tuple[str, str]] = {
    "refuse": ("Refused", "problem"),
    "warn": ("Warning", ""),
    "info": ("Note", "muted"),
}
"""Level of a finding → its word and the role of its label."""


@dataclass(frozen=True, slots=True)
class MachineRow:
    """The entry of the hosts file, the result of the check, and its current stage."""

    rank: int
    host: Host
    is_here: bool
    checked: CheckedMachine | None = None
    stage: str = ""

    @property
    def name(self) -> str:
        if self.host.ssh in HERE:
            return "This machine"
        return f"{self.host.ssh} (here)" if self.is_here else self.host.ssh or "name it"

    @property
    def state(self) -> str:
        if self.stage or self.checked is None:
            return self.stage or DASH
        return "Answered" if self.checked.facts is not None else "Not reached"


@dataclass(frozen=True, slots=True)
class MachineColumn:
    """A column; `text` gives what the check found."""

    title: str
    tip: str
    width: int
    text: Callable[[MachineFacts], str] = lambda facts: ""
    is_figure: bool = False


def free_memory(facts: MachineFacts) -> str:
    """“40.0 of 64.0 GB”: the unit is written once if both have it."""
    free, total = amount(facts.memory_free), amount(facts.memory)
    return f"{free.removesuffix(total[-3:])} of {total}"


def free_disk(facts: MachineFacts) -> str:
    return DASH if facts.disk_free is None else amount(facts.disk_free)


COLUMNS = (
    MachineColumn("Rank", "The number of the process; rank 0 runs here and writes the run folder", 44, is_figure=True),
    MachineColumn("Name for ssh", "As typed after ssh. 127.0.0.1 is this machine. Double-click to edit.", 120),
    MachineColumn("Address", "An IPv4 address at which the others reach it. Double-click to edit.", 88),
    MachineColumn("State", "Progress or result of the check", 100),
    MachineColumn("Chip", "", 108, lambda facts: facts.chip),
    MachineColumn("Memory free", "Free now, of the total", 134, free_memory, True),
    MachineColumn("Disk free", "Where models are kept", 78, free_disk, True),
    MachineColumn("Model", "The form's model is there", 52, lambda facts: "Yes" if facts.model else "No"),
)


class MachineModel(RowsModel):
    columns = COLUMNS
    edited = Signal(int, int, str)  # rank, column, text

    def show_rows(self, rows: Sequence[MachineRow]) -> None:
        if len(rows) != len(self.rows):
            self.set_rows(rows)
        elif rows != self.rows:  # an open editor stays open
            self.rows = list(rows)
            self.repaint()

    def flags(self, index: Index) -> Qt.ItemFlag:
        flags = Qt.ItemFlag.ItemIsEnabled | Qt.ItemFlag.ItemIsSelectable
        is_editable = index.column() == ADDRESS or (index.column() == NAME and index.row() > 0)
        return flags | Qt.ItemFlag.ItemIsEditable if is_editable else flags

    def setData(self, index: Index, value: Any, role: int = Qt.ItemDataRole.EditRole) -> bool:
        self.edited.emit(index.row(), index.column(), str(value))
        return True

    def text(self, row: MachineRow, column: int) -> str:
        if column <= STATE:
            return (str(row.rank), row.name, ", ".join(row.host.ips) or DASH, row.state)[column]
        facts = row.checked.facts if row.checked is not None else None
        return (COLUMNS[column].text(facts) or DASH) if facts is not None else ""

    def extra(self, row: MachineRow, index: Index, role: int) -> Any:
        if role == Qt.ItemDataRole.EditRole:
            return row.host.ssh if index.column() == NAME else ", ".join(row.host.ips)
        return None

    def colour(self, row: MachineRow, column: int) -> Any:
        colours = theme.palette()
        if column == STATE and row.checked is not None and not row.stage:
            return colours.good if row.checked.facts is not None else colours.bad
        return colours.placeholder if column == NAME and not row.host.ssh else colours.text

    def tip(self, row: MachineRow, column: int) -> str:
        if row.checked is None or (facts := row.checked.facts) is None:
            return plain_tip(row.checked.problem if row.checked is not None else "")
        lines = (
            facts.machine,
            facts.system,
            facts.chip,
            f"Memory: {free_memory(facts)}; a run may use {amount(facts.memory_usable)}",
            f"Python {facts.python}, mlx {facts.mlx}, mlx-lm {facts.mlx_lm}, GRPO Studio {facts.grpo_studio}",
        )
        return plain_tip("\n".join(filter(None, lines)))


class MachineTable(BaseTable):
    """The list of machines."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.machines = MachineModel(self)
        self.setModel(self.machines)
        self.setAccessibleName("Machines")
        triggers = QAbstractItemView.EditTrigger
        self.setEditTriggers(triggers.DoubleClicked | triggers.EditKeyPressed | triggers.AnyKeyPressed)
        self.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
        self.horizontalHeader().setStretchLastSection(True)
        for number, each in enumerate(COLUMNS):
            self.setColumnWidth(number, theme.scaled(each.width))

    def show_rows(self, rows: Sequence[MachineRow]) -> None:
        self.machines.show_rows(rows)
        shown = max(1, min(len(rows), MOST_ROWS))
        around = self.horizontalHeader().sizeHint().height() + self.horizontalScrollBar().sizeHint().height() + 4
        self.setFixedHeight(around + theme.scaled(ROW_HEIGHT) * shown)

    def edit_name(self, rank: int) -> None:
        index = self.machines.index(rank, NAME)
        self.setCurrentIndex(index)
        self.edit(index)


class MachinePanel(QWidget):
    """One line, or the list of machines with its buttons and the result of its check."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        machines = self._machines = session.machines
        self._session = session
        self.summary = label(wrap=True, role="muted")
        self.table = MachineTable(self)
        check_tip = "Reaches every machine, compares versions and memory, and measures the connection"
        copy_tip = "Sends the form's model over ssh to the machines that lack it, up to 8 GB"
        self.check = button("Check", machines.check, tip=check_tip)
        self.stop = button("Stop", machines.stop, tip="Stop the check")
        self.copy_model = button("Copy the model", lambda: machines.check(copies=True), tip=copy_tip)
        self.add = button("Add a machine", self._add, tip="Add an entry to the hosts file")
        self.remove = button("Remove", self._remove, tip="Remove the selected machine from the list")
        self.save = button("Save hosts file…", self._save, tip="Write the list as a hosts file of mlx.launch")
        buttons = QWidget()
        flow = FlowLayout(buttons)
        for each in (self.check, self.stop, self.copy_model, self.add, self.remove, self.save):
            flow.addWidget(each)
        self._link, self._findings = label(wrap=True, selectable=True), QVBoxLayout()
        self._findings.setSpacing(4)
        self._command_line = ElidedLabel(Qt.TextElideMode.ElideMiddle, font=theme.mono_font(theme.CAPTION))
        self.copy_command = CopyLink("Copy the command of all ranks")
        self._command_row = QWidget()
        row(label("By hand", role="muted"), (self._command_line, 1), self.copy_command, into=self._command_row)
        self._details = QWidget(self)
        column(self.table, buttons, self._link, self._findings, self._command_row, into=self._details)
        column(self.summary, self._details, into=self)
        self.table.machines.edited.connect(self._edit)

    def tab_stops(self) -> list[QWidget]:
        return [self.table, self.check, self.stop, self.copy_model, self.add, self.remove, self.save, self.copy_command]

    def show_machines(self, *, details: bool) -> None:
        """Show the machines; without `details` only the line, unless there are several."""
        machines, report = self._machines, self._machines.report
        has_rows, is_checking = bool(machines.hosts), machines.is_checking
        set_shown(self._details, details or has_rows)
        self.summary.setText(machines.problem or machines.summary())
        set_style_property(self.summary, "role", "problem" if machines.problem else "muted")
        self.table.show_rows([_machine_row(machines, rank) for rank in range(len(machines.hosts))])
        for widget in (self.table, self.remove, self.save):
            set_shown(widget, has_rows)
        self.add.setText("Add a machine" if has_rows else "Add a second machine")
        self.add.setEnabled(not is_checking)
        self.remove.setEnabled(not is_checking)
        self.save.setEnabled(machines.can_save)
        set_shown(self.check, has_rows and not is_checking)
        self.check.setEnabled(not machines.problem and all(host.ssh for host in machines.hosts))
        set_shown(self.stop, is_checking)
        set_shown(self.copy_model, machines.can_copy and not is_checking)
        self._link.setText(report.link_sentence() if report is not None else "")
        set_shown(self._link, bool(self._link.text()))
        clear_layout(self._findings)
        for finding in report.findings if report is not None else ():
            word, role = LEVELS[finding.level]
            self._findings.addWidget(label(f"{word}: {finding.sentence}", role=role, wrap=True, selectable=True))
        if report is not None and not is_checking and not report.findings:
            self._findings.addWidget(label("These machines can train together.", wrap=True))
        self.copy_command.content = machines.command()
        self._command_line.setText(machines.short_command())
        self._command_line.setToolTip(f"<p>{escape(machines.command())}</p>")
        set_shown(self._command_row, bool(machines.command()))

    def _add(self) -> None:
        self._machines.add()
        self.table.edit_name(len(self._machines.hosts) - 1)

    def _remove(self) -> None:
        if rows := self.table.selected_rows():
            self._machines.remove(rows[0])

    def _edit(self, rank: int, column: int, text: str) -> None:
        (self._machines.rename if column == NAME else self._machines.move_to)(rank, text)

    def _save(self) -> None:
        known = self._machines.path
        try:
            if known:
                path = user_path(known, "hosts")
            else:
                path = save_file(self, "hosts", "Save hosts file", "hosts.json", "Hosts (*.json)")
            if path is not None:
                self._machines.save(path)
        except UserError as error:
            self._session.message.emit(error.faults[0].sentence)


def _machine_row(machines: Machines, rank: int) -> MachineRow:
    stage = machines.stages.get(rank)
    return MachineRow(rank, machines.hosts[rank], machines.is_here(rank), machines.machine(rank), str(stage or ""))


class MachinesPart(QObject):
    def __init__(self, session: Session, parent: QWidget) -> None:
        super().__init__(parent)
        settings = [
            replace(SETTINGS[key], group="") for key in FIELDS
        ]  # the card's title is the heading of their group
        self.card = SettingsCard(KEY, "Machines", settings, (), (), parent)
        self.panel = MachinePanel(session, self.card)
        self.card.middle.addWidget(self.panel)
        self.card.more.toggled.connect(lambda _: self._show())
        session.machines.changed.connect(self._show)
        self._show()

    def _show(self) -> None:
        self.panel.show_machines(details=self.card.is_open)
