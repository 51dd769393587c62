"""The message on a function that failed: one printable line with the line of its file."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from backend.rewards.errors import Failure, RewardError, describe_error
from backend.rewards.registry import FunctionDescription
from backend.types import Completion, Problem

HUGE = "long \x1b[31m\n\u202e" * 2_000


@pytest.mark.parametrize("raised", [False, True])
def test_messages_fit_on_a_line(raised: bool) -> None:
    whats = ["raised ValueError: no (mine.py, line 3)", f"raised {HUGE} (mine.py, line 3)"]
    samples = [None, *itertools.product(["", "short", HUGE], repeat=2)]
    files = [None, Path("mine.py"), Path("m" * 250 + ".py")]
    for what, texts, name, file in itertools.product(whats, samples, ["f", "f" * 10_000], files):
        sample = (Problem(0, texts[0], [], [], ""), Completion([], [], texts[1], "eos")) if texts else None
        function = FunctionDescription(name, file, 12_345)
        (problem,) = RewardError.of_call(function, Failure(what, raised=raised), sample).faults
        assert len(problem.sentence) <= (320 if texts else 200) and problem.sentence.isprintable()
        assert f"line 3){', on the prompt “' if texts else '.'}" in problem.sentence, "what is cut keeps its end"
        assert ("line 12345" in problem.sentence) != raised
        if texts and len("".join(texts)) <= 10:
            assert problem.sentence.endswith(f", on the prompt “{texts[0]}” and the completion “{texts[1]}”.")


def test_in_the_app_a_missing_module_comes_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rewards_for_mathematics.py"
    file.write_text("import sentence_transformers\n")
    with pytest.raises(ModuleNotFoundError) as missing:
        exec(compile(file.read_text(), str(file), "exec"), {"__name__": "theirs"})
    words = describe_error(missing.value, file)
    assert "sentence_transformers" in words and words.endswith("line 1)")
    monkeypatch.setattr("backend.rewards.errors.is_bundled", lambda: True)
    assert describe_error(missing.value, file) == f"{words}; not in the app: use grpo-studio from pip"
