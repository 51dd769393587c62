"""A completion of a run with tools as a text to read: its turns, and in each the calls with their results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any, Literal

Kind = Literal["head", "text", "call", "note", "result", "failed", "warning"]
"""What a part is: the number of a turn, what the model wrote, a call, its time, its result or error, why it ends."""
Part = tuple[Kind, str]

LEFT_OUT = "The results did not fit within the completion length: they were left out, and the completion ended here."
NOT_RUN = "Not run: the completion has no tool turns left."


def turns_of(completion: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The turns of a row of completions.jsonl; none for a run without tools."""
    turns = completion.get("turns")
    return [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []


def turns_mark(completion: Mapping[str, Any]) -> str:
    """“3 turns, 2 calls, 1 failed”, “no call”; "" for a completion without turns."""
    turns = turns_of(completion)
    calls = sum(len(turn.get("calls") or ()) for turn in turns)
    failed = sum(bool(result.get("failed")) for turn in turns for result in turn.get("results") or ())
    if not calls:
        return "no call" if turns else ""
    mark = f"{len(turns)} turn{'s' * (len(turns) > 1)}, {calls} call{'s' * (calls > 1)}"
    return f"{mark}, {failed} failed" if failed else mark


def conversation_parts(completion: Mapping[str, Any]) -> list[Part]:
    """The whole text of a completion in parts that are shown differently; one part where it has a single turn."""
    turns = turns_of(completion)
    if len(turns) < 2 and not any(turn.get("calls") for turn in turns):
        text = completion.get("text")
        return [("text", text if isinstance(text, str) else "")]
    *parts, (kind, last) = [part for number, turn in enumerate(turns, 1) for part in _turn_parts(number, turn)]
    return [*parts, (kind, last.removesuffix("\n"))]


def conversation_text(completion: Mapping[str, Any]) -> str:
    return "".join(text for _, text in conversation_parts(completion))


def _turn_parts(number: int, turn: Mapping[str, Any]) -> Iterator[Part]:
    yield "head", f"{chr(10) * (number > 1)}Turn {number}, {turn.get('tokens')} tokens\n"
    if text := str(turn.get("text") or "").strip("\n"):
        yield "text", f"{text}\n"
    calls, results = turn.get("calls") or [], turn.get("results") or []
    for call, result in zip_longest(calls, results):
        arguments = ((call or {}).get("arguments") or {}).items()
        inside = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments)
        yield "call", f"→ {(call or result).get('name')}({inside})"
        if result is None:
            yield "warning", f"\n{NOT_RUN}\n"
            continue
        seconds = result.get("seconds") or 0.0
        yield "note", f"  {seconds:.3g} s\n" if seconds >= 1 else f"  {seconds * 1000:.3g} ms\n"
        content = str(result.get("content")).replace("\n", "\n  ")
        yield ("failed", f"✕ {content}\n") if result.get("failed") else ("result", f"← {content}\n")
    if results and not turn.get("result_tokens"):
        yield "warning", f"{LEFT_OUT}\n"
