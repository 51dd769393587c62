"""The Monitor page: what a run is doing, and what it has learned when it is done."""

from functools import partial

from PySide6.QtCore import QCoreApplication, QEvent, Qt, QTimer
from PySide6.QtGui import QKeyEvent, QResizeEvent, QShowEvent
from PySide6.QtWidgets import QMenu, QWidget

from app import theme
from app.pages.monitor.panels import HealthCards, LogView, MetricTile, RankModel
from app.pages.monitor.steering import SteeringPanel
from app.state import charts
from app.state.charts import CHARTS, Curve
from app.state.correctness import correctness_of, largest_reward
from app.state.evaluations import read_evaluations
from app.state.messages import problems_to
from app.state.run import PHASE_WORDS, Run, ranks_of
from app.state.run_files import STEERED_STATES, failed_line, newest_checkpoint, setting_of_problem, silence_advice
from app.state.run_notices import before_and_after, note_text
from app.state.run_summary import count_text
from app.state.session import Session
from app.widgets.basic.controls import ComboBox, ElidedLabel, LinkButton
from app.widgets.basic.dialogs import open_link, open_path
from app.widgets.basic.labels import EmptyState, button, label, plain_tip
from app.widgets.basic.layout import column, configure, holder, row, set_shown, set_tab_order, show_all, stack
from app.widgets.basic.number_format import MINUS, dollars, duration, signed
from app.widgets.basic.tables import BaseTable
from app.widgets.charts.chart_grid import SMOOTHING, ChartContent, ChartGrid, plots_of
from app.widgets.charts.curves import Trace
from app.widgets.charts.plot import FORMATS
from app.widgets.run_header import BeforeAfter, CardAction, ResultCard, RunHeader
from backend.config.config import needs_reference
from backend.jobs.job_file import read_job
from backend.runs.archive import averaging_window
from backend.runs.metric_names import MEASURES
from backend.trainer.evaluation.evaluation_rows import evaluations_of

CORRECT = "correct"
AVERAGED = "Mean of the newest steps, and its change since the first ones: ten each, or a quarter of a short run."
TILES = (  # label, metric, colour, unit, help
    ("Correct", CORRECT, "good", "share", f"Share of completions with the full score for correctness. {AVERAGED}"),
    ("Reward", "reward", "accent", "", f"Mean reward of a step. {AVERAGED}"),
    ("Divergence", "distillation/divergence", "kl", "nats", f"Distance from the teacher, per token. {AVERAGED}"),
    ("KL", "kl", "kl", "nats", f"Distance of the policy from the reference model, per token. {AVERAGED}"),
    ("Clipped", "clip_ratio_total", "clip", "share", f"Share of tokens whose ratio was clipped. {AVERAGED}"),
    ("Length", "completions/mean_length", "length", "tokens", f"Mean length of a completion. {AVERAGED}"),
    ("Loss", "loss", "accent", "nats", f"Mean negative log-likelihood of a learned token. {AVERAGED}"),
    ("Entropy", "entropy", "length", "nats", f"How open the policy is, per token. {AVERAGED}"),
    ("Sampling", "rollout_tokens_per_second", "text", "tokens/s", "Tokens sampled per second in the newest step."),
    ("Learning", "train_tokens_per_second", "text", "tokens/s", "Tokens learned per second in the newest step."),
    ("Peak memory", "peak_memory_gb", "text", "GB", "The most memory that was in use at once."),
)
TILES_OF_MODE = {  # mode → metrics of its tiles, besides those of every run
    "grpo": ("reward", "kl", "clip_ratio_total", "completions/mean_length", "rollout_tokens_per_second"),
    "sft": ("loss", "entropy", "train_tokens_per_second"),
    "distill": ("distillation/divergence", "completions/mean_length", "rollout_tokens_per_second"),
}
AT_ONCE = ("rollout_tokens_per_second", "train_tokens_per_second", "peak_memory_gb")  # only the newest value counts
LOW_PAGE = 660  # height of the page below which it leaves out what the charts say too
PHASES_OF_JOB = {"loading": "starting the job", "waiting": "waiting for a machine"}
ROOM_FOR_RANKS, MOST_RANKS = 620, 4
"""Height of the page from which it has a table of machines, and its rows without scrolling: charts need the room."""


class MonitorPage(QWidget):
    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self._run: Run | None = None
        self._is_low = False
        # The elapsed time moves on between two steps of the run.
        self._clock = configure(QTimer(self, interval=1000), timeout=self._show_time)
        self.steering: SteeringPanel | None = None  # once it is asked for
        hint, go = "Start one on Train, or open an earlier one on Runs.", partial(session.page_requested.emit, "train")
        self.nothing = EmptyState("No run yet", hint, "Go to Train", button_clicked=go)
        self.header = RunHeader(session.open_run)
        self.note = ElidedLabel()
        self.job = label(role="muted")
        self.job_link = LinkButton("Open the job", on_click=lambda: open_link(self._job_url))
        self._job_row = holder(row(self.job, self.job_link, None))
        self.findings = HealthCards(session, self)
        self.verdict = ResultCard()
        self.tiles = {metric: MetricTile(label, role, unit, help) for label, metric, role, unit, help in TILES}
        self.rank_model = RankModel(self)
        self.ranks = BaseTable(model=self.rank_model, name="Machines of the run", resizable=True)
        self.ranks_card = configure(self.ranks.in_card(), visible=False)
        self.grid = RunCharts(session)
        self.log = LogView()
        tip = "Change settings of this run from its next step on"
        self.change = button("Change settings…", self.change_settings, tip=tip, shown=False)
        self.stop_when = partial(self.change_settings, "stop_when")  # for the menu
        for tool in (self.change, *self.grid.tools):
            self.header.tools.addWidget(tool)

        tile_row = self._tile_row = holder(row(*((tile, 1) for tile in self.tiles.values())))
        right = (0, 0, theme.GUTTER, 0)  # the grid has none: its scroll bar is in the gutter
        head = (self.header, self._job_row, self.note)
        above = column(*head, self.findings, self.verdict, tile_row, self.ranks_card, margins=right)
        margins = (theme.GUTTER, theme.GUTTER, 0, theme.GUTTER)
        content = column(above, (self.grid, 1), column(self.log, margins=right), margins=margins)
        self._stack = stack(self.nothing, holder(content), into=self)
        session.run_changed.connect(self._on_run_changed)
        self._on_run_changed()

    def _on_run_changed(self) -> None:
        self._run = self.session.run
        if self.steering is not None:
            self.steering.deleteLater()  # with what was typed for the other run
            self.steering = None
        self.grid.show_run(self._run)
        self.log.follow(self._run.folder.log if self._run else None)
        self.log.unfold(False)
        if self._run is not None:
            configure(self._run, changed=self._refresh, state_changed=self._show_verdict)
        self._stack.setCurrentIndex(0 if self._run is None else 1)
        self.verdict.show_result("", "muted")  # what it says of the next run may be the same, its buttons are not
        self._show_verdict()
        self.findings.show_run(self._run)
        self._refresh()

    def resizeEvent(self, event: QResizeEvent) -> None:
        if self._run is not None:
            self._fit_height(self._run)
            self._show_verdict()
        self.findings.fit()

    def showEvent(self, event: QShowEvent) -> None:
        self._refresh()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() == Qt.Key.Key_Escape and self.grid.span is not None:
            self.grid.zoom(None)
        else:
            super().keyPressEvent(event)

    def _refresh(self) -> None:
        if (run := self._run) is None or not self.isVisible():
            self._clock.stop()
            return
        self.header.show_run(run.folder, run.state, live=run.is_live)
        self._show_progress(run)
        self._show_time()
        (self._clock.start if run.is_live else self._clock.stop)()
        job = None
        with problems_to(self.session.messages.say):
            job = read_job(run.folder)
        set_shown(self._job_row, job is not None)
        if job is not None:
            most = f"at most {job.timeout_h:g} h and {dollars(job.usd_per_hour * job.timeout_h)}"
            self.job.setText(f"On Hugging Face: {job.flavor}, {most}, paid by {job.owner}")
            self._job_url = job.url
        set_shown(self.change, run.state in STEERED_STATES and not run.folder.is_remote)
        steps, config, right = run.data.steps, run.config, correctness_of(run)
        of_mode = TILES_OF_MODE.get(str(config.get("train_mode")), TILES_OF_MODE["grpo"])
        shown = {*of_mode, "peak_memory_gb", *([CORRECT] if right else ()), *([run.measure] if run.step else ())}
        for metric, tile in self.tiles.items():
            set_shown(tile, metric in shown)
            if metric in AT_ONCE:
                tile.show_value(steps.latest(metric))
            else:
                name, full = (right.metric, right.full) if right and metric == CORRECT else (metric, 1.0)
                before, after = before_and_after(run, name, full)
                tile.show_value(after, before)
        if steps.latest("kl") is None and not needs_reference(config):
            self.tiles["kl"].show_value(None, instead="off: Beta 0")
        if not steps.latest("clip_ratio_total") and charts.ratio_is_always_1(config):
            self.tiles["clip_ratio_total"].show_value(None, instead="ratio always 1")
        notes = [note_text(note) for note in run.data.notes if note.get("level") != "warning"]  # warnings are findings
        configure(self.note, text=notes[-1] if notes else "", toolTip=plain_tip("\n".join(notes)))
        self._fit_height(run)
        if not run.is_live or run.silence or not self.verdict.isHidden():
            self._show_verdict()
        self.findings.show_run(run)
        self.grid.show_news()
        QCoreApplication.sendPostedEvents(None, QEvent.Type.LayoutRequest)

    def _show_progress(self, run: Run) -> None:
        step, total = run.step, run.iterations
        if run.read_share is not None:  # a long event log takes a second or two
            self.header.show_progress(step, total, "reading the event log", run.read_share)
        elif run.silence:
            self.header.show_progress(step, total, run.silence)
        elif (start := run.start_progress) is not None:
            doing = f"{start.doing[:1].lower()}{start.doing[1:]}"
            self.header.show_progress(step, total, doing, start.share, start.figures)
        else:
            words = PHASE_WORDS | (PHASES_OF_JOB if run.folder.is_remote else {})
            phase = words.get(run.data.phase, run.data.phase) if run.is_live else ""
            if run.state == "starting" and not phase:
                phase = "starting the training process"
            self.header.show_progress(step, total, phase, run.data.phase_progress)

    def _show_time(self) -> None:
        if self._run is not None and self._run.read_share is None:
            self.header.show_time(self._run.elapsed_s, None if self._run.silence else self._run.eta_s)

    def _fit_height(self, run: Run) -> None:
        ranks = ranks_of(run.data) if self.height() >= theme.scaled(ROOM_FOR_RANKS) else []
        set_shown(self.ranks_card, bool(ranks))
        if ranks != self.rank_model.rows:
            self.rank_model.set_rows(ranks)
        self.ranks.fit_rows(MOST_RANKS, 4)
        is_low = self._is_low = self.height() < theme.scaled(LOW_PAGE)
        for tile in self.tiles.values():
            tile.set_low(is_low)
        has_charts = run_has_charts(run)
        set_shown(self._tile_row, has_charts and (run.is_live or not is_low))
        show_all(has_charts, self.grid, *self.grid.tools[1:])
        self.log.fill(not has_charts)
        set_shown(self.note, bool(self.note.text()) and not is_low)

    def _show_verdict(self) -> None:
        run = self._run
        if run is None or (run.state in ("reading", "starting", "running", "stopping") and not run.silence):
            self.verdict.hide()
            return
        # Filled first: each part that appears in a shown card lays out the page and all charts again.
        self._fill_verdict(run)
        if not run_has_charts(run):  # nothing else is there to see
            self.log.unfold()
        self.verdict.show()
        # The card has new buttons, which Qt puts at the end of the tab order.
        sections = self.grid.sections.values()
        set_tab_order(*self.grid.tools, self.findings.more, *self.verdict.buttons, *list(sections)[:1])

    def _fill_verdict(self, run: Run) -> None:
        show, session, step = self.verdict.show_result, self.session, newest_checkpoint(run.folder)
        ending = run.data.ending or {}
        is_finished = run.state == "finished"
        ask_to_export = partial(session.export_requested.emit, run.folder)
        export = CardAction("Export to LM Studio…", ask_to_export, primary=is_finished)
        chat = CardAction("Chat", lambda: session.chat_with(run.folder))
        open_folder = CardAction("Open folder", lambda: open_path(run.folder.path))
        evaluate = CardAction("Evaluate", lambda: session.page_requested.emit("evaluate"))
        open_log = CardAction("Open log", self.log.open_file)
        report = CardAction("Report a problem…", lambda: session.problem_found.emit(run))
        is_remote = run.folder.is_remote
        again = "Follow it again" if is_remote else "Start over" if step is None else f"Resume from step {step:,}"
        resume = CardAction(again, self.resume, primary=True)
        where = f"after step {run.step:,}" if run.step else "before the first step"
        if run.silence:
            advice = silence_advice((run.data.started or {}).get("pid"), step)
            show(run.silence, "warning", advice=advice, actions=[open_log])
        elif run.state == "queued":
            waiting = session.queue.now.waiting
            place = waiting.index(run.folder) if run.folder in waiting else 0
            before = f"{count_text(place, 'run trains', 'runs train')} before it." if place else "It trains next."
            queue = CardAction("Show the queue", lambda: session.page_requested.emit("runs"))
            show("Waiting in the queue", "muted", before, actions=[queue])
        elif run.state == "paused":
            actions = [CardAction("Resume", lambda: session.send("resume"), primary=True)]
            show("Paused", "warning", run.data.pause_reason, "Nothing is lost.", actions=actions)
        elif is_finished:
            is_early = ending.get("reason") in ("stop_when", "early_stopping")
            sentence = str(ending.get("sentence") or "") if is_early else ""
            actions = [export, chat, evaluate, open_folder]
            self.verdict.setToolTip(averaged(run))
            advice = "" if self._is_low else averaged(run)
            show(f"Finished: {effort(run)}", "good", sentence, advice, changes(run), actions)
        elif run.state == "stopped":
            sentence = str(ending.get("sentence") or "Stopped; everything is saved.")
            results = [export, chat, evaluate] if run.step else []
            actions = [*([] if is_remote else [resume]), *results, open_folder]
            self.verdict.setToolTip(sentence)
            advice = "" if self._is_low else sentence
            show(f"Stopped: {effort(run)}", "muted", advice=advice, changes=changes(run), actions=actions)
        elif run.state == "failed":
            is_bug = bool(ending.get("traceback"))
            fix = "" if is_remote else f"Fix this, then {'start over' if step is None else 'resume'}."
            advice = "This is a bug in GRPO Studio; details are in the log." if is_bug else fix
            actions = [resume]
            if setting_of_problem(run.data.ending) == "hosts":
                actions.append(CardAction("Resume here alone", lambda: self.resume("--hosts", "none")))
            if (failed := failed_line(run.folder, run.data.ending)) is not None:
                file, line = failed
                go = partial(session.show_failed_line, file, line, run.problem)
                actions.append(CardAction(f"Open {file.name}, line {line}", go))
            edit = CardAction("Edit settings", partial(self._edit_settings, run))
            actions += [edit, open_log, *([report] if is_bug else [])]
            show(f"Failed {where}", "bad", run.problem, advice, actions=actions)
            self.log.unfold(is_bug or run.problem.endswith(" log.txt."))  # with the traceback of a reward function
        elif is_remote:
            show("The job is not followed", "warning", run.problem, actions=[resume, open_log])
        else:
            saved = f"Everything up to step {step:,} is saved." if step is not None else "There is no checkpoint yet."
            show(f"Crashed {where}", "bad", run.problem, saved, actions=[resume, open_log, report])

    def change_settings(self, key: str = "") -> None:
        """Open the dialog that changes settings of the run, at this one."""
        if (run := self._run) is None or run.state not in STEERED_STATES:
            self.session.message.emit("Settings can change while a run trains. To change an ended run, clone it.")
            return
        panel = self.steering = self.steering or SteeringPanel(run, self)
        panel.refresh()
        panel.show()
        panel.raise_()
        panel.activateWindow()
        if key:
            panel.fields[key].control.setFocus(Qt.FocusReason.ShortcutFocusReason)

    def finish_step(self) -> None:
        with problems_to(self.session.message.emit):
            if self._run is not None:
                self._run.send("finish-step")
                self.session.message.emit("The run stops at the end of this step.")

    def resume(self, *options: str) -> None:
        if self._run is not None and not self._run.is_live:
            self.session.starter.resume(self._run.folder, *options)

    def _edit_settings(self, run: Run) -> None:
        self.session.settings_requested.emit(run.folder)
        if key := setting_of_problem(run.data.ending):
            self.session.field_requested.emit(key)


def changes(run: Run) -> list[BeforeAfter]:
    """What came of the run: in training, on held-out prompts, on the test split, in its newest evaluation.

    The share of right completions where a reward tells it, else the reward, or the loss of a run without one.
    """
    right = correctness_of(run)
    metric, full, unit = (right.metric, right.full, "share") if right else (run.measure, 1.0, "")
    what = "Correct" if right else MEASURES[metric].capitalize()
    most = largest_reward(run) if metric == "reward" else None
    found = [BeforeAfter(f"{what} in training", *before_and_after(run, metric, full), unit, most)]
    held_out = run.series(metric, held_out=True)[1] / full
    if len(held_out) > 1:
        found.append(BeforeAfter(f"{what} on held-out prompts", float(held_out[0]), float(held_out[-1]), unit))
    tested = run.data.test_metrics.get(metric)
    if isinstance(tested, int | float):
        found.append(BeforeAfter(f"{what} on test prompts", None, tested / full, unit))
    if (newest := next(read_evaluations(run.folder), None)) is not None:
        made = newest.evaluation
        figures = [side.figures for side in made.headline.sides.values()]
        differences = [made.headline.difference] if made.headline.difference else []
        passes = all(each.pass_at for each in figures)
        means = [min(each.pass_at.items())[1] if passes else each.reward for each in (*figures, *differences)]
        change = means.pop() if differences else None
        text = f"Evaluated on {made.data.split}"
        if change and change.low is not None and change.high is not None:
            ends = (f"{x * 100:+.0f}" if passes else signed(x) for x in (change.low, change.high))
            text += f": {' to '.join(ends)}".replace("-", MINUS)
        before = means[0].value if len(means) > 1 else None
        found.append(BeforeAfter(text, before, means[-1].value, "share" if passes else ""))
    return [change for change in found if change.after is not None]


def run_has_charts(run: Run) -> bool:
    return run.is_live or run.state == "queued" or run.step > 0


def effort(run: Run) -> str:
    """“32 steps in 43 s”; for a run that ended early, “12 of 32 steps in 16 s”."""
    of = f" of {run.iterations:,}" if run.iterations and run.iterations != run.step else ""
    return f"{run.step:,}{of} step{'s' if of or run.step != 1 else ''} in {duration(run.elapsed_s)}"


def averaged(run: Run) -> str:
    count = averaging_window(len(run.series(run.measure)[0]))
    steps = f"{count} steps" if count > 1 else "step"
    text = f"Training: means of the first and last {steps}."
    evaluated = run.series(run.measure, held_out=True)[0]
    if len(evaluated) > 1:
        start = f"after step {evaluated[0]:,}" if evaluated[0] else "before training"
        text += f" Held-out: {start}, after step {evaluated[-1]:,}."
    return f"{text} Evaluation: 95 % interval." if evaluations_of(run.folder) else text


class RunCharts(ChartGrid):
    def __init__(self, session: Session) -> None:
        self._session, prefs = session, session.prefs
        self._run: Run | None = None
        self._curves: list[list[Curve]] = [[] for _ in CHARTS]
        self._curves_for: tuple[object, ...] = ()
        plots = plots_of(((chart.title, chart) for chart in CHARTS), session.guide_requested)
        super().__init__(plots, self._content, lambda index: bool(self._curves[index]), prefs)
        for plot in plots:
            plot.set_log(plot.title in prefs.members("log_charts"))
            log_changed = partial(prefs.set_member, "log_charts", plot.title)
            configure(plot, offer_taken=session.use_two_updates, log_changed=log_changed)
        self.step_chosen.connect(lambda step: session.completions_requested.emit(step, None))
        self.reported.connect(session.message)
        smoothing = ComboBox(name="Smoothing of the charts", length=13, items=SMOOTHING)
        smoothing.currentIndexChanged.connect(lambda _: self.set_smoothing(smoothing.currentData()))
        menu, tip = QMenu(self), "Evaluations, saves, changed settings, findings and resumes"
        self.marks = configure(menu.addAction("Show marks"), checkable=True, checked=prefs.chart_marks, toolTip=tip)
        self.marks.toggled.connect(partial(setattr, prefs, "chart_marks"))
        self.marks.toggled.connect(self.show_news)
        menu.addAction("Show all curves", lambda: [plot.show_all_curves() for plot in plots])
        menu.addAction("Show all steps", lambda: self.zoom(None))
        menu.addSeparator()
        for name, text in FORMATS.items():
            menu.addAction(f"Save all as {text}s…", partial(self.save_all, name))
        self.tools = (self.zoom_button(), smoothing, button("Charts", menu=menu, name="What to do with the charts"))

    def show_run(self, run: Run | None) -> None:
        self._run, self._curves_for = run, ()
        self.run_name = run.folder.name if run is not None else "charts"
        self.forget_span()
        self.mark_step(None)
        for plot in self.plots:
            if plot.traces:  # of the run before, until its turn comes
                plot.show_traces(())

    def show_news(self) -> None:
        if (run := self._run) is None:
            return
        is_live = run.is_live or run.state == "queued"
        names, rewards = (run.data.steps.names(), run.data.evals.names()), run.reward_names
        key = (*map(len, names), tuple(rewards), is_live, bool(run.step))
        expected = [f"rewards/{name}/{kind}" for name in rewards for kind in ("mean", "std")]
        of_steps, of_evals = (  # of SFT with reward functions the evaluations alone have rewards
            list(dict.fromkeys([*listed, *(expected if "reward" in listed else ())])) for listed in names
        )
        for index, chart in enumerate(CHARTS if key != self._curves_for else ()):
            listed = of_evals if chart.held_out else of_steps or expected
            curves = charts.curves_of(chart, listed, rewards)
            has_place = charts.has_place(chart, curves, listed, run.config, has_steps=bool(run.step))
            # Without a step the page says why the run ended, and empty charts add nothing.
            self._curves[index] = curves if has_place and (run.step or is_live) else []
        self._curves_for = key
        self.refresh(run.data.steps.span)

    def _content(self, index: int) -> ChartContent:
        run, chart = self._run, CHARTS[index]
        if run is None:
            return ChartContent()
        read = partial(run.series, held_out=chart.held_out)
        shown = []
        for curve in self._curves[index]:
            x, y = read(curve.metric)
            low = high = None
            if curve.spread:
                spread = read(curve.spread)[1]
                if len(spread):
                    low, high = y - spread, y + spread
            elif curve.low and len(read(curve.low)[1]) and len(read(curve.high)[1]):
                low, high = read(curve.low)[1], read(curve.high)[1]
            trace = Trace(curve.label, curve.colour, x, y, low, high, curve.metric in chart.stacked)
            shown += [trace] if trace.has_data else []
        marks = run.data.marks if self._session.prefs.chart_marks else ()
        reason = charts.flat_reason(chart, run.config)
        if reason and not any((trace.y > 0).any() for trace in shown):
            return ChartContent((), reason, marks, "Set Updates per rollout to 2 in the form")
        is_live = run.is_live or run.state == "queued"
        return ChartContent(shown, charts.placeholder(chart, run.config, is_live=is_live, steps=run.step), marks)
