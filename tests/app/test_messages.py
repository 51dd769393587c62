"""The status strip's sentences: each belongs to a cause, and goes when the cause does."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtWidgets import QApplication

from app.state import messages
from app.state.messages import Messages, Offer
from app.state.prefs import Prefs
from app.state.run_starter import START
from app.state.session import FORMAT, Session
from app.window import Window
from backend.utils import places
from tests.support import made_up_runs
from tests.support.windows import SilentService


@pytest.fixture
def window(tmp_path: Path, qtbot) -> Window:
    session = Session(Prefs(tmp_path / "prefs"))
    session.service = SilentService()
    window = Window(session)
    qtbot.addWidget(window, before_close_func=lambda window: setattr(window.session, "run", None))
    window.show()
    return window


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
    """It was shown as any other, and Resume started a process that said it in the log alone."""
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
    """“No reward function is ticked” stayed in the strip after Undo had ticked them again. No tick means the defaults
    since."""
    draft = window.session.draft
    draft.update({"model": "a/b", "data": "a/b"})
    draft.set("reward_functions", ["no_such_reward"])
    window.session.starter.start()
    assert "reward function" in sentence(window)
    window.undo()
    qtbot.waitUntil(lambda: sentence(window) == "")


def test_a_page_that_is_not_shown_cannot_take_the_keyboard(window: Window, qtbot) -> None:
    """Rewards, Sample, then on Train a weight was edited, and Return, Down, Space collapsed the sidebar: the hidden
    page had taken the focus for its Cancel button when the sampling ended."""
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
