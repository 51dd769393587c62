"""The Machines card of the Train page: the settings of a run on several machines, the list of these, and their check."""

from __future__ import annotations

from dataclasses import replace

from PySide6.QtCore import QObject
from PySide6.QtWidgets import QWidget

from app.model.session import Session
from app.widgets.basic.file_dialogs import save_file
from app.widgets.form.settings_card import SettingsCard
from app.widgets.machines.machine_panel import MachinePanel, MachinesView
from app.widgets.machines.machine_table import NAME, MachineRow
from backend.spec.config import SETTINGS
from backend.spec.faults import Mistake
from backend.spec.settings.machines import DistributedFields
from backend.spec.user_input.paths import user_path

KEY, TITLE = "machines", "Machines"
FIELDS = tuple(DistributedFields.model_fields)
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
        except Mistake as mistake:
            self._session.message.emit(mistake.faults[0].sentence)
