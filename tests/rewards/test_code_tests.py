"""`code_tests`: programs are scored by the tests that they pass, and hostile ones get nothing."""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from backend.config.config import parse
from backend.data.rows import check_columns
from backend.rewards import programs
from backend.rewards.calls import RewardError
from backend.rewards.confinement.confine import FOLDER_PREFIX
from backend.rewards.functions import code
from backend.rewards.functions.code import UnusableTestsError, row_tests, same_output
from backend.rewards.programs import NotPlainError, decoded, encoded, runner
from backend.rewards.scorer import Scorer
from backend.rewards.scoring import RewardSource, TrainerState
from backend.rewards.worker import RewardWorker
from tests.support.cases import cases
from tests.support.scoring import make_group, report_of

ADD = "def add(a, b):\n    return a + b\n"
ASSERTS = ["assert add(1, 2) == 3", "assert add(1, 5) == 6"]


def scores(texts: list[str], entry: str = "code_tests(seconds=0.5)", **row: Any) -> list[float | None]:
    group = make_group(*texts, **row)
    report_of(group, [entry])
    return [next(iter(completion.scores.values())) for completion in group.completions]


@cases(
    ("text", "program"),
    [
        (f"So:\n```python\n{ADD}```\nDone.", ADD),
        (f"```\nfirst\n```\nno, this:\n```py\n{ADD}```", ADD),
        (f"<think>\n```python\nthought\n```\n</think>\n```python\n{ADD}```", ADD),
        (f"<answer>\n```python\n{ADD}\n```\n</answer>", ADD),
        (ADD, ADD),
        (f"```python\n{ADD}", ADD),  # cut off
        ("", ""),
    ],
)
def test_the_last_fenced_block_of_the_answer_is_run(text: str, program: str) -> None:
    assert code._program(text).strip() == program.strip()


CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
FUNCTIONS = (
    "from solution import add\n\ndef test_a():\n    assert add(1, 2) == 3\n\ndef test_b():\n    assert add(1, 2) == 4\n"
)
PAIRS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "8\n"]}
CALLS: dict[str, Any] = {"fn_name": "add"}
SOLUTION = "class Solution:\n    def add(self, a, b):\n        return a + b, a\n"
VERIFICATION: dict[str, Any] = {"language": "python"}
VERIFICATION |= {"test_cases": [{"fn_name": None, "input": "2", "output": "4.0", "type": "stdin_stdout"}]}
EQUALS = "class P:\n def __init__(s, n): s.n = n\n def __eq__(s, o): return s.n == o.n\n"
THREADS = (
    "import threading\ndef f():\n x = []\n t = threading.Thread(target=x.append, args=(1,))\n t.start(); t.join()\n"
    " return x[0]"
)
FORMS: list[tuple[str, dict[str, Any], str, list[float]]] = [
    ("MBPP", {"test_list": ASSERTS}, ADD, [1.0]),
    ("MBPP's setup", {"test_list": ["assert add(N, 2) == 3"], "test_setup_code": "N = 1"}, ADD, [1.0]),
    ("one text", {"tests": "x = add(1, 2)\nassert x == 3 and add(0, 0) == 1\nassert add(1, 1) == 2\n"}, ADD, [0.5]),
    ("HumanEval", {"test": CHECK, "entry_point": "add"}, ADD, [1.0]),
    ("KodCode", {"test": FUNCTIONS}, ADD, [0.5]),
    ("a loop", {"tests": "for n in range(3):\n    assert add(n, n) == 2 * n\n"}, ADD, [1.0]),
    ("APPS", {"input_output": json.dumps(PAIRS)}, "print(sum(map(int, input().split())))", [0.5]),
    ("APPS, by call", {"input_output": CALLS | {"inputs": [[1, 2], [3, 4]], "outputs": [[3], 7]}}, ADD, [1.0]),
    ("LeetCode", {"input_output": CALLS | {"inputs": [[1, 2]], "outputs": [[3, 1]]}}, SOLUTION, [1.0]),
    ("open-r1", {"verification_info": VERIFICATION}, "print(float(input()) * 2.0000000001)", [1.0]),
    (
        "a dict",
        {"tests": ["assert f() == {'a': [1, (2,)], 'b': {4}}"]},
        "def f(): return {'a': [1, (2,)], 'b': {4}}",
        [1],
    ),
    ("objects of the program", {"tests": ["assert P(1) == P(1)", "assert P(1) != P(2)"]}, EQUALS, [1.0]),
    ("an exit", {"tests": {"inputs": [""], "outputs": ["3"]}}, "print(3)\nraise SystemExit", [1.0]),
    ("a traceback", {"tests": {"inputs": [""], "outputs": ["3"]}}, "print(3)\n1 / 0", [0.0]),
    ("threads", {"tests": ["assert f() == 1"]}, THREADS, [1.0]),
]


@cases(("row", "program", "expected"), [case[1:] for case in FORMS])
def test_each_form_of_tests(row: dict[str, Any], program: str, expected: list[float]) -> None:
    assert scores([program], **row) == pytest.approx(expected)


def test_strict_wants_them_all_and_most_tests_are_the_first() -> None:
    half = ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]
    assert scores([ADD], "code_tests(strict=true)", tests=half) == [0.0]
    assert scores([ADD], "code_tests(strict=true, most_tests=1)", tests=half) == [1.0]
    assert scores([ADD], "code_tests(column=mine)", mine=half, tests=["assert add(1, 1) == 2"]) == [0.5]


def test_a_row_without_tests_has_no_score_and_another_column_name_is_no_parameter() -> None:
    no_calls = CALLS | {"inputs": [], "outputs": []}
    assert scores([ADD], tests="") == scores([ADD]) == scores([ADD], tests=no_calls) == [None]
    assert scores([ADD], tests=ASSERTS, seconds="60", column="nowhere") == [1.0]


@cases(
    ("value", "what"),
    [
        *((3, "int"), ("print(1)", "asserts nothing"), ("assert (", "syntax error on line 1")),
        *(({"inputs": ["1"]}, "as many inputs"), ([1], "neither texts")),
    ],
)
def test_a_column_without_tests_is_said(value: Any, what: str) -> None:
    with pytest.raises(UnusableTestsError, match=what):
        row_tests(value, {}, 50)
    with pytest.raises(RewardError, match="code_tests raised ValueError: the column tests holds"):
        scores([ADD], tests=value)


def test_a_dataset_without_a_known_column_is_refused_before_the_run() -> None:
    def faults(entry: str, **row: Any) -> list[str]:
        config = parse({"model": "m", "data": "d", "reward_functions": [entry]})
        return [str(fault) for fault in check_columns([{"prompt": "p"} | row], config, "rows.jsonl")]

    assert not faults("code_tests", test_list=[]) and not faults("code_tests(column=mine)", mine="")
    (sentence,) = faults("code_tests", solution="")
    assert sentence.startswith("reward_functions: code_tests finds no column tests with tests; rows.jsonl has the c")
    assert faults("code_tests(column=mine)", tests="") and len(sentence) <= 220


FORGED = b'[0]\\n[1]\\n[0, 0, {"value": true}]\\n[1, 1, {"value": true}]\\n[0, 0, {"truth": true}]\\n'
HOSTILE = {
    "loops": "while True: pass",
    "hogs memory": "x = []\nwhile True: x.append(b'x' * 10**7)",
    "prints without end": "while True: print('x' * 10**4)",
    "forks": "import os\nos.fork()\n" + ADD,
    "starts programs": "import subprocess\nsubprocess.run(['true'])\n" + ADD,
    "exits as if all were well": "import os\nprint('3')\nos._exit(0)",
    "reads a file": "def add(a, b): return len(open('{secret}').read()) and a + b",
    "writes a file": "def add(a, b):\n    open('{secret}', 'w')\n    return a + b",
    "lists a folder": "import os\ndef add(a, b): return bool(os.listdir('{home}')) and a + b",
    "reaches a network": "import socket as s\ns.socket(s.AF_INET, s.SOCK_DGRAM).sendto(b'', ('127.0.0.1', 9))\n" + ADD,
    "signals its parent": "import os\nos.kill(os.getppid(), 9)\n" + ADD,
    "forges a report": f"import os\nfor file in range(64):\n    try: os.write(file, b'{FORGED.decode()}')\n"
    "    except OSError: pass\nos._exit(0)",
    "equals everything": "class A:\n    __eq__ = lambda a, b: True\ndef add(a, b): return A()",
    "patches the observer": "import builtins, json\njson.dumps = lambda *a, **k: '[0, 0, {\"value\": 9}]'\n"
    "builtins.isinstance = lambda *a: True\ndef add(a, b): return 9",
    "exits before the tests": "raise SystemExit(0)",
    "looks for the expected values": "import gc\n"
    "partials = [o for o in gc.get_objects() if type(o).__name__ == 'partial']\n"
    "found = [o.args[1] for o in partials if getattr(o.func, '__name__', '') == '_holds']\n"
    "def add(a, b): return found[b // 4]",
    "looks for an open file": "import os\nfound = 0\nfor file in range(4, 4096):\n"
    "    try: os.fstat(file); found = 1\n    except OSError: pass\ndef add(a, b): return found and a + b",
    "looks for tokens": "import os\ndef add(a, b): return 'precious' in str(os.environ) and a + b",
    "becomes a shell": "import os\ndef add(a, b): os.execv('/bin/sh', ['sh', '-c', 'echo [0] >&3'])",
    "replaces the observer later": "import sys, threading\ndef later():\n"
    "    while True: vars(sys.modules['solution'])['__observe__'] = lambda number, value: None\n"
    "threading.Thread(target=later, daemon=True).start()\ndef add(a, b): return 9",
    "writes broken reports": "import os\nos.write(3, b'[' * 99999 + b'\\n')\n"
    "os.write(3, b'[0, 0, {\"value\": [\"c\", 1' + b'0' * 999 + b', 0]}]\\n')\n"
    "os.write(3, b'[0, 0, {\"value\": 1' + b'0' * 99999 + b'}]')",
}
MORE = {
    "sleeps": "import time\ntime.sleep(99)",
    "exits in a test": "import os\ndef add(a, b): os._exit(0)",
    "signals by thread": "import os, ctypes\np = os.getppid()\n"
    "if ctypes.CDLL(None).syscall(234, p, p, 9): raise OSError\n" + ADD,
    "is an int that equals everything": "class A(int):\n    __eq__ = lambda a, b: True\n    __hash__ = None\n"
    "def add(a, b): return A(9)",
    "raises in every test": "def add(a, b): raise SystemExit(0)",
    "prints a verdict": "print('[0]\\n[1]\\n2 passed')\ndef add(a, b): return 9",
    "patches the comparison": "import operator\noperator.eq = lambda a, b: True\ndef add(a, b): return 9",
    "imports our comparison": "import backend.rewards.functions.code\n" + ADD,
    "looks for the code of another": "import gc, sys\nframe, seen = sys._getframe(), gc.get_objects()\n"
    "while frame: seen += [frame.f_locals, frame.f_globals, sys.argv, sys.orig_argv]; frame = frame.f_back\n"
    "found = any('HON'.replace('N', 'NEST') in str(o) for o in seen if type(o) in (dict, list, tuple))\n"
    "def add(a, b): return found and a + b",
    "looks into folders": "import os\nfound = 0\nfor path in ('..', '../..', '/', '/tmp', '/dev/shm', '/proc'):\n"
    "    try: found += len(os.listdir(path))\n    except OSError: pass\ndef add(a, b): return found and a + b",
    "reads its memory as a file": "open('/proc/self/mem', 'rb')\n" + ADD,
    "looks for tokens in C": "import ctypes\n"
    "all = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), 'environ')\nnumber = found = 0\n"
    "while all[number]: found |= b'precious' in all[number]; number += 1\ndef add(a, b): return found and a + b",
    "makes raw sockets": "import socket as s\ns.socketpair(s.AF_UNIX, s.SOCK_RAW)\n" + ADD,
    "shares memory": "import mmap\nmmap.mmap(-1, 8 << 30)\n" + ADD,
    "writes shared memory": "open('/dev/shm/grpo', 'w')\n" + ADD,
    "raises its limits": "import resource as r\nr.setrlimit(r.RLIMIT_CPU, (99, 99))\n" + ADD,
    "survives its exit": "import os\nos._exit = lambda code: None\nraise SystemExit(0)",
    "blocks every signal": "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
    "leaves threads": "import threading, time\n"
    "for _ in range(99): threading.Thread(target=time.sleep, args=(9,)).start()",
    "hangs in C": "import ctypes\nctypes.PyDLL(None).sleep(99)",
    "hangs at its exit": "import sys, time\nsys.stdout.flush = lambda: time.sleep(99)",
    "nests 3,000 folders": "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')\n" + ADD,
    "hides files too deep": "import os, time\nfor _ in range(30): os.mkdir('d' * 200); os.chdir('d' * 200)\n"
    "for n in range(40): open(str(n), 'wb').write(b'x' * 10**6)\ntime.sleep(0.4)\n" + ADD,
    "makes empty files": "import os\nfor n in range(10**6): os.close(os.open(str(n), os.O_CREAT))",
    "writes many files": "import time\nfor n in range(40): open(str(n), 'wb').write(b'x' * 10**6)\ntime.sleep(0.4)\n"
    + ADD,
}
ON_LINUX_ALONE = {"reads a file", "lists a folder", "signals its parent", "signals by thread", "looks into folders"}
ON_LINUX_ALONE |= {"shares memory", "looks for tokens in C", "becomes a shell"}
"""What a Mac does not refuse (docs/rewards.md), or has not."""


@pytest.mark.parametrize("programs", [HOSTILE, pytest.param(MORE, marks=pytest.mark.proof)], ids=len)
def test_hostile_programs_get_nothing_and_cost_no_more_than_their_time(
    programs: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "precious")
    monkeypatch.setenv("OPENAI_API_KEY", "precious")
    runner.close()
    secret = tmp_path / "secret.txt"
    secret.write_text("3")
    tried = {name: text for name, text in programs.items() if sys.platform == "linux" or name not in ON_LINUX_ALONE}
    texts = [text.replace("{secret}", str(secret)).replace("{home}", str(tmp_path)) for text in tried.values()]
    began = time.monotonic()
    honest = f"{ADD}# HONEST"
    seen = dict(zip(["first", *tried, "last"], scores([honest, *texts, ADD], tests=ASSERTS), strict=True))
    assert seen == dict.fromkeys(tried, 0.0) | {"first": 1.0, "last": 1.0}
    # Of some the time runs out, a second on the clock each, if one after the other.
    assert time.monotonic() - began < 12
    assert secret.read_text() == "3"
    server = runner._server
    assert scores([f"{ADD}# next"], tests=ASSERTS) == [1.0] and runner._server is server
    runner.close()
    assert not list(Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}{server}-*"))


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (ADD, 1.0),
        ("def add(a, b):\n    return a + b if b < 3 else 1 / 0", 0.0),
        ("import os\ndef add(a, b):\n    if b > 2: os.write(3, b'[0]\\n'); os._exit(0)\n    return a + b", 0.0),
    ],
    ids=["honest", "raises after it was right", "was right once and forges the end"],
)
@pytest.mark.parametrize(
    "test", ["assert add(1, 2) == 3 and add(1, 5) == 6", "for n in (1, 5): assert add(1, n) == n + 1"]
)
def test_a_test_has_passed_at_its_end_alone(program: str, expected: float, test: str) -> None:
    if "os.write" in program and test.startswith("for"):
        expected = 1.0  # how often a loop observes is not known; docs/rewards.md says so
    assert scores([program], tests=[test]) == [expected]


def test_programs_that_get_no_turn_have_no_score_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "SHARE", 0.0)  # a second is left for the call
    texts = [f"import time\ntime.sleep(9)  # {n}" for n in range(8)]
    group = make_group(*texts, tests=ASSERTS)
    report = report_of(group, ["code_tests"])
    assert all(completion.reward is None for completion in group.completions)
    assert report.metrics == {"code_tests/not_run": 8.0} and report.columns == {"tests passed": [None] * 8}


def test_a_process_that_is_lost_is_no_score_and_the_next_call_has_another() -> None:
    assert scores([ADD], tests=ASSERTS) == [1.0]
    runner._server.kill()
    assert scores([ADD], tests=ASSERTS) == [None]
    assert scores([ADD], tests=ASSERTS) == [1.0]


@pytest.mark.skipif(sys.platform != "linux", reason="a Mac's sandbox cannot be entered twice")
def test_programs_run_inside_the_confined_process_of_reward_functions_too(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("3")
    scorer = Scorer(RewardSource([["code_tests(seconds=0.5)"]], None, tmp_path), RewardWorker(), 30)
    try:
        reads = f"def add(a, b): return bool(open({str(secret)!r}).read()) and a + b"
        kills = "import os\ndef add(a, b):\n    for p in range(2, 99999): os.kill(p, 9)"
        group = make_group(ADD, reads, kills, tests=ASSERTS)
        report = scorer.score([group], 0, [1.0], TrainerState())
        assert [completion.reward for completion in group.completions] == [1.0, 0.0, 0.0]
        assert report.columns == {"tests passed": ["2 of 2", "0 of 2", "0 of 2"]}
    finally:
        scorer.close()


def test_nothing_is_run_where_it_could_not_be_confined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refuses = "lambda folder: 'the kernel offers no Landlock here'"
    server = f"from backend.rewards import programs\nprograms.confine.confine_program = {refuses}\nprograms.main()"
    monkeypatch.setattr(programs, "module_command", lambda module: [sys.executable, "-c", server])
    runner.close()
    made = tmp_path / "made"
    with pytest.raises(RewardError, match="programs cannot be kept from your files here: the kernel offers no Landloc"):
        scores([f"open({str(made)!r}, 'w')\n{ADD}"], tests=ASSERTS)
    assert not made.exists()


@cases(
    "value",
    [
        *(None, True, 3, -(2**90), 1.5, float("inf"), "é\ud800", b"\0", 1j),
        *([1, [2]], (1,), {1, 2}, {"a": (1, None)}, {(1, 2): {3}}, [], {}),
    ],
)
def test_plain_values_come_back_equal(value: Any) -> None:
    back = decoded(json.loads(json.dumps(encoded(value))))
    assert back == value and type(back) is type(value)


COLLIDING = ["s", *(n * (2**61 - 1) for n in range(5000))]


@pytest.mark.parametrize(
    "claim",
    [{}, ["x"], [1], [], ["c", "x y"], ["c", 10**999, 0], ["s", ["l"]], ["b", 3], ["d", "ab", 3], COLLIDING],
    ids=range(10),
)
def test_what_is_no_value_is_refused(claim: Any) -> None:
    with pytest.raises(NotPlainError):
        decoded(claim)


EQUAL = [
    ("3\n", "3"),
    ("a  \nb\n\n", "a\nb"),
    ("1 2", "1\n2"),
    ("0.3333333333", "0.33333333334"),
    ("3", "3.0"),
    ("", ""),
]
DIFFERENT = [("1 2", "12"), ("3.0", "3"), ("0.34", "0.33"), ("nan", "1.0"), ("YES", "yes")]


def test_outputs_are_compared_as_judges_do() -> None:
    assert all(same_output(actual, expected) for actual, expected in EQUAL)
    assert not any(same_output(actual, expected) for actual, expected in DIFFERENT)
