"""Problems and groups of completions as what a message holds: plain JSON and arrays.

Numbers of tokens travel as arrays: log-probabilities were float32 when they were sampled, so nothing is lost. A dataset's row may have
values that JSON does not know; those of common types are kept, and another one is refused with the name of its column.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date, datetime, time
from decimal import Decimal
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from backend.types import Completion, Group, Problem
from backend.utils.errors import UserError
from backend.utils.text import quote

TYPE, VALUE = "\0type", "\0value"
"""Keys of a mapping that stands for a value of another type. No column of a dataset has a name that begins with a zero byte."""
Arrays = dict[str, np.ndarray]


# ── problems ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def packed_problems(problems: Sequence[Problem]) -> list[dict[str, Any]]:
    """Raises UserError for a row with a value that cannot be sent."""
    return [asdict(problem) | {"row": _packed_row(problem.row)} for problem in problems]


def unpacked_problems(packed: Sequence[dict[str, Any]]) -> list[Problem]:
    return [Problem(**{**each, "row": _unpacked(each["row"])}) for each in packed]


def _packed_row(row: dict[str, Any]) -> dict[str, Any]:
    packed: dict[str, Any] = {}
    for column, value in row.items():
        try:
            packed[column] = _packed(value)
        except TypeError as error:
            raise UserError(
                "data", f"The column {quote(column, 40)} holds {error}, which cannot be sent to other machines."
            ) from None
    return packed


def _packed(value: Any) -> Any:
    """Raises TypeError that names the type of what cannot be sent."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_packed(each) for each in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _packed(each) for key, each in value.items()}
    if isinstance(value, bytes):
        return {TYPE: "bytes", VALUE: base64.b64encode(value).decode()}
    for kind in (datetime, date, time):  # a datetime is a date too, so it comes first
        if isinstance(value, kind):
            return {TYPE: kind.__name__, VALUE: value.isoformat()}
    if isinstance(value, Decimal):
        return {TYPE: "Decimal", VALUE: str(value)}
    if isinstance(value, tuple):
        return {TYPE: "tuple", VALUE: [_packed(each) for each in value]}
    raise TypeError(f"a {type(value).__name__}")


_READ = {
    "bytes": base64.b64decode, "datetime": datetime.fromisoformat, "date": date.fromisoformat, "time": time.fromisoformat,
    "Decimal": Decimal, "tuple": lambda values: tuple(_unpacked(each) for each in values),
}  # fmt: skip


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(each) for each in value]
    if isinstance(value, dict):
        if TYPE in value:
            return _READ[value[TYPE]](value[VALUE])
        return {key: _unpacked(each) for key, each in value.items()}
    return value


# ── completions ──────────────────────────────────────────────────────────────────────────────────────────────────────


def packed_completions(groups: Sequence[Group]) -> tuple[dict[str, Any], Arrays]:
    """What learning needs of every completion: its tokens with their log-probabilities and masks, its end, its advantage."""
    completions = [completion for group in groups for completion in group.completions]
    lengths = [len(completion.tokens) for completion in completions]
    body = {
        "sizes": [len(group.completions) for group in groups], "lengths": lengths,
        "stops": [completion.stop for completion in completions],
    }  # fmt: skip
    arrays = {
        "tokens": _joined([c.tokens for c in completions], np.int32),
        "logps": _joined([c.logps for c in completions], np.float32),
        "advantages": np.array([c.advantage for c in completions], np.float64),
    }
    # An empty list stands for one value throughout, so only lists that have values are sent.
    for name, dtype in (("log_kept", np.float32), ("log_held", np.float32), ("mask", np.uint8)):
        lists = [getattr(completion, name) for completion in completions]
        if any(lists):
            arrays[name] = _joined(lists, dtype)
            body[f"has {name}"] = [bool(each) for each in lists]
    return body, arrays


def unpacked_completions(body: dict[str, Any], arrays: Arrays, problems: Sequence[Problem]) -> list[Group]:
    """The groups of these problems, with what `packed_completions` keeps."""
    lengths = body["lengths"]
    columns: dict[str, list[Any]] = {name: _split(arrays[name], lengths) for name in ("tokens", "logps")}
    for name in ("log_kept", "log_held", "mask"):
        has_values = body.get(f"has {name}", [False] * len(lengths))
        counts = [length if has else 0 for length, has in zip(lengths, has_values, strict=True)]
        columns[name] = _split(arrays[name], counts) if name in arrays else [[] for _ in lengths]
    rows: Any = zip(*columns.values(), body["stops"], arrays["advantages"].tolist(), strict=True)
    completions = iter([
        Completion(tokens, logps, "", stop, log_kept, log_held, mask, advantage=advantage)
        for tokens, logps, log_kept, log_held, mask, stop, advantage in rows
    ])  # fmt: skip
    return [
        Group(problem, [next(completions) for _ in range(size)])
        for problem, size in zip(problems, body["sizes"], strict=True)
    ]


def packed_scored(groups: Sequence[Group]) -> tuple[dict[str, Any], Arrays]:
    """Everything of every completion that was sampled and scored."""
    body, arrays = packed_completions(groups)
    completions = [completion for group in groups for completion in group.completions]
    body["scored"] = [[c.text, c.scores, c.reward, _packed_row(c.logged)] for c in completions]
    return body, arrays


def unpacked_scored(body: dict[str, Any], arrays: Arrays, problems: Sequence[Problem]) -> list[Group]:
    groups = unpacked_completions(body, arrays, problems)
    completions = (completion for group in groups for completion in group.completions)
    for completion, (text, scores, reward, logged) in zip(completions, body["scored"], strict=True):
        completion.text, completion.scores, completion.reward, completion.logged = (
            text,
            scores,
            reward,
            _unpacked(logged),
        )
    return groups


def packed_prompts(groups: Sequence[Group]) -> tuple[list[int], np.ndarray]:
    """(the prompts' lengths, their tokens): what learning needs of the problems."""
    prompts = [group.problem.tokens for group in groups]
    return [len(prompt) for prompt in prompts], _joined(prompts, np.int32)


def unpacked_prompts(lengths: Sequence[int], tokens: np.ndarray) -> list[Problem]:
    return [Problem(i, "", [], prompt, "") for i, prompt in enumerate(_split(tokens, lengths))]


def _joined(lists: Sequence[Sequence[Any]], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *(np.array(each, dtype) for each in lists)])


def _split(x: np.ndarray, lengths: Sequence[int]) -> list[list[Any]]:
    values = x.tolist()
    return [values[start:end] for start, end in pairwise([0, *accumulate(lengths)])]
