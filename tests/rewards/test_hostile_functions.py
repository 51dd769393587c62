"""Hostile reward functions in the worker: each costs one clear message at most, and the next scoring works."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent, indent
from types import SimpleNamespace
from typing import Any

import pytest

from backend.rewards.inputs import TrainerState
from backend.rewards.scorer import begin_scorer
from backend.rewards.worker_process import RewardWorker
from backend.utils.errors import UserError
from tests.support.scoring import make_group

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for what is left in /proc")

MARK = "GRPO_HOSTILE_TEST"
"""An environment variable by which everything that a function starts is found again."""
TIMEOUT_S, AMPLE_S = 0.4, 8.0
RUNNING = r"was still running after 0.4 s \(reward_timeout\)"
PIPE = r"(closed or replaced|wrote something of its own into) the pipe by which scores are returned"
SPOILED = "left Python in a state in which its process could not go on"
SCORED = "^$"

# Body of the function, pattern of the message. RUN is the folder of a run, TRAINER the pid of this process.
HOSTILE: dict[str, tuple[str, str]] = {
    "hangs in C with the interpreter's lock": ("ctypes.PyDLL(None).sleep(99)", RUNNING),
    "hangs in a regular expression": ("import re; re.fullmatch('(a+)+b', 'a' * 64)", RUNNING),
    "exits": ("sys.exit(0)", "SystemExit"),
    "ends its process": ("os._exit(0)", r"ended the process it ran in \(exit code 0\)"),
    "crashes": ("ctypes.string_at(0)", r"signal 11, segmentation fault"),
    "kills itself": ("os.kill(os.getpid(), 9)", "signal 9, killed"),
    "recurses": ("def again(): again()\nagain()", "RecursionError"),
    "takes all of memory": ("bytearray(1 << 50)", "MemoryError"),
    "raises what has no text": ("class Odd(Exception):\n    def __str__(self): raise ValueError\nraise Odd", "Odd"),
    "raises 10 MB": ("raise ValueError('long\\n' * 2_000_000)", "ValueError: long"),
    "returns a huge number": ("return [10 ** 400 for _ in completions]", "not a finite number"),
    "returns text": ("return ['1' for _ in completions]", r"\(str\) as a score, which is not a number"),
    "closes all descriptors": ("os.closerange(0, 4096)", PIPE),
    "writes into every descriptor": (
        "for fd in range(3, 64):\n    try: os.write(fd, b'{\"scores\": [[1, 1]]}')\n    except OSError: pass",
        PIPE,
    ),
    "truncates every descriptor": (
        "for fd in range(3, 64):\n    try: os.ftruncate(fd, 0)\n    except OSError: pass",
        SCORED,
    ),
    "prints 100 MB": ("for _ in range(100): os.write(1, b'y' * 1_000_000)", f"^$|{RUNNING}"),
    "reads its input": ("input()", "EOFError"),
    "breaks json": ("json.dumps = json.loads = None; json.JSONEncoder.encode = lambda *a: 'x'", SCORED),
    "breaks builtins": (
        "import builtins\nfor name in ('len', 'isinstance', 'zip', 'list', 'type', 'str'): setattr(builtins, name, "
        "None)",
        SPOILED,
    ),
    "sleeps at exit": ("atexit.register(time.sleep, 99)", SCORED),
    "leaves threads": ("for _ in range(8): threading.Thread(target=time.sleep, args=(99,)).start()", SCORED),
    "forks": ("os.fork()", SCORED),
    "leaves a pool": (
        "import multiprocessing as m; m.get_context('fork').Pool(2).apply_async(time.sleep, (99,))",
        SCORED,
    ),
    "leaves a daemon": (
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.closerange(0, 99); time.sleep(99)\n"
        "    os._exit(0)\nos.wait()",
        SCORED,
    ),
    "leaves a daemon and dies": (
        "subprocess.Popen(['sleep', '99'], start_new_session=True); os._exit(0)",
        "exit code 0",
    ),
    "nests 2,000 folders": ("for _ in range(2000): os.mkdir('d'); os.chdir('d')", SCORED),
    "deletes the event log": ("os.remove(f'{RUN}/events.jsonl')", "PermissionError"),
    "deletes a checkpoint": ("import shutil; shutil.rmtree(f'{RUN}/checkpoints')", "PermissionError"),
    "changes permissions": ("os.chmod(RUN, 0)", "PermissionError"),
    "connects": ("socket.create_connection(('127.0.0.1', 9), 1)", r"PermissionError.*\(reward_network is off\)"),
    "makes datagram sockets": ("socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)", "PermissionError"),
    "looks for tokens": ("assert 'HF_TOKEN' not in os.environ, 'a token'", SCORED),
    "kills the trainer": ("os.kill(TRAINER, signal.SIGKILL)", "PermissionError"),
    "logs a name of two lines": ("log_extra('a\\nb', [1, 2])", "ValueError: .*a name on one line"),
}
ENDS_CLEAN = ("Error", "Exit", "score", "Odd")
"""Messages after which the worker is as it was, and is used again."""
HEAD = """
import asyncio, atexit, ctypes, json, os, signal, socket, subprocess, sys, threading, time
from backend.rewards import register_reward_function
RUN, TRAINER = {run!r}, {trainer}
"""
FUNCTION = """
@register_reward_function("mine")
def mine(prompts, completions, answer, types=None, log_extra=None, log_metric=None, **rest):
"""


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    (folder / "checkpoints" / "000004").mkdir(parents=True)
    for name in ("events.jsonl", "run.lock", "checkpoints/000004/adapters.safetensors"):
        (folder / name).write_text(f"precious {name}")
    return folder


@pytest.fixture(scope="module")
def worker() -> Iterator[RewardWorker]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, str(os.getpid()))
        patch.setenv("HF_TOKEN", "precious")
        worker = RewardWorker()
        yield worker
        worker.stop()


def scored(worker: RewardWorker, file: Path, timeout_s: float) -> str:
    """The message; "" where two completions are scored as if nothing were wrong."""
    settings: Any = SimpleNamespace(
        reward_functions=["mine"],
        reward_functions_file=str(file),
        stages=[],
        reward_timeout=timeout_s,
        reward_isolation="process",
        reward_network=False,
    )
    group = make_group("four", "5")
    try:
        begin_scorer(settings, {False: worker}).score([group], 0, [1.0], timeout_s, TrainerState())
    except UserError as error:
        (problem,) = error.faults
        assert problem.setting in ("reward_functions", "reward_functions_file")
        return problem.sentence
    assert [completion.reward for completion in group.completions] == [1.0, 1.0]
    return ""


def contents(folder: Path) -> dict[str, tuple[int, int, str]]:
    return {
        str(path): (path.stat().st_mode, path.stat().st_mtime_ns, path.read_text() if path.is_file() else "")
        for path in (folder, *sorted(folder.rglob("*")))
    }


def left_behind() -> list[str]:
    """Processes that come from the worker of these tests, by their environment."""
    mark = f"{MARK}={os.getpid()}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if entry.name != str(os.getpid()) and mark in (entry / "environ").read_bytes():
                found.append(f"{entry.name} {(entry / 'cmdline').read_text()}")
        except OSError:  # it has just ended, or is another user's
            continue
    return found


AT_IMPORT = ("hangs in C with the interpreter's lock", "exits", "ends its process")


@pytest.mark.parametrize(
    ("name", "at_import"), [*((name, False) for name in HOSTILE), *((name, True) for name in AT_IMPORT)]
)
def test_hostile_function_gets_one_message(
    name: str, at_import: bool, worker: RewardWorker, victim: Path, tmp_path: Path
) -> None:
    body, pattern = HOSTILE[name]
    head = HEAD.format(run=str(victim), trainer=os.getpid())
    returns = "return [1.0 for _ in completions]"
    file, sound = tmp_path / "mine.py", tmp_path / "sound.py"
    during = f"{head}{FUNCTION}{indent(dedent(body), '    ')}\n    {returns}\n"
    file.write_text(f"{head}\n{body}\n{FUNCTION}    {returns}\n" if at_import else during)
    sound.write_text(f"{head}{FUNCTION}    {returns}\n")
    before = contents(victim.parent)
    worker.start()
    begun = time.monotonic()
    message = scored(worker, file, TIMEOUT_S if RUNNING in pattern else AMPLE_S)
    assert time.monotonic() - begun < 10
    assert re.search(pattern, message), message
    if message:
        assert message.isprintable() and message.endswith(".") and len(message) <= 200 and "mine.py" in message
    if not message or not any(word in message for word in ENDS_CLEAN):
        worker.stop(1.0)
        assert not left_behind()
    assert scored(worker, sound, 20.0) == "", "the next scoring"
    assert contents(victim.parent) == before
