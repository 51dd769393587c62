"""The message on a function that failed: one printable line of at most 200 characters, and the line of its file."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from backend.rewards.errors import Failure, RewardError, describe_error
from backend.rewards.registry import FunctionDescription
from backend.types import Completion, Problem

HUGE = "long \x1b[31m\n\u202e" * 2_000


def sample(prompt: str, completion: str) -> tuple[Problem, Completion]:
    return Problem(0, prompt, [], [], "", None, {}), Completion([], [], completion, "eos")


@pytest.mark.parametrize("has_line", [False, True])
def test_messages_fit_on_a_line(has_line: bool) -> None:
    whats = ["raised ValueError: no (mine.py, line 3)", f"raised {HUGE} (mine.py, line 3)"]
    texts = ["", "short", HUGE]
    files = [None, Path("mine.py"), Path("m" * 250 + ".py")]
    for what, prompt, text, name, file in itertools.product(whats, texts, texts, ["f", "f" * 10_000], files):
        function = FunctionDescription(name, file, 12_345)
        (problem,) = RewardError(function, Failure(what, has_line=has_line), sample(prompt, text)).faults
        assert len(problem.sentence) <= 200 and problem.sentence.isprintable()
        assert "line 3), on the prompt “" in problem.sentence, "what is cut keeps its end"
        assert ("line 12345" in problem.sentence) != has_line
        if len(prompt) < 10 and len(text) < 10 and len(what) < 100:
            assert f"{what}, on the prompt “{prompt}” and the completion “{text}”." in problem.sentence


def test_in_the_app_a_missing_module_comes_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rewards_for_mathematics.py"
    file.write_text("import sentence_transformers\n")
    with pytest.raises(ModuleNotFoundError) as missing:
        exec(compile(file.read_text(), str(file), "exec"), {"__name__": "theirs"})
    words = describe_error(missing.value, file)
    assert "sentence_transformers" in words and words.endswith("line 1)")
    monkeypatch.setattr("backend.rewards.errors.is_bundled", lambda: True)
    assert describe_error(missing.value, file) == f"{words}; not in the app: use grpo-studio from pip"
