"""Faults of the program are caught and shown as a report: of the window, its threads and native code, of the helper
process, of a run."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.crash_catcher import CrashCatcher
from app.state.processes import Service
from app.state.run_state import RunState
from app.state.session import SERVICE_FAILED
from app.widgets.menu_dialogs import ProblemDialog
from app.window import Window
from backend.runs.run_folder import RunFolder

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
