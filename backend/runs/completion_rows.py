"""Rows of completions as typed dictionaries: one line of a run's completions.jsonl, and one group to be scored; and a
completion with tools as a text to read. Only the step of a row is checked: code that shows one must expect missing
keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any, Literal, NotRequired, TypedDict

Stop = Literal["eos", "length", "string"]  # an end-of-sequence token, the length limit, or one of the `stop` strings


class TokenData(TypedDict):
    """Every token of one completion, recorded with `record_tokens`. Each list has one entry a token. Log-probabilities
    are in nats, after the temperature. The learner's values are of the last update of the step, and absent where the
    completion was left out of every update."""

    text: list[str]  # of a character that several tokens make up, the last one has it
    logp: list[float | None]  # when sampled, before top-p, top-k and min-p
    mask: NotRequired[list[int]]  # 1 where a token is trained on; absent: 1 throughout
    learned_logp: NotRequired[list[float | None]]  # before that update
    ratio: NotRequired[list[float | None]]  # π_θ / π_old as the loss had it
    clipped: NotRequired[list[int]]  # 1 where clipping took effect
    advantage: NotRequired[list[float | None]]  # absent where all are the completion's own `advantage`


class TurnRow(TypedDict):
    """What the policy wrote until it ended a turn, and what its calls gave."""

    text: str  # outside the calls
    tokens: int
    calls: list[dict[str, Any]]  # name, arguments
    results: list[dict[str, Any]]  # name, content, failed, seconds
    result_tokens: int  # 0 where the results did not fit and were left out


class CompletionRow(TypedDict):
    """One completion of a `GroupRow`."""

    text: str
    tokens: int  # that the policy wrote, ends of turns included
    stop: Stop
    rewards: dict[str, float | None]  # reward function → its score; None where it had no opinion
    reward: float | None  # the weighted sum of the scores
    advantage: NotRequired[float]  # absent in an evaluation
    turns: NotRequired[list[TurnRow]]  # of a run with tools; `text` is the last turn's then
    logged: NotRequired[dict[str, Any]]  # columns that reward functions noted (TRL's `log_extra`)
    teacher_context: NotRequired[dict[str, Any]]  # self-distillation: solution_of (index in the group), feedback
    token_data: NotRequired[TokenData]


class GroupRow(TypedDict):
    """One line of completions.jsonl: the completions that a step sampled for one prompt."""

    step: int
    prompt: str
    answer: str
    type: str | None
    completions: list[CompletionRow]
    images: NotRequired[list[str]]  # paths of the prompt's pictures, in order


class SampledRow(TypedDict):
    """One completion of a `ScoringRow`."""

    text: str
    tokens: list[int]  # empty where only the text is known
    stop: Stop
    turns: NotRequired[list[TurnRow]]
    conversation: NotRequired[int]  # its number at the tool host that sampled it


class ScoringRow(TypedDict):
    """A group to be scored: the inputs of reward functions."""

    prompt: str
    answer: str
    type: str | None
    messages: list[dict[str, Any]]
    columns: dict[str, Any]  # every column of the dataset's row
    completions: list[SampledRow]
    images: NotRequired[list[str]]  # paths, as in `messages`


# JSON escapes every quote inside a string, so the first two occur nowhere else in a line.
_DATA, _DATA_TEXT_END, _DATA_END = b', "token_data": {"text": [', b'], "logp": [', b"}"


def without_token_data(line: bytes) -> bytes:
    """A line of completions.jsonl without its token data, which may be four fifths of it, for faster parsing."""
    kept: list[bytes] = []
    start = 0
    while (cut := line.find(_DATA, start)) >= 0:
        texts = line.find(_DATA_TEXT_END, cut)
        end = line.find(_DATA_END, texts) if texts >= 0 else -1
        if end < 0:
            break
        kept.append(line[start:cut])
        start = end + 1
    return b"".join([*kept, line[start:]]) if kept else line


def _listed(row: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    found = row.get(key)
    return [item for item in found if isinstance(item, kind)] if isinstance(found, list) else []


def images_of(row: Mapping[str, Any]) -> list[str]:
    return _listed(row, "images", str)


def prompt_key(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What tells a row's prompt from others: its text and its pictures."""
    return (str(row.get("prompt")), *images_of(row))


def listed_completions(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return _listed(row, "completions", dict)


def scores_of(completion: Mapping[str, Any]) -> Mapping[str, Any]:
    scores = completion.get("rewards")
    return scores if isinstance(scores, dict) else {}


def logged_of(completion: Mapping[str, Any]) -> Mapping[str, Any]:
    logged = completion.get("logged")
    return logged if isinstance(logged, dict) else {}


EXPLANATION = "/explanation"
"""Ends the name of a logged column that holds a judge's explanations; the reward's name comes before."""


def explanation_of(completion: Mapping[str, Any], reward: str) -> str:
    """What a judge wrote about a completion; "" where the reward is no judge or wrote nothing."""
    return str(logged_of(completion).get(reward + EXPLANATION) or "")


def token_ids(tokens: Any) -> list[int]:
    """The ids of a row's `tokens`; empty where it has a count."""
    ids = tokens if isinstance(tokens, list) else []
    return ids if all(isinstance(token, int) for token in ids) else []


def policy_tokens(completion: Mapping[str, Any]) -> int | None:
    """The tokens that the policy wrote, without results of tools; None where the row does not say."""
    if turns := completion.get("turns"):
        return sum(turn.get("tokens", 0) for turn in turns)
    return token_count(completion.get("tokens"))


def token_count(tokens: Any) -> int | None:
    """The number of a row's `tokens`, ids or a count; None where neither is."""
    if isinstance(tokens, list):
        return len(tokens)
    return tokens if isinstance(tokens, int) else None


Kind = Literal["head", "text", "call", "note", "result", "failed", "warning"]
"""What a part is: the number of a turn, what the model wrote, a call, its time, its result or error, why it ends."""
Part = tuple[Kind, str]

LEFT_OUT = "The results did not fit within the completion length: they were left out, and the completion ended here."
NOT_RUN = "Not run: the completion has no tool turns left."


def turns_of(completion: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The turns of a row of completions.jsonl; none for a run without tools."""
    return _listed(completion, "turns", dict)


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
    parts: list[Part] = []
    for number, turn in enumerate(turns, 1):
        parts.append(("head", f"{chr(10) * (number > 1)}Turn {number}, {turn.get('tokens')} tokens\n"))
        if text := str(turn.get("text") or "").strip("\n"):
            parts.append(("text", f"{text}\n"))
        calls, results = turn.get("calls") or [], turn.get("results") or []
        for call, result in zip_longest(calls, results):
            arguments = ((call or {}).get("arguments") or {}).items()
            inside = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments)
            parts.append(("call", f"→ {(call or result).get('name')}({inside})"))
            if result is None:
                parts.append(("warning", f"\n{NOT_RUN}\n"))
                continue
            seconds, content = result.get("seconds") or 0.0, str(result.get("content")).replace("\n", "\n  ")
            parts.append(("note", f"  {seconds:.3g} s\n" if seconds >= 1 else f"  {seconds * 1000:.3g} ms\n"))
            parts.append(("failed", f"✕ {content}\n") if result.get("failed") else ("result", f"← {content}\n"))
        if results and not turn.get("result_tokens"):
            parts.append(("warning", f"{LEFT_OUT}\n"))
    kind, last = parts.pop()
    return [*parts, (kind, last.removesuffix("\n"))]


def conversation_text(completion: Mapping[str, Any]) -> str:
    return "".join(text for _, text in conversation_parts(completion))
