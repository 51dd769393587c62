"""Hostile reward functions, and the sentence that each gets.

Each is the body of `mine`, or with `at_import` a whole file. RUN is the folder of a run, TRAINER the process that asks for scores, HOME the
user's home folder. `sentence` is a pattern for what people are told; None for a function that scores and
whose mischief comes to nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent, indent

TIMEOUT_S = 0.4
SCORES = "return [1.0 for _ in completions]"

_HEAD = """
import asyncio, atexit, ctypes, gc, json, os, random, resource, signal, socket, subprocess, sys, threading, time
from pathlib import Path
from backend.rewards import register_reward_function
RUN, TRAINER, HOME = {run!r}, {trainer}, {home!r}
"""
_FUNCTION = """
@register_reward_function("mine")
def mine(prompts, completions, answer, types=None, log_extra=None, log_metric=None, **rest):
"""


@dataclass(frozen=True)
class Hostile:
    """One function. `kind` groups the table; `in_suite`: it runs with every `make test`, the others with `make proofs`."""

    kind: str
    name: str
    body: str
    sentence: str | None
    at_import: bool = False
    in_suite: bool = False

    def source(self, run: Path, trainer: int, home: Path) -> str:
        head = _HEAD.format(run=str(run), trainer=trainer, home=str(home))
        body = dedent(self.body).strip()
        if self.at_import:
            return f"{head}\n{body}\n{_FUNCTION}    {SCORES}\n"
        return f"{head}{_FUNCTION}{indent(body, '    ')}\n    {SCORES}\n"


STILL_RUNNING = rf"was still running after {TIMEOUT_S:g} s \(reward_timeout\)"
PIPE = r"(closed or replaced|wrote something of its own into) the pipe by which scores are returned"

SPOILED = "left Python in a state in which its process could not go on"


def exits(code: int) -> str:
    return rf"ended the process it ran in \(exit code {code}\)"


def dies(number: int) -> str:
    return rf"ended the process it ran in \(signal {number}\b[^)]*\)"


def raises(error: str, text: str = "") -> str:
    return rf"{error}: .*{text}" if text else error


def gives(what: str) -> str:
    return re.escape(what)


_HANGS = [
    ("a regular expression", "import re; re.fullmatch('(a+)+b', 'a' * 64)"),
    ("a power of whole numbers", "10 ** 10 ** 9"),
    ("the text of a whole number", "sys.set_int_max_str_digits(0); str(1 << 40_000_000)"),
    ("a long call into C", "sum(range(10 ** 12))"),
    ("a loop", "while True: pass"),
    ("a loop that swallows everything", "while True:\n    try:\n        while True: pass\n    except BaseException: pass"),
    ("sleep", "time.sleep(99)"),
    ("sleep in C with the interpreter's lock", "ctypes.PyDLL(None).sleep(99)", True),
    ("a lock taken twice", "lock = threading.Lock(); lock.acquire(); lock.acquire()"),
    ("a queue that stays empty", "import queue; queue.Queue().get()"),
    ("an empty pipe", "os.read(os.pipe()[0], 1)"),
    ("a process waited for", "subprocess.run(['sleep', '99'])"),
    ("a stopped process", "os.kill(os.getpid(), signal.SIGSTOP)"),
    ("all signals blocked", "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); time.sleep(99)"),
    ("a generator without end", "return iter(int, 1)"),
    ("scores whose numbers hang", "class Slow:\n    def __float__(self): time.sleep(99)\nreturn [Slow() for _ in completions]"),
    ("an exception whose text hangs", "class Slow(Exception):\n    def __str__(self): time.sleep(99)\nraise Slow"),
    ("sorting for ever", "class Less:\n    def __lt__(self, other): time.sleep(99)\nsorted([Less(), Less()])"),
]  # fmt: skip

_EXITS = [
    ("_exit 0", "os._exit(0)", exits(0)),
    ("_exit 1", "os._exit(1)", exits(1)),
    ("_exit 3", "os._exit(3)", exits(3)),
    ("_exit in a thread", "threading.Thread(target=os._exit, args=(4,)).start(); time.sleep(9)", exits(4)),
    ("exit in C", "ctypes.CDLL(None).exit(5)", exits(5)),
    ("sys.exit", "sys.exit(0)", raises("SystemExit"), True),
    ("sys.exit with a text", "sys.exit('enough')", raises("SystemExit", "enough")),
    ("abort", "os.abort()", dies(6)),
    ("a segmentation fault", "ctypes.string_at(0)", dies(11)),
    ("a segmentation fault with a handler", "signal.signal(signal.SIGSEGV, signal.SIG_IGN); os.kill(os.getpid(), 9)", dies(9)),
    ("SIGKILL to itself", "os.kill(os.getpid(), signal.SIGKILL)", dies(9)),
    ("SIGTERM to itself", "os.kill(os.getpid(), signal.SIGTERM)", dies(15)),
    ("an illegal instruction", "os.kill(os.getpid(), signal.SIGILL)", dies(4)),
    ("an alarm", "signal.alarm(0) or signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(9)", dies(14)),
    ("exec of another program", "os.execv('/bin/true', ['true'])", exits(0)),
    ("exec of a program that answers", "os.execv('/bin/sh', ['sh', '-c', 'for f in 3 4 5 6 7 8; do echo {} >&$f; done'])", rf"{PIPE}|{exits(0)}|{exits(2)}"),
    ("a recursion", "def again(): again()\nagain()", raises("RecursionError"), True),
    ("a recursion in C", "import pickle\nx = []\nfor _ in range(200_000): x = [x]\npickle.dumps(x)", raises("RecursionError")),
    ("all of memory", "bytearray(1 << 50)", raises("MemoryError"), True),
]  # fmt: skip

_EXCEPTIONS = [
    ("BaseException", "raise BaseException('b')", raises("BaseException", "b")),
    ("KeyboardInterrupt", "raise KeyboardInterrupt", raises("KeyboardInterrupt")),
    ("GeneratorExit", "raise GeneratorExit", raises("GeneratorExit")),
    ("StopIteration", "raise StopIteration(3)", raises("StopIteration", "3")),
    ("a group", "raise BaseExceptionGroup('g', [KeyboardInterrupt(), ValueError('v')])", raises("BaseExceptionGroup")),
    ("a text that raises", "class Odd(Exception):\n    def __str__(self): raise ValueError\nraise Odd", raises("Odd"), True),
    ("a text that exits", "class Odd(Exception):\n    def __str__(self): sys.exit(0)\n    __repr__ = __str__\nraise Odd", raises("Odd")),
    ("a text that is no text", "class Odd(Exception):\n    def __str__(self): return 3\nraise Odd", raises("Odd")),
    ("a text of 10 MB and many lines", "raise ValueError('long\\n' * 2_000_000)", raises("ValueError", "long"), True),
    ("control characters and half a surrogate", "raise ValueError('\\x1b[2J\\ud800\\u202e\\0')", raises("ValueError")),
    ("a name of 10,000 letters", "raise type('E' * 10_000, (Exception,), {})('x')", "EEEE"),
    ("a cause without end", "e = ValueError('loop'); e.__context__ = e.__cause__ = e; raise e", raises("ValueError", "loop")),
    ("no exception at all", "raise 3", raises("TypeError")),
]  # fmt: skip

_VALUES = [
    ("a huge whole number", "return [10 ** 400 for _ in completions]", gives("not a finite number"), True),
    ("a number of 5,000 digits as text", "return ['9' * 5000 for _ in completions]", gives("which is not a number")),
    ("nan", "return [float('nan') for _ in completions]", gives("nan as a score")),
    ("infinite", "return [float('-inf') for _ in completions]", gives("-inf as a score")),
    ("too large for 32 bits", "return [1e300 for _ in completions]", gives("as a score, which is too large")),
    ("text", "return ['1' for _ in completions]", gives("(str) as a score, which is not a number"), True),
    ("one text", "return 'ab'", gives("str where a list of 2 scores was expected")),
    ("a mapping", "return {0: 1.0, 1: 1.0}", gives("dict where a list of 2 scores was expected")),
    ("None", "return None", gives("None where a list of 2 scores was expected")),
    ("a number", "return 1.0", gives("float where a list of 2 scores was expected")),
    ("too few", "return [1.0]", gives("1 scores for 2 completions")),
    ("too many", "return [1.0] * 10_000_000", gives("10,000,000 scores for 2 completions")),
    ("a list that lies about its length", "class Lies(list):\n    def __len__(self): return 2\nreturn Lies([1.0])", gives("1 scores for 2 completions")),
    ("a list that lies about its items", "class Lies(list):\n    def __iter__(self): raise OSError('no')\nreturn Lies([1.0, 1.0])", raises("OSError", "no")),
    ("an array of objects", "import numpy; return numpy.array([object(), object()])", gives("(object) as a score, which is not a number")),
    ("an array of arrays", "import numpy; return numpy.ones((2, 2))", gives("(list) as a score, which is not a number")),
    ("complex numbers", "return [1j for _ in completions]", gives("(complex) as a score, which is not a number")),
    ("a number that raises", "class Odd:\n    def __float__(self): raise OSError('disk')\nreturn [Odd(), Odd()]", raises("OSError", "disk")),
    ("a number that exits", "class Odd:\n    def __float__(self): os._exit(9)\nreturn [Odd(), Odd()]", exits(9)),
    ("a float that lies", "class Odd(float):\n    def __float__(self): return 1e999\nreturn [Odd(1), Odd(1)]", gives("not a finite number")),
    ("a value whose repr raises", "class Odd:\n    def __repr__(self): raise ValueError\nreturn [Odd(), Odd()]", gives("(Odd) as a score, which is not a number"), True),
    ("tolist that raises", "class Odd:\n    def tolist(self): raise OSError('list')\nreturn Odd()", raises("OSError", "list")),
    ("an awaitable that raises", "async def go(): raise OSError('late')\nreturn go()", raises("OSError", "late")),
]  # fmt: skip

_DESCRIPTORS = [
    ("all closed", "os.closerange(0, 4096)", PIPE),
    ("all closed one by one", "for fd in range(256):\n    try: os.close(fd)\n    except OSError: pass", PIPE),
    ("all redirected", "null = os.open('/dev/null', os.O_RDWR)\nfor fd in range(3, 64):\n    if fd != null: os.dup2(null, fd)", f"{PIPE}|{STILL_RUNNING}|exit code 0"),
    ("garbage in every one", "for fd in range(3, 64):\n    try: os.write(fd, b'{\"scores\": [[1, 1]]}\\n')\n    except OSError: pass", PIPE),
    ("garbage without end", "for fd in range(3, 64):\n    try:\n        os.set_blocking(fd, False)\n        while os.write(fd, b'x' * 65536): pass\n    except OSError: pass", f"{PIPE}|{STILL_RUNNING}|returned more than"),
    ("its requests read", "for fd in range(0, 16):\n    try:\n        os.set_blocking(fd, False); os.read(fd, 9)\n    except OSError: pass", None),
    ("input()", "input()", raises("EOFError"), True),
    ("stdout closed", "sys.stdout.close(); sys.stderr.close(); os.close(1); os.close(2)", None),
    ("100 MB printed", "for _ in range(1000): sys.stdout.write('x' * 100_000)", f"^$|{STILL_RUNNING}"),
    ("100 MB printed in C", "for _ in range(100): os.write(1, b'y' * 1_000_000)", f"^$|{STILL_RUNNING}"),
    ("too many open", "keep = [os.open('/dev/null', os.O_RDONLY) for _ in range(5_000_000)]", raises("OSError", "Too many open files")),
]  # fmt: skip

_PATCHES = [
    ("json", "json.dumps = json.loads = None; json.JSONEncoder.encode = lambda *a: 'x'; json.encoder.c_make_encoder = None", None, True),
    ("open and os", "import builtins\nbuiltins.open = os.open = os.write = os.read = os._exit = None", None),
    ("builtins", "import builtins\nfor name in ('len', 'isinstance', 'zip', 'list', 'float', 'print', 'hasattr', 'type', 'str'): setattr(builtins, name, None)", SPOILED, True),
    ("sys.modules", "sys.modules.clear(); sys.path.clear(); sys.meta_path.clear()", None),
    ("time", "time.monotonic = time.time = time.perf_counter = lambda: 1e18", None),
    ("time that raises", "time.perf_counter = time.monotonic = None", SPOILED),
    ("math", "import math; math.isfinite = lambda x: True; return [float('nan')] * 2", SPOILED),
    ("tracing", "sys.settrace(lambda *a: time.sleep(9)); sys.setprofile(lambda *a: None)\n(lambda: 1)()", STILL_RUNNING),
    ("an audit hook that raises", "sys.addaudithook(lambda *a: (_ for _ in ()).throw(OSError('no')))", SPOILED),
    ("collection", "gc.disable(); gc.set_threshold(0); gc.freeze()", None),
    ("a finalizer that hangs", "class Odd:\n    def __del__(self): time.sleep(9)\nOdd()", STILL_RUNNING),
    ("recursion limit", "sys.setrecursionlimit(30)", f"^$|{SPOILED}"),
    ("crash handler off", "import faulthandler; faulthandler.disable(); ctypes.string_at(0)", dies(11)),
    ("an import hook", "sys.meta_path.insert(0, 3); import this_is_not_there", raises("AttributeError") + "|ModuleNotFoundError"),
]  # fmt: skip

_LATER = [
    ("atexit that sleeps", "atexit.register(time.sleep, 99)", None, True),
    ("atexit that exits", "atexit.register(os._exit, 7)", None),
    ("signals ignored", "for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM): signal.signal(n, signal.SIG_IGN)", None),
    ("a handler that sleeps", "signal.signal(signal.SIGTERM, lambda *a: time.sleep(99)); os.kill(os.getpid(), signal.SIGTERM)", STILL_RUNNING),
    ("few files", "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))", None),
    ("no processor time", "resource.setrlimit(resource.RLIMIT_CPU, (0, 0))\nwhile True: pass", dies(9)),
    ("no address space", "resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20)); bytearray(1 << 22)", raises("MemoryError")),
    ("threads left running", "for _ in range(8): threading.Thread(target=time.sleep, args=(99,)).start()", None, True),
    ("a thread that spins", "threading.Thread(target=lambda: [0 for _ in iter(int, 1)], daemon=True).start()", None),
    ("a thread that exits later", "threading.Timer(0.05, os._exit, (8,)).start(); time.sleep(0.2)", exits(8)),
    ("a shielded task", "async def go():\n    asyncio.shield(asyncio.create_task(asyncio.sleep(99))); await asyncio.sleep(0)\nasyncio.run(go())", None),
    ("a task that ignores its cancellation", "async def stay():\n    while True:\n        try: await asyncio.sleep(99)\n        except asyncio.CancelledError: pass\nasync def go():\n    asyncio.create_task(stay()); await asyncio.sleep(0)\nasyncio.run(go())", STILL_RUNNING),
    ("an event loop closed", "loop = asyncio.new_event_loop(); asyncio.set_event_loop(loop); loop.close(); asyncio.new_event_loop = None", None),
]  # fmt: skip

_PROCESSES = [
    ("a pool", "import multiprocessing as m; m.get_context('fork').Pool(2).apply_async(time.sleep, (99,))", None, True),
    ("a pool that is waited for", "import multiprocessing as m; m.get_context('fork').Pool(2).apply(time.sleep, (99,))", STILL_RUNNING),
    ("a manager of shared objects", "import multiprocessing as m; m.Manager()", raises("EOFError")),
    ("a fork that goes on", "os.fork()", None),
    ("a fork that sleeps", "if os.fork() == 0: time.sleep(99)", None),
    ("a small fork bomb", "for _ in range(5):\n    if os.fork() == 0:\n        os.fork(); os.fork(); time.sleep(99)", None),
    ("a daemon", "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.chdir('/'); os.closerange(0, 99); time.sleep(99)\n    os._exit(0)\nos.wait()", None, True),
    ("a daemon, then death", "subprocess.Popen(['sleep', '99'], start_new_session=True); os._exit(0)", exits(0), True),
    ("a daemon that holds the pipes", "subprocess.Popen(['sleep', '99'], start_new_session=True, close_fds=False); os.kill(os.getpid(), 9)", dies(9)),
    ("its children killed with it", "p = subprocess.Popen(['sh', '-c', 'trap \"\" TERM HUP; while :; do sleep 1; done'])\nos._exit(2)", exits(2)),
]  # fmt: skip

_FILES = [
    ("the event log deleted", "os.remove(f'{RUN}/events.jsonl')", raises("PermissionError"), True),
    ("the event log emptied", "open(f'{RUN}/events.jsonl', 'w')", raises("PermissionError")),
    ("the event log emptied by a shell", "os.system(f': > \"{RUN}/events.jsonl\"')", None),
    ("a checkpoint deleted", "import shutil; shutil.rmtree(f'{RUN}/checkpoints')", raises("PermissionError"), True),
    ("the lock deleted", "os.unlink(f'{RUN}/run.lock')", raises("PermissionError")),
    ("permissions taken", "os.chmod(RUN, 0)", raises("PermissionError"), True),
    ("times changed", "os.utime(f'{RUN}/events.jsonl', (0, 0))", raises("PermissionError")),
    ("a link written through", "os.symlink(RUN, 'run'); open('run/events.jsonl', 'a')", raises("PermissionError")),
    ("a stop word", "open(f'{RUN}/control.json', 'w')", raises("PermissionError")),
    ("a file in the home folder", "open(f'{HOME}/.bashrc-hostile', 'w')", raises("PermissionError")),
    ("its own source", "open(__file__, 'a')", raises("PermissionError")),
    ("a large file", "os.truncate(open('large', 'w').name, 1 << 40)", raises("OSError", "File too large")),
    ("its working folder deleted", "import shutil; shutil.rmtree(os.getcwd(), ignore_errors=True)", None),
    ("100,000 files", "for n in range(100_000): open(f'n{n}', 'w').close()", f"^$|{STILL_RUNNING}"),
]  # fmt: skip

_OUTSIDE = [
    ("TCP", "socket.create_connection(('127.0.0.1', 9), 1)", raises("PermissionError"), True),
    ("UDP", "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)", raises("PermissionError")),
    ("a name looked up", "socket.getaddrinfo('example.com', 443)", raises("gaierror")),
    ("HTTP", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9')", raises("URLError")),
    ("a token in the environment", "assert not [n for n in os.environ if n in ('HF_TOKEN', 'GRPO_HOSTILE_SECRET')], 'a token'", None, True),
    ("the trainer's environment", "open(f'/proc/{TRAINER}/environ').read()", raises("PermissionError")),
    ("the trainer killed", "os.kill(TRAINER, signal.SIGKILL)", raises("PermissionError"), True),
    ("the parent killed", "os.kill(os.getppid(), signal.SIGKILL)", raises("PermissionError")),
    ("everybody killed", "os.kill(-1, signal.SIGKILL)", None),
    ("the trainer stopped", "os.kill(TRAINER, signal.SIGSTOP)", raises("PermissionError")),
    ("the trainer debugged", "c = ctypes.CDLL(None, use_errno=True)\nif c.ptrace(16, TRAINER, None, None) < 0: raise OSError(ctypes.get_errno(), 'refused')", raises("PermissionError")),
    ("the trainer's memory", "open(f'/proc/{TRAINER}/mem', 'r+b')", raises("PermissionError")),
    ("the trainer's limits", "resource.prlimit(TRAINER, resource.RLIMIT_CPU, (1, 1))", raises("PermissionError")),
    ("the trainer's priority", "os.setpriority(os.PRIO_PROCESS, TRAINER, 19)", raises("PermissionError")),
    ("the environment changed", "os.environ.clear(); os.environ['PATH'] = '/nowhere'", None),
]  # fmt: skip

_LOGS = [
    ("too few values", "log_extra('c', [1])", gives("logged 1 values in the column c for 2 completions")),
    ("an object without a text", "class Odd:\n    def __str__(self): raise OSError('no')\nlog_extra('c', [Odd(), Odd()])", raises("OSError", "no")),
    ("a column that contains itself", "x = []; x.append(x); log_extra('c', [x, x])", raises("RecursionError")),
    ("a column name over two lines", "log_extra('a\\nb', [1, 2])", raises("ValueError", "a name on one line"), True),
    ("a metric of the trainer's", "log_metric('loss', 1.0)", raises("ValueError", "metric of the trainer")),
    ("a metric that is no number", "log_metric('m', float('nan'))", raises("ValueError", "finite")),
    ("a metric beyond float", "log_metric('m', 10 ** 400)", raises("OverflowError")),
    ("a million metrics", "for n in range(1_000_000): log_metric(f'm{n}', 1.0)", f"{STILL_RUNNING}|{PIPE}|metrics"),
    ("half a surrogate", "log_extra('c', ['\\ud800', '\\x00'])", None),
]  # fmt: skip

_IMPORTS = [
    ("a hang", "time.sleep(99)", STILL_RUNNING, True),
    ("a regular expression", "import re; re.fullmatch('(a+)+b', 'a' * 64)", STILL_RUNNING),
    ("_exit 0", "os._exit(0)", exits(0)),
    ("sys.exit", "sys.exit(0)", raises("SystemExit"), True),
    ("abort", "os.abort()", dies(6)),
    ("BaseException", "raise BaseException('b')", raises("BaseException", "b")),
    ("KeyboardInterrupt", "raise KeyboardInterrupt", raises("KeyboardInterrupt")),
    ("a text that raises", "class Odd(Exception):\n    def __str__(self): raise ValueError\nraise Odd", raises("Odd")),
    ("a recursion", "def again(): again()\nagain()", raises("RecursionError")),
    ("descriptors closed", "os.closerange(0, 4096)", PIPE),
    ("the event log deleted", "os.remove(f'{RUN}/events.jsonl')", raises("PermissionError")),
    ("a daemon", "subprocess.Popen(['sleep', '99'], start_new_session=True); os._exit(1)", exits(1)),
    ("a module that is not there", "import not_there_at_all", raises("ModuleNotFoundError", "not_there_at_all")),
    ("not Python", "def (:", "syntax error on line"),
]  # fmt: skip


def _table() -> list[Hostile]:
    rows = [Hostile("hangs", row[0], row[1], STILL_RUNNING, in_suite=len(row) > 2) for row in _HANGS]
    kinds = {
        "ends": _EXITS, "raises": _EXCEPTIONS, "returns": _VALUES, "descriptors": _DESCRIPTORS, "patches": _PATCHES, "leaves": _LATER,
        "processes": _PROCESSES, "files": _FILES, "reaches out": _OUTSIDE, "logs": _LOGS, "import": _IMPORTS,
    }  # fmt: skip
    for kind, entries in kinds.items():
        rows += [Hostile(kind, row[0], row[1], row[2], kind == "import", len(row) > 3) for row in entries]
    return rows


HOSTILE = _table()
