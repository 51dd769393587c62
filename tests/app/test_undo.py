"""Undo and redo: every change of the form is a step, and typing without a pause is a single step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest

from app.state.draft import PAUSE_S, Draft, History
from app.state.prefs import Prefs
from app.state.presets import presets
from app.state.session import Session
from app.window import Window
from backend.config.config import SETTINGS
from backend.utils import places


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def draft(tmp_path: Path, qapp) -> Draft:
    return Draft(tmp_path / "draft.yaml")


@pytest.fixture
def history(draft: Draft, clock: Clock) -> History:
    return History(draft, clock=clock)


def type_into(draft: Draft, key: str, text: str) -> None:
    for end in range(1, len(text) + 1):
        draft.set(key, text[:end])


def test_typing_without_a_pause_is_one_step(draft: Draft, history: History):
    type_into(draft, "run_name", "first")
    assert (history.count(), history.undoText()) == (1, "Run folder name")
    history.undo()
    assert draft.value("run_name") == ""
    history.redo()
    assert draft.value("run_name") == "first"


def test_a_pause_or_another_field_starts_a_new_step(draft: Draft, history: History, clock: Clock):
    type_into(draft, "run_name", "a")
    clock.now += PAUSE_S
    draft.set("run_name", "ab")
    draft.set("seed", 7)
    draft.set("run_name", "abc")
    assert history.count() == 4
    history.undo()
    history.undo()
    history.undo()
    assert (draft.value("run_name"), draft.value("seed")) == ("a", 0)


def test_undoing_an_opened_file_restores_the_previous_file_too(draft: Draft, history: History, tmp_path: Path):
    (tmp_path / "a.yaml").write_text("model: a/b\ndata: a/b\nseed: 3\n")
    (tmp_path / "b.yaml").write_text("model: a/b\ndata: a/b\nseed: 4\n")
    draft.load(tmp_path / "a.yaml")
    draft.load(tmp_path / "b.yaml")
    assert history.undoText() == "Open b.yaml"
    history.undo()
    assert (draft.value("seed"), draft.path, draft.dirty) == (3, tmp_path / "a.yaml", False)
    history.undo()
    assert (draft.value("seed"), draft.path) == (0, None)
    history.redo()
    history.redo()
    assert (draft.value("seed"), draft.path) == (4, tmp_path / "b.yaml")


def test_a_preset_and_a_new_config_are_one_step_each(draft: Draft, history: History):
    before = draft.values()
    dapo = next(preset for preset in presets() if preset.title == "DAPO")
    draft.apply(dapo)
    draft.reset()
    assert (history.count(), history.undoText()) == (2, "New config")
    history.undo()
    assert history.undoText() == "DAPO"
    assert draft.value("grpo_loss_type") == "dapo"
    history.undo()
    assert draft.values() == before


def test_every_setting_can_be_undone(draft: Draft, history: History):
    before = draft.values()
    for key in SETTINGS:
        draft.set(key, "something else")
    while history.canUndo():
        history.undo()
    assert draft.values() == before


@pytest.fixture
def window(tmp_path: Path, qtbot, monkeypatch) -> Iterator[Window]:
    (tmp_path / "demo.yaml").write_text("model: a/b\ndata: a/b\niters: 60\n")
    monkeypatch.setattr(places, "demo_config", lambda: tmp_path / "demo.yaml")
    session = Session(Prefs(tmp_path / "prefs"))
    window = Window(session)
    session.restore()
    qtbot.addWidget(window)
    window.resize(1280, 800)
    with qtbot.waitActive(window):
        window.show()
        window.activateWindow()
    window.show_page("train")
    yield window
    if "service" in vars(session):
        session.service.close()


def test_the_menu_names_the_next_undo_step(window: Window):
    undo, redo = window.menus["undo"], window.menus["redo"]
    assert not undo.isEnabled(), "the demo that the first launch shows is no edit"
    window.session.draft.set("temperature", 0.5)
    assert (undo.isEnabled(), undo.text()) == (True, "Undo Temp")
    undo.trigger()
    assert (undo.isEnabled(), redo.text()) == (False, "Redo Temp")
    redo.trigger()
    assert window.session.draft.value("temperature") == 0.5


def test_undo_keys_undo_the_form_and_not_the_line_edit(window: Window, qtbot):
    field = window.pages["train"].form.fields["run_name"]
    field.control.setFocus()
    QTest.keyClicks(field.control, "first")
    assert window.session.draft.value("run_name") == "first"
    QTest.keyClick(field.control, Qt.Key.Key_Z, Qt.KeyboardModifier.ControlModifier)
    assert (field.control.text(), window.session.draft.value("run_name")) == ("", "")
    assert field.control.hasFocus(), "the cursor stays where it was"
    QTest.keyClick(field.control, Qt.Key.Key_Z, Qt.KeyboardModifier.ControlModifier | Qt.KeyboardModifier.ShiftModifier)
    assert field.control.text() == "first"
