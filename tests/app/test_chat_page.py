"""The Chat page: choosing, loading, asking, stopping, scoring, and giving the memory back, with a service
that answers by hand. A real model is asked in test_real_runs.py."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QImage
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QToolButton

from app import theme
from app.pages.chat.answer_view import PromptPictures, split_thinking
from app.pages.chat.chat_page import ChatPage, ServePanel
from app.state.chat import HeldOutRow
from app.state.prefs import Prefs
from app.state.processes import VerbProcess
from app.state.session import Session
from backend.runs.run_folder import RunFolder
from tests.support.cases import cases
from tests.support.trained_run import make_run
from tests.support.trainer_by_hand import locked
from tests.support.windows import Asked, ServiceByHand, drop

MINE = '''from backend.rewards import register_reward_function
@register_reward_function("long")
def long(completions, **kwargs):
    """Long is good."""
    return [len(text) / 10 for text in completions]
'''
SCORED = {"rewards": {"r1_int_reward_func": 0.5, "r1_count_xml": 0.25}, "reward": 0.625, "advantage": 0.0}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs folder with a LoRA run of two checkpoints."""
    folder = tmp_path_factory.mktemp("chat")
    make_run(folder / "runs" / "first", folder / "models", (2.0, 1.0), system_prompt="Answer briefly.", temperature=0.5)
    return folder / "runs"


@pytest.fixture
def page(qtbot, session: Session, made: Path, monkeypatch) -> Iterator[ChatPage]:
    monkeypatch.setenv("GRPO_STUDIO_RUNS", str(made))
    session.service = ServiceByHand()
    page = ChatPage(session)
    page.chat._make_service = ServiceByHand
    qtbot.show(page, 1080, 700)
    yield page
    page.chat.unload()


def service_of(page: ChatPage) -> ServiceByHand:
    return page.chat._service


def load(page: ChatPage) -> ServiceByHand:
    page.load()
    service = service_of(page)
    service.last("chat_load").answer({"sides": ["base", "tuned"], "bytes": 2_000_000, "notes": []})
    return service


def send(page: ChatPage, prompt: str = "Hi") -> Asked:
    page.prompt.setPlainText(prompt)
    page.send()
    return service_of(page).last("chat_reply")


def reply(side: str, text: str, answer: str = "") -> dict[str, Any]:
    """The report of an answer that has ended."""
    group = {"prompt": "Hi", "answer": answer, "type": None, "messages": [], "columns": {}}
    group["completions"] = [{"text": text}]
    figures = {"tokens": 5, "stop": "eos", "prompt_tokens": 9, "prefilled": 9, "first_token_s": 0.05, "seconds": 0.25}
    return {"side": side, "text": text, "group": group, **figures}


def test_newest_run_is_chosen(page: ChatPage):
    assert page.models.text() == "first"
    labels = [page.checkpoints.itemText(i) for i in range(page.checkpoints.count())]
    assert labels == ["End, step 16", "Best, step 8", "Step 16", "Step 8"]
    assert page.notice.title.text() == "first" and "side by side" in page.notice.sentence.text()
    assert "Needs about 25" in page.notice.sentence.text(), "the process beside the model's kilobytes"
    assert page.notice.button.isHidden() and page.prompt.isVisible() and not page.rows.next.isEnabled()


def test_loading(page: ChatPage):
    page.checkpoints.setCurrentIndex(1)
    page.prompt.setPlainText("Hi")
    QTest.keyClick(page.prompt, Qt.Key.Key_Return)
    service = service_of(page)
    assert service.last("chat_load").arguments == {"name": str(page._choice.name), "checkpoint": "best"}
    assert (
        page.notice.title.text() == "Loading first" and page.notice.bar.isVisible() and not page.load_button.isEnabled()
    )
    service.last("chat_load").answer({"sides": ["base", "tuned"], "bytes": 2_000_000, "notes": []})
    assert service.last("chat_reply").arguments["prompt"] == "Hi", "it is sent once the model is loaded"
    page.load()
    page.notice.button.click()
    assert service.retired and page.chat.state == "empty" and page.notice.button.isHidden()


def test_what_was_asked_stays_with_its_run(qtbot, page: ChatPage):
    load(page)
    asked = send(page, "Mine")
    asked.report(reply("base", "One."))
    asked.answer({})
    page.choose("somebody/model")
    assert page.transcript.answers == [] and page.chat.state == "empty"
    later = qtbot.show(ChatPage(page.session), 1080, 700)  # after a restart
    assert later.transcript.answers[0]["base"].text.toPlainText() == "One." and later.transcript.isVisible()
    assert later.transcript.answers[0]["tuned"].status.text() == "Stopped"
    later.chat._make_service = ServiceByHand
    later.continues.click()
    load(later)
    assert send(later, "And?").arguments["turns"] == {
        "base": [["Mine", "One.", [], []]],
        "tuned": [["Mine", "", [], []]],
    }
    later.reset_button.click()
    assert later.transcript.answers == [] and next(later.chat._folder.iterdir()).read_text() == ""
    later.chat.unload()


def test_calls_of_tools_are_shown_as_they_run(page: ChatPage):
    load(page)
    assert page.use_tools.isHidden(), "the run has none"
    page.chat.unload()
    page.load()
    about = {"sides": ["base", "tuned"], "bytes": 2_000_000, "notes": [], "has_tools": True}
    service_of(page).last("chat_load").answer(about)
    asked = send(page)
    view = page.transcript.answers[0]["base"]
    assert asked.arguments["tools"] is True and page.use_tools.isVisible()
    call = {"name": "add", "arguments": {"a": 1}}
    turn = {"text": "So:", "tokens": 7, "calls": [call], "results": [], "result_tokens": 0}
    asked.report({"new_text": {"base": "So: <tool_call>"}})
    asked.report({"turns_of": "base", "turns": [turn]})
    assert view.status.text() == "Running add…" and view.text.toPlainText() == ""
    turn = turn | {"results": [{"name": "add", "content": "3", "failed": False, "seconds": 0.5}], "result_tokens": 4}
    asked.report({"turns_of": "base", "turns": [turn]})
    said = "Turn 1, 7 tokens\nSo:\n→ add(a=1)  500 ms\n← 3"
    assert view.calls.toPlainText() == said and not view.calls.isHidden()
    asked.report({"new_text": {"base": "It is 3."}})
    last = {"text": "It is 3.", "tokens": 5, "calls": [], "results": [], "result_tokens": 0}
    asked.report(reply("base", "It is 3.") | {"turns": [turn, last]})
    assert (view.calls.toPlainText(), view.text.toPlainText()) == (said, "It is 3.")
    asked.answer({})
    page.use_tools.click()
    page.continues.click()
    again = send(page, "And?").arguments
    assert again["tools"] is False and again["turns"]["base"] == [["Hi", "It is 3.", [turn, last], []]]


def test_both_sides_stream_and_are_scored(page: ChatPage):
    service = load(page)
    assert page.about.text() == "Base and tuned are loaded, 2.00 MB of weights.".replace(" MB", "\u202fMB")
    asked = send(page)
    assert asked.arguments["sides"] == ["base", "tuned"] and asked.arguments["temperature"] == 0.5
    assert asked.arguments["system"] is None, "the run's own, which the engine knows"
    assert page.send_button.text() == "Stop" and page.prompt.toPlainText() == ""
    asked.report({"new_text": {"base": "On", "tuned": "Tw"}})
    asked.report({"new_text": {"base": "e"}})
    views = page.transcript.answers[0]
    assert (views["base"].text.toPlainText(), views["tuned"].text.toPlainText()) == ("One", "Tw")
    asked.report(reply("base", "One."))
    scoring = service.last("score").arguments
    assert scoring["settings"]["reward_functions"] == ["r1_int", "r1_count_xml"] and not scoring["with_cases"]
    service.last("score").answer({"scored": [[SCORED]], "functions": []})
    assert views["base"].text.toPlainText() == "One."
    assert "5 tokens, ended, the first after 50" in views["base"].status.text()
    assert (
        "0.625" in views["base"].scores.text()
        and theme.reward_colour("r1_int_reward_func").name() in views["base"].scores.text()
    )
    assert views["tuned"].status.text() == "Writing…"
    asked.report(reply("tuned", "Two"))
    asked.answer({})
    assert page.chat.state == "ready" and page.send_button.text() == "Send" and not page.send_button.isEnabled()


def test_escape_stops(page: ChatPage):
    service = load(page)
    asked = send(page)
    asked.report({"new_text": {"tuned": "Tw"}})
    QTest.keyClick(page.prompt, Qt.Key.Key_Escape)
    assert service.cancelled == [service.asked.index(asked) + 1] and page.chat.state == "ready"
    assert page.transcript.answers[0]["tuned"].status.text() == "Stopped"
    page.sides.choose("tuned")
    assert send(page, "Alone").arguments["turns"] == {"tuned": []}
    page.chat.stop()
    page.continues.click()
    later = send(page, "And now?")
    assert later.arguments["sides"] == ["tuned"] and later.arguments["turns"] == {"tuned": [["Alone", "", [], []]]}
    later.answer({})
    page.new_conversation()
    assert send(page).arguments["turns"] == {"tuned": []} and len(page.transcript.answers) == 1


@pytest.fixture
def seeing(page: ChatPage) -> ChatPage:
    """The page with its run, as if its model read pictures."""
    page._choice = replace(page._choice, reads_images=True)
    load(page)
    return page


def remove(page: ChatPage, file: str) -> None:
    QApplication.processEvents()
    buttons = [each for each in page.pictures.findChildren(QToolButton) if each.isVisible()]
    next(each for each in buttons if each.toolTip() == f"Remove {Path(file).name}").click()


def test_pictures_are_dropped_chosen_removed_and_asked_about(seeing: ChatPage, tmp_path: Path, monkeypatch):
    page, files = seeing, [tmp_path / f"{name}.png" for name in ("red", "green", "blue")]
    for file in files:
        QImage(8, 8, QImage.Format.Format_RGB32).save(str(file))
    red, green, blue = map(str, files)
    drop(page.prompt.viewport(), files[0])
    drop(page, files[1])
    monkeypatch.setattr("app.pages.chat.chat_page.open_file", lambda *_: files[2])
    page.add_pictures.click()
    assert page.pictures.paths == [red, green, blue] and not page.prompt.toPlainText()
    drop(page, tmp_path / "notes.txt")
    remove(page, green)
    asked = send(page, "What is this?")
    assert asked.arguments["images"] == [red, blue] and page.pictures.paths == []
    shown = page.transcript.widget().findChild(PromptPictures)
    assert shown.paths == [red, blue] and not shown.findChildren(QToolButton)
    asked.answer({})
    page.continues.click()
    again = send(page, "And now?").arguments
    assert again["images"] == [] and again["turns"]["base"] == [["What is this?", "", [], [red, blue]]]
    row = {"row": 0, "of": 8, "source": "rows.jsonl", "prompt": "Which?", "images": [red], "answer": "0"}
    service_of(page).last("chat_reply").answer({})
    page.chat.row = HeldOutRow(**row)
    page.chat.row_changed.emit()
    assert page.pictures.paths == [red], "those of the row"
    remove(page, red)
    assert send(page, "Which?").arguments["row"] is None, "another question without them"


def test_a_model_that_reads_text_only_is_shown_no_picture(page: ChatPage, tmp_path: Path, told):
    drop(page, tmp_path / "red.png")
    assert told == ["first reads text only, so it cannot be shown a picture."]
    assert page.pictures.paths == [] and page.add_pictures.isHidden()


def test_rows_of_the_dataset(page: ChatPage):
    service = load(page)
    send(page, "Before").answer({})
    page.rows.next.click()
    assert service.last("chat_row").arguments == {"row": 0}
    row = {"row": 0, "of": 8, "source": "rows.jsonl", "prompt": "0 plus 0?", "images": [], "answer": "0"}
    service.last("chat_row").answer(row)
    assert page.prompt.toPlainText() == "0 plus 0?" and page.rows.about.text() == "Row 1 of 8"
    page.send()
    asked = service.last("chat_reply").arguments
    assert (asked["row"], asked["answer"], asked["turns"]) == (0, "0", {"base": [], "tuned": []})
    assert page.rows.expected.text() == "", "the next prompt has another answer"
    service.last("chat_reply").answer({})
    assert [turn.is_first for turn in page.chat.turns] == [True, True]
    page.continues.click()
    assert send(page, "Why?").arguments["row"] == 0, "its conversation goes on"
    service.last("chat_reply").answer({})
    page.rows.previous.click()
    assert service.last("chat_row").arguments == {"row": -1}


def test_sampling_settings(page: ChatPage):
    load(page)
    page.prompt.setPlainText("Hi")
    assert page.panel.fields["temperature"].text() == "0.5" and page.send_button.isEnabled()
    for key, wrong in (("temperature", "-1"), ("top_p", "0"), ("top_k", "1.5"), ("max_tokens", "0"), ("seed", "")):
        right = page.panel.fields[key].text()
        page.panel.fields[key].setText(wrong)
        assert not page.send_button.isEnabled() and page.panel.problem.text(), key
        page.panel.fields[key].setText(right)
    page.panel.fields["max_tokens"].setText("2000000")
    assert page.panel.problem.text() == "Max tokens is a whole number from 1 to 1,000,000."
    page.panel.fields["max_tokens"].setText("64")
    page.panel.system.setPlainText("Be kind.")
    assert send(page).arguments["system"] == "Be kind." and page.panel.restore.isEnabled()
    page.panel.restore.click()
    assert page.panel.system_message() is None


def test_training_run_gets_the_memory(page: ChatPage, made: Path):
    service = load(page)
    with locked(RunFolder(made / "first")):
        page._check_live_run()
        assert service.retired and page.chat.state == "empty"
        assert page.notice.title.text() == "A run is training"
        assert "first needs this machine's memory" in page.notice.sentence.text()
        assert not page.load_button.isEnabled() and not page.notice.button.isVisible()
        page.load()
        assert page.chat.state == "empty"
    RunFolder(made / "first").lock.unlink()
    page._check_live_run()
    assert page.load_button.isEnabled() and page.notice.title.text() == "first"


def test_reward_code_runs_only_with_consent(page: ChatPage, made: Path, tmp_path: Path, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    settings = {"reward_functions": ["long", "r1_int"], "reward_weights": [1.0, 1.0]}
    settings["reward_functions_file"] = str(file)
    make_run(tmp_path / "runs" / "own", made.parent / "models", **settings)
    monkeypatch.setenv("GRPO_STUDIO_RUNS", str(tmp_path / "runs"))
    page.choose_run(RunFolder(tmp_path / "runs" / "own"))
    assert page.chat.state == "loading", "another page's button loads at once"
    load(page)
    assert "not allowed to run" in page.about.text()
    send(page).report(reply("base", "text"))
    assert not [asked for asked in service_of(page).asked if asked.name == "score"]
    page.session.consent.ask = lambda requests: True
    service = load(page)
    asked = send(page)
    asked.report(reply("base", "text"))
    assert service.last("score").arguments["settings"]["reward_functions_file"] == str(file)
    scores = {"rewards": {"long": 0.4, "r1_int_reward_func": 0.0}, "reward": 0.4}
    service.last("score").answer({"scored": [[scores]], "functions": []})
    assert "Reward 0.400" in page.transcript.answers[-1]["base"].scores.text()


@cases(
    ("text", "parts"),
    [
        ("plain", ("", "plain")),
        ("<think>a b</think>\n\nfour", ("a b", "four")),
        ("a b</think>four", ("a b", "four")),
        ("<think>still", ("still", "")),
        ("<think></think>four", ("", "<think></think>four")),
    ],
)
def test_split_thinking(text: str, parts: tuple[str, str]):
    assert split_thinking(text) == parts


SERVER = """import json, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if "7" in sys.argv:
    sys.exit("port: Port 7 is in use.")
about = {"url": "http://127.0.0.1:8090/v1", "models": ["base", "first"], "needs_key": False}
print(json.dumps(about | {"argv": sys.argv[1:]}), flush=True)
time.sleep(60)
"""


@pytest.fixture
def serving(page: ChatPage, tmp_path: Path, monkeypatch) -> Iterator[ServePanel]:
    """The panel of a page whose server is a script."""
    (tmp_path / "server.py").write_text(SERVER)
    command = [sys.executable, str(tmp_path / "server.py")]
    monkeypatch.setattr("app.state.chat.backend_command", lambda *arguments: [*command, *arguments])
    page.serve_button.click()
    yield page.serving
    page.endpoint.close()


def serve(qtbot, page: ChatPage, port: str = "8090") -> VerbProcess:
    page.serving.port.setText(port)
    page.serving.start.click()
    task = page.endpoint._task
    assert task is not None and page.endpoint.state == "starting" and not page.serving.port.isEnabled()
    qtbot.waitUntil(lambda: page.endpoint.state in ("serving", "off"))
    return task


def test_serving(qtbot, page: ChatPage, serving: ServePanel):
    assert serving.isVisible() and serving.port.text() == "8080" and "Needs about" in serving.status.text()
    page.checkpoints.setCurrentIndex(1)
    task = serve(qtbot, page)
    choice = page._choice
    options = ["--checkpoint", "best", "--port", "8090", "--parent", str(os.getpid()), "--json"]
    assert task.command[2:] == ["endpoint", choice.name, *options]
    assert serving.status.text() == "Serving first, Best, step 8" and page.serve_button.text() == "Serving"
    serving.copy.click()
    assert QApplication.clipboard().text() == serving.url.text() == "http://127.0.0.1:8090/v1"
    assert serving.models.text() == "Models: base, first"
    page.choose("somebody/model")
    assert serving.status.text() == "Serving first, Best, step 8", "another choice leaves it alone"
    serving.start.click()
    qtbot.waitUntil(lambda: page.endpoint.state == "off")
    assert serving.problem.isHidden() and not serving.url.isVisible()
    assert serving.start.text() == "Start" and page.serve_button.text() == "Serve"
    assert Prefs(page.session.prefs.folder).endpoint_port == 8090


def test_server_that_does_not_start(qtbot, page: ChatPage, serving: ServePanel):
    serve(qtbot, page, "7")
    assert serving.problem.text() == "Port 7 is in use." and serving.start.isEnabled() and serving.port.isEnabled()
    serving.port.setText("70000")
    assert not serving.start.isEnabled()
    task = serve(qtbot, page)
    task._process.terminate()
    qtbot.waitUntil(lambda: page.endpoint.state == "off")
    assert serving.problem.text() == "The server was ended by another program."


def test_server_ends_with_the_window(qtbot, page: ChatPage, serving: ServePanel):
    task = serve(qtbot, page)
    with qtbot.waitSignal(task.done):
        page.endpoint.close()  # as the app does when it quits
    assert not task.is_running


def test_server_ends_when_the_window_is_killed():
    server = "from backend.cli.endpoint import _end_with; _end_with({})"
    window = f"import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', '{server}'.format(os.getpid())])"
    subprocess.run([sys.executable, "-c", window], stdout=subprocess.PIPE, timeout=30, check=True)  # until both ended
