"""Labelled rows for SFT: prompt and completion, or a chat whose assistant is imitated. Max Seq cuts them at the end."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from backend.data.files import Row, Rows
from backend.data.images import placed
from backend.data.problems import (
    Messages,
    PromptFormat,
    TooLong,
    apply_chat_template,
    check_reads_images,
    has_chat_template,
    message_list,
    messages_of,
    no_prompt_fits,
    problem_of,
    tokenizer_lock,
    with_system,
)
from backend.data.prompts import TokenizedPrompts
from backend.data.rows import row_name, shown_source
from backend.types import Completion, Group, Label, Problem, content_text, image_paths
from backend.utils.errors import UserError
from backend.utils.text import quote, reason_of

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def labelled_chat(row: Row, prompt_format: PromptFormat, where: str) -> tuple[Messages, int]:
    """(chat up to the last turn to imitate, index of the first message to imitate). Raises UserError."""
    completion, before = row.get(prompt_format.completion_column), list[dict[str, Any]]()
    if completion is not None:
        setting, column = "completion_feature", prompt_format.completion_column
        before = messages_of(row, prompt_format, where)
        turns: Any = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    else:
        setting, column = "messages_feature", prompt_format.messages_column
        turns = row.get(column)
    turns = message_list(turns, setting, column, where)
    turns = placed(turns, {} if before else row, where)
    turns = turns if before else with_system(turns, row, prompt_format)
    last = max((i for i, turn in enumerate(turns) if turn["role"] == "assistant"), default=None)
    if last is None or not (before or last):
        named = f"The column {quote(column, 24)} of {where}"
        raise UserError(setting, f"{named} has no message of the assistant that answers, so nothing to imitate.")
    return [*before, *turns[: last + 1]], len(before)


def whole_chat(row: Row, prompt_format: PromptFormat, where: str) -> Messages:
    return labelled_chat(row, prompt_format, where)[0]


def label_of(
    row: Row, tokenizer: Any, prompt_format: PromptFormat, where: str
) -> tuple[Messages, list[int], Label | TooLong, bool]:
    """(prompt of the last turn, its token ids, the row's label, True where only the last turn is imitated because the
    template changes earlier ones). TooLong: nothing to imitate is left within Max Seq. Raises UserError."""
    chat, first = labelled_chat(row, prompt_format, where)
    check_reads_images(chat, tokenizer, where)
    prompt, variables = chat[:-1], prompt_format.variables_of(row)
    tools = row.get("tools")  # mlx-lm's and TRL's column, for TRL also as JSON
    try:
        tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
    except (ValueError, RecursionError) as error:
        raise UserError("data", f"The column tools of {where} is not JSON: {reason_of(error)}.") from None
    if isinstance(tools, list):
        variables = {**variables, "tools": tools}
    last_only = False
    if has_chat_template(tokenizer):
        ids = list(tokenizer.apply_chat_template(chat, **variables))
        start = apply_chat_template(prompt, tokenizer, variables)
        mask = _generation_mask(chat, ids, first, tokenizer, variables)
        if mask is None:
            render = partial(tokenizer.apply_chat_template, **variables)
            mask, last_only = _prefix_mask(chat, ids, start, first, render)
    else:
        start = apply_chat_template(prompt, tokenizer, variables) if prompt else []
        answer = list(tokenizer.encode(content_text(chat[-1]["content"]), add_special_tokens=False))
        ids, mask = start + answer, [0] * len(start) + [1] * len(answer)
        last_only = any(message["role"] == "assistant" for message in chat[first:-1])
    ends = getattr(tokenizer, "eos_token_ids", None) or {tokenizer.eos_token_id}
    for i in range(1, len(ids)):  # a template's marks may leave out the end of a turn
        mask[i] = mask[i] or int(ids[i] in ends and bool(mask[i - 1]))
    if not any(mask[i] and ids[i] in ends for i in range(len(start), len(ids))):
        ids, mask = [*ids, tokenizer.eos_token_id], [*mask, 1]
    if not prompt_format.masks_prompt:
        mask = [1] * len(ids)
    mask[0] = 0  # nothing predicts it
    most = prompt_format.max_tokens
    fits = 1 in mask[:most] and (len(ids) <= most or not image_paths(chat))
    return prompt, start, Label(ids[:most], mask[:most], len(ids) > most) if fits else TooLong(len(ids)), last_only


def _generation_mask(chat: Messages, ids: list[int], first: int, tokenizer: Any, variables: Any) -> list[int] | None:
    """The mask of a template that marks what the assistant writes; None for others."""
    inner = getattr(tokenizer, "_tokenizer", tokenizer)
    template = getattr(inner, "chat_template", None)
    if first or not isinstance(template, str) or not _GENERATION.search(template):
        return None
    made = inner.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True, **variables)
    mask = list(made["assistant_masks"])
    return mask if list(made["input_ids"]) == ids and 1 in mask else None


def _prefix_mask(
    chat: Messages, ids: list[int], start: list[int], first: int, render: Callable[..., Sequence[int]]
) -> tuple[list[int], bool]:
    """The mask by comparing the chat's beginnings with the whole; only of the last turn where they differ."""
    begin = next((i for i, pair in enumerate(zip(ids, start, strict=False)) if pair[0] != pair[1]), len(start))
    spans, last_only = [(begin, len(ids))], False
    for i in (i for i in range(first, len(chat) - 1) if chat[i]["role"] == "assistant"):
        before = list(render(chat[:i], add_generation_prompt=True))
        after = list(render(chat[: i + 1], add_generation_prompt=False))
        if ids[: len(after)] == after and after[: len(before)] == before:
            spans.append((len(before), len(after)))
        else:
            last_only = True
    mask = [0] * len(ids)
    for begin, end in spans[:1] if last_only else spans:
        mask[begin:end] = [1] * (end - begin)
    return mask, last_only


def tokenized(rows: Rows, tokenizer: Any, prompt_format: PromptFormat, source: str) -> TokenizedPrompts:
    """The rows as prompts, with labels if the format says so."""
    make = LabelledRows if prompt_format.labelled else TokenizedPrompts
    return make(rows, tokenizer, prompt_format, source)


def with_label(problem: Problem, tokenizer: Any, prompt_format: PromptFormat, most: int) -> Problem:
    """A prompt that is sampled from, with its row's label, cut after `most` tokens. Raises UserError without one."""
    row = {**problem.row, prompt_format.prompt_column: problem.messages}
    with tokenizer_lock:
        _, start, label, _ = label_of(row, tokenizer, prompt_format, f"row {problem.index + 1}")
    end = len(start) + most
    if isinstance(label, TooLong) or 1 not in label.mask[:end]:
        left = f"Row {problem.index + 1} has nothing to imitate within Max Seq and Completion; raise them"
        raise UserError("max_seq_length", f"{left}, or leave the row out.")
    is_cut = label.is_cut or end < len(label.tokens)
    return replace(problem, label=Label(label.tokens[:end], label.mask[:end], is_cut))


def labelled_group(problem: Problem) -> Group:
    """The row's label as the only completion of its prompt, which ends before the first token to imitate."""
    assert problem.label is not None
    ids, mask = problem.label.tokens, problem.label.mask
    start = mask.index(1)
    stop = "length" if problem.label.is_cut else "eos"
    completion = Completion(ids[start:], [0.0] * (len(ids) - start), "", stop, mask=mask[start:])
    return Group(replace(problem, tokens=ids[:start]), [completion])


class LabelledRows(TokenizedPrompts):
    """Rows as problems with a label; None where nothing to imitate fits Max Seq. Lengths are of whole rows."""

    read = staticmethod(whole_chat)
    last_turns = 0  # rows of several turns so far of which only the last is imitated

    def __getitem__(self, index: int) -> Problem | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        row, is_new = self._row(index), self._lengths[index] < 0
        with tokenizer_lock:
            found = label_of(row, self._tokenizer, self.format, row_name(index, self._source))
        prompt, tokens, label, last_only = found
        is_long = isinstance(label, TooLong)
        self._lengths[index] = min(label.at_least if is_long else len(label.tokens), 2**31 - 1)
        self.cut += is_new and not is_long and label.is_cut
        self.last_turns += is_new and last_only
        return None if is_long else replace(problem_of(index, row, prompt, tokens, self.format), label=label)

    def too_long_note(self, split: str) -> str:
        notes = {
            f"are longer than Max Seq ({self.format.max_tokens} tokens), and cut at the end": self.cut,
            "have nothing to imitate within Max Seq, or images and do not fit it, and are left out": self.too_long,
            "are imitated in their last turn only: the chat template changes earlier ones": self.last_turns,
        }
        found = (f"{count} of {len(self)} rows of the {split} split {what}." for what, count in notes.items() if count)
        return " ".join(found)


def check_prompts(rows: Rows, tokenizer: Any, prompt_format: PromptFormat, source: str) -> None:
    """Raise UserError for an invalid chat or label, or if no row fits. Stops tokenising at the first that fits."""
    columns = prompt_format.completion_column, prompt_format.messages_column
    without: list[int] = []
    if prompt_format.labelled:
        without = [i for i, row in enumerate(rows, 1) if all(row.get(name) in (None, "", []) for name in columns)]
    if without:
        named = f"{', '.join(map(str, without[:5]))}{f' and {len(without) - 5:,} more' if len(without) > 5 else ''}"
        these = f"There is no completion and no message to imitate in row{'s' * (len(without) > 1)} {named}"
        raise UserError("completion_feature", f"{these} of {shown_source(source)}.")
    if not any(tokenized(rows, tokenizer, prompt_format, source)):
        raise no_prompt_fits(prompt_format, "Every prompt")
