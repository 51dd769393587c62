"""Compare a completion's final answer with the dataset's as mathematics: `1/2`, `0.5` and `\\frac{1}{2}` are equal.

Equal texts, whole numbers and words are decided here; everything else goes to math-verify, in a child process
(`backend.rewards.functions.math_verify_process`). The cost is bounded: of an answer the last `LONGEST` characters are
read, and a comparison that takes too long counts as wrong; after `PATIENCE` of those in one call, the rest is compared
as text only.
"""

from __future__ import annotations

import atexit
import re
import signal
import threading
from functools import lru_cache

from backend.rewards.functions.answer_text import final_answer
from backend.utils.child_process import ChildEnded, ChildProcess, module_command

LONGEST = 500
"""Characters of an answer that are compared, the last of it."""
PATIENCE = 5
"""Comparisons that may run out of time in one call before the rest of it is compared as text."""
VERB = "equality"
"""The argument that makes a bundled app's executable this child, where there is no Python to run a module with."""

_INTEGER = re.compile(r"[-−+]?\d{1,3}(?:,\d{3})+|[-−+]?\d+")
_WORDS = re.compile(r"[^\W\d_]+(?:[\s'’,-]+[^\W\d_]+)*")
_TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}")


def correct(completions: list[str], answers: list[str]) -> list[bool | None]:
    """Whether each completion's final answer equals the dataset's; None where the dataset has none.

    The final answer is searched for in the last `<answer>`, else after the thoughts; there it is the content of the
    last `\\boxed{…}`, else what follows the last `####`, else the whole text.
    """
    verdicts: list[bool | None] = []
    timed_out: set[tuple[str, str]] = set()
    for completion, answer in zip(completions, answers, strict=True):
        reference, candidate = _tail(final_answer(answer)), _tail(final_answer(completion))
        verdict = _verdict_without_mathematics(reference, candidate)
        if verdict is None and reference and len(timed_out) < PATIENCE:
            verdict = _math_verify_verdict(reference, candidate)
            timed_out |= {(reference, candidate)} if verdict is None else set()
        verdicts.append(bool(verdict) if reference else None)
    return verdicts


def _tail(text: str) -> str:
    return text[-LONGEST:].strip()


def _verdict_without_mathematics(reference: str, candidate: str) -> bool | None:
    """The verdict on equal texts, words, whole numbers and an empty answer; None where mathematics has to decide."""
    reference, candidate = _normalized(reference), _normalized(candidate)
    if reference == candidate:
        return True
    if not candidate or _WORDS.fullmatch(reference):
        return False
    if _INTEGER.fullmatch(reference) and _INTEGER.fullmatch(candidate):
        return _canonical_integer(reference) == _canonical_integer(candidate)
    return None


def _normalized(text: str) -> str:
    """Without case, dollar signs around it, `\\text{}` or the full stop at its end."""
    return " ".join(_TEXT_COMMAND.sub(r"\1", text).casefold().strip("$ \n.").split())


def _canonical_integer(text: str) -> str:
    # Compared as text: int() raises above 4,300 digits (sys.set_int_max_str_digits).
    digits = text.replace(",", "").lstrip("+-−").lstrip("0")
    return ("-" if text[0] in "-−" and digits else "") + digits


@lru_cache(maxsize=10_000)
def _math_verify_verdict(reference: str, candidate: str) -> bool | None:
    """math-verify's verdict; None where it took too long."""
    return _math_verify.ask(reference, candidate)


class _MathVerify:
    """The child process, started for the first comparison and again after one that ended it."""

    def __init__(self) -> None:
        self.child = ChildProcess(_command(), grace_s=1.0)
        self._lock = threading.Lock()

    def ask(self, reference: str, candidate: str) -> bool | None:
        """The verdict; None where the comparison ran out of processor time, or ended the child twice.

        A child that died of anything else may have been killed from outside, so it gets a second chance. Raises
        RuntimeError where math-verify cannot work at all: that is no completion's fault, and must not become a score of
        0.
        """
        with self._lock:
            for _ in range(2):
                if not self.child.is_started:
                    self._start()
                try:
                    return self.child.request([reference, candidate])
                except ChildEnded as ended:
                    if ended.exit_code == -signal.SIGPROF:
                        break
            return None

    def _start(self) -> None:
        self.child.start()
        try:
            greeting = self.child.receive()
        except ChildEnded as ended:
            sentence = f"the process that checks mathematics ended at once, with code {ended.exit_code}"
            raise RuntimeError(sentence) from ended
        if greeting != "ready":
            self.close()
            raise RuntimeError(greeting)

    def close(self) -> None:
        self.child.stop()


def _command() -> list[str]:
    return module_command("backend.rewards.functions.math_verify_process", VERB)


_math_verify = _MathVerify()
atexit.register(_math_verify.close)
