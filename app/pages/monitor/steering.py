"""The dialog that changes settings of a live run, with their present values and the changes so far."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from PySide6.QtCore import QObject, Qt, Signal
from PySide6.QtWidgets import QDialog, QGridLayout, QWidget

from app import theme
from app.state.messages import problems_to
from app.state.run import Run
from app.state.run_files import STEERED_STATES
from app.state.session import Session
from app.widgets.basic.controls import LinkButton
from app.widgets.basic.labels import button, label
from app.widgets.basic.layout import TabArea, clear_layout, column, configure, grid, holder, on_screen, row, set_shown
from app.widgets.form.field import Field
from app.widgets.form.fields import make_field
from backend.config.config import SETTINGS, Config
from backend.runs.run_names import name_of
from backend.runs.steering import Change, changed
from backend.utils.errors import UserError

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
ASKED = "Sent. The trainer answers at its next break."


class SteeringPanel(QDialog):
    """The dialog. Call `show_settings` whenever the run or its settings may have changed."""

    change_asked = Signal(dict)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle("Change settings")
        self._present: Config | None = None
        self._edited: dict[str, Any] = {}
        self._done = 0
        self._changes: list[Change] | None = None
        self.fields: dict[str, Field] = {}
        intro = label("A change takes effect from the next step on, also after a resume.", role="muted", wrap=True)
        self.problem = label(role="problem", wrap=True)
        self.answer = label(role="muted", wrap=True, selectable=True)
        self.apply_button = button("Apply", self._ask, primary=True)
        self.revert_button = button("Revert", self._revert, tip="Shows the present values again")
        self._history_title = label("Changes of this run", font=theme.heading_font())
        self._history = column(spacing=4)
        groups = [self._group(title, keys) for title, keys in GROUPS.items()]
        parts = (intro, *groups, self._history_title, self._history, None)
        scroll = TabArea(horizontalScrollBarPolicy=Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        scroll.setWidget(holder(column(*parts, spacing=2 * theme.SPACE, margins=theme.GUTTER)))
        texts = column(self.problem, self.answer)
        margins = (theme.GUTTER, theme.SPACE, theme.GUTTER, theme.GUTTER)
        foot = row((texts, 1), self.revert_button, self.apply_button, margins=margins)
        column((scroll, 1), foot, into=self, spacing=0)
        self.resize(on_screen(self, 760, 540))

    def _group(self, title: str, keys: Sequence[str]) -> QGridLayout:
        cells = grid(())
        cells.addWidget(label(title, font=theme.heading_font()), 0, 0, 1, COLUMNS)
        for place in range(COLUMNS):
            cells.setColumnStretch(place, 1)
        y, x = 1, 0
        for key in keys:
            self.fields[key] = field = make_field(SETTINGS[key], self)
            field.edited.connect(self._on_edited)
            span = COLUMNS if field.wide else 1
            if x + span > COLUMNS:
                y, x = y + 1, 0
            cells.addWidget(field, y, x, 1, span)
            x += span
        return cells

    def show_settings(self, run: str, present: Config, changes: Sequence[Change], done: int) -> None:
        """Show a run's present settings and its changes. `done`: steps done."""
        self.setWindowTitle(f"Change settings of {run}")
        self._done = done
        if present != self._present:
            self._present = present
            self._edited = {key: raw for key, raw in self._edited.items() if _differs(present, key, raw, done)}
            for key, field in self.fields.items():
                if key not in self._edited:
                    field.show_value(getattr(present, key))
            self._check()
        if list(changes) == self._changes:
            return
        self._changes = list(changes)
        clear_layout(self._history)
        set_shown(self._history_title, bool(changes))
        for change in reversed(self._changes):
            undo = LinkButton(
                "Undo",
                on_click=partial(self._send, {key: old for key, (old, _) in change.settings.items()}),
                tip="Changes these settings back, from the next step on",
                name=f"Undo: {change.sentence}",
            )
            text = label(change.sentence, wrap=True, selectable=True)
            self._history.addWidget(holder(row((text, 1), (undo, 0, Qt.AlignmentFlag.AlignTop))))

    def show_answer(self, sentence: str, *, is_refusal: bool = False) -> None:
        self.answer.setText("" if is_refusal else sentence)
        self.problem.setText(sentence if is_refusal else "")

    def _on_edited(self, key: str, raw: Any) -> None:
        self._edited[key] = raw
        self.answer.setText("")
        self._check()

    def _check(self) -> None:
        if self._present is None:
            return
        pairs: dict[str, Any] = {}
        problems: dict[str, str] = {}
        try:
            pairs = changed(self._present, self._edited, self._done)
        except UserError as error:
            problems = {fault.setting: fault.sentence for fault in error.faults}
        values = self._present.model_dump() | self._edited
        for key, field in self.fields.items():
            field.show_problem(problems.pop(key, ""))
            set_shown(field, field.setting.applies(values))
        self.problem.setText(" ".join(problems.values()))
        self.apply_button.setEnabled(bool(pairs))
        self.apply_button.setText(f"Apply {len(pairs)} changes" if len(pairs) > 1 else "Apply")
        self.revert_button.setEnabled(bool(self._edited))

    def _revert(self) -> None:
        self._edited = {}
        for key, field in self.fields.items():
            field.show_value(getattr(self._present, key))
        self._check()

    def _ask(self) -> None:
        assert self._present is not None
        self._send({key: self._edited[key] for key in changed(self._present, self._edited, self._done)})

    def _send(self, settings: dict[str, Any]) -> None:
        self.show_answer(ASKED)
        self.change_asked.emit(settings)


class RunSteering(QObject):
    """Opens the panel over the run on show, passes its changes to the run, and shows what the trainer says."""

    def __init__(self, session: Session, parent: QWidget) -> None:
        super().__init__(parent)
        self._session, self._parent = session, parent
        self._run: Run | None = None
        self._asked_after: int | None = None
        self.panel: SteeringPanel | None = None
        session.run_changed.connect(self._follow)

    def open(self, key: str = "") -> None:
        run = self._session.run
        if run is None or run.state not in STEERED_STATES:
            self._session.message.emit("Settings can change while a run trains. To change an ended run, clone it.")
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
            self.panel.fields[key].control.setFocus(Qt.FocusReason.ShortcutFocusReason)

    def stop_when(self) -> None:
        self.open("stop_when")

    def finish_step(self) -> None:
        run, say = self._session.run, self._session.message.emit
        with problems_to(say):
            if run is not None:
                run.send("finish-step")
                say("The run stops at the end of this step.")

    def _follow(self) -> None:
        if self._run is self._session.run:
            return
        if self.panel is not None and self._run is not None:
            self.panel.deleteLater()  # with what was typed for the other run
            self.panel = None
        self._run = self._session.run
        if self._run is not None:
            configure(self._run, changed=self._refresh, state_changed=self._refresh)

    def _refresh(self, _state: str = "") -> None:
        panel, run = self.panel, self._run
        if panel is None or run is None:
            return
        if run.state not in STEERED_STATES:
            panel.hide()
            return
        try:
            panel.show_settings(name_of(run.folder), *run.settings_now(), run.step)
        except UserError as error:
            panel.show_answer(_message(error), is_refusal=True)
            return
        if self._asked_after is not None:
            after = self._asked_after
            new = (note for note in run.data.notes if note.get("seq", -1) > after)
            if answers := [note for note in new if note.get("answers") == "change"]:
                self._asked_after = None
                panel.show_answer(str(answers[0]["sentence"]), is_refusal=answers[0].get("level") == "warning")

    def _ask(self, settings: dict[str, Any]) -> None:
        if self.panel is None or self._run is None:
            return
        self._asked_after = max((note.get("seq", -1) for note in self._run.data.notes), default=-1)
        try:
            self._run.change(settings)
        except UserError as error:
            self._asked_after = None
            self.panel.show_answer(_message(error), is_refusal=True)


def _differs(present: Config, key: str, raw: Any, done: int) -> bool:
    try:
        return bool(changed(present, {key: raw}, done))
    except UserError:
        return True


def _message(error: UserError) -> str:
    return " ".join(fault.sentence for fault in error.faults)
