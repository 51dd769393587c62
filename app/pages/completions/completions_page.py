"""The Completions page: what does the model write? Every completion of a step with each reward beside it, or any of the whole run
that a filter, a search or a prompt leaves.

Rows are shown as the trainer wrote them; this page scores nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PySide6.QtCore import Qt, QTimer
from PySide6.QtGui import QHideEvent, QResizeEvent, QShowEvent
from PySide6.QtWidgets import QFileDialog, QMenu, QSplitter, QStackedLayout, QVBoxLayout, QWidget

from app import theme
from app.pages.completions.completion_lists import CompletionLists, RunLines, called
from app.pages.completions.filter_bar import RUN, STEP, FilterBar
from app.pages.completions.reading_pane import ReadingPane
from app.pages.completions.step_head import StepHead
from app.state.completion_facts import ALL, FILTERS, SUFFIXES, CompletionExport, Place
from app.state.run import Run
from app.state.run_completions import RunCompletions
from app.state.session import Session
from app.widgets.basic.controls import LinkButton
from app.widgets.basic.labels import EmptyState, button
from app.widgets.basic.layout import set_shown
from app.widgets.completions.completion_detail import CompletionDetail
from app.widgets.completions.completion_model import CompletionModel
from app.widgets.completions.completion_table import CompletionTable
from backend.utils.errors import UserError

# Saving completions into a file: asks where, writes in slices on the event loop, and says how it went.

SLICE_S = 0.010


class CompletionSaving:
    """One export at a time. `tell` takes a sentence, `changed` is called when an export has begun or ended."""

    def __init__(self, page: QWidget, tell: Callable[[str], object], changed: Callable[[], object]) -> None:
        self._page, self._tell, self._changed = page, tell, changed
        self._export: CompletionExport | None = None
        self._timer = QTimer(page)
        self._timer.timeout.connect(self._advance)

    @property
    def is_busy(self) -> bool:
        return self._export is not None

    def ask(self, source: Path, places: Sequence[Place]) -> None:
        """Ask for a file, and write these completions of `source` into it."""
        filters = ";;".join(f"{name} (*{suffix})" for suffix, name in SUFFIXES.items())
        start = str(Path.home() / f"{source.parent.name} completions.jsonl")
        chosen, name = QFileDialog.getSaveFileName(self._page, "Save completions", start, filters)
        if chosen:
            target = Path(chosen)
            typed = target.suffix in SUFFIXES
            suffix = next((suffix for suffix, text in SUFFIXES.items() if name.startswith(text)), ".jsonl")
            self.save(source, places, target if typed else target.with_name(target.name + suffix))

    def save(self, source: Path, places: Sequence[Place], target: Path) -> None:
        """Begin to write; the event loop goes on with it."""
        try:
            self._export = CompletionExport(source, places, target)
        except UserError as mistake:
            self._tell(mistake.faults[0].sentence)
            return
        self._timer.start(0)
        self._changed()

    def cancel(self) -> None:
        """Stop the export; nothing of it is left."""
        if self._export is not None:
            self._export.cancel()
            self._end(f"{self._export.target.name} was not saved.")

    def _advance(self) -> None:
        export = self._export
        if export is None:
            self._timer.stop()
            return
        try:
            if export.advance(SLICE_S):
                self._tell(f"Saving {export.written:,} of {export.total:,} completions…")
            else:
                self._end(f"{export.written:,} completions are in {export.target.name}.")
        except UserError as mistake:
            self._end(mistake.faults[0].sentence)

    def _end(self, sentence: str) -> None:
        self._timer.stop()
        self._export = None
        self._tell(sentence)
        self._changed()


# ── completions page ─────────────────────────────────────────────────────────────────────────────────────────────────

DETAIL, BESIDE = 250, 720
"""Initial height of the detail below the table, and its initial width beside the table."""
WIDE = 1500
"""From this page width on the detail is beside the table."""


class CompletionsPage(QWidget):
    """The page.

    Attributes:
        session – the state shared with the other pages.
        completions – what the run has beyond the step on screen; None without a run.
    """

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self.completions: RunCompletions | None = None
        self._run: Run | None = None
        self._shown: tuple[Run, int] | None = None
        self._picked = 0
        self._compose()
        self._lay_out()
        self._connect()
        self._on_run_changed()

    # ── building ────────────────────────────────────────────────────────────────────────────────

    def _compose(self) -> None:
        self.nothing = EmptyState("No completions yet", "They appear here with the first step of a run.", "Go to Train")
        self.model = CompletionModel(self)
        self.table = CompletionTable(self.model)
        self.table.allow_sorting()
        self.bar = FilterBar()
        self.pane = ReadingPane("Completion")
        self.detail = CompletionDetail(pane=self.pane)
        self.follow_prompt = LinkButton("Follow this prompt")
        self.follow_prompt.setToolTip("Every time that this prompt was sampled in the run")
        self.show_its_step = LinkButton("Show its step")
        for link in (self.follow_prompt, self.show_its_step):
            self.detail.add_link(link)
        self.head = StepHead()
        self.saving = CompletionSaving(self, self.session.message.emit, self._show_saving)
        self.save = button("Save", self.saving.cancel, tip="Save completions as JSON lines or Markdown")
        self._save_menu = QMenu(self.save)
        self._save_menu.addAction("Selected completions…", lambda: self._save(self.table.selected_rows()))
        self._save_menu.addAction("Everything shown…", lambda: self._save(range(self.model.rowCount())))
        self._show_saving()
        self.head.add_button(self.save)
        self.lists = CompletionLists(self.model, self.table, self.detail, self.bar, self.head.about)

    def _lay_out(self) -> None:
        self.parts = QSplitter(Qt.Orientation.Vertical, childrenCollapsible=False, handleWidth=theme.SPACE)
        self.parts.addWidget(self.table.in_card())
        self.parts.addWidget(self.detail)
        for part, share in enumerate((3, 1)):  # a low window takes from both
            self.parts.setStretchFactor(part, share)
        self.parts.setSizes([1000, theme.scaled(DETAIL)])
        content = QWidget()
        column = QVBoxLayout(content)
        column.setContentsMargins(*(2 * theme.SPACE,) * 4)
        column.setSpacing(theme.SPACE)
        column.addWidget(self.head)
        column.addWidget(self.bar)
        column.addWidget(self.parts, 1)
        self._stack = QStackedLayout(self)
        self._stack.addWidget(self.nothing)
        self._stack.addWidget(content)

    def _connect(self) -> None:
        self.nothing.button_clicked.connect(lambda: self.session.page_requested.emit("train"))
        # Both, as Qt changes the selection before the current line.
        self.table.picked.connect(self._show_picked)
        self.table.chosen.connect(lambda _row, _completion: self._show_picked())
        self.table.touched.connect(self._stop_following)
        self.table.activated.connect(lambda _index: self.go_to_step())
        self.table.sort_requested.connect(self._sort)
        self.head.moved.connect(self.go)
        self.head.typed.connect(self._pick_or_tell)
        self.head.followed.connect(self._turn_following)
        self.bar.query_changed.connect(self._show_again)
        self.bar.scope_changed.connect(self._show_again)
        self.bar.searched.connect(self._search)
        self.bar.moved.connect(self.move)
        self.pane.setting_requested.connect(self._go_to_setting)
        self.follow_prompt.clicked.connect(lambda _checked=False: self._follow_prompt())
        self.show_its_step.clicked.connect(lambda _checked=False: self.go_to_step())
        self.session.run_changed.connect(self._on_run_changed)

    def resizeEvent(self, event: QResizeEvent) -> None:
        """In a wide page the completion is beside the table, so that its lines are not too long to read."""
        super().resizeEvent(event)
        wide = self.width() >= theme.scaled(WIDE)
        orientation = Qt.Orientation.Horizontal if wide else Qt.Orientation.Vertical
        # Sizes are set on a change only: the user may have moved the handle.
        if orientation != self.parts.orientation():
            self.parts.setOrientation(orientation)
            self.detail.set_upright(wide)
            self.parts.setSizes([self.width(), theme.scaled(BESIDE)] if wide else [self.height(), theme.scaled(DETAIL)])

    # ── the run and its step ────────────────────────────────────────────────────────────────────

    def _on_run_changed(self) -> None:
        self._run, self._shown = self.session.run, None
        self.completions = None
        self.head.follow(True)
        self.bar.reset()
        if self._run is not None:
            self._run.changed.connect(self._refresh)
            self._run.restarted.connect(self._forget)
            self.completions = RunCompletions(self._run.folder.completions, self._run)
            self.completions.grew.connect(self._grow)
            self.completions.voided.connect(self._show_again)
        self._refresh()

    def _forget(self) -> None:
        """A resume has cut the file back: what is shown will get other rows."""
        self._shown = None
        if self.completions is not None:
            self.completions.clear()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._refresh()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._read_on()

    def _read_on(self) -> None:
        """Read the whole file only while what it says is shown."""
        if self.completions is not None:
            self.completions.follow(self.isVisible() and (self.bar.scope.key == RUN or self.bar.is_filtering))

    def _refresh(self) -> None:
        """Show the newest step, or the picked one. A hidden page does nothing."""
        if not self.isVisible():
            return
        self._read_on()
        steps = self._run.completion_steps() if self._run else []
        self._stack.setCurrentIndex(1 if steps else 0)
        if self._run is None or not steps:
            return
        step = steps[-1] if self.head.newest.isChecked() else _nearest(steps, self._picked)
        self.head.show_step(step, steps[0], steps[-1])
        if self._shown != (self._run, step):
            self._shown = (self._run, step)
            self._show()

    def _show_again(self) -> None:
        """Show what the filter bar now says."""
        self._shown = None
        self._refresh()

    def _show(self) -> None:
        if self._shown is None or self.completions is None:
            return
        run, step = self._shown
        of_run = self.bar.scope.key == RUN
        set_shown(self.show_its_step, of_run)
        if of_run:
            self.lists.show_run(run, self.completions)
        else:
            self.lists.show_step(run, self.completions, step)
        self._show_picked()

    def _grow(self) -> None:
        if self.isVisible() and self.bar.scope.key == RUN and self._run is not None and self.completions is not None:
            self.lists.grow(self._run, self.completions)

    def _search(self, text: str) -> None:
        if self.completions is not None:
            self.completions.find(text)
            self.bar.scope.choose(RUN if text else STEP)

    def _sort(self, key: str, descending: bool) -> None:
        self.lists.order = (key, descending)
        self._show_again()

    # ── what is read ────────────────────────────────────────────────────────────────────────────

    def _show_picked(self) -> None:
        """Show the current completion; of two that are selected, what the second changes of the first."""
        line = self.table.current_line
        set_shown(self.follow_prompt, line is not None)
        if line is None:
            self.detail.show_completion({}, None)
            return
        completions, run = self.completions, self._run
        if completions is not None and run is not None:
            self.lists.show_weights(run, line)
            self.pane.set_token_loader(lambda: completions.token_data(line.offset, line.place))
        pair = self.table.selected_lines if len(self.table.selected_rows()) == 2 else []
        first, second = (pair[0].completion, pair[1].completion) if len(pair) == 2 else (None, None)
        if first is not None and second is not None:
            self.detail.show_completion(pair[1].row, second)
            self.pane.show_difference(first, second, f"From {called(pair[0])} to {called(pair[1])}")
        else:
            self.detail.show_completion(line.row, line.completion)

    def _follow_prompt(self) -> None:
        line = self.table.current_line
        if line is not None:
            self.bar.follow_prompt(hash(str(line.row.get("prompt"))))

    def _go_to_setting(self, key: str) -> None:
        self.session.page_requested.emit("train")
        self.session.field_requested.emit(key)

    def _save(self, rows: Sequence[int]) -> None:
        lines = self.model.lines
        if isinstance(lines, RunLines):  # without reading what is not shown
            places = [lines.place(row) for row in rows]
        else:
            places = [(line.offset, line.place) for line in (lines[row] for row in rows) if line.completion is not None]
        if self.completions is not None and places:
            self.saving.ask(self.completions.path, places)

    def _show_saving(self) -> None:
        """While an export is written the button cancels it."""
        self.save.setText("Cancel" if self.saving.is_busy else "Save")
        self.save.setProperty("menu", not self.saving.is_busy)
        self.save.setMenu(None if self.saving.is_busy else self._save_menu)  # pyright: ignore[reportArgumentType]: None takes it away

    # ── moving ──────────────────────────────────────────────────────────────────────────────────

    def find_text(self) -> None:
        """Focus the search."""
        self.bar.search.setFocus(Qt.FocusReason.ShortcutFocusReason)
        self.bar.search.selectAll()

    def show_requested(self, step: int, name: str | None) -> None:
        """Show the completions of a step that a filter of FILTERS leaves; None: all."""
        self.bar.reset()
        self.bar.show_filter(name or ALL)
        self._shown = None  # the step may be the one on screen, with the filter it had
        self._pick_or_tell(step)

    def pick(self, step: int) -> None:
        """Show this step, or the nearest one that has completions, until Follow newest is ticked."""
        steps = self._run.completion_steps() if self._run else []
        # The nearest now: a step beyond the end would follow the run.
        self._picked = _nearest(steps, step) if steps else step
        self.head.follow(False)
        if self.bar.scope.key == RUN:
            self.bar.scope.choose(STEP)
        self._refresh()

    def _pick_or_tell(self, step: int) -> None:
        self.pick(step)
        if self._picked != step:
            self.session.message.emit(
                f"Step {step:,} has no completions; step {self._picked:,} is the nearest that has."
            )

    def _turn_following(self, follow: bool) -> None:
        if not follow and self._shown is not None:
            self._picked = self._shown[1]
        self._refresh()

    def _stop_following(self) -> None:
        """Stop following a live run once a completion is selected, so that the next step does not replace it."""
        if self.head.newest.isChecked() and self._shown is not None and self._shown[0].is_live:
            self.head.newest.setChecked(False)

    def show_earlier(self) -> None:
        self.go(-1)

    def show_later(self) -> None:
        self.go(1)

    def go(self, by: int) -> None:
        """Move by this many steps, forwards or back, among those that have completions."""
        steps = self._run.completion_steps() if self._run else []
        if not steps or self._shown is None:
            return
        index = steps.index(_nearest(steps, self._shown[1])) + by
        if 0 <= index < len(steps):
            self.pick(steps[index])

    def go_to_step(self) -> None:
        """From a completion in the list of the whole run to its step."""
        line = self.table.current_line
        if line is not None and self.bar.scope.key == RUN and isinstance(step := line.row.get("step"), int):
            self._go_to(step, line.offset, line.place)

    def _go_to(self, step: int, offset: int, place: int) -> None:
        self.pick(step)
        lines = self.model.lines
        row = next((at for at, line in enumerate(lines) if (line.offset, line.place) == (offset, place)), None)
        if row is not None:
            self.table.selectRow(row)

    def show_next(self) -> None:
        self.move(1)

    def show_previous(self) -> None:
        self.move(-1)

    def move(self, by: int) -> None:
        """To the next completion that the filter leaves, or the previous one: in the list, or across steps."""
        line, completions = self.table.current_line, self.completions
        if completions is None or line is None:
            return
        if self.bar.scope.key == RUN:
            row = self.table.currentIndex().row() + by
            if 0 <= row < self.model.rowCount():
                self.table.selectRow(row)
            return
        completions.follow(True)
        number = completions.number_of(line.offset, line.place)
        chosen = completions.select(self.bar.query)
        at = (
            None
            if number is None
            else int(np.searchsorted(chosen, number, side="right" if by > 0 else "left")) - (by < 0)
        )
        if at is None or not 0 <= at < len(chosen):
            self._tell_no_further(by)
            return
        facts = completions.facts
        values = (facts.per_completion("step"), facts.per_completion("offset"), facts.column("place"))
        self._go_to(*(int(column[chosen[at]]) for column in values))

    def _tell_no_further(self, by: int) -> None:
        completions = self.completions
        where = "later" if by > 0 else "earlier"
        what = FILTERS[self.bar.query.filter].label.lower()
        is_read = completions is None or completions.is_complete
        so_far = (
            ""
            if is_read or completions is None
            else f" in the {completions.share:.0%} of the file that are read so far"
        )
        self.session.message.emit(f"There is no {where} completion of “{what}”{so_far}.")


def _nearest(steps: list[int], step: int) -> int:
    """The known step nearest to `step`, of two as near the earlier one."""
    at = bisect_left(steps, step)
    return min(steps[max(0, at - 1) : at + 1] or steps[-1:], key=lambda known: (abs(known - step), known))
