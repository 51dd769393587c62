"""Backend processes: a training outlives its window; the service never blocks, and survives the death of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PySide6.QtCore import QCoreApplication, QObject
from pytestqt.qtbot import QtBot

from app.state.processes import ProcessOutcome, Service, VerbProcess
from backend.utils.errors import ConfigProblem
from backend.utils.places import project_root

pytestmark = pytest.mark.usefixtures("helper")

CHILD = """
import json, os, sys, time
print("to stdout é"); print("to stderr", file=sys.stderr)
about = {"pid": os.getpid(), "sid": os.getsid(0), "group": os.getpgid(0), "cwd": os.getcwd(),
         "path": os.environ["PYTHONPATH"], "stdin": sys.stdin.read()}
json.dump(about, open("about.json", "w"))
while not os.path.exists("enough"):
    time.sleep(0.02)
open("survived", "w").write("yes")
"""

WINDOW = """
import sys, time
from pathlib import Path
from app.state.processes import start_detached
from backend.runs.run_folder import RunFolder
start_detached([sys.executable, "-c", sys.argv[2]], RunFolder(Path(sys.argv[1])))
print("started", flush=True)
time.sleep(60)
"""


def wait_for(path: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not (path.exists() and path.stat().st_size):
        assert time.monotonic() < deadline, f"{path} was never written"
        time.sleep(0.02)


def started_by_a_window(folder: Path, death: int) -> dict:
    """Start the child from another process, end that process with a signal, and return what the child reports."""
    folder.mkdir()
    (folder / "log.txt").write_text("before\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(project_root())}
    window = subprocess.Popen(
        [sys.executable, "-P", "-c", WINDOW, str(folder), CHILD], env=environment, stdout=subprocess.PIPE
    )
    try:
        assert window.stdout is not None
        assert window.stdout.readline() == b"started\n"
        wait_for(folder / "about.json")
    finally:
        window.send_signal(death)
        window.wait(60)
        window.stdout.close()
    return json.loads((folder / "about.json").read_text())


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGINT])
def test_a_training_outlives_its_window(tmp_path: Path, death: int) -> None:
    folder = tmp_path / "run"
    child = started_by_a_window(folder, death)
    os.kill(child["pid"], 0)  # raises where there is no such process
    assert child["group"] == child["sid"] != os.getsid(0)
    assert child["cwd"] == str(folder)
    assert child["path"].split(os.pathsep)[0] == str(project_root())
    assert child["stdin"] == ""
    (folder / "enough").touch()
    wait_for(folder / "survived")
    lines = (folder / "log.txt").read_text(encoding="utf-8").split("\n")[:3]
    assert sorted(lines) == ["before", "to stderr", "to stdout é"]


def outcome_of(qtbot, *command: str) -> tuple[ProcessOutcome, list[str]]:
    short = VerbProcess(list(command), QCoreApplication.instance())
    lines: list[str] = []
    short.line.connect(lines.append)
    with qtbot.waitSignal(short.done) as ended:
        short.start()
    return ended.args[0], lines


def python(qtbot, text: str) -> tuple[ProcessOutcome, list[str]]:
    return outcome_of(qtbot, sys.executable, "-c", text)


def test_a_character_split_between_two_reads_is_decoded(qtbot) -> None:
    # Decoding each read by itself gives two replacement characters here.
    outcome, lines = python(
        qtbot,
        "import sys, time; out = sys.stdout.buffer\n"
        "for piece in (b'caf\\xc3', b'\\xa9 and', b' more\\nlast'):\n"
        "    out.write(piece); out.flush(); time.sleep(0.05)",
    )
    assert lines == ["café and more", "last"]
    assert outcome == ProcessOutcome(True, "last", "café and more\nlast")


def test_failed_killed_missing_and_cancelled_verbs(qtbot, tmp_path: Path) -> None:
    outcome, lines = python(qtbot, "import sys; print('working'); print('It is full.',  file=sys.stderr); sys.exit(2)")
    assert (outcome.ok, outcome.sentence) == (False, "It is full.") and sorted(lines) == ["It is full.", "working"]
    killed = python(qtbot, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")[0]
    assert (killed.ok, killed.sentence) == (False, "The process was killed before it was done.")
    missing = outcome_of(qtbot, str(tmp_path / "nothing"))[0]
    assert not missing.ok and "cannot be started" in missing.sentence
    short = VerbProcess([sys.executable, "-c", "print('on', flush=True); import time; time.sleep(60)"])
    short.line.connect(lambda _line: short.cancel())
    with qtbot.waitSignal(short.done) as ended:
        short.start()
    assert ended.args[0].sentence == "Cancelled." and not ended.args[0].ok


SERVICE_CHILD = """
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
    made = Service(command=[sys.executable, "-c", SERVICE_CHILD, str(cancelled)])
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


@pytest.mark.parametrize("how", ["by its number", "by the end of its owner"])
def test_cancelled_question(qtbot: QtBot, service: Service, cancelled: Path, how: str):
    replies, after, owner = Replies(), Replies(), QObject()
    number = replies.ask(service, "echo", owner=owner)
    if how == "by its number":
        service.cancel(number)
    else:
        del owner
    after.ask(service, "echo")
    qtbot.waitUntil(lambda: bool(after.answers and cancelled.exists()))
    assert not replies.answers and not replies.progress and cancelled.read_text() == f"{number}\n"


def test_a_process_that_dies_refuses_its_questions_and_is_replaced(qtbot: QtBot, service: Service):
    replies, again = Replies(), Replies()
    replies.ask(service, "die")
    qtbot.waitUntil(lambda: bool(replies.faults))
    assert "ended before it answered: out of luck." in replies.faults[0].sentence
    again.ask(service, "echo", x=2)
    qtbot.waitUntil(lambda: bool(again.answers))
    assert again.answers == [{"x": 2}]


def test_a_command_that_cannot_be_started_refuses(qtbot: QtBot):
    service, replies = Service(command=["/nowhere/python"]), Replies()
    replies.ask(service, "echo")
    qtbot.waitUntil(lambda: bool(replies.faults))
    assert "No such file" in replies.faults[0].sentence or "execve" in replies.faults[0].sentence


def test_close_ends_the_process_and_refuses_later_questions(qtbot: QtBot, service: Service):
    replies, late = Replies(), Replies()
    replies.ask(service, "pid")
    qtbot.waitUntil(lambda: bool(replies.answers))
    service.close()
    with pytest.raises(ProcessLookupError):
        os.kill(replies.answers[0], signal.SIGCONT)
    late.ask(service, "echo")
    qtbot.waitUntil(lambda: bool(late.faults))
    assert late.faults == [ConfigProblem("", "The window is closing.")]
