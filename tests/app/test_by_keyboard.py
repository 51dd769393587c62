"""Every page and dialog by keyboard alone: what Tab reaches, in which order, what it is called, that it leads on, and
that the place is seen."""

from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QPushButton, QWidget

from app import theme
from app.pages import PAGES
from app.pages.monitor.steering import SteeringPanel
from app.pages.runs.run_actions import CloneDialog, FreeSpaceDialog
from app.pages.runs.run_table import ColumnDialog
from app.pages.train.picker import Picker
from app.state.prefs import Prefs
from app.state.session import Session
from app.widgets.basic.dialogs import QuestionBox, TextDialog
from app.widgets.consent_dialog import consent_dialog
from app.widgets.export_panel import ExportPanel
from app.widgets.menu_dialogs import AboutDialog, PreferencesDialog, PresetPanel, ProblemDialog
from app.widgets.run_header import SwitcherMenu
from app.window import FORM_PAGES, Window
from backend.rewards.allowed_code import CodeToAllow, read_code
from tests.support import made_up_runs
from tests.support.tab_walk import unmarked, unnamed, walk_by_tab
from tests.support.windows import ServiceHere

PAGE_KEYS = [page.key for page in PAGES]


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory, qapp: QApplication) -> Iterator[Window]:
    folder = tmp_path_factory.mktemp("keyboard")
    theme.apply(qapp, "light")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_STUDIO_RUNS", str(folder / "runs"))
        patch.setenv("GRPO_STUDIO_PREFS", str(folder / "prefs"))
        run = made_up_runs.make_run(folder / "runs" / "made-up", steps=6)
        session = Session(Prefs(folder / "prefs"))
        session.service = ServiceHere()  # pyright: ignore
        session.restore()
        window = Window(session)
        window.resize(1280, 800)
        window.show()
        window.activateWindow()
        QTest.qWaitForWindowActive(window)
        session.open_run(run.path)
        yield window
        session.close_run()
        window.deleteLater()


def wait_until(condition: Callable[[], object]) -> None:
    """Turn the event loop until something is so, for a minute at most. Raises AssertionError."""
    for _ in range(3000):
        if condition():
            return
        QTest.qWait(20)
    raise AssertionError("It never came to be.")


def open_page(window: Window, key: str) -> None:
    """Show a page with the focus in the sidebar, and let it settle."""
    window.activateWindow()
    window.show_page(key)
    QTest.qWait(50)
    if key in FORM_PAGES:  # what is found when the dataset is read becomes a stop
        dataset = window.session.dataset
        wait_until(lambda: dataset.state not in ("none", "reading") and not dataset._pending)
    window.sidebar.buttons[key].setFocus(Qt.FocusReason.TabFocusReason)


@pytest.mark.parametrize("key", [*PAGE_KEYS, "all settings"])
def test_tab_round_a_page(window: Window, key: str) -> None:
    density, key = ("all", "train") if key == "all settings" else ("essentials", key)
    open_page(window, key)
    if key == "train":
        window.pages[key].density.choose(density)
    walk = walk_by_tab(window)
    assert walk.traps == [] and walk.unseen == [] and walk.upward == []
    assert walk.unreached(window) == [] and unnamed(window) == [] and unmarked(walk.forward) == []
    assert walk.backward[-1] is walk.forward[-1] is window.sidebar.buttons[key]
    assert walk.backward[-2::-1] == walk.forward[:-1], "Shift+Tab goes the same way back"


def picker(window: Window) -> QWidget:
    page = window.pages["train"]
    page.form.fields["model"].pick_requested.emit()
    picker = window.findChildren(Picker)[-1]
    wait_until(lambda: picker.model.rows)  # a selected entry can be starred and used
    return picker


def consent(window: Window) -> QWidget:
    file = Path(window.session.prefs.folder) / "mine.py"
    file.write_text("import json\n")
    return consent_dialog([CodeToAllow(read_code(file), changed=False)], window)


def runs_dialog(kind: type[QWidget], open_it: Callable[[Any], object]) -> Callable[[Window], QWidget]:
    def opened(window: Window) -> QWidget:
        page = window.pages["runs"]
        page.refresh()
        wait_until(lambda: page.model.rows)
        open_it(page)
        return page.findChildren(kind)[-1]

    return opened


def window_dialog(kind: type[QWidget], method: str, *arguments: Any) -> Callable[[Window], QWidget]:
    def opened(window: Window) -> QWidget:
        attrgetter(method)(window)(*arguments)
        return window.findChildren(kind)[-1]

    return opened


def export(window: Window) -> QWidget:
    panel = ExportPanel(window.session.run.folder, window.session.service, window)
    panel.open_beside()
    return panel


DIALOGS: dict[str, Callable[[Window], QWidget]] = {
    "picker": picker,
    "presets": window_dialog(PresetPanel, "files.show_presets"),
    "preferences": window_dialog(PreferencesDialog, "show_preferences"),
    "shortcuts": window_dialog(TextDialog, "help.show_shortcuts"),
    "about": window_dialog(AboutDialog, "help.show_about"),
    "problem": window_dialog(ProblemDialog, "help.report_caught", "ValueError: an example", "Traceback"),
    "question": lambda window: QuestionBox(
        window, "Sure?", "It ends.", {"keep": "Keep", "stop": "Stop", "no": "Cancel"}
    ),
    "consent": consent,
    "export": export,
    "columns": runs_dialog(ColumnDialog, lambda page: page.choose_columns()),
    "free space": runs_dialog(FreeSpaceDialog, lambda page: page.free_space()),
    "clone": runs_dialog(CloneDialog, lambda page: page.clone(page.model.rows[0])),
    "change settings": lambda window: SteeringPanel(window.session.run, window),
    "switcher": window_dialog(SwitcherMenu, "switch_run"),
}


PRESSED_BY_RETURN = {"picker": ["Use"], "presets": ["Apply"], "preferences": []}
PRESSED_BY_RETURN |= {"switcher": [], "question": ["Keep"], "consent": ["Do Not Run"], "export": ["Export"]}
PRESSED_BY_RETURN |= {"clone": ["Create the run"], "change settings": ["Apply"]}


@pytest.mark.parametrize("name", DIALOGS)
def test_tab_round_a_dialog(window: Window, monkeypatch, name: str) -> None:
    run = window.session.run
    monkeypatch.setenv("GRPO_STUDIO_RUNS", str(run.folder.path.parent))
    open_page(window, "train" if name == "picker" else "runs")
    dialog = DIALOGS[name](window)
    dialog.show()
    dialog.activateWindow()
    wait_until(lambda: (focused := QApplication.focusWidget()) is not None and focused.window() is dialog)
    walk = walk_by_tab(dialog)
    assert walk.traps == [] and walk.unseen == [] and len(walk.upward) <= 1  # round from the last to the first
    assert walk.unreached(dialog) == [] and unnamed(dialog) == [] and unmarked(walk.forward) == []
    assert set(walk.backward) == set(walk.forward)
    next((x for x in walk.forward if not isinstance(x, QPushButton)), walk.forward[-1]).setFocus()
    pressed = [each.text() for each in dialog.findChildren(QPushButton) if each.isDefault() and each.isVisible()]
    assert pressed == PRESSED_BY_RETURN.get(name, ["Close"])
    QTest.keyClick(QApplication.focusWidget(), Qt.Key.Key_Escape)
    assert not dialog.isVisible()
    dialog.deleteLater()
