"""What the desktop hears of a run: notifications on a real D-Bus, a click on one, the icon's progress; and what is news
at all."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication, QFileDialog, QSystemTrayIcon

from app import theme
from app.__main__ import connect_desktop
from app.desktop import LauncherIcon, Notifier
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

needs_bus = pytest.mark.skipif(
    not sys.platform.startswith("linux") or shutil.which("dbus-daemon") is None, reason="needs a D-Bus daemon"
)

SERVER = """
from jeepney import DBusAddress, HeaderFields, MatchRule, message_bus, new_method_return, new_signal
from jeepney.io.blocking import open_dbus_connection
name, path = "org.freedesktop.Notifications", "/org/freedesktop/Notifications"
bus = open_dbus_connection("SESSION")
bus.send_and_get_reply(message_bus.RequestName(name))
bus.send_and_get_reply(message_bus.AddMatch(MatchRule(type="signal", interface="com.canonical.Unity.LauncherEntry")))
print("ready", flush=True)
while True:
    message = bus.receive()
    member = message.header.fields.get(HeaderFields.member)
    if member == "Notify":
        signature, body = message.header.fields[HeaderFields.signature], message.body
        print("Notify", signature, body[3], "|", body[4], flush=True)
        bus.send(new_method_return(message, "u", (7,)))
        for number in (8, 7):  # 8 is another program's
            bus.send(new_signal(DBusAddress(path, interface=name), "ActionInvoked", "us", (number, "default")))
    elif member == "Update":
        print("Update", message.body[1]["progress"][1], message.body[1]["progress-visible"][1], flush=True)
"""
"""A desktop: it prints what it is asked to show, and clicks on every notification."""


@pytest.fixture
def desktop(monkeypatch) -> Iterator[subprocess.Popen[str]]:
    """A private bus with a desktop on it; its prints are on `stdout`."""
    command = ["dbus-daemon", "--session", "--nofork", "--print-address=1"]
    daemon = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert daemon.stdout is not None
    monkeypatch.setenv("DBUS_SESSION_BUS_ADDRESS", daemon.stdout.readline().strip())
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None and server.stdout.readline() == "ready\n"
    yield server
    for process in (server, daemon):
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def printed(desktop: subprocess.Popen[str]) -> str:
    assert desktop.stdout is not None
    return desktop.stdout.readline().strip()


@needs_bus
def test_notifications_and_progress_reach_a_linux_desktop(desktop, qapp: QApplication, qtbot) -> None:
    from app.desktop import SessionBus

    qapp.setDesktopFileName("grpo-studio")
    bus = SessionBus()
    notifier, icon, clicks = Notifier(bus), LauncherIcon(bus), []
    notifier.clicked.connect(lambda: clicks.append(1))
    notifier.show("sums finished", "Reward 1 < 2 & rising.")
    assert printed(desktop) == "Notify susssasa{sv}i sums finished | Reward 1 &lt; 2 &amp; rising."
    qtbot.waitUntil(lambda: bool(clicks))
    icon.show_percent(43)
    icon.show_percent(43)
    icon.show_percent(None)
    assert [printed(desktop), printed(desktop)] == ["Update 0.43 True", "Update 0.0 False"]
    assert clicks == [1], "the click on another program's notification is not ours"
    bus.close()


def test_mac_menu_bar_icon_goes(qapp: QApplication, qtbot, monkeypatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
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
    monkeypatch.setattr(LauncherIcon, "show_percent", lambda _self, percent: heard.percents.append(percent))
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
