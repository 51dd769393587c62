"""The window's desk: it never waits, it starts its process when it is first asked, and it outlives that process."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PySide6.QtCore import QObject
from pytestqt.qtbot import QtBot

from app.desk import Desk
from app.prefs import Prefs
from app.studio import Studio
from backend.spec.faults import Fault

CHILD = """
import json, os, sys, time
for line in sys.stdin:
    said = json.loads(line)
    number, name = said.get("id"), said.get("ask")
    def say(**what):
        sys.stdout.buffer.write(json.dumps({"id": number, **what}, ensure_ascii=False).encode() + b"\\n")
        sys.stdout.buffer.flush()
    if name == "echo":
        say(progress={"half": 1}); say(answer=said["with"])
    elif name == "pid":
        say(answer=os.getpid())
    elif name == "refuse":
        say(faults=[{"setting": "model", "sentence": "There is no model x."}])
    elif name == "die":
        print("out of luck", file=sys.stderr, flush=True); os._exit(3)
    elif name == "slow":  # half a line, and half a character, at a time
        text = json.dumps({"id": number, "answer": "é" * 9}, ensure_ascii=False).encode() + b"\\n"
        for at in range(0, len(text), 7):
            sys.stdout.buffer.write(text[at:at + 7]); sys.stdout.buffer.flush(); time.sleep(0.01)
    elif "cancel" in said:
        open(sys.argv[1], "a").write(f"{said['cancel']}\\n")
"""


@pytest.fixture
def cancelled(tmp_path: Path) -> Path:
    return tmp_path / "cancelled"


@pytest.fixture
def desk(qtbot: QtBot, cancelled: Path) -> Iterator[Desk]:
    made = Desk(command=[sys.executable, "-c", CHILD, str(cancelled)])
    yield made
    made.close()


class Heard:
    """What came back for a question."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.faults: list[Fault] = []
        self.told: list[dict[str, Any]] = []

    def ask(self, desk: Desk, question: str, **with_: Any) -> int:
        return desk.ask(question, self.answers.append, refused=self.faults.extend, told=self.told.append, **with_)


def until(qtbot: QtBot, true: Callable[[], object]) -> None:
    qtbot.waitUntil(lambda: bool(true()), timeout=10_000)


def test_answers_come_back_later_and_not_at_once(qtbot: QtBot, desk: Desk):
    heard = Heard()
    began = time.monotonic()
    heard.ask(desk, "echo", name="é")
    assert time.monotonic() - began < 0.2 and not heard.answers
    until(qtbot, lambda: heard.answers)
    assert heard.answers == [{"name": "é"}] and heard.told == [{"half": 1}] and not heard.faults


def test_one_process_answers_everything(qtbot: QtBot, desk: Desk):
    heard = Heard()
    for _ in range(3):
        heard.ask(desk, "pid")
    until(qtbot, lambda: len(heard.answers) == 3)
    assert len(set(heard.answers)) == 1


def test_a_refusal_names_its_setting(qtbot: QtBot, desk: Desk):
    heard = Heard()
    heard.ask(desk, "refuse")
    until(qtbot, lambda: heard.faults)
    assert heard.faults == [Fault("model", "There is no model x.")]


def test_an_answer_cut_anywhere_is_whole(qtbot: QtBot, desk: Desk):
    heard = Heard()
    heard.ask(desk, "slow")
    until(qtbot, lambda: heard.answers)
    assert heard.answers == ["é" * 9]


def test_what_is_taken_back_is_heard_of_no_more(qtbot: QtBot, desk: Desk, cancelled: Path):
    heard, after = Heard(), Heard()
    number = heard.ask(desk, "echo")
    desk.cancel(number)
    after.ask(desk, "echo")
    until(qtbot, lambda: after.answers and cancelled.exists())
    assert not heard.answers and not heard.told
    assert cancelled.read_text() == f"{number}\n"


def test_a_question_goes_with_its_owner(qtbot: QtBot, desk: Desk, cancelled: Path):
    heard, after, owner = Heard(), Heard(), QObject()
    number = heard.ask(desk, "echo", owner=owner)
    del owner
    after.ask(desk, "echo")
    until(qtbot, lambda: after.answers and cancelled.exists())
    assert not heard.answers and cancelled.read_text() == f"{number}\n"


def test_a_process_that_dies_refuses_in_a_sentence_and_is_replaced(qtbot: QtBot, desk: Desk):
    heard, again = Heard(), Heard()
    heard.ask(desk, "die")
    until(qtbot, lambda: heard.faults)
    assert "ended before it answered: out of luck." in heard.faults[0].sentence
    again.ask(desk, "echo", x=2)
    until(qtbot, lambda: again.answers)
    assert again.answers == [{"x": 2}]


def test_one_that_dies_again_and_again_is_started_no_more(qtbot: QtBot, desk: Desk):
    for tries in range(1, 4):
        heard = Heard()
        heard.ask(desk, "die")
        assert not heard.faults, "never before the caller went on"
        until(qtbot, lambda heard=heard: heard.faults)
        assert ("Open GRPO Studio again" in heard.faults[0].sentence) == (tries > 1)
    assert desk._process is None


def test_a_command_that_cannot_be_started_is_said(qtbot: QtBot):
    desk, heard = Desk(command=["/nowhere/python"]), Heard()
    heard.ask(desk, "echo")
    until(qtbot, lambda: heard.faults)
    assert "No such file" in heard.faults[0].sentence or "execve" in heard.faults[0].sentence


def test_closing_ends_the_process_and_refuses_what_comes_later(qtbot: QtBot, desk: Desk):
    heard, late = Heard(), Heard()
    heard.ask(desk, "pid")
    until(qtbot, lambda: heard.answers)
    desk.close()
    with pytest.raises(ProcessLookupError):
        os.kill(heard.answers[0], signal.SIGCONT)
    late.ask(desk, "echo")
    until(qtbot, lambda: late.faults)
    assert late.faults == [Fault("", "The window is closing.")]


def test_the_session_has_one_desk_and_starts_nothing_for_it(qtbot: QtBot, tmp_path: Path):
    studio = Studio(Prefs(tmp_path / "prefs"))
    assert studio.desk is studio.desk and studio.desk._process is None


def test_the_real_process_answers(qtbot: QtBot):
    desk, heard = Desk(), Heard()
    heard.ask(desk, "weather")
    until(qtbot, lambda: heard.faults)
    desk.close()
    assert heard.faults == [Fault("", "There is no question weather.")]
