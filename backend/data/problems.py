"""Turn a dataset row into a Problem: chat messages, rendered with the chat template and tokenised."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from backend.config.row_settings import prompt_limit
from backend.config.setting import PromptSettings
from backend.data.files import LazyRows, Row, Rows
from backend.data.images import placed, with_paths
from backend.data.rows import row_name
from backend.runs.start_progress import telling
from backend.tools.host import NO_TOOLS, ToolSchemas, environment_name
from backend.types import Problem, content_text, image_paths, is_chat
from backend.utils.errors import UserError
from backend.utils.text import quote, reason_of

Messages = list[dict[str, Any]]  # chat messages: [{"role": …, "content": …}, …], as in `Problem`

ALWAYS_EXACT = 200_000  # characters of a chat that are always tokenised
LONGEST_TOKEN = 1000  # maximum characters per token; longer texts are too long without tokenising
FIRST_TRY = 4  # assumed characters per token in the first attempt to cut
IMAGE_SIZE = 1600  # characters of text that take about the tokens of an image
tokenizer_lock = threading.Lock()  # serialises access of two threads to the run's tokenizer


@dataclass(frozen=True, slots=True)
class TooLong:
    """Instead of token ids: a lower bound for a chat that does not fit."""

    at_least: int


def count(tokens: list[int] | TooLong) -> int:
    """Number of tokens, or its lower bound."""
    return tokens.at_least if isinstance(tokens, TooLong) else len(tokens)


def has_chat_template(tokenizer: Any) -> bool:
    """False for the tokenizers of most base models."""
    return bool(getattr(tokenizer, "has_chat_template", False) or getattr(tokenizer, "chat_template", None))


def apply_chat_template(messages: Messages, tokenizer: Any, variables: Mapping[str, Any]) -> list[int]:
    """Token ids of a chat including the generation prompt. Without a template, contents are joined."""
    if has_chat_template(tokenizer):
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, **variables))
    return list(tokenizer.encode("\n\n".join(content_text(message["content"]) for message in messages)))


def tokenize_if_fits(
    messages: Messages, tokenizer: Any, variables: Mapping[str, Any], where: str, most: int | None
) -> list[int] | TooLong:
    """`apply_chat_template` that raises UserError naming `where`; not for chats certainly longer than `most` tokens."""
    check_unicode(messages, where)
    check_reads_images(messages, tokenizer, where)
    size = _characters(messages)
    if most is not None and size > ALWAYS_EXACT and size > most * LONGEST_TOKEN:
        return TooLong(max(most, size // LONGEST_TOKEN) + 1)
    try:
        return apply_chat_template(messages, tokenizer, variables)
    except UserError as error:  # of images
        raise UserError(error.faults[0].setting, f"In {where}: {error.faults[0].sentence}") from error
    except Exception as error:  # of any kind: templates call raise_exception, divide by zero, recurse
        verb = "refuses" if isinstance(error, TemplateError) else "fails for"
        why = f"The model's chat template {verb} {where}: {reason_of(error)}."
        raise UserError("prompt_feature", why) from None


def check_reads_images(messages: Messages, tokenizer: Any, where: str) -> None:
    """Raise UserError for a chat with images that the model does not read."""
    reads = getattr(tokenizer, "reads_images", False)
    if image_paths(messages) and not (reads and has_chat_template(tokenizer)):
        lacks = "has no chat template to place them" if reads else "reads only text; choose a vision model"
        raise UserError("model", f"There are images in {where}, and the model {lacks}.")


def check_unicode(messages: Messages, where: str) -> None:
    """Raise UserError for a lone surrogate, which no tokenizer accepts."""
    try:
        for message in messages:
            (message["role"] + content_text(message["content"])).encode()
    except UnicodeEncodeError:
        raise UserError("prompt_feature", f"The text of {where} is broken: it holds half a character.") from None


def _characters(messages: Messages) -> int:
    contents = [message["content"] for message in messages]
    texts = [content if isinstance(content, str) else content_text(content) for content in contents]
    return sum(map(len, texts)) + (IMAGE_SIZE * len(image_paths(messages)) if texts != contents else 0)


def last_user_message(messages: Messages) -> int | None:
    return next((i for i in reversed(range(len(messages))) if messages[i]["role"] == "user"), None)


def cut_left(
    messages: Messages, tokenizer: Any, variables: Mapping[str, Any], where: str, most: int
) -> tuple[Messages, list[int]] | None:
    """Cut the start of the last user message so that the chat fits `most` tokens. Returns (chat, tokens), or None if
    nothing fits or there is no user message. A chat with images is never cut. Raises UserError naming the row."""
    place = last_user_message(messages)
    if place is None or most < 1 or image_paths(messages) or len(messages[place]["content"]) < 2:
        return None
    text: str = messages[place]["content"]

    def attempt(kept: int) -> tuple[Messages, list[int]] | None:
        shorter = {**messages[place], "content": text[len(text) - kept :]}
        chat = [*messages[:place], shorter, *messages[place + 1 :]]
        tokens = tokenize_if_fits(chat, tokenizer, variables, where, most)
        return None if isinstance(tokens, TooLong) or len(tokens) > most else (chat, tokens)

    # Double from a guess while it fits, so that a text of millions of characters is never tokenised; then bisect.
    fits, best, beyond = 0, None, len(text)
    kept = min(most * FIRST_TRY, beyond - 1)
    while beyond - fits > 1:
        if (found := attempt(kept)) is None:
            beyond = kept
        else:
            fits, best = kept, found
        kept = min(2 * kept, beyond - 1) if beyond == len(text) else (fits + beyond) // 2
    return best


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """Columns, system message and template variables that make a prompt of a row."""

    prompt_column: str
    answer_column: str
    type_column: str
    system_column: str
    system_prompt: str  # default system message; "" for none
    template_variables: Mapping[str, Any]  # extra template variables (`enable_thinking`, …)
    max_tokens: int  # maximum prompt tokens
    cuts: bool = False  # cut longer prompts on the left instead of dropping them
    has_own_limit: bool = False  # true if `max_tokens` comes from `max_prompt_length`, not from Max Seq
    tools: ToolSchemas = NO_TOOLS  # tools that the template shows to the model
    environments: tuple[str, ...] = ()  # names of the environments; ("",) if there is only one, which then has no name
    environment_column: str = ""  # column that names the row's environment; "" if they have no names
    messages_column: str = ""  # column with whole chats, whose last answer is asked for where a row has no prompt
    completion_column: str = ""  # column with the answer to imitate
    labelled: bool = False  # rows are read with what is imitated; `max_tokens` is that of whole rows
    masks_prompt: bool = True  # only the assistant's tokens are imitated

    @classmethod
    def of(cls, config: PromptSettings, tools: ToolSchemas = NO_TOOLS, *, labelled: bool = False) -> PromptFormat:
        """`labelled`: for rows with what is imitated."""
        most = prompt_limit(config.max_seq_length, config.max_completion_length, config.max_prompt_length)
        has_names = isinstance(config.environment, dict) and bool(config.environment)
        return cls(
            prompt_column=config.prompt_feature,
            answer_column=config.answer_feature,
            type_column=config.type_feature,
            system_column=config.system_feature,
            system_prompt=config.system_prompt,
            template_variables=config.chat_template_kwargs,
            max_tokens=config.max_seq_length if labelled else most,
            cuts=config.long_prompts == "cut_left",
            has_own_limit=most == config.max_prompt_length,
            tools=tools,
            environments=tuple(config.environment) if has_names else ("",) if config.environment else (),
            environment_column=config.environment_column if has_names else "",
            messages_column=config.messages_feature if labelled or config.train_mode == "sft" else "",
            completion_column=config.completion_feature if labelled else "",
            labelled=labelled,
            masks_prompt=config.mask_prompt or not labelled,
        )

    def environment_of(self, row: Row) -> str:
        """Name of a row's environment; "" if there is at most one."""
        return as_text(row.get(self.environment_column)) if self.environment_column else ""

    def variables_of(self, row: Row) -> Mapping[str, Any]:
        """Template variables of a row, with its tools if it has any: some templates write about an empty list."""
        schemas = self.tools.of(self.environment_of(row))
        return {**self.template_variables, "tools": schemas} if schemas else self.template_variables


def messages_of(row: Row, prompt_format: PromptFormat, where: str) -> Messages:
    """Chat of one row: its own or the default system message, then its prompt (text or messages). With an environment
    it may have none: `reset` writes it. `row` has images as paths. Raises UserError on `prompt_feature`, `environment`,
    or `data` for images; `where` names the row."""
    if prompt_format.environment_column:
        environment_name(row, prompt_format.environment_column, prompt_format.environments, where)
    prompt, chat = row.get(prompt_format.prompt_column), row.get(prompt_format.messages_column)
    if prompt is None and isinstance(chat, list):
        answers = (i for i, each in enumerate(chat) if isinstance(each, dict) and each.get("role") == "assistant")
        prompt = chat[: max(answers, default=len(chat))]
    if prompt_format.environments and (prompt is None or prompt == []):
        prompt = [{"role": "user", "content": ""}]  # as TRL
    if isinstance(prompt, str) and prompt.strip():
        messages = [{"role": "user", "content": prompt}]
    else:
        messages = message_list(prompt, "prompt_feature", prompt_format.prompt_column, where)
    return with_system(placed(messages, row, where), row, prompt_format)


def message_list(cell: Any, setting: str, column: str, where: str) -> Messages:
    """The chat in a cell, contents as text, or as parts where there are images. Raises UserError on `setting`."""
    if isinstance(cell, list) and all(isinstance(turn, dict) for turn in cell):
        # Tables fill with None, or [] for calls, what a message lacks; one with calls needs no text.
        cell = [{k: v for k, v in turn.items() if v is not None and (v or k != "tool_calls")} for turn in cell]
        cell = [{"content": ""} | turn if "tool_calls" in turn else turn for turn in cell]
    if not is_chat(cell):
        is_empty = not (cell.strip() if isinstance(cell, str) else cell)
        wrong = "is missing or empty" if is_empty else "must hold text or a list of messages with role and content"
        raise UserError(setting, f"The column {quote(column, 24)} of {where} {wrong}.")
    chat: Messages = []
    for number, message in enumerate(cell, 1):
        content: str | list[Any] = message["content"]
        if not isinstance(content, str):
            parts: list[dict[str, Any]] = []
            for i, part in enumerate(content, 1):
                about: dict[str, Any] = part if isinstance(part, dict) else {}
                kind, why = about.get("type", "text"), "has no text"
                if kind == "image" or (kind == "text" and isinstance(about.get("text"), str)):
                    parts.append({"type": kind, kind: about.get(kind)})
                    continue
                if kind != "text":
                    why = f'is of the type "{quote(kind, 20)}"; only text and image are supported'
                place = f"Part {i} of message {number} in the column {quote(column, 24)} of {where}"
                raise UserError(setting, f"{place} {why}.")
            content = parts if any(part["type"] == "image" for part in parts) else content_text(parts)
        chat.append({**message, "content": content})
    return chat


def with_system(messages: Messages, row: Row, prompt_format: PromptFormat) -> Messages:
    """The chat with the row's or the default system message, unless it has one."""
    system = as_text(row.get(prompt_format.system_column)) or prompt_format.system_prompt
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def as_text(value: Any) -> str:
    """A cell as the text of an answer; "" for None."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 156, as a model writes it: a column of whole numbers with an empty cell is read as floats
    return "" if value is None else str(value)


def problem_of(index: int, row: Row, messages: Messages, tokens: list[int], prompt_format: PromptFormat) -> Problem:
    texts = [message["content"] for message in messages if message["role"] == "user"] or [messages[-1]["content"]]
    kind = row.get(prompt_format.type_column)
    return Problem(
        index=index,
        prompt=content_text(texts[-1]),
        messages=messages,
        tokens=tokens,
        answer=as_text(row.get(prompt_format.answer_column)),
        type=as_text(kind) if kind is not None else None,
        row=row,
    )


def fitting_problem(index: int, row: Row, tokenizer: Any, prompt_format: PromptFormat, source: str) -> Problem | None:
    """Row `index` as a Problem; None if its prompt is too long. Raises UserError naming the row."""
    where = row_name(index, source)
    row = with_paths(row, source, where)
    chat, tokens = fitted(messages_of(row, prompt_format, where), row, tokenizer, prompt_format, where)
    return problem_of(index, row, chat, tokens, prompt_format) if isinstance(tokens, list) else None


def with_opening(problem: Problem, text: str, tokenizer: Any, prompt_format: PromptFormat) -> Problem:
    """The problem with `text`, from `reset`, at the end of its last user message. Raises UserError if too long then."""
    messages, where = list(problem.messages), f"the prompt of row {problem.index + 1}"
    place = last_user_message(messages)
    place = -1 if place is None else place
    content = messages[place]["content"]
    content = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    messages[place] = {**messages[place], "content": content}
    with tokenizer_lock:
        chat, tokens = fitted(messages, problem.row, tokenizer, prompt_format, where)
    if isinstance(tokens, TooLong):
        raise no_prompt_fits(prompt_format, f"With what the environment's reset wrote, {where}")
    return problem_of(problem.index, problem.row, chat, tokens, prompt_format)


def fitted(
    messages: Messages, row: Row, tokenizer: Any, prompt_format: PromptFormat, where: str
) -> tuple[Messages, list[int] | TooLong]:
    """(chat, tokens), cut if configured; TooLong if it does not fit. Raises UserError."""
    variables, most = prompt_format.variables_of(row), prompt_format.max_tokens
    tokens = tokenize_if_fits(messages, tokenizer, variables, where, most)
    if isinstance(tokens, list) and len(tokens) <= most:
        return messages, tokens
    if prompt_format.cuts and (cut := cut_left(messages, tokenizer, variables, where, most)) is not None:
        return cut
    return messages, TooLong(count(tokens))


def no_prompt_fits(prompt_format: PromptFormat, prompts: str) -> UserError:
    """Error for a split in which no prompt fits; `prompts` starts the message."""
    most = prompt_format.max_tokens
    if prompt_format.labelled:
        return UserError("max_seq_length", f"No row has anything to imitate in its first {most} tokens; raise Max Seq.")
    if prompt_format.has_own_limit:
        advice = "raise it, or cut prompts on the left"
        return UserError("max_prompt_length", f"{prompts} is longer than Max prompt ({most} tokens); {advice}.")
    room = f"the {most} token{'s' if most != 1 else ''} that Max Seq leaves beside the completion"
    return UserError("max_seq_length", f"{prompts} is longer than {room}; raise Max Seq or lower Completion.")


def chat_sizes(
    rows: Rows,
    prompt_format: PromptFormat,
    source: str,
    read: Callable[[Row, PromptFormat, str], Messages] = messages_of,
) -> Sequence[int]:
    """Characters of every row's chat and tools, cached for lazy rows. Raises UserError for the first invalid row."""
    known = rows.known if isinstance(rows, LazyRows) else {}
    key = ("chat sizes", str(prompt_format))
    if key not in known:
        sizes = array("I")
        names = prompt_format.environments or ("",)
        of_tools = {name: len(str(own)) if (own := prompt_format.tools.of(name)) else 0 for name in names}
        for index, row in enumerate(telling(rows, "Checking", source, lambda done: done / len(rows))):
            where = row_name(index, source)
            chat = read(with_paths(row, source, where), prompt_format, where)
            check_unicode(chat, where)
            characters = _characters(chat) + of_tools[prompt_format.environment_of(row)]
            sizes.append(min(characters, 2**32 - 1))
        known[key] = sizes
    return known[key]
