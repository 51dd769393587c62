r"""Find the final answer in a completion, and compare it with the dataset's as mathematics: `1/2` equals `\frac{1}{2}`.

Equal texts, whole numbers and words are decided here; the rest goes to math-verify, in a child process, because an
answer such as 9^{9^9} keeps sympy inside one call into C that nothing can interrupt. Each comparison has a limit on its
processor time (SIGPROF, whose default action ends the process); the next one starts another child."""

import atexit
import logging
import re
import signal
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache

from backend.rewards.functions.r1 import extract_answer
from backend.utils import child_process
from backend.utils.child_process import ChildEnded, ChildProcess, module_command

LONGEST = 500  # characters of an answer that are compared, the last of it
PATIENCE = 5  # comparisons that may run out of time in one call before the rest of it is compared as text
LIMIT_S = 1.0  # processor time of a comparison. Wall-clock time would make a verdict depend on the machine's load

_BOXES = ("\\boxed{", "\\fbox{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # a brace, or a backslash with the character it escapes: `\{` is no brace
_INTEGER = re.compile(r"[-−+]?\d{1,3}(?:,\d{3})+|[-−+]?\d+")
_WORDS = re.compile(r"[^\W\d_]+(?:[\s'’,-]+[^\W\d_]+)*")
_TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}")


def answer_part(text: str) -> str:
    """The text in the last closed `<answer>`; without one, what follows the last thought; else all of it. Stripped."""
    if answer := extract_answer(text):
        return answer
    end = max((text.rfind(tag) + len(tag) for tag in ("</think>", "</reasoning>") if tag in text), default=0)
    return text[end:].strip()


def marked_answer(text: str) -> str:
    """The content of the last `\\boxed{…}`, else the line after the last `####` (GSM8K); else empty."""
    start = max(text.rfind(box) + len(box) if box in text else -1 for box in _BOXES)
    depth = 1
    for brace in _BRACE.finditer(text, start) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth and (boxed := text[start : brace.start()].strip()):
            return boxed
        if not depth:
            break
    _, mark, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0].strip() if mark else ""


def final_answer(text: str) -> str:
    """The marked answer of the answer part, else the whole answer part."""
    part = answer_part(text)
    return marked_answer(part) or part


def correct(completions: list[str], answers: list[str]) -> list[bool | None]:
    """Compare each completion's final answer with the dataset's; None where the dataset has none."""
    verdicts: list[bool | None] = []
    timed_out: set[tuple[str, str]] = set()
    for completion, answer in zip(completions, answers, strict=True):
        reference, candidate = (final_answer(text)[-LONGEST:].strip() for text in (answer, completion))
        verdict = _verdict_without_mathematics(reference, candidate)
        if verdict is None and reference and len(timed_out) < PATIENCE:
            verdict = _math_verify_verdict(reference, candidate)
            timed_out |= {(reference, candidate)} if verdict is None else set()
        verdicts.append(bool(verdict) if reference else None)
    return verdicts


def _verdict_without_mathematics(reference: str, candidate: str) -> bool | None:
    plain = (_TEXT_COMMAND.sub(r"\1", text).casefold().strip("$ \n.") for text in (reference, candidate))
    reference, candidate = (" ".join(text.split()) for text in plain)
    if reference == candidate:
        return True
    if not candidate or _WORDS.fullmatch(reference):
        return False
    if _INTEGER.fullmatch(reference) and _INTEGER.fullmatch(candidate):
        first, second = (int(text.replace(",", "").replace("−", "-")) for text in (reference, candidate))
        return first == second
    return None


class _MathVerify:
    """The child process, started for the first comparison and again after one that ended it."""

    def __init__(self, command: Sequence[str] = ()) -> None:
        command = command or module_command("backend.rewards.functions.math_equality")
        self.child = ChildProcess(command, grace_s=1.0)
        self._lock = threading.Lock()

    def ask(self, reference: str, candidate: str) -> bool | None:
        """The verdict; None where the comparison ran out of processor time, or ended the child twice. Raises
        RuntimeError where math-verify cannot work at all, which must not become a score of 0."""
        with self._lock:
            for _ in range(2):
                if self.child.pid is None:
                    self.child.start()
                    try:
                        greeting = self.child.receive()
                    except ChildEnded as ended:
                        sentence = f"the process that checks mathematics ended at once, with code {ended.exit_code}"
                        raise RuntimeError(sentence) from ended
                    if greeting != "ready":
                        self.child.stop()
                        raise RuntimeError(greeting)
                try:
                    return self.child.request([reference, candidate])
                except ChildEnded as ended:
                    if ended.exit_code == -signal.SIGPROF:
                        break
            return None


_math_verify = _MathVerify()
_math_verify_verdict = lru_cache(maxsize=10_000)(_math_verify.ask)
atexit.register(_math_verify.child.stop)


# In the child process

_PROSE = re.compile(r"(?<![\\A-Za-z])(?:[A-Za-z]{3,}|[A-Za-z]{2}\s+[A-Za-z]{2})")
_FUNCTIONS = re.compile(r"(?<![\\A-Za-z])(sin|cos|tan|ln|log|exp|pi)(?![A-Za-z])")
_DELIMITERS = re.compile(r"\\?\$|\\[()\[\]]")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?: \d{3})+(?![\d])")
_MIXED_NUMBER = re.compile(r"(?<![\d.,])(\d+) +(\d+) */ *(\d+)")
_SCIENTIFIC = re.compile(r"(?<=\d)[eE]([+-]?\d+)\b")


def main(arguments: Sequence[str] = ()) -> None:
    """Say "ready", or why not; then answer each [reference, candidate] with true or false until stdin ends."""
    out = child_process.claim_stdout()
    try:
        equal = comparison()
    except ImportError as error:
        child_process.answer(out, f"math-verify cannot be loaded: {error}")
        return
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    child_process.answer(out, "ready")
    for reference, candidate in child_process.requests():
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        verdict = equal(reference, candidate)
        signal.setitimer(signal.ITIMER_PROF, 0)
        child_process.answer(out, verdict)


def comparison() -> Callable[[str, str], bool]:
    """A function that compares two answers with math-verify; False for what it cannot parse."""
    logging.disable()  # it would log every completion that it cannot parse
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    def read(text: str) -> list[object]:
        configs = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
        # Its own time limits are alarms, whose handlers Python runs only between calls into C: SIGPROF does it better.
        return parse(text, configs, parsing_timeout=None)  # pyright: ignore[reportArgumentType]

    def parsed(text: str) -> list[object]:
        formula = _DELIMITERS.sub(" ", text).strip().rstrip(".")
        formula = _SPACED_THOUSANDS.sub(lambda match: match[0].replace(" ", ""), formula)
        formula = _MIXED_NUMBER.sub(r"(\1+\2/\3)", formula)
        formula = _FUNCTIONS.sub(r"\\\1", _SCIENTIFIC.sub(r" \\cdot 10^{\1}", formula))
        first, second = (text, f"${formula}$") if _PROSE.search(formula) else (f"${formula}$", text)
        return read(first) or read(second)

    def equal(reference: str, candidate: str) -> bool:
        try:
            return verify(parsed(reference), parsed(candidate), timeout_seconds=None)  # pyright: ignore
        except (Exception, RecursionError):  # sympy may raise anything on hostile text, which is no right answer
            return False

    equal(r"\frac{1}{2} + x^2", r"x^2 + 0.5")  # the first parse builds the grammar's tables, outside the time limit
    return equal


if __name__ == "__main__":
    main()
