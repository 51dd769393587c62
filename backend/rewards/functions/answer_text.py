"""Find the answer in a completion: after the thoughts, in `<answer>`, in `\\boxed{}`, after `####`.

It judges nothing. Completions may be huge and hostile, so everything here is a plain search that passes over the text a
fixed number of times: no regular expression that could backtrack.
"""

from __future__ import annotations

import re

from backend.rewards.functions.r1 import extract_answer

_BOXES = ("\\boxed{", "\\fbox{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or a backslash with the character it escapes: `\\{` is no brace."""
_MARK = "####"


def answer_part(text: str) -> str:
    """The text in the last closed `<answer>`; without one, what follows the last thought; else all of it. Stripped."""
    return extract_answer(text) or after_thoughts(text)


def after_thoughts(text: str) -> str:
    """What follows the last `</think>` or `</reasoning>`, stripped; all of the text without one."""
    end = max((text.rfind(tag) + len(tag) for tag in ("</think>", "</reasoning>") if tag in text), default=0)
    return text[end:].strip()


def marked_answer(text: str) -> str:
    """The content of the last `\\boxed{…}`, else the line after the last `####`; else empty."""
    return _boxed(text) or _behind_mark(text)


def final_answer(text: str) -> str:
    """The marked answer of the answer part, else the whole answer part."""
    part = answer_part(text)
    return marked_answer(part) or part


def _boxed(text: str) -> str:
    """The content of the last box up to its matching brace; empty where it is not closed."""
    start = max(text.rfind(box) + len(box) if box in text else -1 for box in _BOXES)
    depth = 1
    for brace in _BRACE.finditer(text, start) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return text[start : brace.start()].strip()
    return ""


def _behind_mark(text: str) -> str:
    """The rest of the line after the last `####`, which is GSM8K's form of an answer."""
    _, mark, rest = text.rpartition(_MARK)
    return rest.strip().partition("\n")[0].strip() if mark else ""
