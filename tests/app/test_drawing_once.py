"""What a run's news costs the Monitor page, laid out at once and then painted once; and what it tells before all was read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PySide6.QtCore import QEvent, QObject
from PySide6.QtWidgets import QApplication, QWidget

from app.pages.monitor.monitor_page import MonitorPage
from app.state.run import Run
from app.state.run_notices import reward_before_and_after
from app.state.session import Session
from app.widgets.run_header import RunHeader
from backend.runs.archive import first_and_last_means
from tests.support import made_up_runs


class Count(QObject):
    """Counts the events of one type that a widget gets."""

    def __init__(self, widget: QWidget, kind: QEvent.Type) -> None:
        super().__init__(widget)
        self.kind, self.events = kind, 0
        widget.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        self.events += event.type() == self.kind
        return False


@pytest.fixture
def page(qtbot) -> Iterator[MonitorPage]:
    page = MonitorPage(Session())
    qtbot.addWidget(page)
    page.resize(1060, 700)
    page.show()
    yield page
    page.session.close_run()


def test_nothing_is_left_to_lay_out_when_the_page_is_painted(qtbot, page: MonitorPage, tmp_path: Path) -> None:
    page.session.open_run(made_up_runs.make_run(tmp_path / "run", steps=8).path)
    qtbot.waitUntil(lambda: page.session.run.state == "finished" and not page.grid.turns.isActive())
    page.verdict.show_result("Another card", "good", "That is lower than the one of the run.")
    content = page.verdict.parentWidget()
    layouts = [Count(widget, QEvent.Type.LayoutRequest) for widget in (content, page.verdict)]
    page._refresh()
    in_time = [count.events for count in layouts]
    QApplication.processEvents()
    assert min(in_time) > 0 and [count.events for count in layouts] == in_time


def test_progress_is_not_painted_at_once(qtbot) -> None:
    header = RunHeader()
    qtbot.addWidget(header)
    header.show_run("run", "running", live=True)
    with qtbot.waitExposed(header):
        header.show()
    paints = Count(header._bar, QEvent.Type.Paint)
    header.show_progress(30, 60)
    assert paints.events == 0
    qtbot.waitUntil(lambda: paints.events > 0)


@pytest.mark.parametrize("count", [0, 1, 3, 19, 39, 40, 41, 90])
def test_the_change_of_the_reward_is_that_of_all_its_values(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    values[2::7] = np.nan

    class OfRewards:
        def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
            return np.arange(count), values

    assert reward_before_and_after(OfRewards()) == first_and_last_means(values.tolist())  # pyright: ignore[reportArgumentType]


def test_no_time_is_left_to_tell_while_a_event_log_is_read(
    qtbot, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("app.state.run.SLICE", 20_000)
    monkeypatch.setattr("app.state.run.BUDGET_S", 0.0)
    run = Run(made_up_runs.make_run(tmp_path / "run", steps=40, total=60, ending=None))
    run.poll()
    assert 0 < run.step < 40 and run.read_share is not None and run.eta_s is None
    run.close()
