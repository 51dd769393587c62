"""Steers the run that is shown: opens the panel of settings, passes what it asks for to the run, and shows what the trainer says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PySide6.QtCore import QObject, Qt, Signal
from PySide6.QtWidgets import QDialog, QGridLayout, QHBoxLayout, QVBoxLayout, QWidget

from app import theme
from app.state.run import Run
from app.state.run_files import STEERED_STATES
from app.state.session import Session
from app.widgets.basic.controls import LinkButton
from app.widgets.basic.labels import button, label
from app.widgets.basic.layout import TabArea, clear_layout, on_screen, set_shown
from app.widgets.form.fields import Field, make_field
from backend.config.config import SETTINGS, Config
from backend.runs.steering import Change, changed
from backend.utils.errors import UserError

# The panel that changes settings of a live run: the settings that may change, with their present values, and the
# changes so far.

GROUPS: dict[str, tuple[str, ...]] = {
    "Learning": ("iters", "learning_rate", "lr_final", "max_grad_norm"),
    "Update": ("beta", "epsilon", "epsilon_high", "delta", "entropy_coef", "mask_truncated_completions"),
    "Sampling": ("temperature", "top_p", "top_k", "min_p", "dynamic_sampling"),
    "Rewards": ("reward_weights", "reward_weights_final", "scale_rewards"),
    "Saving and stopping": (
        *("save_every", "steps_per_eval", "stop_when", "early_stopping_patience", "early_stopping_min_delta"),
    ),
}
"""Title → keys; together they are `STEERABLE`."""
COLUMNS = 3
SIZE = (760, 540)
"""In pixels; it fits a window of 880×600."""


class SteeringPanel(QDialog):
    """A window beside the main one. `show_settings` whenever the run or its settings may have changed.

    Signals:
        change_asked(dict) – change these raw settings.
    """

    change_asked = Signal(dict)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle("Change settings")
        self._present: Config | None = None
        self._edited: dict[str, Any] = {}
        self._done = 0
        self._changes: list[Change] | None = None
        self.fields: dict[str, Field] = {}
        self._intro = label(
            "The step in flight ends with the settings it began with; a change holds from the next one on, after a resume too.",
            role="muted",
            wrap=True,
        )
        self._problem = label(role="problem", wrap=True)
        self._answer = label(role="muted", wrap=True, selectable=True)
        self.change = button("Change", self._ask, primary=True)
        self.put_back = button("Put back", self._put_back, tip="Shows the present values again")
        self._history = QVBoxLayout()
        self._history.setSpacing(4)
        self._lay_out()
        self.resize(on_screen(self, *SIZE))

    def _lay_out(self) -> None:
        content = QWidget()
        column = QVBoxLayout(content)
        column.setContentsMargins(theme.GUTTER, theme.GUTTER, theme.GUTTER, theme.GUTTER)
        column.setSpacing(2 * theme.SPACE)
        column.addWidget(self._intro)
        for title, keys in GROUPS.items():
            column.addLayout(self._group(title, keys))
        self._history_title = label("Changes of this run", font=theme.heading_font())
        column.addWidget(self._history_title)
        column.addLayout(self._history)
        column.addStretch(1)
        scroll = TabArea()
        scroll.setWidget(content)
        scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        foot = QHBoxLayout()
        foot.setContentsMargins(theme.GUTTER, theme.SPACE, theme.GUTTER, theme.GUTTER)
        foot.setSpacing(theme.SPACE)
        texts = QVBoxLayout()
        texts.addWidget(self._problem)
        texts.addWidget(self._answer)
        foot.addLayout(texts, 1)
        foot.addWidget(self.put_back)
        foot.addWidget(self.change)
        whole = QVBoxLayout(self)
        whole.setContentsMargins(0, 0, 0, 0)
        whole.addWidget(scroll, 1)
        whole.addLayout(foot)

    def _group(self, title: str, keys: Sequence[str]) -> QGridLayout:
        grid = QGridLayout()
        grid.setHorizontalSpacing(2 * theme.SPACE)
        grid.setVerticalSpacing(theme.SPACE)
        grid.addWidget(label(title, font=theme.heading_font()), 0, 0, 1, COLUMNS)
        for key in keys:
            self.fields[key] = field = make_field(SETTINGS[key], self)
            field.edited.connect(self._on_edited)
        for column in range(COLUMNS):
            grid.setColumnStretch(column, 1)
        self._place(grid, keys)
        return grid

    def _place(self, grid: QGridLayout, keys: Sequence[str]) -> None:
        """Fields from left to right; a wide one has a row of its own."""
        row, column = 1, 0
        for key in keys:
            field = self.fields[key]
            span = COLUMNS if field.wide else 1
            if column + span > COLUMNS:
                row, column = row + 1, 0
            grid.addWidget(field, row, column, 1, span)
            column += span

    # ── showing ─────────────────────────────────────────────────────────────────────────────────

    def show_settings(self, run: str, present: Config, changes: Sequence[Change], done: int) -> None:
        """Show a run's present settings and its changes. What the user has typed stays. `done`: steps done."""
        self.setWindowTitle(f"Change settings of {run}")
        self._done = done
        if present != self._present:
            self._present = present
            self._edited = {key: raw for key, raw in self._edited.items() if self._differs(key, raw)}
            for key, field in self.fields.items():
                if key not in self._edited:
                    field.show_value(getattr(present, key))
            self._check()
        if list(changes) != self._changes:
            self._changes = list(changes)
            self._show_history()

    def show_answer(self, sentence: str, *, is_refusal: bool = False) -> None:
        """Show what the trainer said to a change."""
        self._answer.setText("" if is_refusal else sentence)
        self._problem.setText(sentence if is_refusal else "")

    def focus_setting(self, key: str) -> None:
        """Put the cursor into a field."""
        self.fields[key].control.setFocus(Qt.FocusReason.ShortcutFocusReason)

    def _show_history(self) -> None:
        clear_layout(self._history)
        set_shown(self._history_title, bool(self._changes))
        for change in reversed(self._changes or []):
            line = QWidget()
            across = QHBoxLayout(line)
            across.setContentsMargins(0, 0, 0, 0)
            across.addWidget(label(change.sentence, wrap=True, selectable=True), 1)
            undo = LinkButton("Undo")
            undo.setToolTip("Changes these settings back, from the next step on")
            undo.setAccessibleName(f"Undo: {change.sentence}")
            undo.clicked.connect(lambda _checked=False, change=change: self._undo(change))
            across.addWidget(undo, 0, Qt.AlignmentFlag.AlignTop)
            self._history.addWidget(line)

    # ── editing ─────────────────────────────────────────────────────────────────────────────────

    def _on_edited(self, key: str, raw: Any) -> None:
        self._edited[key] = raw
        self._answer.setText("")
        self._check()

    def _check(self) -> None:
        """Show each fault beside its field, and enable Change where something is different and nothing wrong."""
        present = self._present
        if present is None:
            return
        pairs: dict[str, Any] = {}
        problems: dict[str, str] = {}
        try:
            pairs = changed(present, self._edited, self._done)
        except UserError as mistake:
            problems = {fault.setting: fault.sentence for fault in mistake.faults}
        values = present.model_dump() | self._edited
        for key, field in self.fields.items():
            field.show_problem(problems.pop(key, ""))
            set_shown(field, field.setting.applies(values))
        self._problem.setText(" ".join(problems.values()))
        self.change.setEnabled(bool(pairs))
        self.change.setText(f"Change {len(pairs)} settings" if len(pairs) > 1 else "Change")
        self.put_back.setEnabled(bool(self._edited))

    def _differs(self, key: str, raw: Any) -> bool:
        """Whether what was typed is not the present value; text that is no value at all differs too."""
        assert self._present is not None
        try:
            return bool(changed(self._present, {key: raw}, self._done))
        except UserError:
            return True

    def _put_back(self) -> None:
        self._edited = {}
        for key, field in self.fields.items():
            field.show_value(getattr(self._present, key))
        self._check()

    def _ask(self) -> None:
        assert self._present is not None
        asked = {key: self._edited[key] for key in changed(self._present, self._edited, self._done)}
        self.show_answer("Asked; the trainer answers between two bursts of work.")
        self.change_asked.emit(asked)

    def _undo(self, change: Change) -> None:
        self.show_answer("Asked; the trainer answers between two bursts of work.")
        self.change_asked.emit({key: old for key, (old, _) in change.settings.items()})


# ── run steering ─────────────────────────────────────────────────────────────────────────────────────────────────────


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
        except UserError as mistake:
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
        except UserError as mistake:
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
        except UserError as mistake:
            self._asked_after = None
            self.panel.show_answer(_sentence(mistake), is_refusal=True)


def _seq(note: dict[str, Any]) -> int:
    seq = note.get("seq")
    return seq if isinstance(seq, int) else -1


def _sentence(mistake: UserError) -> str:
    return " ".join(fault.sentence for fault in mistake.faults)
