"""The picker: typing filters, the arrows move, Enter takes; the Hub is a question away, and no page waits for it."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from pytestqt.qtbot import QtBot

from app.pages.train import picker as picker_module
from app.pages.train.picker import WHERE, DownloadRow, Picker, PickerEntry, PickerLine, suggested_models
from app.pages.train.train_page import TrainPage
from app.state.jobs import Downloads
from app.state.prefs import Prefs
from app.state.session import Session
from backend.utils.errors import ConfigProblem
from tests.models.test_hub import FILES, GGUF, MLX, Repo, point_at
from tests.support.hub_server import HubStandIn
from tests.support.windows import ServiceByHand, ServiceHere

NOW = time.time()
SMALL = {"kind": "qwen3", "precision": "4-bit", "changed": NOW}
BASE = {"kind": "llama", "precision": "bf16", "changed": NOW - 9e6, "remarks": ["It has no chat template."]}
LOCAL: list[dict[str, Any]] = [
    {"id": "a/small-4bit", "name": "a/small-4bit", "where": "cache", "place": "/c/a", "size": 352_000_000} | SMALL,
    {"id": "/m/base", "name": "base", "where": "folder", "place": "/m/base", "size": 16_100_000_000} | BASE,
    {"id": "a/gguf", "name": "a/gguf", "where": "cache", "size": 5, "refusal": "It is a GGUF file."},
    {"id": "a/half", "name": "a/half", "where": "cache", "partial": 1_240_000_000, "refusal": "Unfinished: resume it."},
]
HUB: list[dict[str, Any]] = [
    {"id": "b/new-4bit", "size": 968_000_000, "downloads": 41_230} | SMALL,
    {"id": "b/bad", "size": None, "refusal": "It is a GGUF file.", "downloads": 7},
]


@pytest.fixture
def session(session: Session) -> Session:
    session.service = ServiceByHand()  # pyright: ignore
    session.downloads = Downloads(session.service)
    return session


def open_picker(qtbot: QtBot, session: Any, local: list[dict[str, Any]]) -> Picker:
    widget = Picker("model", session)
    qtbot.addWidget(widget)
    widget.choose(lambda _: None)
    session.service.last("models").answer({"found": local})
    return widget


@pytest.fixture
def picker(qtbot: QtBot, session: Session, monkeypatch) -> Picker:
    monkeypatch.setattr(picker_module, "suggested_models", list)
    session.prefs.remember_used("model", "/m/base")
    return open_picker(qtbot, session, LOCAL)


def row_texts(picker: Picker) -> list[str]:
    """Every row from the top: headings in brackets."""
    return [f"[{row.text}]" if isinstance(row, PickerLine) else row.name for row in picker.model.rows]


def press(picker: Picker, *keys: Qt.Key, control: bool = False) -> None:
    modifier = Qt.KeyboardModifier.ControlModifier if control else Qt.KeyboardModifier.NoModifier
    for qt_key in keys:
        QTest.keyClick(picker.search, qt_key, modifier)


def current(picker: Picker) -> str:
    row = picker.table.selected_row
    return row.id if isinstance(row, PickerEntry) else row.text if row else ""


def cell(picker: Picker, name: str, column: int) -> str:
    place = row_texts(picker).index(name)
    return str(picker.model.index(place, column).data())


def test_recent_entries_come_first(picker: Picker):
    assert row_texts(picker) == ["[Recent]", "base", "[On this machine]", "a/small-4bit", "a/gguf", "a/half"]
    assert current(picker) == "/m/base" and picker.take.isEnabled() and picker.take.text() == "Use"


def test_the_hub_is_searched_on_request(picker: Picker, session: Any):
    QTest.keyClicks(picker.search, "4")
    press(picker, Qt.Key.Key_Return, control=True)
    older = session.service.last("hub_search")
    QTest.keyClicks(picker.search, "bit")
    press(picker, Qt.Key.Key_Return, control=True)
    older.answer({"found": HUB})
    assert row_texts(picker)[-1] == "[Searching…]", "an answer to an older question"
    asked = session.service.last("hub_search")
    assert asked.arguments == {"words": "4bit", "repo_type": "model", "is_reward": False}
    asked.answer({"found": HUB})
    assert row_texts(picker) == ["[On this machine]", "a/small-4bit", "[On Hugging Face]", "b/new-4bit", "b/bad"]
    picker.choose_id("b/new-4bit")
    assert picker.take.text().replace("\u202f", " ") == "Download 968 MB"
    assert cell(picker, "b/new-4bit", WHERE) == "41,230 downloads"
    press(picker, Qt.Key.Key_Return)
    assert session.service.last("download").arguments["id"] == "b/new-4bit"
    assert session.prefs.used("model")[0] == "b/new-4bit"


def test_suggested_models(qtbot: QtBot, session: Any, monkeypatch):
    monkeypatch.setattr("backend.utils.machine.machine_bytes", lambda: 2_000_000_000)
    entries = suggested_models()
    picker = open_picker(qtbot, session, [{"id": entries[1].id, "name": entries[1].id, "where": "cache"}])
    assert row_texts(picker)[:3] == ["[On this machine]", entries[1].id, "[Suggested downloads]"]
    assert row_texts(picker).count(entries[1].id) == 1, "what is here is not offered once more"
    assert [cell(picker, entry.id, WHERE) for entry in (entries[0], entries[-1])] == ["Fits", "Too large"]
    picker.choose_id(entries[0].id)
    assert picker.take.text().replace("\u202f", " ") == "Download 294 MB"
    assert "first run on any Mac" in picker.detail.text() and "of 2.0\u00a0GB." in picker.detail.text()
    press(picker, Qt.Key.Key_Return)
    assert session.service.last("download").arguments["id"] == entries[0].id
    QTest.keyClicks(picker.search, "llama")
    assert row_texts(picker)[:2] == ["[Suggested downloads]", "mlx-community/Llama-3.2-1B-Instruct-4bit"]


def test_a_download_is_paused_resumed_and_done(qtbot: QtBot):
    service: Any = ServiceByHand()
    downloads = Downloads(service)
    download = downloads.start("model", "a/b")
    assert downloads.start("model", "a/b") is download and len(service.asked) == 1, "not twice at a time"
    service.last("download").report({"phase": "downloading", "done": 10, "total": 40})
    assert (download.done, download.total, download.state) == (10, 40, "running")
    downloads.pause(download)
    assert service.cancelled == [1] and download.state == "paused" and downloads.of("model") == [download]
    downloads.start("model", "a/b")
    with qtbot.waitSignal(downloads.finished):
        service.last("download").answer({"place": "/p"})
    assert download.state == "done" and downloads.of("model") == []


def test_a_failed_download_says_why_and_can_be_tried_again(qtbot: QtBot):
    service: Any = ServiceByHand()
    downloads = Downloads(service)
    download = downloads.start("model", "a/b")
    line = DownloadRow(download, downloads)
    qtbot.addWidget(line)
    service.last("download").refuse([ConfigProblem("model", "The disk is full.")])
    line.show_progress(download)
    assert download.state == "failed" and line.trouble.text() == "The disk is full." and "stopped" in line.status.text()
    line.pause.click()
    line.show_progress(download)
    assert download.state == "running" and len(service.asked) == 2 and line.trouble.isHidden()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch) -> Iterator[HubStandIn]:
    stand_in = HubStandIn({"someone/tiny-4bit": Repo(FILES, MLX), "someone/tiny-gguf": Repo(FILES, GGUF)})
    monkeypatch.setenv("HOME", str(tmp_path))
    with stand_in:
        point_at(stand_in.url, tmp_path / "hf", monkeypatch)
        yield stand_in


@pytest.fixture
def page(qtbot: QtBot, tmp_path: Path, monkeypatch) -> TrainPage:
    monkeypatch.setattr(picker_module, "SETTLE_MS", 0)
    session = Session(Prefs(tmp_path / "prefs"))
    session.service = ServiceHere()  # pyright: ignore
    return qtbot.show(TrainPage(session))


def test_hub_model_by_keyboard(qtbot: QtBot, page: TrainPage, hub: HubStandIn):
    field = page.form.fields["model"]
    field.control.setFocus()
    QTest.keyClick(field.control, Qt.Key.Key_Down)
    picker = page.picking._pickers["model"]
    assert picker.isVisible()
    # “There are no models on this machine yet”, it said, although the bundled one is on every machine.
    qtbot.waitUntil(lambda: "Bundled demo/model" in row_texts(picker))
    assert cell(picker, "Bundled demo/model", WHERE) == "Bundled"
    assert "[Suggested downloads]" in row_texts(picker)
    QTest.keyClicks(picker.search, "tiny")
    press(picker, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: "someone/tiny-4bit" in row_texts(picker))
    assert cell(picker, "someone/tiny-gguf", WHERE) == "Cannot be used"
    picker.choose_id("someone/tiny-4bit")
    press(picker, Qt.Key.Key_Return)
    assert page.draft.value("model") == "someone/tiny-4bit", "the field has its name at once"
    qtbot.waitUntil(lambda: "[On this machine]" in row_texts(picker) or "[Recent]" in row_texts(picker))
    picker.choose_id("someone/tiny-4bit")
    assert picker.take.text() == "Use" and "someone/tiny-4bit" not in picker.downloads
    assert page.session.prefs.used("model") == ["someone/tiny-4bit"]
    qtbot.waitUntil(lambda: "4-bit" in page.form.fields["model"]._note.text())


def write_unsupported_model(folder: Path, kind: str = "marvin") -> str:
    """A folder with weights of an unknown model type."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).write_text("")
    return str(folder)


def test_unsupported_model(qtbot: QtBot, page: TrainPage, tmp_path: Path, monkeypatch):
    sentence = "strange cannot be trained. This version of mlx-lm knows no model of the kind marvin."
    draft, field = page.draft, page.form.fields["model"]
    monkeypatch.setattr("app.state.run_starter.start_detached", lambda *_: pytest.fail("it was started"))
    draft.set("data", "a/b")
    field.take(write_unsupported_model(tmp_path / "strange"))
    qtbot.waitUntil(lambda: field._problem is not None and field._problem.text() == sentence)
    assert [fault.sentence for fault in draft.problems()] == [sentence]
    page.session.starter.start()
    assert page.session.messages.current is not None and page.session.messages.current.sentence == sentence
    write_unsupported_model(tmp_path / "strange", "llama")
    page.session.starter.start()
    qtbot.waitUntil(lambda: not draft.problems())
    draft.set("model", str(tmp_path / "another"))
    assert "cannot be trained" not in draft.problems()[0].sentence
