"""Small bugs that a new user met on a real screen, each with its story."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QIcon
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QDialogButtonBox, QStyle

from app import theme
from app.state.memory import NAMES, _memory_parts
from app.state.prefs import Prefs
from app.state.session import Session
from app.widgets.basic.icons import icon
from app.window import Window
from backend.config.config import parse
from backend.models.suggested_models import SUGGESTED_MODELS
from backend.trainer.memory.estimate import estimate
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


def same(first: QIcon, second: QIcon) -> bool:
    return first.pixmap(18, 18).toImage() == second.pixmap(18, 18).toImage()


def test_resume_has_the_icon_of_going_on(window: Window) -> None:
    """Pause became Resume and kept the two bars."""
    pause = window.menus["pause"]
    window.menus.show_state("paused")
    assert pause.text() == "Resume" and same(pause.icon(), icon("play"))
    window.menus.update_icons()  # a change of theme
    assert same(pause.icon(), icon("play"))
    window.menus.show_state("running")
    assert pause.text() == "Pause" and same(pause.icon(), icon("pause"))


def test_the_first_tab_into_the_form_scrolls_to_the_field(window: Window, qtbot) -> None:
    """Tab moved the focus to a field above or below what was visible; only the second Tab scrolled."""
    form = window.pages["train"].form
    form.verticalScrollBar().setValue(form.verticalScrollBar().maximum())
    window.pages["train"].search.setFocus()
    QTest.keyClick(window.pages["train"].search, Qt.Key.Key_Tab)
    focused = QApplication.focusWidget()
    assert form.isAncestorOf(focused)
    top = focused.mapTo(form.viewport(), focused.rect().topLeft()).y()
    assert 0 <= top <= form.viewport().height() - focused.height()


def test_browse_forgets_the_pointer_when_its_menu_closes(window: Window, qtbot) -> None:
    """It stayed grey, as under the pointer, until the pointer came back."""
    browse = window.pages["train"].form.fields["data"].browse
    browse.setAttribute(Qt.WidgetAttribute.WA_UnderMouse, True)  # it was clicked
    browse.menu().popup(browse.mapToGlobal(browse.rect().bottomLeft()))
    browse.menu().close()
    assert not browse.underMouse()


def test_buttons_of_dialogs_have_no_icons(window: Window) -> None:
    """On a bare X11 desktop Cancel had a red cross and Close a black one."""
    box = QDialogButtonBox(QDialogButtonBox.StandardButton.Cancel | QDialogButtonBox.StandardButton.Close, window)
    box.ensurePolished()
    assert not box.style().styleHint(QStyle.StyleHint.SH_DialogButtonBox_ButtonsHaveIcons, None, box)
    assert all(button.icon().isNull() for button in box.buttons())


def test_means_of_another_model_are_not_shown_beside_the_rewards(window: Window, tmp_path: Path) -> None:
    """After Open, the reward table still had the means of what the previous model had written."""
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


def test_every_part_of_the_memory_begins_with_a_capital() -> None:
    """“prompts” stood in lower case in the legend."""
    config = parse({"model": "a/b", "data": "a/b", "num_iterations": 2, "beta": 0.1})
    result = estimate(config, SUGGESTED_MODELS[0].shape, 32 << 30, gpu=True)
    parts = {part.name for phase in (result.rollout, result.training) for part in phase.allocations}
    assert parts <= set(NAMES)
    assert all(part.name[0].isupper() for part in _memory_parts(result).parts)


def test_the_list_below_the_search_shows_whole_rows_in_a_frame(window: Window, qtbot) -> None:
    """The list had no frame and cut its last row."""
    search = window.pages["train"].search
    search.setFocus()
    QTest.keyClicks(search, "batch")
    popup = search.completer().popup()
    qtbot.waitUntil(popup.isVisible)
    assert popup.property("role") == "matches"
    rows = popup.model().rowCount()
    last = popup.visualRect(popup.model().index(min(rows, 12) - 1, 0))
    assert last.bottom() <= popup.viewport().height()
