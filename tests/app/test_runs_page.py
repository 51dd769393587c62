"""The Runs page: what is in the runs folder, in which state, how it is found again, and what can be done with it."""

import json
import re
import shutil
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QInputDialog, QLineEdit
from typer.testing import CliRunner

from app.pages.runs.run_actions import CloneDialog, FreeSpaceDialog
from app.pages.runs.run_table import ColumnDialog
from app.pages.runs.runs_page import RunsPage
from app.state.processes import ProcessOutcome
from app.state.run_list import CACHE, RunList
from app.state.session import Session
from backend.__main__ import app
from backend.runs.run_folder import RunFolder
from backend.runs.run_record import Parent, RunNotes, change_notes, read_notes, read_record, write_parent
from backend.runs.saved_weights import Checkpoint, TrainingState
from backend.utils import places
from tests.support import made_up_runs
from tests.support.trainer_by_hand import add_checkpoints, locked
from tests.support.windows import ProcessByHand


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A finished, a failed and a crashed run."""
    folder = tmp_path / "runs"
    kinds = [("finished", 60, "finished"), ("failed", 12, "failed"), ("crashed", 5, None)]
    for number, (name, steps, ending) in enumerate(kinds):
        run = made_up_runs.make_run(folder / name, steps=steps, ending=ending, learning_rate=10.0 ** (number - 6))
        text = run.events.read_text(encoding="utf-8")
        run.events.write_text(text.replace("17600", f"1760{number}"), encoding="utf-8")
    return folder


@pytest.fixture
def page(qtbot, session: Session, archive: Path) -> RunsPage:
    shown = qtbot.show(RunsPage(session), 1060, 700)
    settle(qtbot, shown)
    return shown


def settle(qtbot, page: RunsPage) -> None:
    qtbot.waitUntil(lambda: not page.runs.is_reading)


def reread(qtbot, page: RunsPage) -> None:
    settle(qtbot, page)  # while it reads, it does not begin again
    page.refresh()
    settle(qtbot, page)


def column(page: RunsPage, key: str) -> list[str]:
    """What a column says, from the first row shown to the last."""
    number = [field.key for field in page.model.columns].index(key)
    view = page.table.sorted
    return [str(view.index(row, number).data()) for row in range(view.rowCount())]


def names(page: RunsPage) -> list[str]:
    return column(page, "name")


def selected(page: RunsPage) -> list[str]:
    return [record.summary.name for record in page.table.selected_runs()]


def test_every_run_has_a_row_newest_first(page: RunsPage) -> None:
    assert names(page) == ["crashed", "failed", "finished"]
    assert column(page, "state") == ["Crashed", "Failed", "Finished"]
    assert column(page, "steps") == ["5 of 60", "12 of 60", "60"]
    assert selected(page) == ["crashed"], "the newest is selected"
    page.table.show_columns([(key, 0) for key in ("model", "change", "disk")])
    assert column(page, "model")[2] == "demo/model"
    assert column(page, "change")[2].startswith("+") and column(page, "disk")[2].endswith("kB")


def test_a_locked_run_is_running_and_cannot_be_trashed(qtbot, page: RunsPage, archive: Path) -> None:
    with locked(RunFolder(archive / "crashed")):
        reread(qtbot, page)
        assert column(page, "state")[0] == "Running"
        assert not page.buttons["trash"].isEnabled() and not page.buttons["resume"].isEnabled()
        page.table.choose(archive / "crashed", archive / "failed")
        assert not page.buttons["trash"].isEnabled(), "nor among others"
    reread(qtbot, page)
    page.table.choose(archive / "crashed")
    assert column(page, "state")[0] == "Crashed"
    assert page.buttons["trash"].isEnabled() and page.buttons["resume"].isEnabled()


def test_a_new_run_starts_from_adapters_where_there_are_some(qtbot, page: RunsPage, archive: Path) -> None:
    page.table.choose(archive / "finished")
    with qtbot.waitSignal(page.session.page_requested) as opened:
        page.do("use_adapter")
    assert opened.args == ["train"], "nothing was seen to happen"
    assert page.session.draft.value("adapter") == str(archive / "finished")
    page.session.draft.set("adapter", "")
    config = archive / "finished" / "config.yaml"
    config.write_text(config.read_text(encoding="utf-8") + "train_type: full\n", encoding="utf-8")
    reread(qtbot, page)
    page.do("use_adapter")
    assert page.session.draft.value("adapter") == "", "full fine-tuning has none"


def test_search(page: RunsPage) -> None:
    page.search.setText("FAIL")
    assert names(page) == ["failed"] and page.search_line.text() == "1 of 3 runs."
    page.search.setText("lr>=1e-5")
    assert names(page) == ["crashed", "failed"]
    page.search.setText("lr>=1e-5 -state:crashed")
    assert names(page) == ["failed"]
    page.search.setText("lrr>1")
    assert page.search_line.text() == "Runs have no lrr. Did you mean lr?" and names(page) == ["failed"]
    page.search.clear()
    assert len(names(page)) == 3 and page.search_line.isHidden()


def test_enter_opens_one_run_and_compares_several(qtbot, page: RunsPage, archive: Path) -> None:
    page.table.choose(archive / "finished")
    with qtbot.waitSignal(page.session.page_requested) as signal:
        qtbot.keyClick(page.table, Qt.Key.Key_Return)
    assert signal.args == ["monitor"] and page.session.run.folder.path == archive / "finished"
    page.table.choose(archive / "finished", archive / "failed")
    assert page.buttons["compare"].text() == "Compare 2 runs" and not page.buttons["open"].isEnabled()
    qtbot.keyClick(page.table, Qt.Key.Key_Return)
    assert page.compare_view.isVisible() and page.compare_view.title.text() == "Compare 2 runs"
    reread(qtbot, page)
    assert page.compare_view.isVisible(), "reading the folder does not leave it"
    qtbot.keyClick(page.compare_view.back, Qt.Key.Key_Escape)
    assert page.table.isVisible() and page.compare_view.comparison is None and len(selected(page)) == 2


def test_resuming_starts_the_trainer_and_shows_the_run(qtbot, page: RunsPage, archive: Path, started, told) -> None:
    page.table.choose(archive / "failed")
    page.buttons["resume"].click()
    assert [folder.path for _, folder in started] == [archive / "failed"]
    qtbot.waitUntil(lambda: page.session.run.state == "starting")  # once its event log is read
    page.table.choose(archive / "crashed")
    page.buttons["resume"].click()
    assert len(started) == 1 and told[-1].startswith("One run at a time")
    page.session.messages.current.offer.take()
    assert [run.name for run in page.session.queue.waiting] == ["crashed"]


def test_columns(qtbot, page: RunsPage) -> None:
    page.choose_columns()
    dialog = page.findChild(ColumnDialog)
    items = [dialog.list.item(row) for row in range(dialog.list.count())]
    listed = {item.data(Qt.ItemDataRole.UserRole): item for item in items}
    assert len(listed) == len(items) and listed["held_out"].text() == "Held-out", "the model was there twice"
    for key in ("learning_rate", "kl", "held_out/accuracy"):
        listed[key].setCheckState(Qt.CheckState.Checked)
    listed["reward"].setCheckState(Qt.CheckState.Unchecked)
    assert column(page, "learning_rate") == ["0.0001", "1e-05", "1e-06"]
    dialog.list.setCurrentItem(listed["state"])
    dialog.move(1)
    keys = [field.key for field in page.model.columns]
    assert "reward" not in keys and keys.index("curve") < keys.index("state")
    page.session.prefs.settings.sync()
    again = RunsPage(page.session)
    qtbot.addWidget(again)
    assert [field.key for field in again.model.columns] == keys


def test_note_and_tags_are_saved_as_they_are_typed(qtbot, page: RunsPage, archive: Path) -> None:
    page.table.choose(archive / "failed")
    qtbot.keyClicks(page.details.tags, "math, first")
    page.details.note.setPlainText("The answer tag is missing.")
    page.table.choose(archive / "finished")  # before any timer: leaving the run saves
    expected = RunNotes("", "The answer tag is missing.", ("math", "first"))
    assert read_notes(RunFolder(archive / "failed")) == expected
    assert read_notes(RunFolder(archive / "finished")) == RunNotes()
    page.search.setText("tag:math answer")
    assert names(page) == ["failed"]


def test_a_run_is_renamed_in_the_table(qtbot, page: RunsPage, archive: Path) -> None:
    page.table.choose(archive / "failed")
    page.table.setFocus()
    qtbot.keyClick(page.table, Qt.Key.Key_F2)
    (edit,) = page.table.viewport().findChildren(QLineEdit)
    assert edit.text() == "failed"
    qtbot.keyClicks(edit, "Sums")
    qtbot.keyClick(edit, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: "Sums" in names(page))  # Qt commits an edit from its event loop
    assert read_notes(RunFolder(archive / "failed")).title == "Sums" == page.details.title.text()
    assert selected(page) == ["failed"], "a row that changes stays selected, and a title renames no folder"
    assert page.table.isVisible() and page.session.run is None, "Return ended the edit and opened nothing"


def test_several_runs_get_a_tag_and_a_star_together(page: RunsPage, archive: Path, monkeypatch) -> None:
    monkeypatch.setattr(QInputDialog, "getText", lambda *_: ("math good", True))
    page.table.choose(archive / "failed", archive / "finished")
    page.do("tag")
    page.do("favourite")
    notes = [read_notes(RunFolder(archive / name)) for name in ("failed", "finished")]
    assert all(one.tags == ("math", "good") and one.favourite for one in notes)
    page.favourites.setChecked(True)
    assert names(page) == ["failed", "finished"]
    page.do("favourite")
    assert names(page) == [], "all of them had a star, so it is taken away"


def test_archived_runs_are_hidden_and_come_back(page: RunsPage, archive: Path) -> None:
    page._filter()
    page.table.choose(archive / "failed")
    page.do("archived")
    assert names(page) == ["crashed", "finished"] and (archive / "failed").exists()
    page.search.setText("is:archived")
    assert names(page) == ["failed"]
    page.search.clear()
    page.archived.setChecked(True)
    page.table.choose(archive / "failed")
    page.do("archived")
    page.archived.setChecked(False)
    assert "failed" in names(page)


def cloned(folder: Path, parent: str) -> None:
    """Note that a run was cloned from another."""
    write_parent(RunFolder(folder), Parent(parent, folder.with_name(parent), 4, True, {}))


def test_parent_and_clones_of_a_run_are_links(qtbot, page: RunsPage, archive: Path) -> None:
    for name, parent in (("failed", "gone & away"), ("crashed", "failed")):
        cloned(archive / name, parent)
    reread(qtbot, page)
    page.table.choose(archive / "failed")
    clones = 'Clones: <a href="crashed">crashed</a>.'
    assert page.details.family.text() == f"Cloned from gone &amp; away (not here). {clones}"
    page.details.family.linkActivated.emit("crashed")
    assert selected(page) == ["crashed"] and page.details.family.text() == 'Cloned from <a href="failed">failed</a>.'


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [("loss", "0.00494", "loss 0.00494"), ("distillation/divergence", "0.000727", "div. 7.27e−4")],
)
def test_a_loss_in_place_of_the_reward(
    qtbot, page: RunsPage, archive: Path, metric: str, value: str, text: str
) -> None:
    events = RunFolder(archive / "finished").events
    events.write_text(re.sub(r'"reward": [-\d.]+', f'"{metric}": {value}', events.read_text(encoding="utf-8")))
    reread(qtbot, page)
    assert column(page, "reward")[-1] == column(page, "held_out")[-1] == text


def test_runs_go_to_the_trash_and_come_back(qtbot, page: RunsPage, archive: Path, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))  # of a new user, who has no such folder
    page.table.choose(archive / "failed")
    page.open()
    page.table.choose(archive / "failed", archive / "finished")
    page.refresh()  # as its timer may at any time: what is being read is of before
    page.buttons["trash"].click()
    settle(qtbot, page)
    assert names(page) == ["crashed"] and page.session.run is None and not (archive / "failed").exists()
    assert list((tmp_path / "data").rglob("failed/events.jsonl"))
    assert page.undo_text.text() == "Moved 2 runs to the trash."
    page.refresh()
    page.undo_button.click()
    settle(qtbot, page)
    assert names(page) == ["crashed", "failed", "finished"] and not list((tmp_path / "data").rglob("failed*"))
    assert page.undo_bar.isHidden() and not RunFolder(archive / "failed").is_locked()
    page.note(archive / "finished", {"title": "Sums again"})
    page.table.choose(archive / "finished")
    page.buttons["trash"].click()
    settle(qtbot, page)
    assert page.undo_text.text() == "Moved Sums again to the trash."
    assert selected(page) == ["failed"], "the run beside it, not the first"


def test_freeing_space_says_how_much_before_it_does(qtbot, page: RunsPage, archive: Path) -> None:
    add_checkpoints(RunFolder(archive / "finished"), {1: 0.1, 2: 0.9, 3: 0.5}, size=500_000)
    reread(qtbot, page)
    page.free_space()
    dialog = page.findChild(FreeSpaceDialog)
    assert "1 checkpoint (step 1)" in dialog.list.item(0).text()
    assert dialog.start.text() == "Delete checkpoints, free 1.00\u202fMB"
    before, spare = page.runs.records[archive / "finished"].bytes, archive / "finished" / "checkpoints" / "000001"
    freed = sum(path.stat().st_size for path in spare.rglob("*") if path.is_file())
    dialog.start.click()
    kept = sorted(path.name for path in (archive / "finished" / "checkpoints").iterdir())
    assert kept == ["000002", "000003"] and not dialog.start.isEnabled()
    assert "Freed 1.00\u202fMB." in dialog.outcome.text()
    assert page.runs.records[archive / "finished"].bytes == before - freed


def test_cache_of_records(qtbot, archive: Path, tmp_path: Path, monkeypatch) -> None:
    def listed() -> tuple[list[str], dict[str, RunNotes]]:
        read: list[str] = []
        monkeypatch.setattr("app.state.run_list.read_named", lambda run: (read.append(run.name), read_record(run))[1])
        runs = RunList(tmp_path)
        with qtbot.waitSignal(runs.settled):
            runs.refresh()
        return read, {path.name: record.notes for path, record in runs.records.items()}

    assert sorted(listed()[0]) == ["crashed", "failed", "finished"]
    assert listed()[0] == []
    change_notes(RunFolder(archive / "failed"), favourite=True)
    read, notes = listed()
    assert read == ["failed"] and notes["failed"].favourite and not notes["finished"].favourite
    shutil.rmtree(archive / "failed")
    listed()
    text = (tmp_path / CACHE).read_text()
    assert "/failed" not in text and "/finished" in text
    (tmp_path / CACHE).write_text(text[: len(text) // 2])
    assert len(listed()[1]) == 2, "half a cache is no harm"
    (tmp_path / CACHE).write_text("[]\n" + text.partition("\n")[2])
    assert len(listed()[0]) == 2, "nor is that of another version"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run with three checkpoints whose learning rate was changed before step 15."""
    run = made_up_runs.make_run(tmp_path / "runs" / "sums", steps=30, learning_rate=3e-5)
    add_checkpoints(run, {10: 0.5, 20: 2.0, 30: 1.0})
    change = {"step": 15, "settings": {"learning_rate": [3e-5, 1e-5]}}
    run.changes.write_text(json.dumps({"v": 1, "changes": [change]}))
    return run


@pytest.fixture
def dialog(qtbot, qapp, run: RunFolder, monkeypatch):
    monkeypatch.setattr("app.widgets.hub_dialogs.VerbProcess", ProcessByHand)
    shown = CloneDialog(run, "Sums")
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
    assert texts == ["Step 30, reward 1, the newest", "Step 20, reward 2, the best", "Step 10, reward 0.5"]
    imitated = TrainingState(step=30, score=0.4535, score_metric="eval/loss")
    assert Checkpoint(Path("30"), imitated).title == "step 30, held-out loss 0.454"
    assert dialog.name.placeholderText() == "sums-from-30" and dialog.create_button.isEnabled()
    assert dialog.differs.text().startswith("Nothing changes")


def test_a_setting_is_compared_with_its_value_at_the_chosen_step(qtbot, dialog: CloneDialog) -> None:
    change(dialog, "learning_rate", "2e-5")
    assert "Learning Rate: 1e-05 → 2e-05" in dialog.differs.text(), "it was changed before step 30"
    dialog.step.setCurrentIndex(2)
    assert "Learning Rate: 3e-05 → 2e-05" in dialog.differs.text()
    dialog.settings.remove("learning_rate")
    assert dialog.differs.text().startswith("Nothing changes") and flags(dialog.command()).count("--set") == 0
    dialog.settings.add("iters")
    qtbot.keyClicks(dialog.settings.fields["iters"].control, "80")
    assert dialog.settings.values() == {"iters": 80}, "typing replaces a setting just added"


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
    command = dialog.command()
    refused = CliRunner().invoke(app(), command[command.index("clone") :]).output  # the checkpoint holds no arrays
    assert "No such option" not in refused and "temperature" not in refused


def test_a_run_at_its_end_goes_on_only_with_more_steps(qtbot, qapp, run: RunFolder) -> None:
    """The newest checkpoint of a finished run has no step left."""
    text = run.config.read_text()
    assert "iters: 60" in text
    run.config.write_text(text.replace("iters: 60", "iters: 30"))
    dialog = CloneDialog(run, "Sums")
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


def test_everything_that_the_verb_refuses_is_shown(dialog: CloneDialog) -> None:
    dialog.on_end(ProcessOutcome(False, "optimizer: It cannot.", "rank: It stays.\noptimizer: It cannot."))
    assert dialog.outcome.text() == "It stays. It cannot."


def test_the_page_opens_the_clone_and_starts_it(qtbot, run: RunFolder, tmp_path: Path, session, started) -> None:
    page = qtbot.show(RunsPage(session))
    settle(qtbot, page)
    page.do("clone")
    dialog = page.findChild(CloneDialog)
    assert dialog.windowTitle() == "New run from sums"
    with qtbot.waitSignal(page.session.page_requested) as signal:
        dialog.cloned.emit(run.path, True)
    assert signal.args == ["monitor"] and started[0][1] == run and page.session.run.folder == run
    other = made_up_runs.make_run(tmp_path / "runs" / "other", steps=3)
    dialog.cloned.emit(other.path, False)
    assert len(started) == 1 and page.session.run.folder == other, "shown, not started"


def test_a_clone_waits_while_another_run_trains(qtbot, run: RunFolder, session, monkeypatch) -> None:
    page = qtbot.show(RunsPage(session))
    settle(qtbot, page)
    monkeypatch.setattr("app.state.run_list.start_detached", lambda *_: None)
    monkeypatch.setattr(Session, "is_training", property(lambda _self: True))
    page.do("clone")
    dialog = page.findChild(CloneDialog)
    assert dialog.at_once.text() == "Add it to the queue"
    folder = RunFolder(places.runs_folder() / "clone")
    made_up_runs.make_run(folder.path, steps=3)
    lines = folder.events.read_text().splitlines(keepends=True)
    folder.events.write_text("".join(line for line in lines if '"finished"' not in line))
    dialog.cloned.emit(folder.path, True)
    assert page.session.queue.waiting == (folder,) and page.session.run is None
