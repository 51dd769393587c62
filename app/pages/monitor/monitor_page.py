"""The Monitor page: what is it doing? And when it is done: what did it learn?

Composes the header with progress, the verdict, the tiles, the grid of charts and the log. Live and archived runs are alike: a folder
that `app.state.run` follows. Figures come from the run, charts from the table of `app.state.charts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from PySide6.QtCore import QObject, Qt, QTimer
from PySide6.QtGui import QKeyEvent, QResizeEvent, QShowEvent
from PySide6.QtWidgets import QStackedLayout, QVBoxLayout, QWidget

from app import theme
from app.pages.monitor import run_verdict
from app.pages.monitor.health_cards import HealthCards
from app.pages.monitor.log_view import LogView
from app.pages.monitor.rank_table import RankTable
from app.pages.monitor.run_steering import RunSteering
from app.pages.shared.run_charts import RunCharts
from app.state import charts
from app.state.completion_facts import FILTERS
from app.state.guide import place_of_rule
from app.state.run import Run
from app.state.run_files import setting_of_problem, silence_advice
from app.state.run_notices import Findings, note_text, take_up
from app.state.run_state import PHASE_WORDS, State, ranks_of
from app.state.run_summary import count_text
from app.state.session import Session
from app.widgets.basic.controls import ElidedLabel
from app.widgets.basic.dialogs import open_path
from app.widgets.basic.labels import EmptyState, plain_tip
from app.widgets.basic.layout import settle_layouts
from app.widgets.charts.metric_tile import MetricTile, TileRow
from app.widgets.result_card import CardAction, ResultCard
from app.widgets.run_header import RunHeader
from backend.trainer.health.watch import Episode
from backend.utils.errors import UserError

# The health cards of the run on show, connected: what they show, how much room they take, and what their buttons do.

ROW_OF_CHARTS = 176
"""Pixels of a row of charts at its lowest."""
TALL_PAGE = 680
"""Height of a page from which on two rows of charts stay in view beside the cards; below it one does."""


class RunFindings(QObject):
    """Fills `cards` with the findings of a run.

    Attributes:
        cards – the widget that a page places.
    """

    def __init__(self, session: Session, page: QWidget) -> None:
        super().__init__(page)
        self._session = session
        self._page = page
        self._run: Run | None = None
        self._findings = Findings()
        self.cards = HealthCards()
        self.cards.completions_requested.connect(self._read_completions)
        self.cards.setting_requested.connect(self._show_setting)
        self.cards.proposal_taken.connect(self._take_up)
        self.cards.guide_requested.connect(lambda code: self._session.guide_requested.emit(place_of_rule(code)))
        self.cards.dismissed.connect(self._dismiss)

    def show_run(self, run: Run | None, beside: Sequence[QWidget] = ()) -> None:
        """Show what is found in this run. `beside`: the page's other widgets above and below the charts."""
        if run is not self._run:
            self._run, self._findings = run, Findings()
            self.cards.unfold(False)
        if beside:
            self._fit(beside)
        self.cards.show_episodes(self._findings.of(run) if run is not None else [])

    def _fit(self, beside: Sequence[QWidget]) -> None:
        width = self._page.width() - 2 * theme.GUTTER
        taken = sum(_height(widget, width) + theme.SPACE for widget in beside if not widget.isHidden())
        row = theme.scaled(ROW_OF_CHARTS)
        room = self._page.height() - 2 * theme.GUTTER - theme.SPACE - taken - row
        second = row + theme.SPACE if self._page.height() >= TALL_PAGE else 0
        self.cards.set_room(room - second, max(room, row // 2))

    def _read_completions(self, step: int, rule: str) -> None:
        self._session.page_requested.emit("completions")
        # Filters that show just what a rule is about have its name.
        self._session.completions_requested.emit(step, rule if rule in FILTERS else None)

    def _show_setting(self, key: str) -> None:
        self._session.page_requested.emit("train")
        self._session.field_requested.emit(key)

    def _take_up(self, settings: dict[str, object]) -> None:
        try:
            take_up(self._session, self._run, settings)
        except UserError as mistake:
            self._session.message.emit(mistake.faults[0].sentence)

    def _dismiss(self, episode: Episode) -> None:
        self._findings.dismiss(episode)
        self.show_run(self._run)


def _height(widget: QWidget, width: int) -> int:
    return widget.heightForWidth(width) if widget.hasHeightForWidth() else widget.sizeHint().height()


# ── monitor page ─────────────────────────────────────────────────────────────────────────────────────────────────────

TILES = (
    ("Reward", "reward", "accent", "", "The newest step's mean reward."),
    ("KL", "kl", "kl", "nats", "Distance of the policy from the reference model, per token."),
    ("Clipped", "clip_ratio_total", "clip", "share", "Share of tokens whose ratio was clipped."),
    ("Length", "completions/mean_length", "length", "tokens", "Mean length of the newest step's completions."),
    ("Sampling", "rollout_tokens_per_second", "text", "tokens/s", "Tokens sampled in a second."),
    ("Peak memory", "peak_memory_gb", "text", "GB", "The most memory that was in use at once."),
)
"""Label, metric, colour, unit, help."""
CLOCK_MS = 1000
ROOM_FOR_RANKS = 620
"""Height of the page from which it has a table of the machines."""


class MonitorPage(QWidget):
    """The page.

    Attributes:
        session – the state shared with the other pages.
    """

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self._run: Run | None = None
        self._clock = QTimer(self, interval=CLOCK_MS)  # the elapsed time moves on between two steps of the run
        self._clock.timeout.connect(self._show_time)
        self.steering = RunSteering(session, self)
        self._compose()
        self._lay_out()
        session.run_changed.connect(self._on_run_changed)
        self._on_run_changed()

    # ── slots of the Run menu ───────────────────────────────────────────────────────────────────

    def change_settings(self) -> None:
        self.steering.open()

    def stop_when(self) -> None:
        self.steering.open_conditions()

    def finish_step(self) -> None:
        self.steering.finish_step()

    # ── composition ─────────────────────────────────────────────────────────────────────────────

    def _compose(self) -> None:
        self.nothing = EmptyState(
            "No run yet", "Start one on the Train page, or open an earlier one on the Runs page.", "Go to Train"
        )
        self.nothing.button_clicked.connect(lambda: self.session.page_requested.emit("train"))
        self.header = RunHeader()
        self.tiles = {metric: MetricTile(label, role, unit, help) for label, metric, role, unit, help in TILES}
        self.verdict = ResultCard()
        self.note = ElidedLabel()
        self.findings = RunFindings(self.session, self)
        self.ranks = RankTable()
        self.log = LogView()
        self.charts = RunCharts(self.session)
        self.grid = self.charts.grid
        for tool in self.charts.tools:
            self.header.tools.addWidget(tool)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() == Qt.Key.Key_Escape and self.grid.span is not None:
            self.grid.zoom(None)
        else:
            super().keyPressEvent(event)

    def _lay_out(self) -> None:
        content = QWidget()
        above, below = QVBoxLayout(), QVBoxLayout()
        tile_row = TileRow(list(self.tiles.values()))
        self._beside_charts = (self.header, self.note, self.verdict, tile_row, self.ranks.card, self.log)
        for part in (self.header, self.note, self.findings.cards, self.verdict, tile_row, self.ranks.card):
            above.addWidget(part)
        below.addWidget(self.log)
        column = QVBoxLayout(content)
        column.setContentsMargins(theme.GUTTER, theme.GUTTER, 0, theme.GUTTER)
        column.setSpacing(theme.SPACE)
        for part in (above, below):
            part.setContentsMargins(0, 0, theme.GUTTER, 0)
            part.setSpacing(theme.SPACE)
        column.addLayout(above)
        column.addWidget(self.grid, 1)  # without a right margin: its scroll bar is in the gutter
        column.addLayout(below)
        self._stack = QStackedLayout(self)
        self._stack.addWidget(self.nothing)
        self._stack.addWidget(content)

    # ── the run ─────────────────────────────────────────────────────────────────────────────────

    def _on_run_changed(self) -> None:
        self._run = self.session.run
        self.charts.show_run(self._run)
        self.log.follow(self._run.folder.log if self._run else None)
        self.log.unfold(False)
        if self._run is not None:
            self._run.changed.connect(self._refresh)
            self._run.state_changed.connect(self._show_verdict)
        self._stack.setCurrentIndex(0 if self._run is None else 1)
        self._show_verdict()
        self.findings.show_run(self._run)
        self._refresh()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        if self._run is not None:
            self._show_ranks(self._run)
        self.findings.show_run(self._run, self._beside_charts)

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._refresh()

    def _refresh(self) -> None:
        """Show the run's present state. A hidden page does nothing."""
        run = self._run
        if run is None or not self.isVisible():
            self._clock.stop()
            return
        self.header.show_run(run.folder.name, run.state, live=run.is_live)
        self._show_progress(run)
        self._show_time()
        (self._clock.start if run.is_live else self._clock.stop)()
        self._show_tiles(run)
        self._show_ranks(run)
        self._show_note(run)
        if not run.is_live or run.silence or not self.verdict.isHidden():
            self._show_verdict()
        self.findings.show_run(run, self._beside_charts)
        self.charts.refresh()
        settle_layouts()

    def _show_progress(self, run: Run) -> None:
        reading = run.read_share
        if reading is not None:  # a long event log takes a second or two
            self.header.show_progress(run.step, run.iterations, "reading what has happened", reading)
            return
        phase = PHASE_WORDS.get(run.phase, run.phase) if run.is_live else ""
        if run.state == "starting" and not phase:
            phase = "starting the training process"
        share, figures = run.phase_progress, ""
        if (start := run.start_progress) is not None:
            phase, share, figures = f"{start.doing[:1].lower()}{start.doing[1:]}", start.share, start.figures
        self.header.show_progress(
            run.step,
            run.iterations,
            run.silence or phase,
            None if run.silence else share,
            "" if run.silence else figures,
        )

    def _show_time(self) -> None:
        if self._run is not None and self._run.read_share is None:
            self.header.show_time(self._run.elapsed_s, None if self._run.silence else self._run.eta_s)

    def _show_tiles(self, run: Run) -> None:
        for metric, tile in self.tiles.items():
            tile.show_value(run.latest(metric), run.first(metric))
        if run.latest("kl") is None and charts.kl_is_off(run.config):
            self.tiles["kl"].show_value(None, instead="off: Beta 0")
        if not run.latest("clip_ratio_total") and charts.ratio_is_always_1(run.config):
            self.tiles["clip_ratio_total"].show_value(None, instead="ratio always 1")

    def _show_ranks(self, run: Run) -> None:
        """Where there is room: in a low window charts and verdict, which tell the same, need it more."""
        has_room = self.height() >= theme.scaled(ROOM_FOR_RANKS)
        self.ranks.show_ranks(ranks_of(run.started, run.ending, run.latest) if has_room else [])

    def _show_note(self, run: Run) -> None:
        """Show the newest note; warnings are among the findings."""
        notes = [note_text(note) for note in run.notes if note.get("level") != "warning"]
        self.note.setText(notes[-1] if notes else "")
        self.note.setToolTip(plain_tip("\n".join(notes)))
        self.note.setVisible(bool(notes))

    # ── the verdict ───────────────────────────────────────────────────────────────────────────

    def _show_verdict(self) -> None:
        run = self._run
        is_silent = run is not None and bool(run.silence)
        if run is None:
            self.verdict.hide()
            return
        results: dict[State, Callable[[Run], None]] = {
            "queued": self._show_queued,
            "paused": self._show_paused,
            "finished": self._show_finished,
            "stopped": self._show_stopped,
            "failed": self._show_failed,
            "crashed": self._show_crashed,
        }
        show = self._show_silent if is_silent else results.get(run.state)
        if show is not None:
            show(run)
        # Filled first: each part that appears in a shown card lays out the page and all charts anew.
        self.verdict.setVisible(is_silent or run.state not in ("starting", "running", "stopping"))
        # The card has new buttons, which Qt puts at the end of the tab order.
        for widget, following in pairwise([*self.charts.tools, *self.verdict.buttons(), self.grid]):
            QWidget.setTabOrder(widget, following)

    def _show_paused(self, run: Run) -> None:
        actions = [
            CardAction("Resume", lambda: self._send("resume"), primary=True),
            CardAction("Change settings…", self.change_settings),
        ]
        waits = "The run waits where it is; nothing is lost."
        advice = f"{waits} It goes on by itself, or with Resume at once." if run.pause_reason else ""
        self.verdict.show_result("Paused", "warning", run.pause_reason or waits, advice, actions=actions)

    def _show_silent(self, run: Run) -> None:
        advice = silence_advice((run.started or {}).get("pid"), run.checkpoint)
        self.verdict.show_result(
            run.silence, "warning", advice=advice, actions=[CardAction("Open log", self.log.open_file)]
        )

    def _show_queued(self, run: Run) -> None:
        place = self.session.queue.now.place_of(run.folder)
        before = f"{count_text(place, 'run trains', 'runs train')} before it." if place else "It is the next to train."
        self.verdict.show_result(
            "Waits in the queue",
            "muted",
            before,
            actions=[CardAction("Show the queue", lambda: self.session.page_requested.emit("runs"))],
        )

    def _show_finished(self, run: Run) -> None:
        actions = [
            CardAction("Export to LM Studio…", self._export, primary=True),
            CardAction("Chat", self._chat),
            CardAction("Open folder", self._open_folder),
            CardAction("Evaluate", lambda: self.session.page_requested.emit("evaluate")),
            CardAction("Completions", lambda: self.session.page_requested.emit("completions")),
        ]
        self.verdict.show_result(
            f"Finished: {run_verdict.effort(run)}",
            "good",
            run_verdict.early_end(run),
            run_verdict.averaged(run),
            changes=run_verdict.changes(run),
            actions=actions,
        )

    def _show_stopped(self, run: Run) -> None:
        sentence = str((run.ending or {}).get("sentence") or "Stopped; everything is saved.")
        actions = [
            self._resume_action(run),
            CardAction("Export to LM Studio…", self._export),
            CardAction("Chat", self._chat),
            CardAction("Open folder", self._open_folder),
        ]
        self.verdict.show_result(
            f"Stopped: {run_verdict.effort(run)}",
            "muted",
            advice=sentence,
            changes=run_verdict.changes(run),
            actions=actions,
        )

    def _show_failed(self, run: Run) -> None:
        is_bug = bool((run.ending or {}).get("traceback"))
        advice = (
            "This is a fault in the program and not in your settings; the log holds the details."
            if is_bug
            else "Mend what the sentence names, then go on."
        )
        is_of_machines = setting_of_problem(run.ending) == "hosts"
        actions = [
            self._resume_action(run),
            *([CardAction("Resume here alone", self._resume_alone)] if is_of_machines else []),
            CardAction("Edit settings", self._edit_settings),
            CardAction("Open log", self.log.open_file),
            *([CardAction("Report a problem…", lambda: self.session.problem_found.emit(run))] if is_bug else []),
        ]
        self.verdict.show_result(
            f"Failed{run_verdict.where_it_ended(run)}", "bad", run.problem, advice, actions=actions
        )
        self.log.unfold(is_bug)

    def _show_crashed(self, run: Run) -> None:
        step = run.checkpoint
        saved = f"Everything up to step {step:,} is saved." if step is not None else "There is no checkpoint yet."
        report = CardAction("Report a problem…", lambda: self.session.problem_found.emit(run))
        actions = [self._resume_action(run), CardAction("Open log", self.log.open_file), report]
        self.verdict.show_result(
            f"Crashed{run_verdict.where_it_ended(run)}", "bad", run.problem, saved, actions=actions
        )

    def _resume_action(self, run: Run) -> CardAction:
        step = run.checkpoint
        return CardAction(f"Resume from step {step:,}" if step is not None else "Start over", self.resume, primary=True)

    # ── actions ────────────────────────────────────────────────────────────────────

    def resume(self) -> None:
        """Resume the run from its newest checkpoint."""
        if self._run is not None and not self._run.is_live:
            self.session.starter.resume(self._run.folder)

    def _resume_alone(self) -> None:
        """Resume a run of several machines on this one."""
        if self._run is not None and not self._run.is_live:
            self.session.starter.resume(self._run.folder, "--hosts", "none")

    def _export(self) -> None:
        if self._run is not None:
            self.session.export_requested.emit(self._run.folder)

    def _chat(self) -> None:
        if self._run is not None:
            self.session.chat_with(self._run.folder)

    def _open_folder(self) -> None:
        if self._run is not None:
            open_path(self._run.folder.path)

    def _edit_settings(self) -> None:
        if self._run is not None:
            self.session.settings_requested.emit(self._run.folder)
            if (key := setting_of_problem(self._run.ending)) and not self.session.draft.dirty:
                self.session.field_requested.emit(key)

    def _send(self, word: str) -> None:
        try:
            if self._run is not None:
                self._run.send(word)
        except UserError as mistake:
            self.session.message.emit(mistake.faults[0].sentence)
