"""Consent to the user's reward code: asked before it first runs and again after a change; a refusal runs nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QLabel, QPushButton

from app.desktop import DroppedFile
from app.state.consent import Consent
from app.state.prefs import Prefs
from app.state.session import Session
from app.widgets.consent_dialog import AllowDialog, ConsentDialog, HostsDialog, ServersDialog
from app.window import Window
from backend.config.config import read
from backend.distributed.hosts_file import AllowedHosts, HostsToAllow
from backend.rewards.allowed_code import CodeToAllow, read_code
from backend.runs.run_folder import RunFolder
from backend.tools.mcp_settings import named_servers
from backend.utils.places import demo_config
from tests.support import small_run

CODE = """import json
import subprocess
from os import path
@register_reward_function('mine')
def mine(completions):
    return []
async def other(x): ...
"""


@pytest.fixture
def reward_file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    return file


class FakeDialog:
    """The `ask` callback: returns `answer` and records the requests."""

    def __init__(self, answer: bool) -> None:
        self.answer, self.requests = answer, list[CodeToAllow]()

    def __call__(self, requests: Any) -> bool:
        self.requests += requests
        return self.answer


def test_consent_is_asked_once(reward_file: Path, tmp_path: Path) -> None:
    dialog, settings = FakeDialog(True), {"reward_functions_file": str(reward_file)}
    consent = Consent(tmp_path / "trusted.json", dialog)
    assert consent.obtain(settings) and [request.changed for request in dialog.requests] == [False]
    assert consent.obtain(settings) and Consent(tmp_path / "trusted.json").obtain(settings), "remembered"
    assert len(dialog.requests) == 1
    reward_file.write_text(CODE + "\n")
    assert consent.code.fingerprints(settings) != {str(reward_file): read_code(reward_file).fingerprint}
    assert consent.obtain(settings) and [request.changed for request in dialog.requests] == [False, True]
    assert consent.code.fingerprints(settings) == {str(reward_file): read_code(reward_file).fingerprint}
    for ours in ({"reward_functions": ["r1_int"]}, read(demo_config("calculator"))):
        assert consent.obtain(ours) and len(dialog.requests) == 2, "what ships needs no consent"


def test_run_starts_nothing_without_consent(qtbot, tmp_path: Path, monkeypatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr("app.state.run_starter.start_detached", lambda *arguments: started.append(arguments))
    session = Session(Prefs(tmp_path / "prefs"))
    session.draft.update(small_run.settings_for(tmp_path) | small_run.low_half(tmp_path))
    assert session.draft.problems() == []
    session.consent.ask = dialog = FakeDialog(False)
    messages: list[str] = []
    session.messages.said.connect(messages.append)
    session.starter.start()
    assert started == [] and len(dialog.requests) == 1
    assert messages[-1] == "The code was not allowed to run, so nothing was started."
    run = RunFolder(tmp_path / "run")
    small_run.write_config(
        run.config, {"model": "m", "data": "d", "reward_functions_file": str(tmp_path / "low_half.py")}
    )
    session.starter.resume(run)
    assert started == [] and len(dialog.requests) == 2
    dialog.answer = True
    session.starter.start()
    assert len(started) == 1
    session.close_run()


HOSTS = [{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}, {"ssh": "mac-b", "ips": ["10.0.0.2"], "program": "~/bin/python"}]


@pytest.fixture
def hosts_file(tmp_path: Path) -> Path:
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps({"hosts": HOSTS, "envs": ["MLX_METAL_FAST_SYNCH=1"]}))
    return file


def test_machines_need_consent(qtbot, tmp_path: Path, hosts_file: Path, monkeypatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr("app.state.run_starter.start_detached", lambda *arguments: started.append(arguments))
    session = Session(Prefs(tmp_path / "prefs"))
    asked: list[HostsToAllow] = []
    messages: list[str] = []
    session.messages.said.connect(messages.append)
    session.consent.ask_hosts = lambda request: bool(asked.append(request)) or len(asked) == 4
    session.draft.update(small_run.settings_for(tmp_path, hosts=str(hosts_file)))
    assert session.draft.problems() == []
    session.starter.start()
    session.starter.queue()
    assert started == [] and len(asked) == 2 and not session.queue.waiting
    assert messages[-1] == "The machines of the hosts file may not be contacted, so nothing was started."
    run = RunFolder(tmp_path / "run")
    small_run.write_config(run.config, {"model": "m", "data": "d", "hosts": "../hosts.json"})
    session.starter.queue_existing(run)
    assert len(asked) == 3 and not session.queue.waiting
    session.starter.resume(run)  # now the answer is yes
    session.close_run()
    session.starter.start()
    assert [request.path for request in asked] == 4 * [hosts_file] and len(started) == 2, "asked once"
    session.close_run()
    session.starter.resume(run, "--hosts", "none")
    hosts_file.write_text(json.dumps(HOSTS))
    assert session.consent.hosts.missing("") is None and not session.consent.obtain_hosts(str(hosts_file))
    assert asked[-1].changed
    session.close_run()


def test_machines_question(qtbot, tmp_path: Path, hosts_file: Path) -> None:
    asked = AllowedHosts(tmp_path / "trusted.json").missing(str(hosts_file))
    assert asked is not None
    dialog = HostsDialog(asked)
    qtbot.addWidget(dialog)
    text = dialog_text(dialog)
    parts = ["Connect to the machines in hosts.json?", "mac-b at 10.0.0.2", "mac-b: ~/bin/python", str(hosts_file)]
    assert all(part in text for part in (*parts, "MLX_METAL_FAST_SYNCH=1"))
    dialog.show()
    QTest.keyClick(dialog, Qt.Key.Key_Return)
    assert dialog.result() == HostsDialog.DialogCode.Rejected


def test_mcp_server_question(qtbot) -> None:
    servers = named_servers(
        {"mcp_servers": {"files": {"command": "npx", "args": ["-y", "a b"], "env": {"KEY": "1"}, "cwd": "/srv"}}}
    )
    dialog = ServersDialog(servers)
    qtbot.addWidget(dialog)
    text = dialog_text(dialog)
    assert all(part in text for part in ("Use the MCP server files?", "KEY=1 npx -y 'a b' in /srv", "your rights"))
    dialog.show()
    assert not any(button.isVisible() and "File" in button.text() for button in dialog.findChildren(QPushButton))
    QTest.keyClick(dialog, Qt.Key.Key_Return)
    assert dialog.result() == ServersDialog.DialogCode.Rejected


def test_dropped_file_is_not_run(qtbot, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(small_run.LOW_HALF + "from pathlib import Path\nPath(__file__).with_name('it-ran').touch()\n")
    window = Window(Session(Prefs(tmp_path / "prefs")))
    qtbot.addWidget(window)
    window.show_page("rewards")
    dialog = window.session.consent.ask = FakeDialog(False)
    window.open_dropped(DroppedFile("reward_functions_file", file))
    settings = small_run.settings_for(tmp_path, reward_functions=["low_half"], reward_weights=[])
    window.session.draft.update(settings)
    assert window.session.draft.value("reward_functions_file") == str(file) and not window.session.draft.problems()
    assert [each.code.path for each in window.session.consent.code.missing(window.session.draft.values())] == [file]
    assert not dialog.requests, "a drop asks nothing, for nothing runs"
    window.session.starter.start()
    assert len(dialog.requests) == 1 and not (tmp_path / "it-ran").exists()


def dialog_text(dialog: AllowDialog) -> str:
    return "\n".join(label.text() for label in dialog.findChildren(QLabel))


def test_code_question(qtbot, reward_file: Path) -> None:
    dialog = ConsentDialog([CodeToAllow(read_code(reward_file), False)])
    qtbot.addWidget(dialog)
    text = dialog_text(dialog)
    parts = ["mine, other", "json, subprocess, os", "subprocess, os, for files", "Run the code in mine.py?"]
    assert all(part in text for part in (str(reward_file), *parts))
    dialog.show()
    QTest.keyClick(dialog, Qt.Key.Key_Return)
    assert dialog.result() == ConsentDialog.DialogCode.Rejected
    changed = ConsentDialog([CodeToAllow(read_code(reward_file), True)])
    qtbot.addWidget(changed)
    assert "mine.py has changed since you allowed it to run." in dialog_text(changed)
    changed.allow.click()
    assert changed.result() == ConsentDialog.DialogCode.Accepted
