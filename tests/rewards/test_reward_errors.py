"""The sentence on a function that failed: one printable line of at most 200 characters, whatever was long, and the line of its file."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from backend.rewards.errors import RewardError, describe_error, failure_room, reward_error
from backend.rewards.registry import FunctionDescription
from backend.rewards.resolve import resolve
from backend.types import Completion, Problem
from tests.support.scoring import make_group, score

HUGE = "long \x1b[31m\n\u202e" * 2_000


def sample(prompt: str, completion: str) -> tuple[Problem, Completion]:
    return Problem(0, prompt, [], [], "", None, {}), Completion([], [], completion, "eos")


@pytest.mark.parametrize("has_line", [False, True])
def test_sentences_fit_on_a_line(has_line: bool) -> None:
    whats = ["raised ValueError: no (mine.py, line 3)", f"raised {HUGE} (mine.py, line 3)"]
    texts = ["", "short", HUGE]
    files = [None, Path("mine.py"), Path("m" * 250 + ".py")]
    for what, prompt, text, name, file in itertools.product(whats, texts, texts, ["f", "f" * 10_000], files):
        function = FunctionDescription(name, file, 12_345)
        (fault,) = reward_error(function, what, sample(prompt, text), has_line).faults
        assert len(fault.sentence) <= 200 and fault.sentence.isprintable()
        assert "line 3), on the prompt “" in fault.sentence, "what is cut keeps its end"
        assert ("line 12345" in fault.sentence) != has_line
        if len(prompt) < 10 and len(text) < 10 and len(what) < 100:
            assert f"{what}, on the prompt “{prompt}” and the completion “{text}”." in fault.sentence


def test_what_one_text_does_not_need_is_the_others() -> None:
    function = FunctionDescription("brevity", Path("mine.py"), 3)
    (fault,) = reward_error(function, "raised " + "x" * 60, sample("2 + 2?", "y" * 300), True).faults
    assert len(fault.sentence) == 200 and "“2 + 2?”" in fault.sentence


def test_an_error_is_cut_to_the_room_that_its_sentence_has() -> None:
    odd = type("Odd" * 3000, (Exception,), {})
    try:
        raise odd(HUGE)
    except odd as error:
        caught = error
    rooms = (
        failure_room(FunctionDescription(name, file, 3), sample(HUGE, HUGE), True) - len("raised ")
        for name, file in (("f", Path("mine.py")), ("f" * 99, Path("m" * 99 + ".py")))
    )
    for room in rooms:
        words = describe_error(caught, Path("mine.py"), room)
        assert words.startswith("OddO") and words.endswith("(mine.py)")
        assert len(words) <= room and words.isprintable()


class LyingAboutItsName(type):
    @property
    def __name__(cls) -> str:
        raise OSError


def test_in_the_app_a_missing_module_comes_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the name of the file and the line beside it, in the words that a sentence leaves."""
    file = tmp_path / "rewards_for_mathematics.py"
    file.write_text("import sentence_transformers\n")
    namespace = {"__name__": "theirs"}
    with pytest.raises(ModuleNotFoundError) as missing:
        exec(compile(file.read_text(), str(file), "exec"), namespace)
    told = describe_error(missing.value, file)
    assert "sentence_transformers" in told and told.endswith("line 1)")
    monkeypatch.setattr("backend.rewards.errors.is_bundled", lambda: True)
    assert describe_error(missing.value, file) == f"{told}; not in the app: use grpo-studio from pip"


def test_a_class_cannot_lie_about_its_name() -> None:
    assert describe_error(LyingAboutItsName("Odd", (Exception,), {})("no"), None) == "Odd: no"


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_an_exceptions_text_has_no_more_time_than_its_function_had(tmp_path: Path, kind: str) -> None:
    """In the trainer's own process; `test_isolation` and the table of hostile functions show it for the other."""
    file = tmp_path / "mine.py"
    file.write_text(
        f"import time\nclass Slow(Exception):\n    def __str__(self):\n        while True: time.sleep(0.01)\n{kind} f(completions): raise Slow\n"
    )
    began = time.monotonic()
    with pytest.raises(RewardError, match=r"f of mine.py, line 5, was still running after 0.3 s"):
        score([make_group("a")], resolve([f"{file}::f"]), [1.0], 0.3)
    assert time.monotonic() - began < 2.0
