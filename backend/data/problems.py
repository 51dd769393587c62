"""A dataset's row becomes a Problem: the prompt column as chat messages, rendered by the chat template, tokenised.

A prompt is never truncated: a row whose prompt leaves no room for the completion is left out and counted. Reading the rows
is `backend.data.rows`'s, choosing when a row is tokenised `backend.data.prompts`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from backend.data.rows import Row, check_columns, first_line
from backend.spec.faults import Mistake
from backend.spec.setting_groups import PromptSettings
from backend.types import Problem

Messages = list[dict[str, Any]]
"""A chat as tokenizers take it: [{"role": …, "content": …}, …]."""


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
    """Tokens of the longest prompt that leaves room for a completion."""

    @classmethod
    def of(cls, config: PromptSettings) -> PromptFormat:
        return cls(
            prompt_column=config.prompt_feature,
            answer_column=config.answer_feature,
            type_column=config.type_feature,
            system_column=config.system_feature,
            system_prompt=config.system_prompt,
            template_variables=config.chat_template_kwargs,
            max_tokens=config.max_seq_length - config.max_completion_length,
        )


def row_name(index: int, source: str) -> str:
    """How sentences call a row: "row 3 of train.jsonl", counted from 1."""
    return f"row {index + 1} of {source}"


# ── one row ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def messages_of(row: Row, prompt_format: PromptFormat, where: str) -> Messages:
    """The chat of one row: its prompt (text or messages) after its own system message or the common one.

    Raises Mistake on `prompt_feature` for a cell that is neither; `where` names the row in the sentence.
    """
    prompt = row.get(prompt_format.prompt_column)
    if isinstance(prompt, str) and prompt.strip():
        messages = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, list) and prompt and all(_is_message(item) for item in prompt):
        messages = [{"role": message["role"], "content": message["content"]} for message in prompt]
    else:
        raise Mistake("prompt_feature", f"The column {prompt_format.prompt_column} of {where} must hold text or a list "
                      f"of messages with role and content, and may not be empty.")  # fmt: skip
    system = _text(row.get(prompt_format.system_column)) or prompt_format.system_prompt
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else str(value)


def check_unicode(messages: Messages, where: str) -> None:
    """Raises Mistake for a lone surrogate, which JSON can carry and no tokenizer takes."""
    try:
        for message in messages:
            (message["role"] + message["content"]).encode()
    except UnicodeEncodeError:
        raise Mistake("prompt_feature", f"The text of {where} is broken: it holds half a character.") from None


def apply_chat_template(messages: Messages, tokenizer: Any, variables: Mapping[str, Any]) -> list[int]:
    """Token ids of a chat up to where the assistant begins. Without a chat template the contents are joined as text."""
    if getattr(tokenizer, "has_chat_template", False) or getattr(tokenizer, "chat_template", None):
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, **variables))
    return list(tokenizer.encode("\n\n".join(message["content"] for message in messages)))


def tokenize(messages: Messages, tokenizer: Any, variables: Mapping[str, Any], where: str) -> list[int]:
    """`apply_chat_template`, with a Mistake that names the row where the text or the template makes that impossible."""
    check_unicode(messages, where)
    try:
        return apply_chat_template(messages, tokenizer, variables)
    except TemplateError as error:  # templates call raise_exception: no system message, turns that do not alternate
        raise Mistake("prompt_feature", f"The model's chat template refuses {where}: {first_line(error)}") from None


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


def tokenized_problem(index: int, row: Row, tokenizer: Any, prompt_format: PromptFormat, source: str) -> Problem:
    """Row `index` as a Problem, however long its prompt. Raises Mistake naming the row."""
    where = row_name(index, source)
    messages = messages_of(row, prompt_format, where)
    tokens = tokenize(messages, tokenizer, prompt_format.template_variables, where)
    return problem_of(index, row, messages, tokens, prompt_format)


# ── all rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Prepared:
    """The problems of one split, and how many rows were left out because the prompt is too long."""

    problems: list[Problem]
    too_long: int = 0
    longest: int = 0
    """Tokens of the longest prompt that was left out."""


def prepare(rows: Sequence[Row], tokenizer: Any, config: PromptSettings, source: str) -> Prepared:
    """Every row as a Problem, tokenised one after the other. Raises Mistake naming the column or the row.

    Training does not wait for rows that it does not sample: it uses `backend.data.prompts`, which gives the same problems.
    """
    if rows and (faults := check_columns(rows, config, source)):
        raise Mistake(faults)
    prompt_format = PromptFormat.of(config)
    prepared = Prepared([])
    for index, row in enumerate(rows):
        problem = tokenized_problem(index, row, tokenizer, prompt_format, source)
        if len(problem.tokens) <= prompt_format.max_tokens:
            prepared.problems.append(problem)
        else:
            prepared.too_long += 1
            prepared.longest = max(prepared.longest, len(problem.tokens))
    return prepared


def check_prompts(rows: Sequence[Row], tokenizer: Any, prompt_format: PromptFormat, source: str) -> None:
    """Raises the Mistake of a row that is no chat, or `max_seq_length` when no prompt leaves room for a completion.

    Builds every row's chat, which is quick, and tokenises only until one prompt fits.
    """
    names = [row_name(index, source) for index in range(len(rows))]
    chats = [messages_of(row, prompt_format, name) for row, name in zip(rows, names, strict=True)]
    lengths = (
        len(tokenize(chat, tokenizer, prompt_format.template_variables, name))
        for chat, name in zip(chats, names, strict=True)
    )
    if not any(length <= prompt_format.max_tokens for length in lengths):
        raise Mistake("max_seq_length", "Every prompt is longer than what Max Seq leaves beside the completion.")


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a model's folder, through mlx-lm, without the model. Raises Mistake on `model`."""
    from mlx_lm.utils import load_tokenizer as load

    try:
        return load(folder)
    except Exception as error:  # transformers raises anything at all for files it cannot read
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise Mistake("model", f"The tokenizer in {folder} cannot be loaded: {reason}.") from error
