"""The Machines card of the Train page: the settings of a run on several machines, their list, and its check."""

import shlex
from dataclasses import replace
from html import escape
from typing import Any

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QAbstractItemView, QWidget

from app import theme
from app.pages.train.form import FieldGrid, SettingsCard
from app.state.machines import Machines
from app.state.memory import amount
from app.state.messages import problems_to
from app.state.session import Session
from app.widgets.basic.controls import CopyLink, ElidedLabel
from app.widgets.basic.dialogs import save_file
from app.widgets.basic.labels import button, label, plain_tip
from app.widgets.basic.layout import FlowLayout, clear_layout, column, configure, holder, row, set_style_property
from app.widgets.basic.number_format import DASH
from app.widgets.basic.tables import BaseTable, Column, Index, RowsModel
from backend.config.config import SETTINGS
from backend.config.setting import MACHINES
from backend.distributed.hosts_file import HERE
from backend.distributed.machine_check import Level, MachineFacts
from backend.utils.files import user_path

FIELDS = tuple(key for key, setting in SETTINGS.items() if setting.group == MACHINES)
NAME, ADDRESS, STATE = 1, 2, 3
MOST_ROWS = 8
LEVELS: dict[Level, tuple[str, str]] = {  # level of a finding → its word and the role of its label
    "refuse": ("Refused", "problem"),
    "warn": ("Warning", ""),
    "info": ("Note", "muted"),
}


def free_memory(facts: MachineFacts) -> str:
    """“40.0 of 64.0 GB”: the unit is written once if both have it."""
    free, total = amount(facts.memory_free), amount(facts.memory)
    return f"{free.removesuffix(total[-3:])} of {total}"


class MachineModel(RowsModel):
    columns = (
        Column("Rank", 44, True, "The number of the process; rank 0 runs here and writes the run folder"),
        Column("Name for ssh", 120, tip="As typed after ssh. 127.0.0.1 is this machine. Double-click to edit."),
        Column("Address", 88, tip="An IPv4 address at which the others reach it. Double-click to edit."),
        Column("State", 100, tip="Progress or result of the check"),
        Column("Chip", 108),
        Column("Memory free", 134, True, "Free now, of the total"),
        Column("Disk free", 78, True, "Where models are kept"),
        Column("Model", 52, tip="The form's model is there"),
    )
    rows: list[int]  # the ranks

    def __init__(self, machines: Machines, parent: QWidget) -> None:
        super().__init__(parent)
        self._machines = machines

    def refresh(self) -> None:
        ranks = range(len(self._machines.hosts))
        if len(ranks) != len(self.rows):
            self.set_rows(ranks)
        else:  # an open editor stays open
            self.repaint()

    def _facts(self, rank: int) -> MachineFacts | None:
        checked = self._machines.machine(rank)
        return checked.facts if checked is not None else None

    def is_editable(self, row: int, column: int) -> bool:
        return column == ADDRESS or (column == NAME and row > 0)

    def setData(self, index: Index, value: Any, role: int = Qt.ItemDataRole.EditRole) -> bool:
        text = str(value)
        if index.column() == NAME:
            self._machines.change(index.row(), ssh=text.strip())
        else:
            self._machines.change(index.row(), ips=tuple(text.replace(",", " ").split()))
        return True

    def text(self, row: int, column: int) -> str:
        machines, host, facts = self._machines, self._machines.hosts[row], self._facts(row)
        name = f"{host.ssh} (here)" if machines.listed.is_here(row) else host.ssh or "name it"
        result = DASH if machines.machine(row) is None else "Answered" if facts is not None else "Not reached"
        state = machines.stages.get(row) or result
        cells = [str(row), "This machine" if host.ssh in HERE else name, ", ".join(host.ips), state]
        if facts is not None:
            disk = "" if facts.disk_free is None else amount(facts.disk_free)
            cells += [facts.chip, free_memory(facts), disk, "Yes" if facts.model else "No"]
        return (cells[column] or DASH) if column < len(cells) else ""

    def extra(self, row: int, index: Index, role: int) -> Any:
        host = self._machines.hosts[row]
        if role == Qt.ItemDataRole.EditRole:
            return host.ssh if index.column() == NAME else ", ".join(host.ips)
        return None

    def colour(self, row: int, column: int) -> str:
        machines = self._machines
        if column == STATE and machines.machine(row) is not None and row not in machines.stages:
            return "bad" if self._facts(row) is None else "good"
        return "placeholder" if column == NAME and not machines.hosts[row].ssh else "text"

    def tip(self, row: int, column: int) -> str:
        if (facts := self._facts(row)) is None:
            checked = self._machines.machine(row)
            return plain_tip(checked.problem if checked is not None else "")
        lines = (
            *(facts.machine, facts.system, facts.chip),
            f"Memory: {free_memory(facts)}; a run may use {amount(facts.memory_usable)}",
            f"Python {facts.python}, mlx {facts.mlx}, mlx-lm {facts.mlx_lm}, GRPO Studio {facts.grpo_studio}",
        )
        return plain_tip("\n".join(filter(None, lines)))


class MachinesCard(SettingsCard):
    def __init__(self, session: Session, parent: QWidget) -> None:
        super().__init__("Machines", parent)
        machines = self._machines = session.machines
        # The card's title is the heading of their group.
        self.grid = FieldGrid([replace(SETTINGS[key], group="") for key in FIELDS], self)
        self.summary = label(wrap=True, role="muted")
        self.model = MachineModel(machines, self)
        triggers = QAbstractItemView.EditTrigger
        edits = triggers.DoubleClicked | triggers.EditKeyPressed | triggers.AnyKeyPressed
        self.table = BaseTable(model=self.model, name="Machines", single=True, resizable=True, editTriggers=edits)
        self.table.horizontalHeader().setStretchLastSection(True)
        copy_tip = "Sends the form's model over ssh to the machines that lack it, up to 8 GB"
        self.check = button("Check", machines.check, tip="Reaches every machine, and compares versions and memory")
        self.stop = button("Stop", machines.stop, tip="Stop the check")
        self.copy_model = button("Copy the model", lambda: machines.check(copies=True), tip=copy_tip)
        self.add = button("Add a machine", self._add, tip="Add an entry to the hosts file")
        selected, tip = self.table.selected_rows, "Remove the selected machine from the list"
        self.remove = button("Remove", lambda: [machines.remove(rank) for rank in selected()], tip=tip)

        def save() -> None:
            with problems_to(session.message.emit):
                path = user_path(machines.path, "hosts") if machines.path else None
                path = path or save_file(self, "hosts", "Save hosts file", "hosts.json", "Hosts (*.json)")
                if path is not None:
                    machines.save(path)

        self.save = button("Save hosts file…", save, tip="Write the list as a hosts file of mlx.launch")
        buttons = (self.check, self.stop, self.copy_model, self.add, self.remove, self.save)
        flow = FlowLayout()
        for each in buttons:
            flow.addWidget(each)
        self._findings = column(spacing=4)
        self._command_line = ElidedLabel(Qt.TextElideMode.ElideMiddle, font=theme.mono_font(theme.CAPTION))
        self.copy_command = CopyLink("Copy the command of all ranks")
        self._command_row = holder(row(label("By hand", role="muted"), (self._command_line, 1), self.copy_command))
        self._details = holder(column(self.table, holder(flow), self._findings, self._command_row))
        self.tab_stops: list[QWidget] = [self.table, *buttons, self.copy_command]
        for part in (self.grid, self.summary, self._details):
            self.parts.addWidget(part)
        machines.changed.connect(self._show)
        self._show()

    def _show(self) -> None:
        machines, report = self._machines, self._machines.report
        hosts, is_checking, command = machines.hosts, machines.is_checking, shlex.join(machines.command())
        self.summary.setText(machines.problem or machines.summary())
        set_style_property(self.summary, "role", "problem" if machines.problem else "muted")
        self.model.refresh()
        self.table.fit_rows(MOST_ROWS, self.table.horizontalScrollBar().sizeHint().height() + 4)
        can_check = not machines.problem and all(host.ssh for host in hosts)
        for widget, shown, enabled in (
            (self.table, hosts, True),
            (self.add, True, not is_checking),
            (self.remove, hosts, not is_checking),
            (self.save, hosts, machines.can_save),
            (self.check, hosts and not is_checking, can_check),
            (self.stop, is_checking, True),
            (self.copy_model, report is not None and report.without_model and not is_checking, True),
            (self._command_row, command, True),
        ):
            configure(widget, visible=bool(shown), enabled=enabled)
        self.add.setText("Add a machine" if hosts else "Add a second machine")
        clear_layout(self._findings)
        for finding in report.findings if report is not None else ():
            word, role = LEVELS[finding.level]
            self._findings.addWidget(label(f"{word}: {finding.sentence}", role=role, wrap=True, selectable=True))
        if report is not None and not is_checking and not report.findings:
            self._findings.addWidget(label("These machines can train together.", wrap=True))
        self.copy_command.content = command
        configure(self._command_line, text=machines.short_command(), toolTip=f"<p>{escape(command)}</p>")

    def _add(self) -> None:
        self._machines.add()
        index = self.model.index(len(self._machines.hosts) - 1, NAME)
        self.table.setCurrentIndex(index)
        self.table.edit(index)
