"""Rows of completions as typed dictionaries: one line of a run's completions.jsonl, and one group that is to be scored.

In completions.jsonl `tokens` is a count; in a group to be scored it holds the sampled ids, which reward functions may
ask for. `token_count` and `token_ids` read either. Rows are checked as far as their step: a file may be cut off, edited
or from another program, so code that shows a row must expect missing keys.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict, cast

from backend.runs.events import is_step, parse_line

# Why a completion ended.

Stop = Literal["eos", "length", "string"]
"""An end-of-sequence token, the length limit, or one of the `stop` strings."""


class TokenData(TypedDict):
    """Every token of one completion, recorded where the run's `record_tokens` is on. Each list has one entry a token.

    Log-probabilities are in nats, after the logits were divided by the temperature; None where one is not finite. What
    the learner made of a token is that of the last update of the step: with one update a rollout every ratio is 1. The
    four keys of the learner are absent where the completion was left out of every update, because nothing of it could
    move the policy (`skip_zero_signal`, `mask_truncated_completions`).
    """

    text: list[str]
    """Joined, they begin with the completion's `text`; an end-of-sequence token follows. Of a character that several
    tokens make up, the last one has it and the others have none."""
    logp: list[float | None]
    """When sampled, before top-p, top-k and min-p."""
    mask: NotRequired[list[int]]
    """1 where a token is trained on; absent: 1 throughout. The learner's values mean nothing where it is 0."""
    learned_logp: NotRequired[list[float | None]]
    """When learned from, before that update."""
    ratio: NotRequired[list[float | None]]
    """π_θ / π_old as the loss had it."""
    clipped: NotRequired[list[int]]
    """1 where clipping took effect."""
    advantage: NotRequired[list[float | None]]
    """Of each token, with the importance correction, and 0 where a token carried no policy term; absent where all are
    the completion's own `advantage`."""


class CompletionRow(TypedDict):
    """One completion of a `GroupRow`."""

    text: str
    tokens: int
    """How many were sampled, the end-of-sequence token included."""
    stop: Stop
    rewards: dict[str, float | None]
    """Reward function → its score; None where it had no opinion."""
    reward: float | None
    """The weighted sum of the scores."""
    advantage: NotRequired[float]
    """Absent in an evaluation, where no completion is compared with its group."""
    logged: NotRequired[dict[str, Any]]
    """Columns that reward functions noted (TRL's `log_extra`); absent where there are none."""
    token_data: NotRequired[TokenData]
    """Absent unless the run records tokens."""


class GroupRow(TypedDict):
    """One line of completions.jsonl: the completions that a step sampled for one prompt, in the order in which they
    were sampled. Written by `backend.trainer.telemetry.group_row`, read by `parse_group_row`."""

    step: int
    prompt: str
    answer: str
    type: str | None
    completions: list[CompletionRow]


class SampledRow(TypedDict):
    """One completion of a `ScoringRow`."""

    text: str
    tokens: list[int]
    """The sampled ids; empty where only the text is known."""
    stop: Stop


class ScoringRow(TypedDict):
    """A group to be scored: the inputs of reward functions. Written and read by `backend.rewards.completion_lines`."""

    prompt: str
    answer: str
    type: str | None
    messages: list[dict[str, Any]]
    columns: dict[str, Any]
    """Every column of the dataset's row."""
    completions: list[SampledRow]


def parse_group_row(line: bytes) -> GroupRow | None:
    """The row of one line of completions.jsonl; None for what is no JSON object with a whole number as its step."""
    row = parse_line(line)
    return cast("GroupRow", row) if row is not None and is_step(row.get("step")) else None


_DATA, _DATA_TEXT_END, _DATA_END = b', "token_data": {"text": [', b'], "logp": [', b"}"
"""What begins the token data of a line, what ends its texts, and what ends it. JSON escapes every quote inside a
string, so the first two occur nowhere else; after the texts there are only keys and numbers."""


def without_token_data(line: bytes) -> bytes:
    """A line of completions.jsonl as the trainer writes it, less its token data, of which it may be four fifths: what
    needs no tokens is parsed that much sooner. Any other line is returned as it is."""
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


def token_ids(tokens: Any) -> list[int]:
    """The ids that a row has under `tokens`; empty where it has a count, or nothing that could be ids."""
    ids = cast("list[Any]", tokens) if isinstance(tokens, list) else []
    return ids if all(isinstance(token, int) for token in ids) else []


def token_count(tokens: Any) -> int | None:
    """How many tokens a row has under `tokens`, where there are ids or a count; None where neither is."""
    if isinstance(tokens, list):
        return len(cast("list[Any]", tokens))
    return tokens if isinstance(tokens, int) else None
