"""Charts: thinning keeps every peak, gaps stay gaps; axes, legend, zoom, marks, steps by keyboard, files."""

import csv
import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PySide6.QtCore import QEvent, QPoint, QPointF, Qt
from PySide6.QtGui import QHelpEvent, QImage
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QToolTip

from app.pages.runs.compare_view import SCALES
from app.state.run import Mark
from app.state.run_comparison import resampled
from app.widgets.charts.chart_grid import ChartContent, ChartGrid
from app.widgets.charts.curves import Trace, axis_range, exponential_average, thin
from app.widgets.charts.plot import Plot, table_text
from tests.support.windows import point_at

X = np.arange(1, 41)
SPIKY = np.where(X == 20, 9.0, 0.01 + X / 4000)
MARKS = [Mark(10, "checkpoint", "Saved: a checkpoint."), Mark(20, "health", "KL jumped.")]


@pytest.fixture
def grid(qtbot, qapp):
    gappy = np.where((X > 10) & (X < 15), np.nan, X / 40)
    contents = [
        ChartContent([Trace("KL", "kl", X, SPIKY)], marks=MARKS),
        ChartContent([Trace("One", "accent", X, gappy), Trace("Two", "reward:1", X, -X / 40)], marks=MARKS),
        ChartContent([], "Waits."),
    ]
    plots = [Plot("KL", "nats", "nats"), Plot("Scores", "score"), Plot("Empty")]
    widget = qtbot.show(ChartGrid(plots, contents.__getitem__, lambda index: True), 1100, 380)
    widget.refresh((1, 40))
    settle(qtbot, widget)
    return widget


def settle(qtbot, grid: ChartGrid) -> None:
    qtbot.waitUntil(lambda: not grid.turns.isActive())


def place(plot: Plot, step: float, value: float) -> QPoint:
    """Where a point of the plot is in its view."""
    view = plot.view
    return view.mapFromScene(view.box.mapViewToScene(QPointF(step, value)))


def click(plot: Plot, step: float, value: float) -> None:
    QTest.mouseClick(plot.view.viewport(), Qt.MouseButton.LeftButton, pos=place(plot, step, value))


def drawn(plot: Plot) -> np.ndarray:
    return plot.view.curves[0].line.getData()[1]


def legend(plot: Plot) -> list[tuple[str, str]]:
    return [(entry.label, entry.value) for entry in plot.legend.entries]


def test_thinning_keeps_peaks_means_and_gaps() -> None:
    x, y = np.arange(100_000), np.random.default_rng(0).normal(size=100_000)
    y[77_777], y[123] = 50, -50
    y[40_000:50_000] = np.nan
    curve = thin(x, y, low=y - 1, high=y + 1, most=1000)
    assert len(curve.raw_x) <= 1000 and (np.diff(curve.raw_x) >= 0).all()
    assert np.nanmax(curve.raw) == 50 and np.nanmin(curve.raw) == -50
    assert abs(curve.raw_x[np.nanargmax(curve.raw)] - 77_777) < 300
    assert np.nanmin(curve.low) == -51 and np.nanmax(curve.high) == 51
    for steps, values in ((curve.x, curve.line), (curve.raw_x, curve.raw), (curve.x, curve.low)):
        assert np.isnan(values[(steps > 40_300) & (steps < 49_700)]).all()
        assert not np.isnan(values[steps < 39_700]).any()
    assert np.nanmedian(curve.line) == pytest.approx(0, abs=0.1), "many steps on a pixel: their mean"
    for count in range(1, 1300, 7):  # every ratio of points to buckets
        part = thin(x[:count], y[:count], low=y[:count], high=y[:count], most=500)
        assert len(part.x) == len(part.line) == len(part.low) and len(part.raw_x) == len(part.raw)


@pytest.mark.parametrize("weight", [0.3, 0.9, 0.999])
def test_smoothing_is_the_bias_corrected_moving_average(weight: float) -> None:
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


def test_a_run_over_time_keeps_spikes_and_ends_in_its_last_value() -> None:
    x, values = np.array([0.1, 0.2, 0.3, 0.4, 2.2, 2.4, 2.6]), np.array([1.0, 9.0, 0.0, 1.0, 5.0, 7.0, 3.0])
    shown = resampled(x, values, np.arange(6.0))[1]
    assert shown[:2].tolist() == [0, 9] and shown[3] == 3 and np.isnan(shown[4:]).all()


def test_axis_ranges() -> None:
    assert axis_range(np.array([0.0, 1.0]))[0] == 0 and axis_range(np.array([100.0, 101.0]))[0] > 99
    assert axis_range(np.array([np.nan])) == (0.0, 1.0)
    low, high = axis_range(np.array([5.0, 5.0]))
    assert low < 5 < high
    assert axis_range(np.array([0.2, 1.0]), unit="share")[1] <= 1.02, "a share ends at 100 %"
    assert axis_range(np.array([0.2, 0.5]), unit="share")[1] == pytest.approx(0.521)
    assert axis_range(np.array([0.2, 1.5]), unit="share")[1] > 1.5


def test_log_axis_for_a_spike(grid: ChartGrid) -> None:
    kl = grid.plots[0]
    kl.set_log(True)
    low, high = kl.view.box.viewRange()[1]
    assert low < math.log10(SPIKY.min()) and high > math.log10(9)
    assert drawn(kl)[19] == pytest.approx(math.log10(9))
    assert kl.view.value_axis.tickStrings([-2.0, -1.0, 0.0, 1.0], 1, 1) == ["0.01", "0.1", "1", "10"]
    assert legend(kl) == [("KL", "0.0200\u202fnats")], "values stay what they are"
    kl.set_log(False)
    assert kl.view.box.viewRange()[1][0] == pytest.approx(0, abs=0.01)
    assert kl.view.value_axis.tickStrings([11.612, 11.614], 1, 0.002) == ["11.612", "11.614"], "each is another"


def test_legend(grid: ChartGrid) -> None:
    kl, scores, empty = grid.plots
    assert legend(scores) == [("One", "1.00"), ("Two", "−1.00")]
    kl.hovered.emit(20)
    assert kl.step_label.text() == scores.step_label.text() == "step 20"
    assert legend(scores) == [("One", "0.500"), ("Two", "−0.500")]
    assert "KL jumped." in kl.accessibleName(), "with the mark at the step"
    kl.hovered.emit(12)
    assert legend(scores)[0] == ("One", "–"), "a gap is a dash"
    assert np.isnan(drawn(scores)[10:14]).all() and np.isfinite(drawn(scores)[:10]).all()
    kl.hovered.emit(None)
    assert kl.step_label.text() == "" and legend(scores)[0] == ("One", "1.00")
    assert empty.waiting.text() == "Waits." and legend(empty) == []

    assert scores.view.box.viewRange()[1][0] < -0.9
    scores.legend.linkActivated.emit("1")
    assert scores.view.box.viewRange()[1][0] > -0.1 and len(scores.view.curves) == 1
    assert [entry.hidden for entry in scores.legend.entries] == [False, True], "it stays in the legend"
    scores.legend.linkActivated.emit("1")
    assert len(scores.view.curves) == 2


def test_click_on_a_point_asks_for_its_step(qtbot, grid: ChartGrid) -> None:
    chosen: list[int] = []
    grid.step_chosen.connect(chosen.append)
    scores = grid.plots[1]
    click(scores, 30, 0.75)
    click(scores, 5, 0.9)  # nothing is there
    assert chosen == [30]
    QTest.mouseDClick(scores.view.viewport(), Qt.MouseButton.LeftButton, pos=place(scores, 5, 0.9))
    assert chosen.pop() == 5, "a double click chooses its step anywhere"
    grid.zoom((10, 30))
    settle(qtbot, grid)
    click(scores, 20, 0.5)
    QTest.mouseDClick(scores.view.viewport(), Qt.MouseButton.LeftButton, pos=place(scores, 20, 0.5))
    qtbot.wait(450)
    assert grid.span is None and chosen == [30], "a double click shows all steps and does not leave the page"
    grid.zoom((10, 30))
    settle(qtbot, grid)
    click(scores, 20, 0.5)
    qtbot.waitUntil(lambda: chosen == [30, 20])


def test_keys_move_the_marked_step_in_all_charts(grid: ChartGrid) -> None:
    kl, scores, _ = grid.plots
    chosen: list[int] = []
    grid.step_chosen.connect(chosen.append)
    for _ in range(3):
        QTest.keyClick(kl, Qt.Key.Key_Left)
    assert kl.step_label.text() == scores.step_label.text() == "step 38"
    QTest.keyClick(kl, Qt.Key.Key_Return)
    assert chosen == [38]
    QTest.keyClick(kl, Qt.Key.Key_Home)
    assert "step 1" in kl.accessibleName()
    QTest.keyClick(kl, Qt.Key.Key_Escape)
    assert kl.step_label.text() == ""


def test_what_a_mark_says_stays_while_the_pointer_rests(qtbot, grid: ChartGrid) -> None:
    """Qt asks for a tool tip a moment later; pyqtgraph's scene answers with none, which hid it."""
    settle(qtbot, grid)
    view = grid.plots[0].view
    assert all(sign.pen().isCosmetic() for sign in view.signs.points()), "else the pen fills each sign to a square"
    at = place(grid.plots[0], 20, 4)
    point_at(view.viewport(), at)
    assert "KL jumped" in QToolTip.text()
    QApplication.sendEvent(view.viewport(), QHelpEvent(QEvent.Type.ToolTip, at, view.viewport().mapToGlobal(at)))
    qtbot.wait(400)
    assert QToolTip.isVisible() and "KL jumped" in QToolTip.text()
    QToolTip.hideText()


def test_every_chart_has_its_turn_however_often_there_is_news(grid: ChartGrid, monkeypatch) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(grid, "draw", lambda plot: (drawn.append(plot.title), grid.stale.pop(grid.plots.index(plot))))
    for _ in range(4):
        grid.refresh((1, 40))
        grid.turns.timeout.emit()
    assert drawn == ["KL", "Scores", "Empty", "KL"]


def test_dragging_zooms_every_plot_and_the_ways_back(qtbot, grid: ChartGrid) -> None:
    zoom, view = grid.zoom_button(), grid.plots[1].view
    qtbot.addWidget(zoom)
    assert zoom.isHidden()
    start, end = place(grid.plots[1], 10, 0), place(grid.plots[1], 20, 0)
    qtbot.mousePress(view.viewport(), Qt.MouseButton.LeftButton, pos=start)
    qtbot.mouseMove(view.viewport(), end)
    qtbot.mouseRelease(view.viewport(), Qt.MouseButton.LeftButton, pos=end)
    settle(qtbot, grid)
    assert grid.plots[0].view.box.viewRange()[0] == pytest.approx([10, 20], abs=0.5)
    grid.mark_step(None)  # the pointer leaves
    for go_back in (zoom.click, lambda: QTest.keyClick(grid.plots[0], Qt.Key.Key_Escape), lambda: grid.zoom((-5, 90))):
        grid.zoom((10, 20))
        settle(qtbot, grid)
        assert not zoom.isHidden() and "10 – 20" in zoom.text()
        assert grid.plots[1].step_label.text() == "steps 10 – 20"
        go_back()
        settle(qtbot, grid)
        assert zoom.isHidden() and grid.plots[1].view.box.viewRange()[0][1] > 40


def test_all_charts_with_data_become_files(grid: ChartGrid, tmp_path: Path, monkeypatch) -> None:
    messages: list[str] = []
    grid.run_name = "my-run"
    grid.reported.connect(messages.append)
    monkeypatch.setattr("app.widgets.charts.chart_grid.open_folder", lambda *_: tmp_path)
    for format in ("png", "svg", "csv"):
        grid.save_all(format)
    names = sorted(path.name for path in tmp_path.glob("my-run-*"))
    assert names == [f"my-run-{chart}.{format}" for chart in ("kl", "scores") for format in ("csv", "png", "svg")]
    assert messages == [f"Saved 2 charts in {tmp_path.name}."] * 3
    image = QImage(str(tmp_path / "my-run-kl.png"))
    assert image.width() == 2 * grid.plots[0].width(), "twice as sharp as on the screen"
    texts = " ".join(ElementTree.parse(tmp_path / "my-run-scores.svg").getroot().itertext())
    assert all(text in texts for text in ("Scores", "score", "step", "One", "Two")), "title, axes and legend, as text"
    monkeypatch.setattr("app.widgets.charts.chart_grid.open_folder", lambda *_: tmp_path / "missing")
    grid.save_all("csv")
    assert len(messages) == 4 and "cannot be written" in messages[3]


def test_tables_read_back_exactly() -> None:
    late = Trace("Late", "clip", np.array([2, 50]), np.array([1 / 3, np.nan]))
    rows = list(csv.reader(table_text([Trace("KL", "kl", X, SPIKY), late]).splitlines()))
    assert rows[0] == ["step", "KL", "Late"] and [row[0] for row in rows[1:]] == [*map(str, range(1, 41)), "50"]
    assert [float(row[1]) for row in rows[1:41]] == SPIKY.tolist()
    assert rows[2][2] == repr(1 / 3) and rows[1][2] == "" and rows[-1] == ["50", "", ""]
    named = [Trace("A", "kl", X, SPIKY, column="KL"), Trace("Band", "kl", X, SPIKY, SPIKY, SPIKY)]
    assert table_text(named).splitlines()[0] == "step,KL,Band,Band low,Band high"
    for axis, head in (("tokens", "tokens,"), ("time", '"working time, ms",')):
        assert table_text(named, SCALES[axis].column).startswith(head), "of a comparison"
