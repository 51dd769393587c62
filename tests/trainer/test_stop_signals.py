"""A closed terminal is a request to stop: everything is saved, whatever else comes while it is, and nothing that cannot be printed matters."""

from __future__ import annotations

import os
import pty
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backend.engine.cpu.compiler import COMPILER
from backend.engine.device import on_cpu
from backend.runs.checkpoints import checkpoint
from backend.runs.events import EventLog, read_events
from backend.runs.run_folder import RunFolder
from backend.trainer.control import STOP_SIGNALS, Control, Stopped, StopRequested, raising_stop
from backend.utils.command import backend_command, backend_environment
from tests.support import small_run


@pytest.fixture(autouse=True)
def not_under_nohup(signal_handlers_restored: None) -> None:
    """A suite that nohup has started ignores SIGHUP, and so would what is tested."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def control(run: RunFolder) -> Control:
    run.path.mkdir(parents=True)
    return Control(run, EventLog(run.events))


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_every_stop_signal_stops(control: Control, number: signal.Signals) -> None:
    control.listen_to_signals()
    os.kill(os.getpid(), number)
    with pytest.raises(Stopped, match=f"{number.name} was received"):
        control.obey()


def test_under_nohup_a_hang_up_is_nothing(control: Control) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup leaves it for the program
    control.listen_to_signals()
    os.kill(os.getpid(), signal.SIGHUP)
    control.obey()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_what_is_whole_or_absent_at_any_moment_is_stopped_at_once_and_once() -> None:
    cleaned_up = False
    with pytest.raises(StopRequested, match="SIGHUP was received"), raising_stop():
        try:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(5)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # a second one does not interrupt what is cleaned up
            cleaned_up = True
    assert cleaned_up


@pytest.fixture
def child(tmp_path: Path, run: RunFolder) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A run in a session of its own with a terminal of its own, and the other end of that terminal."""
    small_run.write_config(run.config, small_run.settings_for(tmp_path, iters=100_000))
    ours, theirs = pty.openpty()
    # setsid gives the session no terminal yet; the first one that its leader opens becomes it.
    leader = "import os, sys; os.open(sys.argv[1], os.O_RDWR); os.execv(sys.argv[2], sys.argv[2:])"
    command = backend_command("train", "--run", str(run.path), "--progress")
    process = subprocess.Popen(
        [sys.executable, "-c", leader, os.ttyname(theirs), *command], stdin=theirs, stdout=theirs, stderr=theirs,
        env=backend_environment(), start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    yield process, ours
    process.kill()
    process.wait()


def test_closing_the_terminal_saves_everything(child: tuple[subprocess.Popen[bytes], int], run: RunFolder) -> None:
    """The system sends SIGHUP then, and every write to the terminal fails; impatient people send more."""
    process, terminal = child
    until = time.monotonic() + 60
    while len(small_run.steps(run)) < 3:
        os.read(terminal, 1 << 16)  # or the terminal's buffer would fill, and the run wait
        assert process.poll() is None and time.monotonic() < until
    os.close(terminal)
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.002)
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 3
    last = list(read_events(run.events))[-1]
    assert last["kind"] == "stopped" and "was received; everything is saved." in last["sentence"]
    assert any(event.get("source") == "SIGHUP" for event in read_events(run.events))
    saved = checkpoint.newest(run)
    assert saved is not None and saved.state.step == last["step"] >= 3
    assert not any("Traceback" in line for line in run.log.read_text().splitlines())


@pytest.mark.proof
@pytest.mark.skipif(not on_cpu() or shutil.which(COMPILER) is None, reason="mlx compiles with g++ on a CPU alone")
def test_ctrl_c_that_ends_the_compiler_too_is_a_stop(tmp_path: Path, run: RunFolder) -> None:
    """A terminal sends SIGINT to every process of the run, and mlx takes a compiler that it has ended for one that has succeeded."""
    small_run.write_config(run.config, small_run.settings_for(tmp_path))
    programs, kernels = tmp_path / "bin", tmp_path / "kernels"  # a folder without any compiled before
    programs.mkdir()
    kernels.mkdir()
    compiler = programs / "g++"
    compiler.write_text(f"""#!/bin/sh
grep -q '"kind": "started"' {shlex.quote(str(run.events))} 2>/dev/null && kill -INT 0
exec {shutil.which(COMPILER)} "$@"
""")
    compiler.chmod(0o755)
    environment = backend_environment() | {"PATH": f"{programs}:{os.environ['PATH']}", "TMPDIR": str(kernels)}
    command = backend_command("train", "--run", str(run.path), "--no-progress")
    done = subprocess.run(command, env=environment, start_new_session=True, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    last = list(read_events(run.events))[-1]
    assert (last["kind"], last["sentence"]) == (
        "stopped", "Stopped at step 0 because SIGINT was received; everything is saved.",
    )  # fmt: skip
    assert "Traceback" not in done.stderr + run.log.read_text()


SLOW = """
import time
from backend.rewards import register_reward_function

@register_reward_function("slow")
def slow(prompts, completions, answer, types=None):
    until = time.monotonic() + 30
    while time.monotonic() < until:
        time.sleep(0.01)
    return [1.0] * len(completions)
"""


@pytest.mark.parametrize("asks", ["SIGTERM", "the word stop"])
def test_no_reward_function_keeps_a_run_from_stopping(tmp_path: Path, run: RunFolder, asks: str) -> None:
    """Its limit is a minute by default; a system that shuts down, and a person, do not wait so long."""
    (tmp_path / "slow.py").write_text(SLOW)
    settings = small_run.settings_for(tmp_path) | {
        "reward_functions": ["slow"], "reward_weights": [], "reward_functions_file": str(tmp_path / "slow.py"),
    }  # fmt: skip
    asked: list[float] = []

    def ask(event: dict[str, Any]) -> None:
        if event["kind"] == "phase" and event["phase"] == "scoring":
            asked.append(time.monotonic())
            timer = threading.Timer(
                0.1, lambda: os.kill(os.getpid(), signal.SIGTERM) if asks == "SIGTERM" else run.say("stop")
            )
            timer.start()

    ending = small_run.train_here(settings, run, ask)
    assert ending.kind == "stopped" and time.monotonic() - asked[0] < 10
    why = "SIGTERM was received" if asks == "SIGTERM" else "it was asked to stop"
    assert ending.sentence == f"Stopped at step 0 because {why}; everything is saved."
    assert small_run.kinds(run).count("command") == 1

    # And the `with` has flushed what Python still held.
