"""A dataset's row becomes a Problem: the prompt column as chat messages, rendered by the chat template, tokenised.

A row whose prompt leaves no room for the completion is left out and counted; or, where the settings say so, the beginning of its last user
message is cut off (`backend.data.chat_tokens`). Reading the rows is `backend.data.rows`'s, choosing when a row is tokenised
`backend.data.prompts`'s.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backend.config.row_settings import prompt_limit
from backend.config.setting_groups import PromptSettings
from backend.data.chat_tokens import Messages, TooLong, characters, check_unicode, count, cut_left, tokenize_if_fits
from backend.data.files import Row
from backend.data.row_views import LazyRows, Rows
from backend.data.rows import check_columns, row_name, shown_source
from backend.runs.start_progress import telling
from backend.types import Problem
from backend.utils.errors import UserError
from backend.utils.text import quote


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """How a row becomes a prompt: the columns, the common system message, the variables of the chat template."""

    prompt_column: str
    answer_column: str
    type_column: str
    system_column: str
    system_prompt: str
    """The system message of rows without one; "" for no system message."""
    template_variables: Mapping[str, Any]
    """Variables of the chat template beside the messages (`enable_thinking`, …)."""
    max_tokens: int
    """Tokens of the longest prompt that is taken."""
    cuts: bool = False
    """Whether a longer prompt is cut on the left; else its row is left out."""
    has_own_limit: bool = False
    """Whether `max_tokens` is `max_prompt_length`, and not what Max Seq leaves beside the completion."""

    @classmethod
    def of(cls, config: PromptSettings) -> PromptFormat:
        most = prompt_limit(config.max_seq_length, config.max_completion_length, config.max_prompt_length)
        return cls(
            prompt_column=config.prompt_feature,
            answer_column=config.answer_feature,
            type_column=config.type_feature,
            system_column=config.system_feature,
            system_prompt=config.system_prompt,
            template_variables=config.chat_template_kwargs,
            max_tokens=most,
            cuts=config.long_prompts == "cut_left",
            has_own_limit=most == config.max_prompt_length,
        )


# ── one row ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def messages_of(row: Row, prompt_format: PromptFormat, where: str) -> Messages:
    """The chat of one row: its prompt (text or messages) after its own system message or the common one.

    Raises UserError on `prompt_feature` for a cell that is neither; `where` names the row in the sentence.
    """
    prompt = row.get(prompt_format.prompt_column)
    if isinstance(prompt, str) and prompt.strip():
        messages = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, list) and prompt and all(_is_message(item) for item in prompt):
        messages = [{"role": message["role"], "content": message["content"]} for message in prompt]
    else:
        raise UserError("prompt_feature", f"The column {quote(prompt_format.prompt_column, 24)} of {where} must hold text or a list "
                      f"of messages with role and content, and may not be empty.")  # fmt: skip
    system = _text(row.get(prompt_format.system_column)) or prompt_format.system_prompt
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else str(value)


def problem_of(index: int, row: Row, messages: Messages, tokens: list[int], prompt_format: PromptFormat) -> Problem:
    """A row as a Problem, once its chat is built and tokenised."""
    from_user = [message["content"] for message in messages if message["role"] == "user"]
    kind = row.get(prompt_format.type_column)
    return Problem(
        index=index,
        prompt=from_user[-1] if from_user else messages[-1]["content"],
        messages=messages,
        tokens=tokens,
        answer=_text(row.get(prompt_format.answer_column)),
        type=_text(kind) if kind is not None else None,
        row=row,
    )


def fitting_problem(index: int, row: Row, tokenizer: Any, prompt_format: PromptFormat, source: str) -> Problem | None:
    """Row `index` as a Problem; None where its prompt leaves no room for a completion. Raises UserError naming the row."""
    where = row_name(index, source)
    messages = messages_of(row, prompt_format, where)
    chat, tokens = fitted(messages, tokenizer, prompt_format, where)
    return problem_of(index, row, chat, tokens, prompt_format) if isinstance(tokens, list) else None


def fitted(
    messages: Messages, tokenizer: Any, prompt_format: PromptFormat, where: str
) -> tuple[Messages, list[int] | TooLong]:
    """A chat that fits with its tokens: as it is, or cut where the format says so. TooLong for one that does not fit. Raises UserError."""
    variables, most = prompt_format.template_variables, prompt_format.max_tokens
    tokens = tokenize_if_fits(messages, tokenizer, variables, where, most)
    if isinstance(tokens, list) and len(tokens) <= most:
        return messages, tokens
    if prompt_format.cuts and (cut := cut_left(messages, tokenizer, variables, where, most)) is not None:
        return cut
    return messages, TooLong(count(tokens))


# ── all rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Prepared:
    """The problems of one split, and how many rows were left out because the prompt is too long."""

    problems: list[Problem]
    too_long: int = 0
    longest: int = 0
    """Tokens of the longest prompt that was left out; of one that was not tokenised, as many as it has at least."""


def prepare(rows: Rows, tokenizer: Any, config: PromptSettings, source: str) -> Prepared:
    """Every row as a Problem, tokenised one after the other. Raises UserError naming the column or the row.

    Training does not wait for rows that it does not sample: it uses `backend.data.prompts`, which gives the same problems.
    """
    if rows and (faults := check_columns(rows, config, source)):
        raise UserError(faults)
    prompt_format = PromptFormat.of(config)
    prepared = Prepared([])
    for index, row in enumerate(rows):
        where = row_name(index, source)
        chat, tokens = fitted(messages_of(row, prompt_format, where), tokenizer, prompt_format, where)
        if isinstance(tokens, list):
            prepared.problems.append(problem_of(index, row, chat, tokens, prompt_format))
        else:
            prepared.too_long += 1
            prepared.longest = max(prepared.longest, count(tokens))
    return prepared


def check_prompts(rows: Rows, tokenizer: Any, prompt_format: PromptFormat, source: str) -> None:
    """Raises the UserError of a row that is no chat, or `max_seq_length` when no prompt leaves room for a completion.

    Builds every row's chat, which is quick, and tokenises only until one prompt fits.
    """
    chat_sizes(rows, prompt_format, source)
    for index, row in enumerate(rows):
        name = row_name(index, source)
        _, tokens = fitted(messages_of(row, prompt_format, name), tokenizer, prompt_format, name)
        if isinstance(tokens, list):
            return
    raise no_prompt_fits(prompt_format, "Every prompt")


def no_prompt_fits(prompt_format: PromptFormat, prompts: str) -> UserError:
    """Of a split without a prompt that fits; `prompts` begins the sentence."""
    most = prompt_format.max_tokens
    if prompt_format.has_own_limit:
        return UserError(
            "max_prompt_length",
            f"{prompts} is longer than Max prompt ({most} tokens); raise it, or cut prompts on the left.",
        )
    return UserError(
        "max_seq_length",
        f"{prompts} is longer than the {most} token{'s' if most != 1 else ''} that Max Seq leaves beside the completion; raise Max Seq or lower Completion.",
    )


def chat_sizes(rows: Rows, prompt_format: PromptFormat, source: str) -> Sequence[int]:
    """Characters of every row's chat. Builds every chat, and raises the UserError of the first row that is none.

    Of lazy rows it is remembered: going through them takes its time.
    """
    known = rows.known if isinstance(rows, LazyRows) else {}
    key = ("chat sizes", str(prompt_format))
    if key not in known:
        sizes, named = array("I"), shown_source(source)
        read = telling(rows, "Checking", source, lambda done: done / len(rows))
        for index, row in enumerate(read, 1):
            where = f"row {index} of {named}"  # as `row_name`, of which naming the source takes as long as the rest
            chat = messages_of(row, prompt_format, where)
            check_unicode(chat, where)
            sizes.append(min(characters(chat), _LARGEST))
        known[key] = sizes
    return known[key]


_LARGEST = 2**32 - 1
"""The largest size that is kept: four bytes."""
