"""`python -m backend serve`: each question gets just one final message, blocks no other; only messages reach stdout."""

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backend.rewards.allowed_code import allow_named
from backend.serve.questions import QUESTIONS, QuestionCall, Server, handler
from backend.utils.command import backend_command, backend_environment
from backend.utils.errors import UserError
from backend.utils.places import demo_folder, project_root

HERE = "tests.serve.test_serve"


def echo(call: QuestionCall, **fields: Any) -> Any:
    call.report({"half": True})
    return fields


def fail(call: QuestionCall, **fields: Any) -> Any:
    raise FAILURES[fields["how"]]


def unsayable(call: QuestionCall, **fields: Any) -> Any:
    return {"a set": {1}}


def patient(call: QuestionCall, **fields: Any) -> Any:
    call.report({"begun": True})
    call.sleep(30)


def thread(call: QuestionCall, **fields: Any) -> Any:
    return threading.get_ident()


FAILURES = {
    "a mistake": UserError("data", "There is no file rows.csv."),
    "no memory": MemoryError(),
    "a full disk": OSError(errno.ENOSPC, "No space left on device", "/a/file"),
    "a bug": ZeroDivisionError("Error"),
}
lasting = patient
ASKED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("echo", "fail", "unsayable", "patient"), (HERE, "quick")),
    "lasting": (HERE, "long"),
    "thread": (HERE, "model"),
    "absent": ("backend.serve.nowhere", "quick"),
}


def answers_to(*questions: dict[str, Any]) -> list[dict[str, Any]]:
    """All messages of the server in reply to these lines, in order."""
    lines: list[str] = []
    Server(lines.append, ASKED).serve([json.dumps(question).encode() for question in questions])
    return [json.loads(line) for line in lines]


def ask(number: int, name: str, **with_: Any) -> dict[str, Any]:
    return {"id": number, "ask": name, "with": with_}


def test_an_answer_comes_after_its_progress():
    assert answers_to(ask(7, "echo", x=1)) == [{"id": 7, "progress": {"half": True}}, {"id": 7, "answer": {"x": 1}}]


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ("a mistake", {"setting": "data", "sentence": "There is no file rows.csv."}),
        ("no memory", {"sentence": "There was not enough memory. Closing other programs helps."}),
        ("a full disk", {"sentence": "/a/file cannot be used: the disk is full."}),
    ],
)
def test_a_mistake_and_what_the_machine_lacks_are_faults_and_no_bug(how: str, fault: dict[str, str]):
    (answer,) = answers_to(ask(1, "fail", how=how))
    (told,) = answer.pop("faults")
    assert answer == {"id": 1} and told | fault == told


@pytest.mark.parametrize("name", ["fail", "unsayable", "absent"])
def test_an_exception_is_answered_with_its_traceback_and_the_loop_goes_on(name: str):
    asked = (ask(1, name, how="a bug"), ask(2, "echo"))
    answers = {answer["id"]: answer for answer in answers_to(*asked) if "progress" not in answer}
    assert "Error" in answers[1]["traceback"]
    assert answers[2]["answer"] == {}


@pytest.mark.parametrize("name", ["patient", "lasting"])
def test_a_running_question_can_be_cancelled(name: str):
    begun, answers = threading.Event(), list[dict[str, Any]]()

    def hear(line: str) -> None:
        answers.append(json.loads(line))
        begun.set()

    def lines() -> Iterator[bytes]:
        yield json.dumps(ask(3, name)).encode()
        assert begun.wait(10)
        yield b'{"cancel": 3}'

    began = time.monotonic()
    Server(hear, ASKED).serve(lines())
    assert answers == [{"id": 3, "progress": {"begun": True}}, {"id": 3, "cancelled": True}]
    assert time.monotonic() - began < 10


def test_a_cancelled_question_that_waits_for_a_thread_is_never_started():
    """More patient questions than threads: the last is cancelled before it gets one."""
    many = [ask(number, "patient") for number in range(1, 8)]
    answers = answers_to(*many, *({"cancel": number} for number in range(7, 0, -1)))
    assert {"id": 7, "progress": {"begun": True}} not in answers
    assert sum("cancelled" in answer for answer in answers) == 7


def test_long_questions_leave_the_pool_free():
    free, lines = threading.Event(), list[dict[str, Any]]()

    def hear(line: str) -> None:
        lines.append(json.loads(line))
        if lines[-1].get("answer") == {"late": True}:
            free.set()

    def questions() -> Iterator[bytes]:
        for number in range(1, 13):
            yield json.dumps(ask(number, "lasting")).encode()
        yield json.dumps(ask(99, "echo", late=True)).encode()
        assert free.wait(10), "twelve downloads keep a look-up waiting"
        for number in range(1, 13):
            yield json.dumps({"cancel": number}).encode()

    Server(hear, ASKED).serve(questions())


def test_model_questions_run_on_one_thread():
    answers = answers_to(*(ask(number, "thread") for number in range(1, 6)))
    assert len({answer["answer"] for answer in answers}) == 1


def test_every_question_of_the_table_has_a_handler():
    for name, place in QUESTIONS.items():
        assert callable(handler(name, *place)), name


def test_prints_of_handlers_do_not_reach_stdout(tmp_path):
    """A library may print, from Python or from C: the window must not read that as an answer. What is unknown is
    refused, and the process ends when stdin does."""
    noisy = "import os\ndef noisy(call):\n    print('noise'); os.write(1, b'more'); return 1\n"
    (tmp_path / "noisy.py").write_text(noisy)
    asked = "import backend.serve.questions as t; t.QUESTIONS['noisy'] = ('noisy', 'quick')"
    start = f"{asked}; from backend.serve.questions import run; run()"
    environment = backend_environment()
    environment["PYTHONPATH"] += os.pathsep + str(tmp_path)
    command, lines = [backend_command("serve")[0], "-P", "-c", start], json.dumps(ask(1, "noisy")).encode()
    lines += b'\n\n{"id": 2, "ask": "weather"}\n'
    done = subprocess.run(command, input=lines, capture_output=True, env=environment, check=True, timeout=60)
    answer, refusal = sorted(map(json.loads, done.stdout.splitlines()), key=lambda each: each["id"])
    assert answer == {"id": 1, "answer": 1}
    assert refusal["faults"][0]["sentence"] == "There is no question weather."
    assert b"noise" in done.stderr and b"more" in done.stderr


PACKAGE = {  # mlx-lm in small: a package that imports its parts, and a handler that imports one of them
    "mlx_lm/__init__.py": "import time\ntime.sleep(0.3)\nfrom .generate import GENERATE\n",
    "mlx_lm/generate.py": "from .models.cache import CACHE\nGENERATE = CACHE\n",
    "mlx_lm/models/__init__.py": "",
    "mlx_lm/models/cache.py": "CACHE = 1\n",
    "handlers.py": "from mlx_lm.models.cache import CACHE\nsample = lambda call: CACHE\n",
}
SCRIPT = """
import threading, time
from backend.models.tokenizers import import_mlx_lm
from backend.serve.questions import handler

tokenizer = threading.Thread(target=import_mlx_lm)
tokenizer.start()
time.sleep(0.1)
print(handler("sample", "handlers", "model")(None))
tokenizer.join()
"""


def test_sampling_while_a_tokenizer_is_loaded_for_the_first_time(tmp_path: Path) -> None:
    """Two threads need mlx-lm at once: a tokenizer for the dataset's preview, the model for a sample.

    On a busy machine the first click on Sample ended in “deadlock detected by _ModuleLock”."""
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    script = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(project_root())!r}]\n{SCRIPT}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("1", "")


def test_tools_are_loaded_while_a_tokenizer_is(tmp_path: Path) -> None:
    """With the real packages, three seconds: transformers replaces its module while it is imported."""
    settings = {"model": str(demo_folder("model")), "data": str(demo_folder("data"))}
    with_tools = {"tools_file": str(project_root() / "resources" / "examples" / "calculator.py")}
    allow_named(with_tools)
    asked = [
        {"id": 1, "ask": "preview_row", "with": {"settings": settings, "split": "train", "index": 0}},
        {"id": 2, "ask": "tools", "with": {"settings": with_tools}},
        {"id": 3, "ask": "models", "with": {"paths": []}},
    ]
    text, env = "".join(json.dumps(each) + "\n" for each in asked), backend_environment()
    done = subprocess.run(backend_command("serve"), input=text, env=env, capture_output=True, text=True, timeout=60)
    ends = {end["id"]: end for end in map(json.loads, done.stdout.splitlines()) if "progress" not in end}
    assert [*sorted(ends)] == [1, 2, 3] and all("answer" in end for end in ends.values()), ends
