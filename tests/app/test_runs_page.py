"""The Runs page: what is in the runs folder, in which state, and what can be done with it."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import pytest
from PySide6.QtCore import QFile, Qt

from app import theme
from app.model.session import Session
from app.pages.runs_page import RunsPage
from backend.spec.places import RunFolder
from tests.support import made_up_runs


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A finished, a failed and a crashed run."""
    folder = tmp_path / "runs"
    for number, (name, steps, ending) in enumerate((("finished", 60, "finished"), ("failed", 12, "failed"), ("crashed", 5, None))):  # fmt: skip
        run = made_up_runs.make_run(folder / name, steps=steps, ending=ending)
        text = run.events.read_text(encoding="utf-8")
        run.events.write_text(text.replace("17600", f"1760{number}"), encoding="utf-8")
    return folder


@pytest.fixture
def page(qtbot, qapp, archive: Path):
    theme.apply(qapp, "light")
    session = Session()
    shown = RunsPage(session)
    qtbot.addWidget(shown)
    shown.resize(1060, 700)
    shown.show()
    qtbot.waitUntil(lambda: not shown._read_timer.isActive(), timeout=5000)
    yield shown
    session.close_run()


def table_rows(page: RunsPage) -> list[list[str]]:
    view = page.table.sorted
    return [[str(view.index(r, c).data()) for c in range(view.columnCount())] for r in range(view.rowCount())]


def test_every_run_has_a_row_newest_first(page: RunsPage) -> None:
    listed = table_rows(page)
    assert [line[:2] for line in listed] == [["crashed", "Crashed"], ["failed", "Failed"], ["finished", "Finished"]]
    assert listed[2][2:4] == ["demo/model", "60 of 60"] and listed[2][5].startswith("+")
    assert page.table.selected_run().path.name == "crashed", "the newest is selected"


def test_a_locked_run_is_running_and_cannot_be_trashed(qtbot, page: RunsPage, archive: Path) -> None:
    handle = os.open(RunFolder(archive / "crashed").lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        page.refresh()
        qtbot.waitUntil(lambda: table_rows(page)[0][1] == "Running", timeout=5000)
        assert not page.trash_button.isEnabled() and not page.resume_button.isEnabled()
    finally:
        os.close(handle)
    page.refresh()
    qtbot.waitUntil(lambda: table_rows(page)[0][1] == "Crashed", timeout=5000)
    assert page.trash_button.isEnabled() and page.resume_button.isEnabled()


def test_filtering_and_sorting(page: RunsPage) -> None:
    page.search.setText("FAIL")
    assert [line[0] for line in table_rows(page)] == ["failed"]
    page.search.clear()
    page.table.sortByColumn(3, Qt.SortOrder.AscendingOrder)
    assert [line[3] for line in table_rows(page)] == ["5 of 60", "12 of 60", "60 of 60"], "by number, not by text"


def test_enter_opens_the_run_on_the_monitor(qtbot, page: RunsPage, archive: Path) -> None:
    page.table.choose(archive / "finished")
    with qtbot.waitSignal(page.session.page_requested) as signal:
        qtbot.keyClick(page.table, Qt.Key.Key_Return)
    assert signal.args == ["monitor"] and page.session.run.folder.path == archive / "finished"


def test_resuming_starts_the_trainer_and_shows_the_run(
    page: RunsPage, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr("app.model.processes.resume_training", started.append)
    page.table.choose(archive / "failed")
    page.resume_button.click()
    assert [folder.path for folder in started] == [archive / "failed"]
    assert page.session.run.state == "starting"
    messages = []
    page.session.messages.said.connect(messages.append)
    page.table.choose(archive / "crashed")
    page.resume_button.click()
    assert len(started) == 1 and messages[0].startswith("One run at a time")


def test_a_run_goes_to_the_trash_and_leaves_the_other_pages(
    qtbot, page: RunsPage, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QFile, "moveToTrash", lambda path: shutil.rmtree(path) is None)
    page.table.choose(archive / "failed")
    page.open()
    monkeypatch.setattr(page, "_is_confirmed", lambda row: False)
    page.move_to_trash()
    assert (archive / "failed").exists(), "not without being sure"
    monkeypatch.setattr(page, "_is_confirmed", lambda row: True)
    page.move_to_trash()
    assert not (archive / "failed").exists() and page.session.run is None
    assert "failed" not in [line[0] for line in table_rows(page)]


def test_an_empty_archive_shows_the_way_to_train(qtbot, page: RunsPage, archive: Path) -> None:
    shutil.rmtree(archive)
    page.refresh()
    assert page.nothing.isVisible() and table_rows(page) == []
