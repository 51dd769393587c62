"""Plots: downsampling keeps every peak, gaps stay gaps, and hovering or zooming one plot affects all."""

from __future__ import annotations

import numpy as np
import pytest
from PySide6.QtCore import QPoint, Qt
from PySide6.QtWidgets import QWidget

from app import theme
from app.widgets.charts.chart_grid import ChartContent, ChartGrid
from app.widgets.charts.curves import axis_range, downsample, envelope, exponential_average, isolated_points, means
from app.widgets.charts.legend import Legend, LegendEntry
from app.widgets.charts.plot import Plot, Trace, nearest_index


def test_downsampling_keeps_every_peak_and_every_wide_gap() -> None:
    x, y = np.arange(100_000), np.random.default_rng(0).normal(size=100_000)
    y[77_777], y[123] = 50, -50
    y[40_000:50_000] = np.nan
    thin_x, thin_y = downsample(x, 1000, y)
    assert len(thin_x) <= 1000 and (np.diff(thin_x) >= 0).all()
    assert np.nanmax(thin_y) == 50 and np.nanmin(thin_y) == -50
    assert np.isnan(thin_y[(thin_x > 40_300) & (thin_x < 49_700)]).all()
    assert not np.isnan(thin_y[thin_x < 39_700]).any()
    assert abs(thin_x[np.nanargmax(thin_y)] - 77_777) < 300


def test_a_band_keeps_its_extremes_and_its_gaps() -> None:
    x, y = np.arange(100_000), np.random.default_rng(0).normal(size=100_000)
    low, high = y - 1, y + 1
    low[123], high[77_777] = -50, 50
    low[40_000:50_000] = high[40_000:50_000] = np.nan
    thin_x, thin_low, thin_high = envelope(x, 500, low, high)
    assert len(thin_x) == len(thin_low) == len(thin_high) <= 501
    assert np.nanmin(thin_low) == -50 and np.nanmax(thin_high) == 50
    assert np.isnan(thin_low[(thin_x > 40_300) & (thin_x < 49_700)]).all()
    assert envelope(x[:300], 500, low, high)[2] is high, "a short band is left as it is"
    for count in range(1, 1300, 7):  # every ratio of points to buckets
        sizes = {len(column) for column in envelope(x[:count], 500, low[:count], high[:count])}
        assert len(sizes) == 1 and len({len(column) for column in downsample(x[:count], 500, y[:count])}) == 1


@pytest.mark.parametrize("count", [1001, 1500, 1999, 2001, 31_337, 100_000])
def test_the_line_of_many_steps_is_their_mean_with_their_extremes_behind_it(qtbot, count: int) -> None:
    y = np.where(np.arange(count) % 2, 1.0, 3.0)
    y[count // 2] = 50
    plot = Plot("Noise")
    qtbot.addWidget(plot)
    plot.resize(300, 200)
    plot.show()
    plot.show_traces([Trace("A", "accent", np.arange(count), y)])
    items = plot._view._curves[0]
    line, raw = items.line.getData()[1], items.raw.getData()[1]
    assert len(line) == len(raw) < count and np.nanmax(raw) == 50 and np.nanmin(raw) == 1
    assert np.median(line) == pytest.approx(2, abs=0.35)
    gap = np.where(np.arange(3000) < 1500, np.nan, 1.0)
    thin = downsample(np.arange(3000), 600, gap)[1]
    assert (np.isnan(means(len(thin), gap)) == np.isnan(thin)).all()


def test_short_curves_are_not_downsampled() -> None:
    x, y = np.arange(500), np.arange(500.0)
    assert downsample(x, 1000, y)[0] is x and downsample(x, 1000, y)[1] is y


@pytest.mark.parametrize("weight", [0.3, 0.6, 0.9, 0.999])
def test_smoothing_equals_the_bias_corrected_moving_average(weight: float) -> None:
    values = np.random.default_rng(1).normal(3, 1, size=3000)
    values[::7] = np.nan
    total = count = 0.0
    expected = []
    for value in values:
        total, count = total * weight, count * weight
        if np.isfinite(value):
            total, count = total + value, count + 1
        expected.append(total / count if np.isfinite(value) else np.nan)
    np.testing.assert_allclose(exponential_average(values, weight), expected, rtol=1e-9)


def test_an_isolated_point_gets_a_dot() -> None:
    assert isolated_points(np.array([1, np.nan, 2, np.nan, 3, 4])).tolist() == [True, False, True, False, False, False]


def test_the_axis_starts_at_zero_only_where_values_come_near_it() -> None:
    assert axis_range(np.array([0.0, 1.0]))[0] == 0 and axis_range(np.array([100.0, 101.0]))[0] > 99
    assert axis_range(np.array([np.nan])) == (0.0, 1.0)
    low, high = axis_range(np.array([5.0, 5.0]))
    assert low < 5 < high


def test_nearest_index_finds_the_closest_step() -> None:
    x = np.array([1, 5, 9])
    assert [nearest_index(x, step) for step in (-3, 2, 4, 7.1, 100)] == [0, 0, 1, 2, 2] and nearest_index(
        x[:0], 1
    ) is None


def test_a_step_without_a_value_has_none() -> None:
    trace = Trace("Held-out", "accent", np.array([10, 20]), np.array([1.0, 2.0]))
    assert [trace.at(step) for step in (10, 12, 20, None)] == [1.0, None, 2.0, 2.0]


@pytest.fixture
def grid(qtbot, qapp):
    theme.apply(qapp, "light")
    x = np.arange(1, 41)
    y = np.sin(x / 5) + 2
    y[10:14] = np.nan
    shown = [
        ChartContent([Trace("One", "accent", x, y, y - 0.5, y + 0.5)]),
        ChartContent([Trace("Two", "reward:1", x, -y)]),
        ChartContent([], "Waits."),
    ]
    plots = [Plot("First", "score"), Plot("Second", "nats", "nats"), Plot("Third")]
    widget = ChartGrid(plots, shown.__getitem__, lambda index: True)
    qtbot.addWidget(widget)
    widget.resize(1000, 300)
    widget.show()
    widget.refresh((1, 40))
    qtbot.waitUntil(lambda: not widget._turns.isActive())
    return widget


def legend_entries(plot: Plot) -> list[tuple[str, str]]:
    return [(entry.label, entry.value) for entry in plot._legend._entries]


def test_the_legend_shows_the_newest_values_or_those_under_the_pointer(grid: ChartGrid) -> None:
    first, second, third = grid.plots
    assert legend_entries(first) == [("One", f"{np.sin(8) + 2:.2f}")]
    first.hovered.emit(5)
    assert first._step_label.text() == second._step_label.text() == "step 5"
    assert legend_entries(second) == [("Two", f"−{np.sin(1) + 2:.2f}\u202fnats")]
    first.hovered.emit(12)
    assert legend_entries(first) == [("One", "–")], "a gap is a dash"
    first.hovered.emit(None)
    assert first._step_label.text() == "" and legend_entries(first) == [("One", f"{np.sin(8) + 2:.2f}")]
    assert third._waiting.text() == "Waits." and legend_entries(third) == []


def test_a_long_legend_has_a_limited_height(qtbot) -> None:
    legend = Legend()
    qtbot.addWidget(legend)
    legend.resize(300, 16)
    few = [LegendEntry(theme.reward_pen(index), f"metric/number {index}", "0.500") for index in range(2)]
    legend.show_entries(few)
    assert not legend.toolTip()
    many = [LegendEntry(theme.reward_pen(index), f"metric/number {index}", "0.500") for index in range(20)]
    legend.show_entries(many)
    assert legend.height() == 4 * 16 and legend.toolTip().count("\n") == 19


def test_a_wide_page_has_four_columns_and_a_usual_one_three(qtbot) -> None:
    plots = [Plot(f"plot {index}") for index in range(8)]
    grid = ChartGrid(plots, lambda index: ChartContent(), lambda index: True)
    qtbot.addWidget(grid)
    grid.show()
    for width, columns in ((1072, 3), (824, 2), (2360, 4), (500, 1)):
        grid.resize(width, 700)
        grid.refresh()
        qtbot.waitUntil(lambda columns=columns: len({plot.x() for plot in plots}) == columns)


def test_a_gap_stays_a_gap(grid: ChartGrid) -> None:
    x, y = grid.plots[0]._view._curves[0].line.getData()
    assert np.isnan(y[10:14]).all() and np.isfinite(y[:10]).all() and len(x) == 40


def test_moving_the_pointer_marks_the_step_below_it(qtbot, grid: ChartGrid) -> None:
    view = grid.plots[0]._view
    steps: list[int | None] = []
    grid.plots[0].hovered.connect(steps.append)
    box = view.box
    index = view.mapFromScene(box.mapViewToScene(QPoint(20, 2)))
    qtbot.mouseMove(view.viewport(), index)
    assert steps[-1] == 20


def test_dragging_zooms_every_plot_and_a_double_click_shows_all(qtbot, grid: ChartGrid) -> None:
    view = grid.plots[1]._view
    box = view.box
    start, end = (view.mapFromScene(box.mapViewToScene(QPoint(step, -2))) for step in (10, 20))
    qtbot.mousePress(view.viewport(), Qt.MouseButton.LeftButton, pos=start)
    qtbot.mouseMove(view.viewport(), end)
    qtbot.mouseRelease(view.viewport(), Qt.MouseButton.LeftButton, pos=end)
    qtbot.waitUntil(lambda: not grid._turns.isActive())
    low, high = grid.plots[0]._view.box.viewRange()[0]
    assert low == pytest.approx(10, abs=0.5) and high == pytest.approx(20, abs=0.5)
    qtbot.mouseDClick(view.viewport(), Qt.MouseButton.LeftButton)
    qtbot.waitUntil(lambda: not grid._turns.isActive())
    assert grid.plots[0]._view.box.viewRange()[0][1] > 39


def test_only_visible_plots_are_drawn(qtbot, grid: ChartGrid) -> None:
    grid.resize(330, 230)  # one column, one plot in sight
    grid.refresh((1, 40))
    qtbot.waitUntil(lambda: not grid._turns.isActive())
    assert 2 in grid._stale
    grid.verticalScrollBar().setValue(grid.verticalScrollBar().maximum())
    qtbot.waitUntil(lambda: 2 not in grid._stale)


def test_a_change_of_theme_recolours_the_curves(qapp, grid: ChartGrid) -> None:
    theme.apply(qapp, "dark")
    assert grid.plots[0]._view.backgroundBrush().color() == theme.palette().plot_background
    assert grid.plots[0]._view._curves[0].line.opts["pen"].color() == theme.palette().accent
    theme.apply(qapp, "light")


def test_a_plot_has_few_widgets(grid: ChartGrid) -> None:
    """A pyqtgraph PlotItem has fifty, for a menu that is never shown: restyling them took half a second at a change of theme."""
    assert len(grid.plots[0]._view.findChildren(QWidget)) < 10


def test_a_hidden_plot_takes_the_new_theme_when_it_is_shown(qapp, qtbot, grid: ChartGrid) -> None:
    grid.hide()
    theme.apply(qapp, "dark")
    assert grid.plots[0]._view.backgroundBrush().color() == theme.LIGHT.plot_background
    grid.show()
    qtbot.waitUntil(lambda: grid.plots[0]._view.backgroundBrush().color() == theme.DARK.plot_background)
    theme.apply(qapp, "light")


@pytest.mark.parametrize(
    ("largest", "title", "told", "ticks"),
    [(0.048, "MB", "48.0\u202fMB", ["0", "20", "40"]), (4.8, "GB", "4.80\u202fGB", ["0", "2", "4"])],
    ids=["a small run", "a large one"],
)
def test_axis_and_legend_show_memory_in_the_same_unit(
    qtbot, largest: float, title: str, told: str, ticks: list[str]
) -> None:
    plot = Plot("Memory", "GB", "GB")
    qtbot.addWidget(plot)
    plot.show()
    for _ in range(2):  # another theme keeps the unit
        plot.show_traces([Trace("Peak", "muted", np.arange(9.0), np.linspace(0, largest, 9))])
        axis = plot._view._value_axis
        assert axis.labelText == title and plot._legend._entries[0].value == told
        spacing = largest / 2.4
        assert axis.tickStrings([0, spacing, 2 * spacing], 1, spacing) == ticks
        theme.signals.changed.emit()


def test_values_are_copied_as_csv(grid: ChartGrid) -> None:
    rows = grid.plots[0].as_csv().splitlines()
    assert rows[0] == "step,One,One low,One high" and len(rows) == 41
    assert rows[11] == "11,,,", "gaps are empty cells"


def test_the_legend_wraps_and_keeps_every_entry(qtbot) -> None:
    legend = Legend()
    qtbot.addWidget(legend)
    legend.show()
    legend.resize(300, 16)
    legend.show_entries([LegendEntry(theme.reward_pen(n), f"a function with a name {n}", "0.123") for n in range(4)])
    assert legend.height() == 4 * 16
    legend.resize(2000, legend.height())
    assert legend.height() == 16
