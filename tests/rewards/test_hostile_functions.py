"""Hostile reward functions in the worker: each costs one clear message at most, and the next scoring works."""

import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent, indent
from types import SimpleNamespace
from typing import Any

import pytest

from backend.rewards.confinement.confine import FOLDER_PREFIX
from backend.rewards.scorer import begin_scorer
from backend.rewards.scoring import TrainerState
from backend.rewards.worker import RewardWorker
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.utils.errors import UserError
from tests.support import small_run
from tests.support.precious import contents, made_run
from tests.support.scoring import make_group

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for what is left in /proc")

MARK = "GRPO_HOSTILE_TEST"  # an environment variable by which everything that a function starts is found again
TIMEOUT_S, AMPLE_S = 0.4, 8.0
RUNNING = r"was still running after 0.4 s \(reward_timeout\)"
PIPE = r"(closed or replaced|wrote something of its own into) the pipe by which scores are returned"
SPOILED = r"ended the process it ran in \(exit code 1\)"
SCORED = "^$"
EVERY_FILE = "for fd in range(3, 64):\n    try: {}\n    except OSError: pass\n"

# Body of the function, pattern of the message. RUN is the folder of a run, TRAINER the pid of this process.
HOSTILE: dict[str, tuple[str, str]] = {
    "hangs in C with the interpreter's lock": ("ctypes.PyDLL(None).sleep(99)", RUNNING),
    "backtracks": ("import re; re.match(r'(a+)+$', 'a' * 40 + 'b')", RUNNING),
    "blocks signals": ("signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64)); time.sleep(1000)", RUNNING),
    "raises what sleeps": ("class Slow(Exception):\n    def __str__(self): time.sleep(1000)\nraise Slow", RUNNING),
    "exits": ("sys.exit(0)", "SystemExit"),
    "ends its process": ("os._exit(0)", r"ended the process it ran in \(exit code 0\)"),
    "crashes": ("ctypes.string_at(0)", r"signal 11, segmentation fault"),
    "recurses": ("def again(): again()\nagain()", "RecursionError"),
    "takes all of memory": ("bytearray(1 << 50)", "MemoryError"),
    "raises what has no text": ("class Odd(Exception):\n    def __str__(self): raise ValueError\nraise Odd", "Odd"),
    "closes all descriptors": ("os.closerange(0, 4096)", PIPE),
    "writes into every descriptor": (EVERY_FILE.format("os.write(fd, b'{\"scores\": [[1, 1]]}')"), PIPE),
    "reads its input": ("input()", "EOFError"),
    "breaks builtins": (
        "import builtins\nfor name in ('len', 'isinstance', 'zip', 'list', 'type', 'str'): setattr(builtins, name, "
        "None)",
        SPOILED,
    ),
    "sleeps at exit": ("atexit.register(time.sleep, 99)", SCORED),
    "leaves a daemon": (
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.closerange(0, 99); time.sleep(99)\n"
        "    os._exit(0)\nos.wait()",
        SCORED,
    ),
    "deletes the event log": ("os.remove(f'{RUN}/events.jsonl')", "PermissionError"),
    "connects": ("socket.create_connection(('127.0.0.1', 9), 1)", r"PermissionError.*\(reward_network is off\)"),
    "locks another run": ("fcntl.flock(os.open(f'{RUN}/run.lock', os.O_RDONLY), fcntl.LOCK_SH)", "OSError"),
    "writes 3 GB": ("open('large', 'wb').truncate(3 << 30)", "OSError.*too large"),
    "looks for tokens": ("assert 'HF_TOKEN' not in os.environ, 'a token'", SCORED),
    "logs 25 MB": ("log_extra('x', ['y' * 12_500_000] * 2)", "ValueError: log_extra takes 4 MB in a step"),
    "raises what causes itself": ("error = ValueError('loop'); error.__cause__ = error; raise error", "Error: loop"),
    "raises terminal commands": ("raise ValueError('\\x1b[2J\\x07')", r"ValueError: \\x1b"),
    "returns deep lists": (
        "deep = []\nfor _ in range(100_000): deep = [deep]\nreturn [deep, deep]",
        "as a score, which is not a number",
    ),
    "stops the event loop": (
        "async def go():\n    asyncio.get_running_loop().stop()\n    await asyncio.sleep(9)\nreturn go()",
        "RuntimeError",
    ),
}
MORE = {
    "truncates every descriptor": (EVERY_FILE.format("os.ftruncate(fd, 0)"), SCORED),
    "prints 100 MB": ("for _ in range(100): os.write(1, b'y' * 1_000_000)", f"^$|{RUNNING}"),
    "breaks json": ("json.dumps = json.loads = None; json.JSONEncoder.encode = lambda *a: 'x'", SCORED),
    "leaves threads": ("for _ in range(8): threading.Thread(target=time.sleep, args=(99,)).start()", SCORED),
    "forks": ("os.fork()", SCORED),
    "leaves a pool": (
        "import multiprocessing as m; m.get_context('fork').Pool(2).apply_async(time.sleep, (99,))",
        SCORED,
    ),
    "leaves a daemon and dies": ("subprocess.Popen(['sleep', '99'], start_new_session=True); os._exit(0)", "code 0"),
    "nests 2,000 folders": ("for _ in range(2000): os.mkdir('d'); os.chdir('d')", SCORED),
    "makes datagram sockets": ("socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)", "PermissionError"),
    "leases another run's file": (
        "fcntl.fcntl(os.open(f'{RUN}/run.lock', os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
        "PermissionError",
    ),
    "makes a session": ("os.setsid()", "PermissionError"),
    "logs 10,000 metrics": ("for n in range(10_000): log_metric(f'm{n}', n)", "ValueError: log_metric takes 200 names"),
    "logs a number of 5,000 digits": ("log_extra('x', [10 ** 5000, 1])", "ValueError"),
    "logs a list in itself": ("loop = []; loop.append(loop); log_extra('x', loop)", "RecursionError"),
    "raises nested groups": (
        "error = ValueError()\nfor _ in range(5000): error = ExceptionGroup('g', [error])\nraise error",
        "ExceptionGroup: g",
    ),
    "returns numbers that exit": (
        "class Odd:\n    def __float__(self): raise SystemExit\nreturn [Odd(), Odd()]",
        "SystemExit",
    ),
    "cancels every task": (
        "async def go():\n    for task in asyncio.all_tasks(): task.cancel()\n    await asyncio.sleep(9)\nreturn go()",
        "Error",
    ),
    "stops itself": ("os.kill(os.getpid(), signal.SIGSTOP)", RUNNING),
    "hangs in the garbage collector": (
        "import gc; gc.callbacks.append(lambda *a: time.sleep(99)); gc.set_threshold(1)",
        RUNNING,
    ),
    "hangs as a number": ("class A:\n    def __float__(self): time.sleep(99)\nreturn [A(), A()]", RUNNING),
    "returns without end": ("import itertools; return itertools.repeat(1.0)", RUNNING),
    "hangs after its own mark": (EVERY_FILE.format("os.write(fd, b'-1\\n')") + "time.sleep(99)", PIPE),
    "forks away from whoever ends it": (
        "for _ in range(16):\n    if os.fork() == 0:\n        os.setsid()\n        while not os.fork(): pass\n"
        "        os._exit(0)",
        SCORED,
    ),
    "kills its group": ("os.killpg(0, 9)", "signal 9, killed"),
    "makes threads without end": (
        "import resource; resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))\n"
        "while True: threading.Thread(target=time.sleep, args=(99,)).start()",
        "can't start new thread",
    ),
    "gives itself no memory": (
        "import resource; resource.setrlimit(resource.RLIMIT_DATA, (0, 0)); bytearray(1 << 24)",
        "MemoryError|ended the process it ran in",
    ),
    "gives itself no files": ("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))", SCORED),
    "fills its folder": ("for n in range(20): open(str(n), 'wb').write(b'x' * 5_000_000)", SCORED),
    "deletes its folder": ("import shutil; shutil.rmtree(os.getcwd(), ignore_errors=True)", SCORED),
    "stays in a deleted folder": ("os.mkdir('d'); os.chdir('d'); os.rmdir('../d')", SCORED),
    "recurses in C": (
        "sys.setrecursionlimit(1 << 30)\nclass A:\n    def __repr__(self): return repr(self)\nrepr(A())",
        "signal 11, segmentation fault",
    ),
    "raises what lies about its class": (
        "class Odd(Exception):\n    __class__ = property(lambda self: 1 / 0)\nraise Odd",
        f"Odd|ZeroDivisionError|{SPOILED}",
    ),
    "raises by a timer": (
        "signal.signal(signal.SIGALRM, lambda *a: 1 / 0); signal.setitimer(signal.ITIMER_REAL, 0.01, 0.001)\n"
        "time.sleep(1)",
        f"ZeroDivisionError|{SPOILED}",
    ),
    "returns a generator": ("return (1.0 for _ in completions)", SCORED),
    "changes its inputs": ("completions[:] = ['x'] * 2; prompts.clear(); answer.clear(); rest.clear()", SCORED),
    "breaks math and os": ("import math; math.isfinite = os.write = os._exit = os.getpid = None", "^$|TypeError"),
    "forgets its modules": ("sys.modules.clear()", f"^$|{SPOILED}"),
    "closes its output": ("sys.stdout.close(); sys.stderr.close(); sys.stdout = None", SCORED),
    "prints terminal commands": ("print('\\x1b[2J\\x1b]0;mine\\x07'); os.write(2, b'\\x1b[8m')", SCORED),
    "sets seeds": ("import random, numpy; random.seed(0); numpy.random.seed(0)", SCORED),
}
ENDS_CLEAN = ("Error", "Exit", "score", "Odd")  # messages after which the worker is as it was, and is used again
HEAD = """
import asyncio, atexit, ctypes, fcntl, json, os, signal, socket, subprocess, sys, threading, time
from backend.rewards import register_reward_function
RUN, TRAINER = {run!r}, {trainer}
"""
FUNCTION = """
@register_reward_function("mine")
def mine(prompts, completions, answer, types=None, log_extra=None, log_metric=None, **rest):
"""


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_run(tmp_path_factory.mktemp("runs"))


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
        train_mode="grpo",
        reward_functions=["mine"],
        reward_functions_file=str(file),
        stages=[],
        reward_timeout=timeout_s,
        reward_isolation="process",
        reward_network=False,
    )
    group = make_group("four", "5")
    try:
        begin_scorer(settings, {False: worker}).score([group], 0, [1.0], TrainerState())
    except UserError as error:
        (problem,) = error.faults
        assert problem.setting in ("reward_functions", "reward_functions_file")
        return problem.sentence
    assert [completion.reward for completion in group.completions] == [1.0, 1.0]
    return ""


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


@pytest.mark.parametrize(
    ("name", "at_import"),
    [
        *((name, False) for name in HOSTILE),
        *((name, True) for name in ("exits", "ends its process")),
        *(pytest.param(name, False, marks=pytest.mark.proof) for name in MORE),
    ],
)
def test_hostile_function_gets_one_message(
    name: str, at_import: bool, worker: RewardWorker, victim: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body, pattern = (HOSTILE | MORE)[name]
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
    assert time.monotonic() - begun < 13
    assert re.search(pattern, message), message
    if message:
        assert message.isprintable() and message.endswith(".") and len(message) <= 200 and "mine.py" in message
    if name in MORE or not message or not any(word in message for word in ENDS_CLEAN):
        worker.stop(1.0)
        assert not left_behind()
        assert not list(Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}{os.getpid()}-*"))
    assert scored(worker, sound, 20.0) == "", "the next scoring"
    assert contents(victim.parent) == before
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.proof
@pytest.mark.parametrize("name", HOSTILE | MORE)
def test_a_run_with_it_is_saved_and_the_next_is_normal(name: str, victim: Path, tmp_path: Path) -> None:
    body, pattern = (HOSTILE | MORE)[name]
    folders = set(Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"))
    file = tmp_path / "mine.py"
    head = HEAD.format(run=str(victim), trainer=os.getpid()) + FUNCTION.replace("**rest", "trainer_state=None, **rest")
    returns = "return [1.0 for _ in completions]"
    file.write_text(f"{head}    if trainer_state.step < 1: {returns}\n{indent(dedent(body), '    ')}\n    {returns}\n")
    limit_s = TIMEOUT_S if RUNNING in pattern else AMPLE_S
    about = {"reward_functions": ["mine"], "reward_weights": [], "reward_functions_file": str(file)}
    about |= {"reward_isolation": "process", "reward_timeout": limit_s, "save_every": 1, "iters": 2}
    raw = small_run.settings_for(tmp_path, **about)
    run = RunFolder(tmp_path / "runs" / "first")
    ending = small_run.train_here(raw, run)
    code, message = (0, "") if ending.kind == "finished" else (2, ending.sentence)
    assert ending.exit_code == code and re.search(pattern, message), ending.sentence
    assert [*read_events(run.events)][-1]["kind"] == ("failed" if code else "finished")
    assert (run.path / "checkpoints" / "000001" / "state.json").is_file()
    file.write_text(f"{head}    {returns}\n")
    assert small_run.train_here(raw, RunFolder(tmp_path / "runs" / "next")).kind == "finished"
    assert not set(Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}{os.getpid()}-*")) - folders
