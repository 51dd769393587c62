"""The main window: pages built once shown, actions by run state, questions on closing, files, themes, first launch."""

import os
import shlex
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QFileOpenEvent, QShowEvent
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QStackedWidget, QWidget
from typer.testing import CliRunner

import app.__main__ as start
from app import menus, theme
from app.desktop import FileOpener
from app.menus import MENUS
from app.state.messages import NOTICE
from app.state.prefs import Prefs
from app.state.processes import ProcessOutcome
from app.state.session import Session
from app.widgets.basic.controls import SearchEdit
from app.widgets.basic.layout import set_style_property
from app.window import Window
from backend.__main__ import app as verbs
from backend.config import first_choices
from backend.runs.run_folder import make_run_folder
from backend.runs.sweep_results import sweep_folder
from backend.utils import places
from tests.support import made_up_runs
from tests.support.trainer_by_hand import locked
from tests.support.windows import PatientQtBot, drop


@pytest.fixture(autouse=True)
def demo(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "demo.yaml"
    file.write_text("model: demo/model\ndata: demo/data\niters: 60\n")
    monkeypatch.setattr(places, "demo_config", lambda: file)


@pytest.fixture
def window(window: Window) -> Window:
    window.resize(1280, 800)
    window.show()
    return window


def test_a_page_shown_right_after_a_change_of_theme_is_styled_before_hidden_ones(window: Window, qtbot, monkeypatch):
    for page in ("runs", "train"):
        window.show_page(page)
    window.set_theme("dark")
    window.show_page("runs")
    with monkeypatch.context() as patch:  # a busy machine: one widget takes longer than a turn
        patch.setattr(theme, "time", SimpleNamespace(monotonic=count().__next__))
        waiting = [each for each in QApplication.allWidgets() if not each.testAttribute(theme.POLISHED)]
        shown = [each for each in waiting if each.isVisible()]
        theme._restyle_hidden()
    assert len(waiting) > len(shown) > 0 and all(each.testAttribute(theme.POLISHED) for each in shown)
    rewards = window.pages["train"].rewards
    qtbot.waitUntil(lambda: rewards.use_defaults.testAttribute(theme.POLISHED))
    assert rewards.use_defaults.grab().toImage().pixelColor(4, 10) == theme.DARK.card
    set_style_property(rewards.count, "role", "")
    assert rewards.count.palette().windowText().color() == theme.DARK.text, (
        "the light theme's colour of a role was left"
    )


def test_rewards_menu(window: Window, monkeypatch):
    waiting = [entry.name for menu in MENUS.values() for entry in menu if entry and entry.is_off]
    assert len(waiting) > 4 and not any(window.menus[name].isEnabled() for name in waiting)
    window.show_page("rewards")
    page = window.pages["rewards"]
    sampled: list[str] = []
    monkeypatch.setattr(page, "sample", lambda: sampled.append(window.current_page))
    window.show_page("train")
    window.menus["sample"].trigger()
    assert sampled == ["rewards"]
    page.enabled_actions_changed.emit({"score": True})
    assert window.menus["score"].isEnabled() and not window.menus["keep_case"].isEnabled()
    monkeypatch.setattr(page.bench, "score", lambda: sampled.append("scored"))
    window.menus["score"].trigger()
    assert sampled[-1] == "scored"


def test_shortcuts(window: Window):
    keys = [action.shortcut().toString() for action in window.menus.by_name.values()]
    keys = [key for key in keys if key]
    assert len(set(keys)) == len(keys)
    entries = [action for menu in window.menuBar().actions() for action in menu.menu().actions()]
    own = [action for action in entries if not action.isSeparator() and not action.menu()]
    bare = [action.text() for action in own if action.shortcut().isEmpty()]
    assert set(bare) <= {"Quit"}, "which has none on platforms where the system gives it one"


@pytest.mark.parametrize(("page", "name"), [("runs", "Search the runs"), ("guide", "Find in the guide")])
def test_find_goes_to_the_search_of_the_page(qtbot: PatientQtBot, window: Window, page: str, name: str):
    made_up_runs.make_run(places.runs_folder() / "demo", steps=1)
    window.activateWindow()
    window.show_page(page)
    field = next(each for each in window.pages[page].findChildren(SearchEdit) if each.accessibleName() == name)
    qtbot.waitUntil(field.isVisible)
    window.menus["find"].trigger()
    assert window.current_page == page and field.hasFocus()


def test_the_focus_stays_on_the_page_when_its_button_is_disabled(window: Window, qtbot: PatientQtBot):
    window.show_page("sweeps")
    page = window.pages["sweeps"]
    with qtbot.waitActive(window):
        window.show()
        window.activateWindow()
    page.resume_button.setEnabled(True)
    page.resume_button.setFocus()
    page.resume_button.setEnabled(False)
    assert page.isAncestorOf(QApplication.focusWidget())
    page.start_button.setFocus()
    page.start_button.hide()
    assert page.isAncestorOf(QApplication.focusWidget())


def test_run_starts_with_the_form(session: Session, started):
    pages = list[str]()
    session.page_requested.connect(pages.append)
    session.restore()
    session.draft.set("run_name", "first")
    session.starter.start()
    ((_, folder),) = started
    assert folder.path == places.runs_folder() / "first" and "iters: 60" in folder.config.read_text()
    assert session.run.folder.path == folder.path and pages == ["monitor"]
    session.close_run()
    assert session.run is None


def test_no_run_is_started_beside_one_that_a_terminal_or_the_sweeps_page_has_started(session: Session, started):
    session.restore()
    (other := make_run_folder("other")).config.write_text("model: a\n")
    (sweep := sweep_folder("rates")).path.mkdir(parents=True)
    sweep.plan.write_text("base: a\n")
    for folder, name in ((other, "other"), (sweep, "The sweep rates")):
        with locked(folder):
            session.starter.start()
        said = session.messages.current
        assert not started and said.sentence.startswith(f"{name} is training: stop it first")
        assert said.cause == NOTICE, "it stayed for hours after the other had ended"
    session.starter.start()
    assert len(started) == 1


def test_a_runs_folder_that_cannot_be_created_is_one_sentence(session: Session, told, tmp_path: Path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRPO_STUDIO_RUNS", str(tmp_path / "file" / "runs"))
    session.restore()
    session.starter.start()
    assert len(told) == 1 and "cannot be written" in told[0] and session.run is None


def test_size_and_theme_are_restored(window: Window, session: Session, qtbot):
    window.resize(900, 640)
    window.set_theme("dark")
    window.close()
    again = Window(Session(Prefs(session.prefs.folder)))
    qtbot.addWidget(again)
    assert again.height() < 700, "not the size of a first launch; the offscreen screen is too narrow to compare widths"
    assert again.session.prefs.theme == "dark"


def test_dropped_rows(window: Window, tmp_path: Path, qtbot):
    """If the form has a model of the user's, only the data settings change."""
    draft = window.session.draft
    draft.update({"model": "me/mine", "iters": 7})
    (tmp_path / "rows.csv").write_text("Question,Final Answer\n1+1,2\n")
    window.show_page("runs")
    drop(window, tmp_path / "rows.csv")
    qtbot.waitUntil(lambda: draft.value("data") == str(tmp_path / "rows.csv"))
    assert (draft.value("prompt_feature"), draft.value("answer_feature")) == ("Question", "Final Answer")
    assert (draft.value("model"), draft.value("iters")) == ("me/mine", 7)
    assert window.current_page == "train"
    assert window.strip.sentence.text() == "rows.csv: prompts from Question, answers from Final Answer."
    assert window.strip.offer.text() == "Undo" and window.strip.offer.isVisible()
    assert window.session.draft.history.undoText() == "Data rows.csv"


def test_rows_dropped_on_the_demo(window: Window, tmp_path: Path, qtbot, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "nothing"))
    draft = window.session.draft
    window.session.restore()
    assert draft.is_demo
    (tmp_path / "rows.jsonl").write_text('{"instruction": "1+1", "output": "2"}\n')
    drop(window, tmp_path / "rows.jsonl")
    qtbot.waitUntil(lambda: draft.value("data") == str(tmp_path / "rows.jsonl"))
    assert (draft.value("model"), draft.value("train_type")) == (first_choices.MODEL, "lora")
    assert (draft.value("prompt_feature"), draft.value("answer_feature")) == ("instruction", "output")
    assert "<answer>" in draft.value("system_prompt")
    assert not draft.problems()
    # The model and all settings were replaced without a word, and nothing said that Run would download.
    assert window.strip.sentence.text() == (
        "rows.jsonl: prompts from instruction, answers from output. The demo was replaced by Qwen3-0.6B-4bit and "
        "the preset Fast try; Run downloads 351\u00a0MB first."
    )
    window.strip.offer.click()
    assert draft.is_demo
    qtbot.waitUntil(lambda: window.strip.sentence.text() == "")
    assert not window.strip.offer.isVisible()


def test_a_dropped_model_or_reward_file_sets_its_setting(window: Window, tmp_path: Path, qtbot):
    draft = window.session.draft
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "mine.py").write_text("")
    drop(window, tmp_path / "model")
    assert window.strip.drop.text() == "Drop to train the model model" and window.strip.drop.isHidden()
    drop(window, tmp_path / "mine.py")
    qtbot.waitUntil(lambda: draft.value("reward_functions_file") == str(tmp_path / "mine.py"))
    assert draft.value("model") == str(tmp_path / "model")
    before = draft.values()
    drop(window, tmp_path / "picture.png")
    qtbot.wait(20)
    assert draft.values() == before


def test_a_dropped_or_opened_config(window: Window, tmp_path: Path, qtbot):
    (tmp_path / "mine.yaml").write_text("model: a/b\ndata: a/b\nseed: 3\n")
    drop(window, tmp_path / "mine.yaml")
    qtbot.waitUntil(lambda: window.session.draft.value("seed") == 3)
    assert window.document.text() == "mine.yaml" and "mine.yaml" in window.windowTitle()
    window.session.draft.reset()
    opener = FileOpener(window.open_from_desktop)
    assert opener.eventFilter(window, QFileOpenEvent(str(tmp_path / "mine.yaml")))
    assert window.session.draft.value("seed") == 3
    assert opener.eventFilter(window, QFileOpenEvent(str(tmp_path / "picture.png")))
    assert window.strip.sentence.text().startswith("picture.png is not a config")


def test_a_run_folder_is_shown_when_it_is_dropped_or_opened(window: Window, tmp_path: Path, qtbot):
    first, second = (made_up_runs.make_run(tmp_path / name, steps=2).path for name in ("first", "second"))
    drop(window, first)
    qtbot.waitUntil(lambda: window.session.run is not None)
    assert window.session.run.folder.path == first and window.current_page == "monitor"
    window.open_from_desktop(second)
    assert window.session.run.folder.path == second


def test_recent_files_lists_existing_files_newest_first(window: Window, tmp_path: Path, monkeypatch):
    for name in ("a", "q&b", "gone"):
        (tmp_path / f"{name}.yaml").write_text("model: a/b\ndata: a/b\n")
        window.files.open_path(tmp_path / f"{name}.yaml")
    (tmp_path / "gone.yaml").unlink()
    monkeypatch.setattr(menus, "save_file", lambda *_: tmp_path / "saved.yaml")
    window.menus["save_as"].trigger()
    menu = window.menus.recent
    menu.aboutToShow.emit()
    entries = [action for action in menu.actions() if not action.isSeparator()]
    assert [action.text().split()[0] for action in entries[:-1]] == ["saved.yaml", "q&&b.yaml", "a.yaml"]
    entries[2].trigger()
    assert window.document.text() == "a.yaml"
    entries[-1].trigger()
    assert window.session.prefs.used("config") == []


def test_save_leaves_the_file_of_another_program_as_it_is(window: Window, tmp_path: Path, monkeypatch):
    file = tmp_path / "trl.yaml"
    file.write_text(text := "model_name_or_path: a/b\nper_device_train_batch_size: 8  # mine\nlerning_rate: 1e-4\n")
    window.files.open_path(file)
    banner, problems = window.pages["train"].translated_file, window.pages["train"].file_problems
    proposed: list[str] = []

    def save_file(*given: object) -> Path:
        proposed.append(str(given[3]))
        return tmp_path / "ours.yaml"

    monkeypatch.setattr(menus, "save_file", save_file)
    assert not banner.isHidden()
    window.menus["save"].trigger()
    assert (file.read_text(), proposed) == (text, ["config.yaml"])
    assert window.document.text() == "ours.yaml" and "group_size: 8" in (tmp_path / "ours.yaml").read_text()
    window.pages["train"]._show_problems()
    assert banner.isHidden() and problems.isHidden(), "they are about a file that the form has left"
    window.menus["save"].trigger()
    assert len(proposed) == 1, "ours is saved without a question"


def told_by_the_verb(*words: str) -> list[str]:
    """The verb runs in this process; this command says what it said: a new process imports the engine for seconds."""
    done = CliRunner().invoke(verbs(), list(words))
    assert done.exit_code == 0, done.output
    return [sys.executable, "-I", "-S", "-c", f"print({done.stdout!r})"]


def test_export_for_trl(window: Window, tmp_path: Path, monkeypatch, qtbot):
    monkeypatch.setattr(menus, "backend_command", told_by_the_verb)
    window.session.draft.update({"model": "a/b", "data": "a/b", "optimizer": "muon"})
    monkeypatch.setattr(menus, "open_folder", lambda *_: tmp_path)
    window.menus["export_for_trl"].trigger()
    qtbot.waitUntil(lambda: window.strip.sentence.text().startswith("Wrote"))
    said = f"Wrote {tmp_path / 'settings-trl'}. Not carried over: optimizer; its README.md says what stands in."
    assert window.strip.sentence.text() == said
    assert "optim: adamw_torch" in (tmp_path / "settings-trl" / "grpo_config.yaml").read_text()
    window.files.show_trl_outcome(
        ProcessOutcome(False, "It is there already.", ""), tmp_path / "gone" / "settings.yaml"
    )
    assert window.strip.sentence.text() == "It is there already."


def test_copied_command(session: Session, tmp_path: Path):
    """Run does the same with a run folder of its own; here the form is one that `check` and `train` refuse alike."""
    session.draft.update({"model": str(tmp_path), "data": "/nowhere.jsonl"})
    session.draft.flush()
    words = shlex.split(session.draft.command_text())
    assert words[words.index("backend") - 1] == "-m" and sys.executable in words
    refused = CliRunner().invoke(verbs(), words[words.index("backend") + 1 :])
    assert refused.exit_code == 2
    assert next(fault.sentence for fault in session.draft.problems() if fault.setting == "model") in refused.stderr


def test_two_windows_autosave_to_files_of_their_own(tmp_path: Path, qapp):
    first_prefs, other = Prefs(tmp_path / "shared"), Prefs(tmp_path / "shared")
    assert (first_prefs.claim(), other.claim()) == (1, 2)
    first, second = Session(first_prefs), Session(other)
    first.draft.set("seed", 1)
    second.draft.set("seed", 2)
    first.draft.flush()
    second.draft.flush()
    assert "seed: 1\n" in first_prefs.draft_file.read_text()
    assert "seed: 2\n" in other.draft_file.read_text()
    os.close(first_prefs.lock)
    third = Prefs(tmp_path / "shared")
    assert third.claim() == 1, "the form of a window that was closed is the next one's"


def test_settings_of_a_run(window: Window):
    run, draft = make_run_folder("old"), window.session.draft
    run.config.write_text("model: a/b\ndata: a/b\nseed: 3\nrun_name: old\n")
    draft.set("seed", 9)
    window.session.settings_requested.emit(run)
    assert (draft.value("seed"), draft.value("run_name")) == (3, ""), "the next run is another one"
    assert draft.path is None, "Save must not write over the run's record"
    assert window.page_stack.currentWidget() is window.pages["train"]
    window.session.undo_requested.emit()
    assert draft.value("seed") == 9


@pytest.mark.parametrize(("answer", "seed"), [("cancel", 9), ("discard", 3), ("save", 3)])
def test_unsaved_edits(window: Window, tmp_path: Path, monkeypatch, answer: str, seed: int):
    (tmp_path / "other.yaml").write_text("model: a/b\ndata: a/b\nseed: 3\n")
    window.session.draft.set("seed", 9)
    assert window.isWindowModified()
    monkeypatch.setattr(menus, "ask", lambda *_: answer)
    monkeypatch.setattr(menus, "save_file", lambda *_: tmp_path / "kept.yaml")
    window.files.open_path(tmp_path / "other.yaml")
    assert window.session.draft.value("seed") == seed
    assert (tmp_path / "kept.yaml").exists() is (answer == "save")
    window.menus["save"].trigger()
    name = "kept.yaml" if answer == "cancel" else "other.yaml"
    assert not window.isWindowModified() and window.document.text() == name
    assert window.session.prefs.config_file == tmp_path / name


def test_the_menu_names_the_next_undo_step(window: Window):
    window.session.restore()
    undo, redo = window.menus["undo"], window.menus["redo"]
    assert not undo.isEnabled(), "the demo that the first launch shows is no edit"
    window.session.draft.set("temperature", 0.5)
    assert (undo.isEnabled(), undo.text()) == (True, "Undo Temp")
    undo.trigger()
    assert (undo.isEnabled(), redo.text()) == (False, "Redo Temp")
    redo.trigger()
    assert window.session.draft.value("temperature") == 0.5


def test_undo_keys_undo_the_form_and_not_the_line_edit(window: Window, qtbot):
    with qtbot.waitActive(window):
        window.activateWindow()
        window.show_page("train")
    window.pages["train"].build_all()
    field = window.pages["train"].form.fields["run_name"]
    field.control.setFocus()
    QTest.keyClicks(field.control, "first")
    assert window.session.draft.value("run_name") == "first"
    QTest.keyClick(field.control, Qt.Key.Key_Z, Qt.KeyboardModifier.ControlModifier)
    assert (field.control.text(), window.session.draft.value("run_name")) == ("", "")
    assert field.control.hasFocus(), "the cursor stays where it was"
    QTest.keyClick(field.control, Qt.Key.Key_Z, Qt.KeyboardModifier.ControlModifier | Qt.KeyboardModifier.ShiftModifier)
    assert field.control.text() == "first"


def test_first_launch_and_later(session: Session):
    session.restore()
    assert session.draft.is_demo and not session.draft.problems()
    assert session.draft.path is None, "Save must not write over the bundled file"
    session.draft.set("temperature", "0.")
    session.draft.flush()
    again = Session(Prefs(session.prefs.folder))
    again.restore()
    assert again.draft.value("temperature") == "0."
    assert not again.draft.is_demo


def test_without_a_display_the_demo_runs_in_the_terminal(monkeypatch, capsys):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    called: list[list[str]] = []

    def execve(program: str, command: list[str], environment: dict[str, str]) -> None:
        called.append(command)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execve", execve)
    with pytest.raises(SystemExit):
        start.main([])
    assert capsys.readouterr().out == "No display was found, so the demo runs here in the terminal.\n"
    assert called[0][-3:] == ["-m", "backend", "demo"]


def test_an_override_that_fails_ends_no_window(qtbot: PatientQtBot):
    """PySide ended the process on Python 3.11."""

    class Page(QWidget):
        def showEvent(self, event: QShowEvent) -> None:
            max(0, "a")  # pyright: ignore

    stack, page = QStackedWidget(), Page()
    stack.addWidget(QWidget())
    stack.addWidget(page)
    qtbot.addWidget(stack)
    stack.show()
    with pytest.raises(TypeError, match="not supported between"):
        stack.setCurrentWidget(page)


@pytest.mark.parametrize("words", [["--page", "foo"], ["--size", "100"], ["--size", "axb"]])
def test_a_wrong_option_is_one_message(words: list[str], capsys):
    with pytest.raises(SystemExit) as ended:
        start.main(words)
    assert ended.value.code == 2 and f"argument {words[0]}: invalid" in capsys.readouterr().err
