"""The charts of one run and the controls above them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from app.state import charts
from app.state.charts import CHARTS, Curve, Naming, column_names
from app.state.guide import place_of_chart
from app.state.run import Run
from app.state.session import Session
from app.widgets.basic.controls import ComboBox
from app.widgets.basic.labels import explain_at
from app.widgets.charts.chart_grid import ChartContent, ChartExport, ChartGrid, ChartsMenu, ZoomButton
from app.widgets.charts.curves import Trace
from app.widgets.charts.plot import Plot

TWO_UPDATES = "Set Updates per rollout to 2 in the form"
SMOOTHING = (("No smoothing", 0.0), ("Light smoothing", 0.6), ("Strong smoothing", 0.9))


class RunCharts:
    """A grid with the charts of `app.state.charts`, filled from a run."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._run: Run | None = None
        self._curves: list[list[Curve]] = [[] for _ in CHARTS]
        self._curves_for: tuple[object, ...] = ()
        prefs = session.prefs
        self._shows_marks = prefs.chart_marks
        self.grid = ChartGrid(
            [Plot(chart.title, chart.axis, chart.unit, chart.help) for chart in CHARTS],
            self._content_of,
            lambda index: bool(self._curves[index]),
        )
        for plot in self.grid.plots:
            place = place_of_chart(plot.title)
            explain_at(plot, place)
            plot.explanation_requested.connect(partial(session.guide_requested.emit, place))
            plot.offer_taken.connect(session.use_two_updates)
            plot.set_log(plot.title in prefs.log_charts)
            plot.log_changed.connect(partial(prefs.set_log_chart, plot.title))
        self.grid.step_chosen.connect(lambda step: session.completions_requested.emit(step, None))
        smoothing = ComboBox()
        for label, weight in SMOOTHING:
            smoothing.addItem(label, weight)
        smoothing.setMinimumContentsLength(13)
        smoothing.setAccessibleName("Smoothing of the charts")
        smoothing.currentIndexChanged.connect(lambda _: self.grid.set_smoothing(smoothing.currentData()))
        export = ChartExport(
            self.grid, lambda: self._run.folder.name if self._run is not None else "charts", session.message.emit
        )
        self.menu = ChartsMenu(self.grid, export)
        self.menu.marks.setChecked(self._shows_marks)
        self.menu.marks.toggled.connect(self.show_marks)
        self.menu.namings[prefs.chart_columns].setChecked(True)
        self.menu.naming_chosen.connect(self.set_naming)
        self.tools = (ZoomButton(self.grid), smoothing, self.menu)

    def show_run(self, run: Run | None) -> None:
        self._run, self._curves_for = run, ()
        self.grid.forget_span()

    def refresh(self) -> None:
        if self._run is not None:
            self._find_curves(self._run)
            self.grid.refresh(self._run.data.steps.span)

    def show_marks(self, shown: bool) -> None:
        self._session.prefs.chart_marks = self._shows_marks = shown
        self.refresh()

    def set_naming(self, naming: Naming) -> None:
        self._session.prefs.chart_columns = naming
        self.refresh()

    def _find_curves(self, run: Run) -> None:
        key = (len(run.data.steps.names()), len(run.data.evals.names()), tuple(run.reward_names), bool(run.step))
        if key == self._curves_for:
            return
        self._curves_for = key
        expected = [f"rewards/{name}/{kind}" for name in run.reward_names for kind in ("mean", "std")]
        steps = list(dict.fromkeys([*run.data.steps.names(), *expected]))
        evals = list(dict.fromkeys([*run.data.evals.names(), *expected])) if run.data.evals.names() else []
        for index, chart in enumerate(CHARTS):
            names = evals if chart.held_out else steps
            curves = charts.curves_of(chart, names, run.reward_names)
            self._curves[index] = curves if charts.has_place(chart, curves, names, has_steps=bool(run.step)) else []

    def _content_of(self, index: int) -> ChartContent:
        run, chart = self._run, CHARTS[index]
        if run is None:
            return ChartContent()
        read = partial(run.series, held_out=chart.held_out)
        naming, scale = self._session.prefs.chart_columns, run.config.get("scale_rewards", "group")
        traces = [
            replace(
                trace_of(curve, read, stacked=curve.metric in chart.stacked),
                columns=column_names(chart, curve, naming, scale),
            )
            for curve in self._curves[index]
        ]
        shown = [trace for trace in traces if trace.has_data]
        marks = run.data.marks if self._shows_marks else ()
        reason = charts.flat_reason(chart, run.config)
        if reason and not any((trace.y > 0).any() for trace in shown):
            return ChartContent((), reason, marks, TWO_UPDATES)
        waiting = charts.placeholder(chart, run.config, is_live=run.is_live, steps=run.step)
        return ChartContent(shown, waiting, marks)


def trace_of(curve: Curve, read: Callable, *, stacked: bool = False) -> Trace:
    """The curve's numbers, and its band where it has one; `read(metric)` returns (steps, values)."""
    x, y = read(curve.metric)
    low = high = None
    if curve.spread:
        spread = read(curve.spread)[1]
        if len(spread):
            low, high = y - spread, y + spread
    elif curve.low and len(read(curve.low)[1]) and len(read(curve.high)[1]):
        low, high = read(curve.low)[1], read(curve.high)[1]
    return Trace(curve.label, curve.colour, x, y, low, high, stacked)
