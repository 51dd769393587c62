"""Small bugs that a new user met on a real screen, each with its story."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication

from app import theme
from app.state.prefs import Prefs
from app.state.session import Session
from app.window import Window
from tests.support.windows import SilentService


@pytest.fixture
def window(tmp_path: Path, qapp: QApplication, qtbot) -> Window:
    theme.apply(qapp, "light")
    session = Session(Prefs(tmp_path / "prefs"))
    session.service = SilentService()
    window = Window(session)
    session.restore()
    qtbot.addWidget(window, before_close_func=lambda window: setattr(window.session, "run", None))
    window.resize(1000, 640)
    window.show_page("train")
    with qtbot.waitActive(window):
        window.show()
        window.activateWindow()
    return window


def test_first_tab_scrolls_to_the_field(window: Window, qtbot) -> None:
    form = window.pages["train"].form
    form.verticalScrollBar().setValue(form.verticalScrollBar().maximum())
    window.pages["train"].search.setFocus()
    QTest.keyClick(window.pages["train"].search, Qt.Key.Key_Tab)
    focused = QApplication.focusWidget()
    assert form.isAncestorOf(focused)
    top = focused.mapTo(form.viewport(), focused.rect().topLeft()).y()
    assert 0 <= top <= form.viewport().height() - focused.height()


def test_means_of_another_model(window: Window, tmp_path: Path) -> None:
    session, table = window.session, window.pages["train"].rewards.table
    bench = session.reward_bench
    scores = [{"rewards": {"r1_int_reward_func": 0.5}, "text": "4"}]
    bench._set_groups([{"prompt": "2+2", "completions": scores}], "sampled from the model")
    bench.cancel()  # no scores of a helper process: those above
    bench.functions = [{"name": "r1_int_reward_func"}]
    bench.changed.emit()
    assert table.model().means == {"r1_int_reward_func": 0.5}
    (tmp_path / "other.yaml").write_text("model: other/model\ndata: other/rows\n")
    session.load_config(tmp_path / "other.yaml")
    assert table.model().means == {}
