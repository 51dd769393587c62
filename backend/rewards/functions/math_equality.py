"""Whether an answer is right, as mathematics: `1/2`, `0.5` and `\\frac{1}{2}` are one answer, and `Paris` is text.

Texts that are equal, whole numbers and words are decided here; for everything else math-verify is asked, in a process
of its own (`backend.rewards.functions.math_verify_process`). Bounded: an answer longer than `LONGEST` is read at its end only, and comparisons
that take too long are given up, a few of them in one call before the rest is compared as text.
"""

from __future__ import annotations

import atexit
import json
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import lru_cache

from backend.rewards.functions.answer_text import final_answer
from backend.spec.command import backend_command, backend_environment

LONGEST = 500
"""Characters of an answer that are read, its last ones."""
PATIENCE = 5
"""Comparisons that may run out of time in one call before the rest of it is compared as text."""
VERB = "equality"
"""What a bundled app's executable is asked for, where there is no Python to run a module with."""

_WHOLE = re.compile(r"[-−+]?\d{1,3}(?:,\d{3})+|[-−+]?\d+")
_WORDY = re.compile(r"[^\W\d_]+(?:[\s'’,-]+[^\W\d_]+)*")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}")


def correct(completions: list[str], answers: list[str]) -> list[bool | None]:
    """For each completion whether its final answer is the dataset's; None where the dataset has none.

    The final answer is in the last `<answer>`, or behind the thoughts; there in the last `\\boxed{…}`, behind the last
    `####`, or it is what stands there last.
    """
    verdicts: list[bool | None] = []
    given_up: set[tuple[str, str]] = set()
    for completion, answer in zip(completions, answers, strict=True):
        right, given = _short(final_answer(answer)), _short(final_answer(completion))
        verdict = _decided(right, given)
        if verdict is None and right and len(given_up) < PATIENCE:
            verdict = _judged(right, given)
            given_up |= {(right, given)} if verdict is None else set()
        verdicts.append(bool(verdict) if right else None)
    return verdicts


def _short(text: str) -> str:
    return text[-LONGEST:].strip()


def _decided(right: str, given: str) -> bool | None:
    """The verdict, where it takes no mathematics: texts, words, whole numbers, an empty answer."""
    right, given = _plain(right), _plain(given)
    if right == given:
        return True
    if not given or _WORDY.fullmatch(right):
        return False
    if _WHOLE.fullmatch(right) and _WHOLE.fullmatch(given):
        return _whole(right) == _whole(given)
    return None


def _plain(text: str) -> str:
    """The text as it is compared: without case, dollar signs around it, `\\text{}` or the full stop at its end."""
    return " ".join(_TEXT.sub(r"\1", text).casefold().strip("$ \n.").split())


def _whole(text: str) -> str:
    """A whole number in one spelling; as text, for Python limits the digits that it turns into a number."""
    digits = text.replace(",", "").lstrip("+-−").lstrip("0")
    return ("-" if text[0] in "-−" and digits else "") + digits


@lru_cache(maxsize=10_000)
def _judged(right: str, given: str) -> bool | None:
    """math-verify's verdict; None where it took too long."""
    return _judge.ask(right, given)


class _Judge:
    """The other process, started when it is first needed and again whenever a comparison has ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def ask(self, right: str, given: str) -> bool | None:
        """The verdict, or None where the comparison outlasted its fuse, or ended the process twice."""
        with self._lock:
            for _ in range(2):
                process = self._process or self._start()
                verdict = self._answer(process, json.dumps([right, given]))
                if isinstance(verdict, bool):
                    return verdict
                if self._end(process) == -signal.SIGPROF:
                    break
            return None

    def _answer(self, process: subprocess.Popen[str], line: str = "") -> object:
        """The next thing the process says, after it was told `line`; None when it has ended."""
        try:
            if line:
                process.stdin.write(f"{line}\n")  # pyright: ignore[reportOptionalMemberAccess]
                process.stdin.flush()  # pyright: ignore[reportOptionalMemberAccess]
            said = process.stdout.readline()  # pyright: ignore[reportOptionalMemberAccess]
        except BrokenPipeError:
            return None
        except BaseException:
            # Interrupted between a question and its answer: the next one would get the answer to this.
            self._end(process)
            raise
        return json.loads(said) if said.endswith("\n") else None

    def _start(self) -> subprocess.Popen[str]:
        """Raises RuntimeError where the process cannot work: that is no completion's fault, and no 0."""
        process = self._process = subprocess.Popen(
            _command(), env=backend_environment(), encoding="utf-8", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True,  # Ctrl-C is for the trainer, which saves and stops
        )  # fmt: skip
        said = self._answer(process)
        if said != "ready":
            code = self._end(process)
            raise RuntimeError(said or f"the process that checks mathematics ended at once, with code {code}")
        return process

    def _end(self, process: subprocess.Popen[str]) -> int:
        """End the process and return how it ended."""
        self._process = None
        process.stdout.close()  # pyright: ignore[reportOptionalMemberAccess]
        with suppress(BrokenPipeError):  # a question that it did not live to read
            process.stdin.close()  # pyright: ignore[reportOptionalMemberAccess]
        try:
            return process.wait(1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def close(self) -> None:
        if self._process:
            self._end(self._process)


def _command() -> list[str]:
    if getattr(sys, "frozen", False):
        return backend_command(VERB)
    return [sys.executable, "-P", "-m", "backend.rewards.functions.math_verify_process"]


_judge = _Judge()
atexit.register(_judge.close)
