"""The dialog that makes a new run from a checkpoint: what it offers, what it refuses, and the command that it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from typer.testing import CliRunner

from app.pages.runs.clone_dialog import CloneDialog
from app.pages.runs.runs_page import RunsPage
from app.state.session import Session
from backend.__main__ import app
from backend.runs.run_folder import RunFolder
from backend.utils import places
from tests.support import made_up_runs
from tests.support.trainer_by_hand import add_checkpoints
from tests.support.windows import ProcessByHand


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run with three checkpoints whose learning rate was changed before step 15."""
    run = made_up_runs.make_run(tmp_path / "runs" / "sums", steps=30, learning_rate=3e-5)
    add_checkpoints(run, {10: 0.5, 20: 2.0, 30: 1.0})
    change = {"step": 15, "settings": {"learning_rate": [3e-5, 1e-5]}}
    run.changes.write_text(json.dumps({"v": 1, "changes": [change]}))
    return run


@pytest.fixture
def dialog(qtbot, qapp, run: RunFolder):
    shown = CloneDialog(run, "Sums", ProcessByHand)
    shown.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose, False)
    qtbot.show(shown)
    yield shown


def change(dialog: CloneDialog, key: str, text: str) -> None:
    if key not in dialog.settings.fields:
        dialog.settings.add(key)
    dialog.settings.fields[key].control.setText(text)
    dialog.settings.fields[key].emit_edited()


def flags(command: list[str]) -> list[str]:
    return command[command.index("clone") + 2 :]


def test_every_checkpoint_is_offered_with_its_reward(dialog: CloneDialog) -> None:
    texts = [dialog.step.itemText(i) for i in range(dialog.step.count())]
    assert texts == ["Step 30, reward 1.00, the newest", "Step 20, reward 2.00, the best", "Step 10, reward 0.500"]
    assert dialog.name.placeholderText() == "sums-from-30" and dialog.create_button.isEnabled()
    assert dialog.differs.text().startswith("Nothing changes")


def test_a_name_that_no_folder_can_have_raises_nothing(dialog: CloneDialog) -> None:
    dialog.name.setText("x" * 300)
    assert "exists" not in dialog.outcome.text()


def test_a_setting_is_compared_with_its_value_at_the_chosen_step(dialog: CloneDialog) -> None:
    change(dialog, "learning_rate", "2e-5")
    assert "Learning Rate: 1e-05 → 2e-05" in dialog.differs.text(), "it was changed before step 30"
    dialog.step.setCurrentIndex(2)
    assert "Learning Rate: 3e-05 → 2e-05" in dialog.differs.text()
    dialog.settings.remove("learning_rate")
    assert dialog.differs.text().startswith("Nothing changes") and flags(dialog.command()).count("--set") == 0


def test_typing_replaces_a_setting_just_added(qtbot, dialog: CloneDialog) -> None:
    dialog.settings.add("iters")
    qtbot.keyClicks(dialog.settings.fields["iters"].control, "80")
    assert dialog.settings.values() == {"iters": 80}


def test_the_command_says_what_was_chosen(dialog: CloneDialog, run: RunFolder) -> None:
    dialog.step.setCurrentIndex(1)
    dialog.way.choose("cold")
    dialog.name.setText("colder")
    for key, text in (("temperature", "0.7"), ("epsilon_high", "0.28"), ("reward_weights", "1, 2, 1, 1, 1")):
        change(dialog, key, text)
    assert flags(dialog.command()) == [
        *("--step", "20", "--cold", "--set", "temperature=0.7", "--set", "epsilon_high=0.28"),
        *("--set", "reward_weights=[1.0, 2.0, 1.0, 1.0, 1.0]"),
        *("--name", "colder", "--runs-dir", str(run.path.parent)),
    ]


def test_a_run_at_its_end_goes_on_only_with_more_steps(qtbot, qapp, run: RunFolder) -> None:
    """The newest checkpoint of a finished run has no step left."""
    text = run.config.read_text()
    assert "iters: 60" in text
    run.config.write_text(text.replace("iters: 60", "iters: 30"))
    dialog = CloneDialog(run, "Sums", ProcessByHand)
    qtbot.addWidget(dialog)
    assert dialog.outcome.text() == "The run has done 30 of its 30 steps. Increase Iterations, or start earlier."
    assert not dialog.create_button.isEnabled()
    dialog.way.choose("cold")
    assert dialog.create_button.isEnabled()
    dialog.way.choose("warm")
    change(dialog, "iters", "31")
    assert dialog.create_button.isEnabled()
    dialog.settings.remove("iters")
    dialog.step.setCurrentIndex(1)
    assert dialog.create_button.isEnabled()


def test_a_wrong_value_is_told_at_its_field_and_nothing_can_be_made(dialog: CloneDialog) -> None:
    change(dialog, "temperature", "-1")
    problem = dialog.settings.fields["temperature"]._problem
    assert not dialog.create_button.isEnabled() and problem.text().startswith("Temp must be above 0")
    change(dialog, "temperature", "0.5")
    assert dialog.create_button.isEnabled()
    dialog.name.setText("sums")
    assert dialog.outcome.text() == "A run of this name exists." and not dialog.create_button.isEnabled()


def test_the_command_is_one_that_the_verb_understands(dialog: CloneDialog) -> None:
    """The made-up checkpoint holds no arrays, so it is refused, but not for the options."""
    change(dialog, "temperature", "0.7")
    command = dialog.command()
    result = CliRunner().invoke(app(), command[command.index("clone") :])
    assert "No such option" not in result.output and "temperature" not in result.output


def test_the_page_opens_the_clone_and_starts_it(qtbot, run: RunFolder, tmp_path: Path, monkeypatch) -> None:
    page = qtbot.show(RunsPage(Session()))
    qtbot.waitUntil(lambda: not page.runs.is_reading)
    started = []
    monkeypatch.setattr("app.state.run_starter.start_detached", lambda _, run: started.append(run.path))
    page.run_actions.do("clone")
    dialog = page.findChild(CloneDialog)
    assert dialog.windowTitle() == "New run from sums"
    with qtbot.waitSignal(page.session.page_requested) as signal:
        dialog.cloned.emit(run.path, True)
    assert signal.args == ["monitor"] and started == [run.path] and page.session.run.folder == run
    other = made_up_runs.make_run(tmp_path / "runs" / "other", steps=3)
    dialog.cloned.emit(other.path, False)
    assert started == [run.path] and page.session.run.folder == other, "shown, not started"
    page.session.close_run()


def test_a_clone_waits_while_another_run_trains(qtbot, run: RunFolder, monkeypatch) -> None:
    page = qtbot.show(RunsPage(Session()))
    qtbot.waitUntil(lambda: not page.runs.is_reading)
    monkeypatch.setattr("app.state.run_list.start_detached", lambda *_: None)
    monkeypatch.setattr(Session, "is_training", property(lambda _self: True))
    page.run_actions.do("clone")
    dialog = page.findChild(CloneDialog)
    assert dialog.at_once.text() == "Add it to the queue"
    folder = RunFolder(places.runs_folder() / "clone")
    made_up_runs.make_run(folder.path, steps=3)
    lines = folder.events.read_text().splitlines(keepends=True)
    folder.events.write_text("".join(line for line in lines if '"finished"' not in line))
    dialog.cloned.emit(folder.path, True)
    assert page.session.queue.waiting == (folder,) and page.session.run is None
