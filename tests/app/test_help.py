"""The Help menu: About with versions and licences, the shortcuts, and the glossary."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QApplication, QPushButton

from app.crash_catcher import CrashCatcher
from app.state import messages
from app.state.guide import GLOSSARY
from app.state.messages import Messages, Offer
from app.state.processes import Service
from app.state.run import RunState
from app.state.run_starter import START
from app.state.session import FORMAT, SERVICE_FAILED
from app.widgets.basic.dialogs import TextDialog
from app.widgets.menu_dialogs import NO_TEXT, AboutDialog, ProblemDialog
from app.window import Window
from backend import __version__
from backend.runs.run_folder import RunFolder
from backend.utils import about, places
from tests.support import made_up_runs


def test_about_shows_versions_and_every_licence(window: Window) -> None:
    window.menus["about"].trigger()
    dialog = window.findChild(AboutDialog)
    assert dialog.windowTitle() == "About GRPO Studio" and dialog.list.count() == len(about.components())
    assert "Permission is hereby granted" in dialog.text.toPlainText(), "ours is shown first"
    for row, part in enumerate(about.components()):
        dialog.list.setCurrentRow(row)
        assert dialog.text.toPlainText().split() == (part.text or NO_TEXT).split(), part.name
    next(each for each in dialog.findChildren(QPushButton) if each.text() == "Copy versions").click()
    copied = QGuiApplication.clipboard().text()
    assert f"grpo-studio: {__version__}" in copied and "Computes on: " in copied and "mlx: " in copied


def test_the_list_of_shortcuts_has_every_one(window: Window) -> None:
    window.menus["undo"].setText("&Undo")  # as KDE does
    window.menus["shortcuts"].trigger()
    text = window.findChild(TextDialog).text.toPlainText()
    for action in window.menus.by_name.values():
        assert action.shortcut().toString() in text
        assert action.shortcut().isEmpty() or action.text().replace("&", "") in text
    assert "&" not in text


def test_glossary_search(window: Window) -> None:
    window.menus["glossary"].trigger()
    page = window.pages["guide"]
    assert page.place == GLOSSARY and "Kullback-Leibler" in page.view.toPlainText()
    page.search.setText("measurements interval range")
    first = page.contents.tree.topLevelItem(0)
    assert first.text(0) == "Confidence interval"
    page.contents.tree.setCurrentItem(first)
    assert page.place == f"{GLOSSARY}#terms-6"


def sentence(window: Window) -> str:
    return window.strip.sentence.text()


def test_the_newest_that_holds_is_shown_and_an_older_one_returns() -> None:
    told: list[str] = []
    them = Messages()
    them.changed.connect(lambda: told.append(them.current.sentence if them.current else ""))
    true = {"a": True, "b": True}
    them.say("a", "a", lambda: true["a"])
    them.say("b", "b", lambda: true["b"])
    them.review()
    true["b"] = False
    them.review()
    them.say("c", "a")
    them.withdraw("a")
    assert told == ["a", "b", "a", "c", ""]
    them.say("d", "d", offer=Offer("Undo", print))
    them.say("", "d")
    assert them.current is None


def test_a_notice_goes_by_itself(qtbot, monkeypatch) -> None:
    monkeypatch.setattr(messages, "NOTICE_S", 0.05)
    them = Messages()
    them.say("Saved mine.yaml.")
    assert them.current is not None
    qtbot.waitUntil(lambda: them.current is None)


def test_run_of_a_newer_version(window: Window, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("app.state.run_starter.start_detached", lambda *_: pytest.fail("was started"))
    newer = made_up_runs.make_run(places.runs_folder() / "newer", steps=3, ending="stopped")
    newer.events.write_text(newer.events.read_text().replace('"v": 1', '"v": 9'))
    window.session.open_run(newer.path)
    said = "The run newer has format 9 and this version of GRPO Studio knows formats up to 1"
    assert sentence(window).startswith(said)
    for start in (window.session.starter.resume, window.session.starter.queue_existing):
        window.session.messages.withdraw(FORMAT)
        start(newer)
        assert sentence(window).startswith(said)
    assert not window.session.queue.waiting
    window.session.open_run(made_up_runs.make_run(places.runs_folder() / "ours", steps=3).path)
    window.session.messages.withdraw(START)
    assert not sentence(window)


def test_a_problem_that_stopped_run_is_said_until_it_is_mended(window: Window, qtbot) -> None:
    draft = window.session.draft
    draft.update({"model": "a/b", "data": "a/b"})
    draft.set("reward_functions", ["no_such_reward"])
    window.session.starter.start()
    assert "reward function" in sentence(window)
    window.undo()
    qtbot.waitUntil(lambda: sentence(window) == "")


def test_a_page_that_is_not_shown_cannot_take_the_keyboard(window: Window, qtbot) -> None:
    """The hidden page took the focus for its Cancel button when the sampling ended."""
    window.show()
    window.show_page("rewards")
    window.show_page("train")
    window.activateWindow()
    qtbot.waitUntil(lambda: window.isActiveWindow())
    field = window.pages["train"].form.fields["iters"].control
    field.setFocus()
    source = window.pages["rewards"].source
    for widget in (source.cancel, source.sample):
        widget.setFocus()
        assert QApplication.focusWidget() is field
    source.sample.parentWidget().setFocus()  # the page remembers it as its own last focus
    for what in ("Sampling", "", "Scoring", ""):
        source.show_busy(what)
        assert QApplication.focusWidget() is field


ROOT = Path(__file__).parents[2]


@pytest.fixture
def catcher(tmp_path: Path, qapp, monkeypatch) -> Iterator[CrashCatcher]:
    monkeypatch.setattr(sys, "excepthook", lambda *caught: None)  # pytest-qt's own would fail the test
    catcher = CrashCatcher(tmp_path / "native.txt")
    assert catcher.install() == ""
    yield catcher
    catcher.remove()
    assert not (tmp_path / "native.txt").exists(), "an end in peace leaves nothing"


def fail(words: str) -> None:
    try:
        raise ValueError(words)
    except ValueError:
        sys.excepthook(*sys.exc_info())


def test_an_exception_is_reported_once(catcher: CrashCatcher) -> None:
    caught: list[tuple[str, str]] = []
    catcher.caught.connect(lambda *parts: caught.append(parts))
    for _ in range(3):
        fail("the same each time")
    fail("another")
    prefix = "Something went wrong in the window: ValueError: "
    assert [sentence for sentence, _ in caught] == [prefix + "the same each time", prefix + "another"]
    assert "in fail" in caught[0][1]


def test_an_exception_in_a_thread_is_reported_in_the_window(catcher: CrashCatcher, window: Window, qtbot) -> None:
    catcher.caught.connect(window.help.report_caught)
    thread = threading.Thread(target=lambda: 1 / 0, name="read ahead")
    thread.start()
    thread.join()
    qtbot.waitUntil(lambda: window.findChild(ProblemDialog) is not None)
    text = window.findChild(ProblemDialog).text.toPlainText()
    assert "thread “read ahead”: ZeroDivisionError" in text and "Traceback" in text


CRASH = """
import ctypes, sys
from pathlib import Path
from PySide6.QtCore import QCoreApplication
from app.crash_catcher import CrashCatcher
app = QCoreApplication([])
catcher = CrashCatcher(Path(sys.argv[1]))
assert catcher.install() == ""
ctypes.string_at(0)
"""


def test_a_native_crash_is_found_at_the_next_start(tmp_path: Path, qapp) -> None:
    file = tmp_path / "native.txt"
    done = subprocess.run([sys.executable, "-c", CRASH, str(file)], cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == -11
    catcher = CrashCatcher(file)
    try:
        assert "Segmentation fault" in (left := catcher.install()) and "string_at" in left
    finally:
        catcher.remove()


@pytest.mark.usefixtures("helper")
def test_a_fault_of_the_helper_process_is_offered(window: Window, qtbot) -> None:
    session = window.session
    session.service = Service(session, [sys.executable, "-c", "raise RuntimeError('the helper is broken')"])
    session.service.failed.connect(session.remember_fault)
    session.service.ask("models", lambda answer: None, on_refused=lambda faults: None)
    qtbot.waitUntil(lambda: session.last_fault is not None)
    assert window.strip.sentence.text() == SERVICE_FAILED or SERVICE_FAILED in window.strip.sentence.toolTip()
    window.menus["report"].trigger()
    assert "the helper is broken" in window.findChild(ProblemDialog).text.toPlainText()
    session.service.close()


def test_a_failed_run_is_reported_with_log_and_settings(window: Window, tmp_path: Path) -> None:
    data, folder = RunState(), RunFolder(tmp_path)
    data.ending = {"traceback": "Traceback (most recent call last):\nKeyError: 'k'"}
    folder.config.write_text("temperature: 0.25\n")
    folder.log.write_text("the last line\n")
    window.session.problem_found.emit(SimpleNamespace(data=data, problem="The run failed.", folder=folder))
    text = window.findChild(ProblemDialog).text.toPlainText()
    for words in ("The run failed.", "KeyError: 'k'", "the last line", "temperature: 0.25"):
        assert words in text
