"""The dialog that changes settings of a live run, with their present values and the changes so far."""

from functools import partial
from typing import Any

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QDialog, QWidget

from app import theme
from app.state.messages import problems_to
from app.state.run import Run
from app.state.run_files import STEERED_STATES
from app.widgets.basic.controls import LinkButton
from app.widgets.basic.labels import button, label
from app.widgets.basic.layout import TabArea, clear_layout, column, configure, grid, holder, on_screen, row, set_shown
from app.widgets.form.fields import Field, make_field
from backend.config.config import SETTINGS, Config
from backend.runs.run_names import name_of
from backend.runs.steering import Change, changed
from backend.utils.errors import UserError

GROUPS: dict[str, tuple[str, ...]] = {  # title → keys; together they are `STEERABLE`
    "Learning": ("iters", "learning_rate", "lr_final", "max_grad_norm"),
    "Update": ("beta", "epsilon", "epsilon_high", "delta", "entropy_coef", "mask_truncated_completions"),
    "Sampling": ("temperature", "top_p", "top_k", "min_p", "dynamic_sampling"),
    "Rewards": ("reward_weights", "reward_weights_final", "scale_rewards"),
    "Saving and stopping": (
        *("save_every", "steps_per_eval", "stop_when", "early_stopping_patience", "early_stopping_min_delta"),
    ),
}
COLUMNS = 3
ASKED = "Sent. The trainer answers at its next break."


class SteeringPanel(QDialog):
    """The dialog for one run. It hides when the run cannot be changed any more."""

    def __init__(self, run: Run, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle("Change settings")
        self.run = configure(run, changed=self.refresh, state_changed=self.refresh)
        self._asked_after: int | None = None
        self._present: Config | None = None
        self._edited: dict[str, Any] = {}  # as typed
        self._differing: dict[str, Any] = {}  # those of `_edited` that differ from the present values
        self._changes: list[Change] | None = None
        self.fields: dict[str, Field] = {}
        intro = label("A change takes effect from the next step on, also after a resume.", role="muted", wrap=True)
        self.problem = label(role="problem", wrap=True)
        self.answer = label(role="muted", wrap=True, selectable=True)
        self.apply_button = button("Apply", lambda: self._send(self._differing), primary=True)
        self.revert_button = button("Revert", self._revert, tip="Shows the present values again")
        self._history_title = label("Changes of this run", font=theme.heading_font())
        self._history = column(spacing=4)
        groups = []
        for title, keys in GROUPS.items():
            groups.append(cells := grid(()))
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
                cells.addWidget(field, y, x, 1, span, Qt.AlignmentFlag.AlignTop)
                x += span
        parts = (intro, *groups, self._history_title, self._history, None)
        scroll = TabArea(horizontalScrollBarPolicy=Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        scroll.setWidget(holder(column(*parts, spacing=2 * theme.SPACE, margins=theme.GUTTER)))
        margins = (theme.GUTTER, theme.SPACE, theme.GUTTER, theme.GUTTER)
        foot = row((column(self.problem, self.answer), 1), self.revert_button, self.apply_button, margins=margins)
        column((scroll, 1), foot, into=self, spacing=0)
        self.resize(on_screen(self, 760, 540))

    def refresh(self, _state: str = "") -> None:
        run = self.run
        if run.state not in STEERED_STATES:
            self.hide()
            return
        self.setWindowTitle(f"Change settings of {name_of(run.folder)}")
        try:
            present, changes = run.settings_now()
        except UserError as error:
            self._show_answer(" ".join(fault.sentence for fault in error.faults), is_refusal=True)
            return
        if present != self._present:
            self._present = present
            self._edited = {key: raw for key, raw in self._edited.items() if self._differs(present, key, raw)}
            for key, field in self.fields.items():
                if key not in self._edited:
                    field.show_value(getattr(present, key))
            self._check()
        if changes != self._changes:
            self._changes = changes
            clear_layout(self._history)
            set_shown(self._history_title, bool(changes))
            for change in reversed(changes):
                back = {key: old for key, (old, _) in change.settings.items()}
                tip, name = "Changes these settings back, from the next step on", f"Undo: {change.sentence}"
                undo = LinkButton("Undo", on_click=partial(self._send, back), tip=tip, name=name)
                text = label(change.sentence, wrap=True, selectable=True)
                self._history.addWidget(holder(row((text, 1), (undo, 0, Qt.AlignmentFlag.AlignTop))))
        after = self._asked_after
        new = (note for note in run.data.notes if after is not None and note.get("seq", -1) > after)
        if (answer := next((note for note in new if note.get("answers") == "change"), None)) is not None:
            self._asked_after = None
            self._show_answer(str(answer["sentence"]), is_refusal=answer.get("level") == "warning")

    def _show_answer(self, sentence: str, *, is_refusal: bool = False) -> None:
        self.answer.setText("" if is_refusal else sentence)
        self.problem.setText(sentence if is_refusal else "")

    def _differs(self, present: Config, key: str, raw: Any) -> bool:
        try:
            return bool(changed(present, {key: raw}, self.run.step))
        except UserError:
            return True

    def _on_edited(self, key: str, raw: Any) -> None:
        self._edited[key] = raw
        self.answer.setText("")
        self._check()

    def _check(self) -> None:
        if self._present is None:
            return
        self._differing = {}
        problems: dict[str, str] = {}
        try:
            self._differing = {key: self._edited[key] for key in changed(self._present, self._edited, self.run.step)}
        except UserError as error:
            problems = {fault.setting: fault.sentence for fault in error.faults}
        values = self._present.model_dump() | self._edited
        for key, field in self.fields.items():
            field.show_problem(problems.pop(key, ""))
            set_shown(field, field.setting.applies(values))
        self.problem.setText(" ".join(problems.values()))
        count = len(self._differing)
        configure(self.apply_button, enabled=count > 0, text=f"Apply {count} changes" if count > 1 else "Apply")
        self.revert_button.setEnabled(bool(self._edited))

    def _revert(self) -> None:
        self._edited = {}
        for key, field in self.fields.items():
            field.show_value(getattr(self._present, key))
        self._check()

    def _send(self, settings: dict[str, Any]) -> None:
        self._show_answer(ASKED)
        self._asked_after = None
        with problems_to(partial(self._show_answer, is_refusal=True)):
            self.run.change(settings)
            self._asked_after = max((note.get("seq", -1) for note in self.run.data.notes), default=-1)
