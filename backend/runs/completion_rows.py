"""completions.jsonl: its rows as typed dictionaries, those of a group to be scored, an index by step, a completion with
tools as a text to read, and export. Only the step of a row is checked: code that shows one must expect missing keys."""

import json
import os
import re
from collections.abc import Generator, Mapping, Sequence
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from backend.runs.events import Follower, is_step, parse_line, placed_lines
from backend.utils.disk import cause
from backend.utils.errors import UserError
from backend.utils.files import open_regular
from backend.utils.text import fenced, quote

Stop = Literal["eos", "length", "string"]  # an end-of-sequence token, the length limit, or one of the `stop` strings


class TokenData(TypedDict):
    """Every token of one completion, recorded with `record_tokens`. Each list has one entry a token. Log-probabilities
    are in nats, after the temperature. The learner's values are of the step's last update; absent if it had none."""

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
    return (str(row.get("prompt")), *images_of(row))


def listed_completions(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return _listed(row, "completions", dict)


def scores_of(completion: Mapping[str, Any]) -> Mapping[str, Any]:
    scores = completion.get("rewards")
    return scores if isinstance(scores, dict) else {}


def logged_of(completion: Mapping[str, Any]) -> Mapping[str, Any]:
    logged = completion.get("logged")
    return logged if isinstance(logged, dict) else {}


EXPLANATION = "/explanation"  # ends the name of a logged column with a judge's explanations, after the reward's


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
    tokens = completion.get("tokens")
    return (len(tokens) or None) if isinstance(tokens, list) else tokens if isinstance(tokens, int) else None


Kind = Literal["head", "text", "call", "note", "result", "failed", "warning"]
"""What a part is: the number of a turn, what the model wrote, a call, its time, its result or error, why it ends."""
Part = tuple[Kind, str]

LEFT_OUT = "The results did not fit within the completion length: they were left out, and the completion ended here."
NOT_RUN = "Not run: the completion has no tool turns left."


def turns_of(completion: Mapping[str, Any]) -> list[Mapping[str, Any]]:
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


SLICE = 1 << 20  # bytes that the index reads at a time
_STEP = re.compile(rb'^\s*\{\s*"step":\s*(\d+)\b')  # the step comes first in a row as the trainer writes it


def parse_group_row(line: bytes) -> GroupRow | None:
    """The row of one line of completions.jsonl; None for anything but a JSON object with a step."""
    row: Any = parse_line(line)
    return row if row is not None and is_step(row.get("step")) else None


def read_line(path: Path, offset: int) -> bytes:
    try:
        with open_regular(path) as file:
            file.seek(offset)
            return file.readline()
    except OSError:
        return b""


class CompletionIndex:
    """Step → byte range in the file. A row is parsed when it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clear()

    def clear(self) -> None:
        self._lines = Follower(self.path, limit=SLICE)
        self._ranges: dict[int, tuple[int, int]] = {}

    def steps(self) -> list[int]:
        return list(self._ranges)

    def advance(self) -> bool:
        """Index the next slice of the file; True if there may be more."""
        placed = self._lines.lines()
        if self._lines.restarted:
            self._ranges.clear()
        for start, line in placed:
            match = _STEP.match(line)
            row = None if match else parse_group_row(line)
            step = int(match[1]) if match else row["step"] if row else None
            if step is not None:
                self._ranges[step] = (self._ranges.get(step, (start, 0))[0], start + len(line))
        return bool(placed)

    def rows(self, step: int | None = None) -> list[GroupRow]:
        return [row for _, row in self.placed_rows(step)]

    def placed_rows(self, step: int | None = None) -> list[tuple[int, GroupRow]]:
        """As `rows`, each with its offset in the file."""
        wanted = next(reversed(self._ranges), -1) if step is None else step
        start, end = self._ranges.get(wanted, (0, 0))
        try:
            with open_regular(self.path) as file:
                file.seek(start)
                text = file.read(end - start)
        except OSError:
            return []
        rows = ((offset, parse_group_row(without_token_data(line))) for offset, line in placed_lines(text, start))
        return [(offset, row) for offset, row in rows if row is not None and row["step"] == wanted]


Place = tuple[int, int]  # offset of a row in completions.jsonl, and the completion's place in it

SUFFIXES = {".jsonl": "JSON lines", ".md": "Markdown"}


def export_completions(source: Path, places: Sequence[Place], target: Path) -> Generator[int, None, None]:
    """Write completions of `source` to `target`, a file of SUFFIXES, and yield the number written so far. The file gets
    its name at the end; closing the iterator before leaves nothing. Raises UserError."""
    if target.suffix not in SUFFIXES:
        raise UserError("export", f"{target.name} must end in .jsonl or .md.")
    written, partial = 0, target.with_name(f".{target.name}.part")
    try:
        with open_regular(source) as file, partial.open("w", encoding="utf-8", errors="replace") as out:
            for offset, group in groupby(places, key=lambda place: place[0]):  # a row's line is parsed once
                file.seek(offset)
                row = parse_group_row(file.readline()) or {}
                completions = listed_completions(row)
                for _, place in group:
                    if place < len(completions):
                        about = {key: row.get(key) for key in ("step", "prompt", "answer", "type")}
                        line = json.dumps(about | dict(completions[place]), ensure_ascii=False) + "\n"
                        out.write(line if target.suffix == ".jsonl" else _markdown(row, completions[place]))
                        written += 1
                        yield written
            out.flush()
            os.fsync(out.fileno())  # before the rename, as `replace_file`
        os.replace(partial, target)
    except OSError as error:
        raise UserError("export", f"{quote(target)} cannot be written: {cause(error)}.") from None
    finally:
        partial.unlink(missing_ok=True)


def _markdown(row: Mapping[str, Any], completion: Mapping[str, Any]) -> str:
    figures = {"reward": completion.get("reward"), "advantage": completion.get("advantage"), **scores_of(completion)}
    logged = "".join(f"{name}: {_rounded(value)}\n\n" for name, value in logged_of(completion).items())
    head = ", ".join(f"{name} {_rounded(value)}" for name, value in figures.items() if value is not None)
    prompt, answer = row.get("prompt"), row.get("answer")
    expected = f"\n\nAnswer: {answer}" if answer not in (None, "") else ""
    return (
        f"## Step {row.get('step')}\n\n{head}; {completion.get('tokens')} tokens, {completion.get('stop')}\n\n{logged}"
        f"### Prompt\n\n{fenced(prompt if isinstance(prompt, str) else '')}{expected}\n\n"
        f"### Completion\n\n{fenced(conversation_text(completion))}\n\n"
    )


def _rounded(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else str(value)
