"""The window's service: it never blocks, starts its process with the first question, and survives the death of that
process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PySide6.QtCore import QObject
from pytestqt.qtbot import QtBot

from app.state.processes import Service
from backend.utils.errors import ConfigProblem

CHILD = """
import json, os, sys, time
for line in sys.stdin:
    message = json.loads(line)
    number, name = message.get("id"), message.get("ask")
    def reply(**fields):
        sys.stdout.buffer.write(json.dumps({"id": number, **fields}, ensure_ascii=False).encode() + b"\\n")
        sys.stdout.buffer.flush()
    if name == "echo":
        reply(progress={"half": 1}); reply(answer=message["with"])
    elif name == "pid":
        reply(answer=os.getpid())
    elif name == "refuse":
        reply(faults=[{"setting": "model", "sentence": "There is no model x."}])
    elif name == "die":
        print("out of luck", file=sys.stderr, flush=True); os._exit(3)
    elif name == "slow":  # half a line, and half a character, at a time
        text = json.dumps({"id": number, "answer": "é" * 9}, ensure_ascii=False).encode() + b"\\n"
        for at in range(0, len(text), 7):
            sys.stdout.buffer.write(text[at:at + 7]); sys.stdout.buffer.flush(); time.sleep(0.01)
    elif "cancel" in message:
        open(sys.argv[1], "a").write(f"{message['cancel']}\\n")
"""


@pytest.fixture
def cancelled(tmp_path: Path) -> Path:
    return tmp_path / "cancelled"


@pytest.fixture
def service(qtbot: QtBot, cancelled: Path) -> Iterator[Service]:
    made = Service(command=[sys.executable, "-c", CHILD, str(cancelled)])
    yield made
    made.close()


class Replies:
    """What came back for a question."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.faults: list[ConfigProblem] = []
        self.progress: list[dict[str, Any]] = []

    def ask(self, service: Service, question: str, **with_: Any) -> int:
        return service.ask(
            question, self.answers.append, on_refused=self.faults.extend, on_progress=self.progress.append, **with_
        )


def wait_until(qtbot: QtBot, condition: Callable[[], object]) -> None:
    qtbot.waitUntil(lambda: bool(condition()))


def test_no_callback_of_a_cancelled_question_is_called(qtbot: QtBot, service: Service, cancelled: Path):
    replies, after = Replies(), Replies()
    number = replies.ask(service, "echo")
    service.cancel(number)
    after.ask(service, "echo")
    wait_until(qtbot, lambda: after.answers and cancelled.exists())
    assert not replies.answers and not replies.progress
    assert cancelled.read_text() == f"{number}\n"


def test_a_question_is_cancelled_when_its_owner_is_destroyed(qtbot: QtBot, service: Service, cancelled: Path):
    replies, after, owner = Replies(), Replies(), QObject()
    number = replies.ask(service, "echo", owner=owner)
    del owner
    after.ask(service, "echo")
    wait_until(qtbot, lambda: after.answers and cancelled.exists())
    assert not replies.answers and cancelled.read_text() == f"{number}\n"


def test_a_process_that_dies_refuses_its_questions_and_is_replaced(qtbot: QtBot, service: Service):
    replies, again = Replies(), Replies()
    replies.ask(service, "die")
    wait_until(qtbot, lambda: replies.faults)
    assert "ended before it answered: out of luck." in replies.faults[0].sentence
    again.ask(service, "echo", x=2)
    wait_until(qtbot, lambda: again.answers)
    assert again.answers == [{"x": 2}]


def test_a_command_that_cannot_be_started_refuses(qtbot: QtBot):
    service, replies = Service(command=["/nowhere/python"]), Replies()
    replies.ask(service, "echo")
    wait_until(qtbot, lambda: replies.faults)
    assert "No such file" in replies.faults[0].sentence or "execve" in replies.faults[0].sentence


def test_close_ends_the_process_and_refuses_later_questions(qtbot: QtBot, service: Service):
    replies, late = Replies(), Replies()
    replies.ask(service, "pid")
    wait_until(qtbot, lambda: replies.answers)
    service.close()
    with pytest.raises(ProcessLookupError):
        os.kill(replies.answers[0], signal.SIGCONT)
    late.ask(service, "echo")
    wait_until(qtbot, lambda: late.faults)
    assert late.faults == [ConfigProblem("", "The window is closing.")]


def test_the_real_process_answers(qtbot: QtBot):
    service, replies = Service(), Replies()
    replies.ask(service, "weather")
    wait_until(qtbot, lambda: replies.faults)
    service.close()
    assert replies.faults == [ConfigProblem("", "There is no question weather.")]
