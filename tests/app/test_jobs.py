"""Training on Hugging Face from the window: the dialog, the run that it makes, and how such a run is shown."""

from pathlib import Path
from typing import Any

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QLabel, QPushButton

from app.pages.runs.run_details import RunDetails
from app.state.run_files import NOT_FOLLOWED, live_run
from app.widgets.export_panel import ExportPanel
from app.widgets.hub_dialogs import JobDialog
from app.window import Window
from backend.config.config import load, parse
from backend.jobs.job_file import JobFile, write_job
from backend.runs.queue import training_run
from backend.runs.run_folder import RunFolder
from backend.runs.run_record import read_record
from backend.utils.errors import ConfigProblem
from tests.support import made_up_runs
from tests.support.small_run import settings_for
from tests.support.trainer_by_hand import locked, write_event
from tests.support.windows import ServiceByHand

ACCOUNT = {"name": "someone", "organisations": ["a-lab"], "can_write": True, "source": "keychain"}
HARDWARE = [
    {"name": "t4-small", "title": "Nvidia T4", "accelerator": "T4", "memory": "16 GB", "usd_per_hour": 0.4},
    {"name": "a100-large", "title": "Nvidia A100", "accelerator": "A100", "memory": "80 GB", "usd_per_hour": 2.5},
]
JOB = JobFile("6a1", "a-lab", "a100-large", 2.5, 2.5, "https://hub/jobs/6a1", "a-lab/jobs/a", 1.8e9)


@pytest.fixture
def window(window: Window, tmp_path: Path, monkeypatch) -> Window:
    monkeypatch.setenv("GRPO_STUDIO_RUNS", str(tmp_path / "runs"))
    window.session.service = ServiceByHand()  # pyright: ignore
    window.resize(1280, 800)
    window.show()
    return window


def asked(window: Window, question: str) -> Any:
    service = window.session.service
    assert isinstance(service, ServiceByHand)
    return service.last(question)


def make_dialog(qtbot, **settings: Any) -> tuple[JobDialog, ServiceByHand]:
    service = ServiceByHand()
    config = parse({"model": "m", "data": "d"} | settings)
    dialog = JobDialog(config, service)  # pyright: ignore
    dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose, False)
    return qtbot.show(dialog), service


def show_job(tmp_path: Path, window: Window, *, ending: str | None = None) -> RunFolder:
    folder = made_up_runs.make_run(tmp_path / "runs" / "there", steps=12, ending=ending)
    write_job(folder, JOB)
    window.show_page("monitor")
    window.session.open_run(folder.path)
    poll(window)
    return folder


def poll(window: Window) -> None:
    run = window.session.run
    assert run is not None
    run.poll()
    while not run.has_caught_up:
        run.poll()
    if "monitor" in window.pages:
        window.pages["monitor"]._refresh()


def test_cost_before_submitting(qtbot):
    dialog, service = make_dialog(qtbot, optimizer="muon")
    labels = [each.text() for each in dialog.findChildren(QLabel) if each.isVisible()]
    assert "m on d" in labels and "Not carried over: Optimizer." in labels
    assert not dialog.submit.isEnabled() and dialog.state.text().startswith("Asking")
    service.last("hub_hardware").answer({"hardware": HARDWARE})
    assert dialog.most.text() == "At most $2.40" and dialog.state.isHidden()
    assert not dialog.submit.isEnabled(), "nobody pays yet"
    service.last("hub_account").answer(ACCOUNT)
    assert [dialog.owner.itemText(i) for i in range(dialog.owner.count())] == ["someone", "a-lab"]
    dialog.table.selectRow(1)
    dialog.hours.setText("2,5")
    assert dialog.most.text() == "At most $6.25" and "2.5 h at $2.50 an hour" in dialog.sum.text()
    for wrong in ("", "0", "-1", "nan", "inf", "soon"):
        dialog.hours.setText(wrong)
        assert not dialog.submit.isEnabled() and dialog.most.text() == "", wrong
    dialog.hours.setText("2.5")
    dialog.owner.choose("a-lab")
    with qtbot.waitSignal(dialog.submitted) as submitted:
        dialog.submit.click()
    assert submitted.args == ["a100-large", 2.5, "a-lab"] and not dialog.isVisible()


def test_without_a_token(qtbot):
    dialog, service = make_dialog(qtbot)
    service.last("hub_hardware").refuse([ConfigProblem("flavor", "The Hub cannot be reached.")])
    service.last("hub_account").answer({})
    assert dialog.state.text() == "The Hub cannot be reached."
    assert dialog.account.label.text().startswith("Not logged in.") and dialog.owner.isHidden()
    service.last("hub_account").answer({"source": "keychain", "problem": "The token is not valid."})
    assert dialog.account.label.text() == "The token is not valid."
    dialog.account.token.setText("me")
    dialog.account.button.click()
    service.last("hub_login").answer(ACCOUNT | {"name": "me"})
    assert dialog.owner.currentText() == "me" and dialog.owner.isVisible() and dialog.account.token.isHidden()


def test_form_trains_there(window: Window, started, tmp_path: Path):
    window.menus["train_there"].trigger()
    assert not window.findChildren(JobDialog), "the form has problems"
    window.session.draft.update(settings_for(tmp_path))
    window.menus["train_there"].trigger()
    asked(window, "hub_hardware").answer({"hardware": HARDWARE})
    asked(window, "hub_account").answer(ACCOUNT)
    window.findChildren(JobDialog)[0].submit.click()
    [(command, folder)] = started
    assert command[-10:] == [
        *("job", "--run", str(folder.path), "--flavor", "t4-small"),
        *("--timeout", "6", "--owner", "someone", "--yes"),
    ]
    assert load(folder.config) == window.session.draft.config()
    assert window.session.run is not None and window.session.run.folder == folder
    assert window.current_page == "monitor"


def test_nothing_is_sent_without_consent(window: Window, started, tmp_path: Path):
    code = tmp_path / "mine.py"
    code.write_text("from backend.rewards import register_reward_function\n")
    settings = parse(settings_for(tmp_path) | {"reward_functions_file": str(code)})
    window.session.consent.ask = lambda _: False
    window.session.starter.start_job(settings, "t4-small", 1.0, "someone")
    assert started == [] and not (tmp_path / "runs").exists()


def test_run_trains_there_again(qtbot, window: Window, tmp_path: Path):
    run = made_up_runs.make_run(tmp_path / "run", steps=3)
    run.config.write_text("model: nowhere\ndata: rows\n", encoding="utf-8")
    window.show_export(run)
    panel = window.findChildren(ExportPanel)[0]
    assert panel.train_there.isHidden()
    panel.choices.target.setCurrentIndex(panel.choices.target.findData("trl"))
    assert panel.train_there.isVisible()
    panel.train_there.click()
    assert window.findChildren(JobDialog)[0].isVisible() and not panel.isVisible()


def test_machine_stays_free_while_a_job_trains(qtbot, window: Window, tmp_path: Path):
    folder = made_up_runs.make_run(tmp_path / "runs" / "there", steps=12, ending=None)
    with locked(folder):
        assert training_run() == folder == live_run()
        window.session.open_run(folder.path)
        poll(window)
        assert not window.menus["run"].isEnabled()
        write_job(folder, JOB)
        window._show_progress()
        assert window.menus["run"].isEnabled(), "as soon as it is submitted"
        show_job(tmp_path, window)
        assert window.session.run is not None and window.session.run.state == "running"
        monitor, enabled = window.pages["monitor"], ("run", "pause", "stop", "save_now", "change_settings")
        assert [window.menus[name].isEnabled() for name in enabled] == [True, False, True, False, False]
        assert not monitor.change.isVisible()
        assert monitor.job.text() == "On Hugging Face: a100-large, at most 2.5 h and $6.25, paid by a-lab"
        assert not window.session.is_training and live_run() is None and training_run() is None
        assert window.session.reattach() and window.session.launched is None
        poll(window)
        window.session.stop_training()
        assert not folder.control.exists(), "closing the window leaves it alone"
        window.menus["stop"].trigger()
        assert folder.control.read_text() == "stop"


def test_job_that_is_not_followed(qtbot, window: Window, started, tmp_path: Path, monkeypatch):
    folder = show_job(tmp_path, window)
    monitor, opened = window.pages["monitor"], []
    monkeypatch.setattr("app.pages.monitor.monitor_page.open_link", opened.append)
    monitor._job_row.findChildren(QPushButton)[0].click()
    assert opened == ["https://hub/jobs/6a1"]
    assert monitor.verdict.title.text() == "The job is not followed"
    assert monitor.verdict.sentence.text() == NOT_FOLLOWED and monitor.verdict.buttons[0].text() == "Follow it again"
    window.session.launched = here = made_up_runs.make_run(tmp_path / "runs" / "here", steps=1, ending=None)
    with locked(here):
        assert window.session.is_training
        monitor.verdict.buttons[0].click()
    [(command, run)] = started
    assert command[-2:] == ["resume", str(folder.path)] and run == folder and window.session.launched == here


def test_job_that_has_failed(qtbot, window: Window, tmp_path: Path):
    folder = show_job(tmp_path, window, ending="failed")
    verdict = window.pages["monitor"].verdict
    assert [each.text() for each in verdict.buttons] == ["Follow it again", "Edit settings", "Open log"]
    assert verdict.advice.text() == ""
    details = qtbot.show(RunDetails())
    details.show_runs([read_record(folder)])
    assert details.machines.text() == "Hugging Face, a100-large"


def test_phases_of_a_job(window: Window, tmp_path: Path):
    folder = show_job(tmp_path, window)
    write_event(folder, "phase", phase="waiting", sentence="QUEUED")
    with locked(folder):
        poll(window)
        assert window.pages["monitor"].header.doing.text().endswith("waiting for a machine")
