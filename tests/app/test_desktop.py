"""What the desktop hears of a run: notifications, the icon's progress, and what is news at all."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication, QFileDialog, QSystemTrayIcon

from app import theme
from app.__main__ import connect_desktop
from app.desktop import Notifier
from app.state.prefs import Prefs
from app.state.run import Run
from app.widgets.menu_dialogs import PreferencesDialog
from app.window import Window
from backend.runs.run_folder import RunFolder, hold_lock
from backend.utils import places
from backend.utils.hub_cache import hub_cache
from tests.support import made_up_runs
from tests.support.trainer_by_hand import write_event
from tests.support.windows import ServiceByHand


def test_notifications_reach_a_linux_desktop(qapp: QApplication, qtbot, tmp_path: Path, monkeypatch) -> None:
    program, told = tmp_path / "notify-send", tmp_path / "told"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {told}\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    Notifier().show("sums finished", "Reward 1 < 2 & rising.")
    qtbot.waitUntil(lambda: told.exists() and told.read_text().endswith("rising.\n"))
    assert told.read_text().splitlines()[-3:] == ["--", "sums finished", "Reward 1 &lt; 2 &amp; rising."]


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_icon_of_notifications_goes(qapp: QApplication, qtbot, monkeypatch, platform: str) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr("shutil.which", lambda _: None)
    notifier = Notifier()
    notifier.show("sums finished", "30 steps.")
    (icon,) = notifier.findChildren(QSystemTrayIcon)
    qapp.applicationStateChanged.emit(Qt.ApplicationState.ApplicationInactive)
    qtbot.wait(20)
    assert icon.isVisible(), "or a click on the notification would not be heard"
    qapp.applicationStateChanged.emit(Qt.ApplicationState.ApplicationActive)
    qtbot.waitUntil(lambda: not icon.isVisible())


@pytest.fixture
def heard(monkeypatch) -> SimpleNamespace:
    heard = SimpleNamespace(notices=[], percents=[])
    monkeypatch.setattr(Notifier, "show", lambda _, *notice: heard.notices.append(notice))
    monkeypatch.setattr("app.window.show_percent", heard.percents.append)
    return heard


@pytest.fixture
def window(window: Window, qapp: QApplication, heard: SimpleNamespace, monkeypatch) -> Window:
    monkeypatch.setattr(window, "is_in_front", lambda: False)
    connect_desktop(qapp, window)
    return window


def live_run(window: Window, qtbot) -> tuple[Run, RunFolder, int]:
    folder = made_up_runs.make_run(places.runs_folder() / "sums", steps=30, ending=None, now=True)
    handle = hold_lock(folder)
    window.session.open_run(folder.path)
    run = window.session.run
    assert run is not None
    qtbot.waitUntil(lambda: run.state == "running" and run.step == 30)
    return run, folder, handle


def test_an_end_and_trouble_are_told_once(window: Window, heard: SimpleNamespace, qtbot) -> None:
    _, folder, handle = live_run(window, qtbot)
    assert heard.percents[-1] == 50 and window.windowTitle().startswith("50 % – sums – ")
    finding = {"code": "identical", "level": "warning", "sentence": "All completions are the same.", "advice": ""}
    for _ in range(2):
        write_event(folder, "health", **finding, step=30)
    write_event(folder, "health", code="fine", level="info", sentence="Nothing to do.", advice="", step=30)
    qtbot.waitUntil(lambda: bool(heard.notices))
    write_event(folder, "finished", step=60, sentence="Finished after 60 steps.")
    os.close(handle)
    qtbot.waitUntil(lambda: len(heard.notices) == 2)
    assert heard.notices[0] == ("sums", "All completions are the same.")
    assert heard.notices[1][0] == "sums finished" and heard.notices[1][1].startswith("30 steps. Reward ")
    assert heard.percents[-1] is None and "%" not in window.windowTitle()


@pytest.mark.parametrize("why", ["in front", "switched off"])
def test_nothing_is_told(window: Window, heard: SimpleNamespace, qtbot, monkeypatch, why: str) -> None:
    if why == "in front":
        monkeypatch.setattr(window, "is_in_front", lambda: True)
    else:
        window.session.prefs.notifies = False
    run, _, handle = live_run(window, qtbot)
    os.close(handle)
    qtbot.waitUntil(lambda: run.state == "crashed")
    qtbot.wait(50)
    assert heard.notices == []


def test_preferences_take_effect_at_once(window: Window, heard: SimpleNamespace, qtbot, monkeypatch, tmp_path) -> None:
    _, _, handle = live_run(window, qtbot)
    service = window.session.service = ServiceByHand()
    window.menus["theme dark"].setText("&Dark")  # as KDE does
    window.menus["preferences"].trigger()
    (dialog,) = window.findChildren(PreferencesDialog)
    assert dialog.theme.itemText(2) == "Dark"
    dialog.shows_progress.click()
    assert heard.percents[-1] is None and not window.session.prefs.shows_progress
    dialog.shows_progress.click()
    assert heard.percents[-1] == 50
    dialog.notifies.click()
    assert not window.session.prefs.notifies
    dialog.closing.setCurrentIndex(2)
    dialog.closing.activated.emit(2)
    dialog.theme.setCurrentIndex(2)
    dialog.theme.activated.emit(2)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setattr(QFileDialog, "getExistingDirectory", lambda *_: str(tmp_path / "models"))
    dialog.folders["models"].choose.click()
    assert dialog.folders["models"].place.text().endswith("/models")
    again = Prefs(window.session.prefs.folder)
    window.session.prefs.settings.sync()
    assert (again.when_closing, again.notifies, again.theme) == ("stop", False, "dark") and theme.mode() == "dark"
    again.use_folders()
    assert hub_cache() == tmp_path / "models"
    monkeypatch.delenv("HF_HUB_CACHE")
    service.last("hub_account").answer({"source": "keychain", "problem": "The Hub does not answer."})
    assert dialog.account.label.text() == "A token is stored (keychain). The Hub does not answer."
    dialog.account.token.setText("hf_x")
    dialog.account.button.click()
    service.last("hub_login").answer({"name": "someone", "can_write": True, "source": "keychain"})
    assert dialog.account.label.text() == "someone (token from keychain)" and dialog.account.token.isVisible()
    dialog.close()
    os.close(handle)
