"""Steers the run that is shown: opens the panel of settings, passes what it asks for to the run, and shows what the trainer says."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import QObject
from PySide6.QtWidgets import QWidget

from app.model.runs.present_settings import STEERED_STATES
from app.model.runs.run import Run
from app.model.session import Session
from app.widgets.monitor.steering_panel import SteeringPanel
from backend.spec.faults import Mistake


class RunSteering(QObject):
    """The panel is made when it is first opened, and closed when another run is shown or this one ends."""

    def __init__(self, session: Session, parent: QWidget) -> None:
        super().__init__(parent)
        self._session, self._parent = session, parent
        self._run: Run | None = None
        self._asked_after: int | None = None
        """The `seq` of the newest note when a change was asked for: the trainer's answer comes after it."""
        self.panel: SteeringPanel | None = None
        session.run_changed.connect(self._follow)

    def open(self, key: str = "") -> None:
        """Show the panel, with the cursor in the field of `key`."""
        run = self._session.run
        if run is None or run.state not in STEERED_STATES:
            self._session.message.emit("Settings change while a run is training; of a run that has ended, clone it.")
            return
        if self.panel is None:
            self.panel = SteeringPanel(self._parent)
            self.panel.change_asked.connect(self._ask)
        self._follow()
        self._refresh()
        self.panel.show()
        self.panel.raise_()
        self.panel.activateWindow()
        if key:
            self.panel.focus_setting(key)

    def open_conditions(self) -> None:
        """Show the panel at the conditions that end the run."""
        self.open("stop_when")

    def finish_step(self) -> None:
        """Stop the run once the step in flight is done."""
        if self._session.run is None:
            return
        try:
            self._session.run.send("finish-step")
        except Mistake as mistake:
            self._session.message.emit(_sentence(mistake))
        else:
            self._session.message.emit("The run stops at the end of the step in flight.")

    def _follow(self) -> None:
        if self._run is self._session.run:
            return
        if self.panel is not None and self._run is not None:
            self.panel.deleteLater()  # with what was typed for the other run
            self.panel = None
        self._run = self._session.run
        if self._run is not None:
            self._run.changed.connect(self._refresh)
            self._run.state_changed.connect(self._refresh)

    def _refresh(self, _state: str = "") -> None:
        panel, run = self.panel, self._run
        if panel is None or run is None:
            return
        if run.state not in STEERED_STATES:
            panel.hide()
            return
        settings = run.present_settings
        try:
            panel.show_settings(run.folder.name, settings.at_last(), settings.changes(), run.step)
        except Mistake as mistake:
            panel.show_answer(_sentence(mistake), is_refusal=True)
            return
        self._show_answer(panel, run)

    def _show_answer(self, panel: SteeringPanel, run: Run) -> None:
        if self._asked_after is None:
            return
        answers = [note for note in run.notes if _seq(note) > self._asked_after and note.get("answers") == "change"]
        if answers:
            self._asked_after = None
            panel.show_answer(str(answers[0]["sentence"]), is_refusal=answers[0].get("level") == "warning")

    def _ask(self, settings: dict[str, Any]) -> None:
        if self.panel is None or self._run is None:
            return
        self._asked_after = max(map(_seq, self._run.notes), default=-1)
        try:
            self._run.change(settings)
        except Mistake as mistake:
            self._asked_after = None
            self.panel.show_answer(_sentence(mistake), is_refusal=True)


def _seq(note: dict[str, Any]) -> int:
    seq = note.get("seq")
    return seq if isinstance(seq, int) else -1


def _sentence(mistake: Mistake) -> str:
    return " ".join(fault.sentence for fault in mistake.faults)
