"""The Help menu: About with versions and licences, the shortcuts, the glossary, and the check for updates."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from PySide6.QtGui import QGuiApplication

from app.widgets.basic.dialogs import TextDialog
from app.widgets.menu_dialogs import NO_TEXT, AboutDialog, GlossaryDialog
from app.window import Window
from backend import __version__
from backend.serve.hub_questions import newer_release
from backend.serve.questions import QuestionCall
from backend.utils import about
from backend.utils import about as components
from backend.utils.errors import UserError
from backend.utils.places import resources


def test_about_shows_versions_and_every_licence(window: Window) -> None:
    window.menus["about"].trigger()
    dialog = window.findChild(AboutDialog)
    assert dialog.windowTitle() == "About GRPO Studio" and dialog.list.count() == len(components.components())
    assert "Permission is hereby granted" in dialog.text.toPlainText(), "ours is shown first"
    for row, part in enumerate(components.components()):
        dialog.list.setCurrentRow(row)
        assert dialog.text.toPlainText().split() == (part.text or NO_TEXT).split(), part.name
    dialog.copy()
    copied = QGuiApplication.clipboard().text()
    assert f"grpo-studio: {__version__}" in copied and "Computes on: " in copied and "mlx: " in copied


def test_the_list_of_shortcuts_has_every_one(window: Window) -> None:
    window.menus["shortcuts"].trigger()
    text = window.findChild(TextDialog).text.toPlainText()
    for action in window.menus.by_name.values():
        assert action.shortcut().toString() in text
        assert action.shortcut().isEmpty() or action.text() in text


def test_glossary_search(window: Window) -> None:
    window.menus["glossary"].trigger()
    dialog = window.findChild(GlossaryDialog)
    assert dialog.windowTitle() == "Glossary"
    for typed, term in (("hit_max_tokens", "Cut off at the limit"), ("num_generations", "Group"), ("kullback", "KL")):
        dialog.search.setText(typed)
        assert any(line.startswith(f"{term} ") for line in dialog.text.toPlainText().splitlines()), typed
    dialog.search.setText("advantage")
    assert dialog.text.toPlainText().startswith("Advantage"), "where the word is the term comes first"
    dialog.search.setText("no such thing")
    assert "No term has" in dialog.text.toPlainText()
    window.menus["glossary"].trigger()
    assert len(window.findChildren(GlossaryDialog)) == 1


class ReleaseList:
    """A server on 127.0.0.1 that answers with `content`, and keeps the paths and headers it was asked with."""

    def __init__(self) -> None:
        self.content, self.status, self.asked = b"{}", 200, list[tuple[str, dict[str, str]]]()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append((self.path, dict(self.headers)))
                self.send_response(outer.status)
                self.end_headers()
                self.wfile.write(outer.content)

            def log_message(self, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_port}/releases"

    def name(self, version: str, page: str = "") -> None:
        self.content = json.dumps({"version": version, "page": page}).encode()


@pytest.fixture
def release_list() -> Iterator[ReleaseList]:
    served = ReleaseList()
    yield served
    served.server.shutdown()
    served.server.server_close()


def ask(address: str) -> dict[str, str] | None:
    return newer_release({"feed": address}, QuestionCall(lambda progress: None))


def test_nothing_is_built_in_and_nothing_is_on(window: Window, monkeypatch) -> None:
    monkeypatch.delenv(about.FEED_VARIABLE, raising=False)
    assert about.feed() == "" and not (resources() / "release_feed.txt").exists()
    assert not window.session.prefs.check_updates
    window.session.updates.check_at_start()
    window.menus["updates"].trigger()
    assert window.strip.sentence.text() == about.NO_FEED
    assert "service" not in vars(window.session), "no process was started for it"


def test_newer_version(window: Window, release_list: ReleaseList, monkeypatch, qtbot, helper) -> None:
    monkeypatch.setenv(about.FEED_VARIABLE, release_list.address)
    release_list.name("999.1", "https://example.org/grpo-studio")
    assert not window.session.updates.check_at_start(), "not before the user turns it on"
    window.menus["update_checks"].trigger()
    assert window.menus["update_checks"].isChecked() and window.session.updates.check_at_start()
    qtbot.waitUntil(lambda: "999.1" in window.strip.sentence.text())
    assert window.strip.sentence.text().endswith("https://example.org/grpo-studio")
    ((path, headers),) = release_list.asked
    assert path == "/releases" and __version__ not in str(headers), "not even our version is told"
    assert not window.session.updates.check_at_start(), "once a day"
    window.session.prefs.updates_checked = time.time() - 90_000
    assert window.session.updates.check_at_start()


@pytest.mark.parametrize(
    "content",
    [
        {"version": "v2.0.0"},
        {"info": {"version": "2.0", "project_url": "https://example.org"}},
        {"tag_name": "v2.0.0", "html_url": "javascript:alert(1)"},
    ],
)
def test_three_kinds_of_lists_are_read(release_list: ReleaseList, content: dict[str, Any]) -> None:
    release_list.content = json.dumps(content).encode()
    found = ask(release_list.address)
    assert found and found["version"].startswith("2.0") and found["page"] in ("", "https://example.org")


@pytest.mark.parametrize("address", ["file:///etc/passwd", "http://example.org/x", "ftp://example.org"])
def test_only_https_is_asked(address: str) -> None:
    with pytest.raises(UserError, match="https"):
        ask(address)
