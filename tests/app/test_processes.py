"""Backend processes: a training outlives the window that started it; every byte that a short verb prints is read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PySide6.QtCore import QCoreApplication

from app.state.processes import ProcessOutcome, VerbProcess
from backend.utils.places import project_root

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
    assert sorted((folder / "log.txt").read_text(encoding="utf-8").split("\n")[:3]) == sorted(
        ["before", "to stdout é", "to stderr"]
    )


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
    assert outcome == ProcessOutcome(True, 0, "last", "café and more\nlast")


def test_a_failure_has_the_last_line_of_stderr_as_its_sentence(qtbot) -> None:
    outcome, lines = python(
        qtbot, "import sys; print('working'); print('The folder is full.', file=sys.stderr); sys.exit(2)"
    )
    assert (outcome.ok, outcome.exit_code, outcome.sentence) == (False, 2, "The folder is full.")
    assert sorted(lines) == ["The folder is full.", "working"]


def test_killed_and_missing_programs_emit_done(qtbot, tmp_path: Path) -> None:
    killed = python(qtbot, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")[0]
    assert (killed.ok, killed.exit_code) == (False, -1)
    missing = outcome_of(qtbot, str(tmp_path / "nothing"))[0]
    assert not missing.ok and "cannot be started" in missing.sentence


def test_a_verb_can_be_cancelled(qtbot) -> None:
    short = VerbProcess([sys.executable, "-c", "print('on', flush=True); import time; time.sleep(60)"])
    short.line.connect(lambda _line: short.cancel())
    with qtbot.waitSignal(short.done) as ended:
        short.start()
    assert ended.args[0].sentence == "Cancelled." and not ended.args[0].ok
