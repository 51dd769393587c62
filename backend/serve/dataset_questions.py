"""Handlers for the Dataset page: rows, the rendered prompt of one, token counts of all. Every question carries the
settings that its answer depends on; opened datasets and token counts are cached."""

import atexit
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

from backend.config.config import Config, keys_used_by
from backend.data.files import Row
from backend.data.preview import (
    UNMEASURED,
    PromptLengths,
    cell_text,
    form_of,
    hub_choices,
    is_warm,
    kind_of,
    newest_run,
    open_dataset,
    overview,
    preview_order,
    preview_problem,
    prompt_pieces,
    settings_of,
    solved_prompts,
    tokenizer_for,
)
from backend.data.problems import PromptFormat
from backend.data.prompt_variety import prompt_variety
from backend.data.rows import MapRows, Splits
from backend.rewards.allowed_code import AllowedCode, AllowedServers, code_files
from backend.rewards.catalogue import locate_reward_file
from backend.rewards.scorer import begin_scorer
from backend.serve.questions import QuestionCall
from backend.tools.host import ToolSchemas
from backend.tools.load import shown_tools
from backend.types import content_text
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.hub_cache import is_dataset_cached
from backend.utils.text import quote

Settings = dict[str, Any]  # those that the answer depends on
_lock = threading.Lock()
_open: tuple[Any, Any] | None = None  # what the process of map functions was started for, and its scorer
_shown: tuple[Any, tuple[ToolSchemas, str]] | None = None  # what tools were read for, and `shown_tools`


def map_rows_of(config: Config) -> tuple[MapRows | None, list[ConfigProblem]]:
    """What calls the map function in a confined process; None without one, or with the reason why it may not run."""
    global _open
    if not config.map_function:
        return None, []
    if not config.reward_functions_file:
        sentence = "There is no reward functions file that has the map function, so rows are shown as they are."
        return None, [ConfigProblem("map_function", sentence)]
    update = {"reward_isolation": "process", "reward_functions": ["r1_int_reward_func"], "stages": []}
    config = config.model_copy(update=update)
    file = {"reward_functions_file": config.reward_functions_file, "reward_network": config.reward_network}
    if missing := AllowedCode().missing(file):
        name = quote(missing[0].code.path.name, 40)
        sentence = f"{name} has not been allowed to run yet; allow it above the rows, which are shown as they are."
        return None, [ConfigProblem("map_function", sentence)]
    with _lock:  # a warm process for this file as it is now
        path = locate_reward_file(config.reward_functions_file).resolve()
        about = path.stat() if path.exists() else None
        stamp = (str(path), about and (about.st_mtime_ns, about.st_size), config.reward_network, config.reward_timeout)
        if _open is None or _open[0] != stamp:
            close()
            _open = (stamp, begin_scorer(config))
        return _open[1].map_rows, []


def close() -> None:
    """End the process, if there is one."""
    global _open
    before, _open = _open, None
    if before is not None:
        before[1].close()


atexit.register(close)


CELL = 240  # characters of a cell that are sent for the table
FULL_CELL, FULL_PROMPT = 20_000, 8_000  # characters of a text and tokens of a prompt sent for the selected row
COUNT_CHUNK, REPORT_EVERY_S = 32, 0.25  # rows tokenised between two checks for cancellation; interval of reports

_UNCOUNTED = {"max_tokens": 0, "cuts": False, "has_own_limit": False, "type_column": ""}
"""Parts of a `PromptFormat` that a prompt's text and length do not depend on."""


def preview(call: QuestionCall, settings: Settings, fetch: bool = False) -> dict[str, Any]:
    """`overview`, or without `fetch` {absent: true} for a Hub dataset that is not on this machine."""
    config = settings_of(settings)
    if not fetch and form_of(config.data) == "hub" and not is_dataset_cached(config.data):
        return {"absent": True}
    map_rows, faults = map_rows_of(config)
    known = overview(config, map_rows)
    # Why rows are not mapped stands first: what a later step finds wrong with them may follow from it.
    return {"absent": False, **known, "faults": [*(fault.to_dict() for fault in faults), *known["faults"]]}


def preview_choices(call: QuestionCall, settings: Settings) -> dict[str, list[str]]:
    """{configs, splits} that a dataset of Hugging Face has."""
    config = settings_of(settings)
    return hub_choices(config.data, config.dataset_config)


def preview_rows(call: QuestionCall, settings: Settings, split: str, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """[{cells: {column: text}, tokens: None where not known, images: [path]}] of the rows with these numbers."""
    config, opened, rows, source = _open_split(settings, split)
    numbers = [number for number in numbers if number < len(rows)]
    tally = None
    if is_warm(config):
        tokenizer = tokenizer_for(config)
        tally = _tally(opened, split, config, tokenizer)
        tally.measure(numbers, tokenizer)
    prompt_format, shown = PromptFormat.of(config, labelled=config.learns_labels), list[dict[str, Any]]()
    for number in numbers:
        row, images = rows[number], list[str]()
        with suppress(UserError):  # a row that training refuses
            images = preview_problem(number, row, None, prompt_format, source)[0].images
        tokens = tally.lengths[number] if tally is not None else UNMEASURED
        cells = {name: cell_text(value, CELL) for name, value in row.items()}
        shown.append({"cells": cells, "tokens": tokens if tokens >= 0 else None, "images": images})
    return shown


def preview_row(call: QuestionCall, settings: Settings, split: str, index: int) -> dict[str, Any]:
    """{cells, messages, images, answer, type, tokens, is_label, kept, pieces, faults}.

    A row in full, and its prompt as the model gets it; `kept` tokens of a prompt that is cut. Without a tokenizer
    `tokens` is None, and a fault says why; while one is being loaded, the rest is reported with `loading`.
    """
    config, _, rows, source = _open_split(settings, split)
    if not 0 <= index < len(rows):
        raise UserError("data", f"{source} has no row {index + 1} any more.")
    row = rows[index]
    cells = [{"name": name, "kind": kind_of(value), "text": cell_text(value, FULL_CELL)} for name, value in row.items()]
    answer: dict[str, Any] = {"cells": cells, "messages": [], "answer": "", "type": None, "tokens": None, "kept": None}
    answer |= {"pieces": [], "images": [], "has_template": True, "faults": []}
    if not is_warm(config):
        call.report(_with_prompt(answer, index, row, None, config, source) | {"loading": True})
    tokenizer, answer["faults"] = _tokenizer(config)
    call.check()
    return _with_prompt(answer, index, row, tokenizer, config, source)


def _with_prompt(
    answer: dict[str, Any], index: int, row: Row, tokenizer: Any, config: Config, source: str
) -> dict[str, Any]:
    schemas, why_not = _tools_of(config)
    prompt_format = PromptFormat.of(config, schemas, labelled=config.learns_labels)
    if why_not:
        answer = answer | {"faults": [*answer["faults"], ConfigProblem("tools_file", why_not).to_dict()]}
    try:
        problem, tokens = preview_problem(index, row, tokenizer, prompt_format, source, cuts=True)
    except UserError as error:
        return answer | {"faults": [*answer["faults"], *(fault.to_dict() for fault in error.faults)]}
    messages = [{**each, "content": content_text(each["content"])[:FULL_CELL]} for each in problem.messages]
    answer = answer | {"messages": messages, "answer": problem.answer[:FULL_CELL], "type": problem.type}
    answer["images"] = [{"path": path, "tokens": tokenizer and tokenizer.tokens_of(path)} for path in problem.images]
    if tokenizer is not None:
        answer["tokens"], answer["is_label"] = tokens, problem.label is not None
        answer["kept"] = len(problem.tokens) if 0 < len(problem.tokens) < tokens else None
        answer["pieces"] = prompt_pieces(problem.tokens[:FULL_PROMPT], tokenizer, problem.label)
        answer["has_template"] = bool(getattr(tokenizer, "chat_template", None))
    return answer


def preview_counts(call: QuestionCall, settings: Settings, split: str, most: int | None = None) -> dict[str, Any]:
    """`PromptLengths.summary` and `no_tokens`, the reason why there are no lengths. Reports the same while it counts
    the first `most` rows, or all, in `preview_order`."""
    config, opened, _, _ = _open_split(settings, split)
    tokenizer, faults = _tokenizer(config)
    no_tokens = faults[0]["sentence"] if faults else ""
    tally = _tally(opened, split, config, tokenizer)
    indices = islice(preview_order(len(tally.rows)), most)
    last_report = time.monotonic()
    while part := list(islice(indices, COUNT_CHUNK)):
        call.check()
        tally.measure(part, tokenizer)
        if time.monotonic() - last_report > REPORT_EVERY_S:
            last_report = time.monotonic()
            call.report({**tally.summary(), "no_tokens": no_tokens})
    return {**tally.summary(), "no_tokens": no_tokens}


def preview_variety(call: QuestionCall, settings: Settings, split: str) -> dict[str, Any]:
    """`PromptVariety.to_dict`: how varied the split's prompts are."""
    config, opened, rows, source = _open_split(settings, split)
    depends = replace(PromptFormat.of(config), **_UNCOUNTED)
    counted_with, answer = opened.computed.get(("variety", split), (None, None))
    if counted_with != depends:
        answer = prompt_variety(rows, config, source).to_dict()
        opened.computed["variety", split] = (depends, answer)
    return answer


def preview_difficulty(call: QuestionCall, settings: Settings, split: str) -> dict[str, Any]:
    """{run, rows: [[index, solved, sampled, kind]]} by `solved_prompts` in the dataset's newest run; {} without one."""
    config = settings_of(settings)
    found = newest_run(config)
    if found is None:
        return {}
    config, _, rows, source = _open_split(settings, split)
    return {"run": found[0].name, "rows": solved_prompts(rows, config, source, *found)}


def _open_split(settings: Settings, split: str) -> tuple[Config, Splits, Any, str]:
    """(settings, their dataset, the rows of a split, where these are from)."""
    config = settings_of(settings)
    opened = open_dataset(config, map_rows_of(config)[0])
    return config, opened, opened.rows(split), opened.source_of(split)


def _tokenizer(config: Config) -> tuple[Any, list[dict[str, str]]]:
    """The tokenizer and no faults, or None and the reasons."""
    try:
        return tokenizer_for(config), []
    except UserError as error:
        return None, [fault.to_dict() for fault in error.faults]


def _tools_of(config: Config) -> tuple[ToolSchemas, str]:
    """`shown_tools`, read again where settings, files or consent have changed."""
    global _shown
    named = {key: getattr(config, key) for key in (*keys_used_by("tools"), "reward_network")}
    with _lock:
        files = [(str(path), path.stat().st_mtime_ns) for path in code_files(named)]
        stamp = (named, files, AllowedCode().missing(named), AllowedServers().missing(named))
        if _shown is None or _shown[0] != stamp:
            _shown = (stamp, shown_tools(config))
        return _shown[1]


def _tally(opened: Splits, split: str, config: Config, tokenizer: Any) -> PromptLengths:
    prompt_format = PromptFormat.of(config, _tools_of(config)[0], labelled=config.learns_labels)
    depends = (tokenizer, replace(prompt_format, answer_column="", **_UNCOUNTED))
    counted_with, tally = opened.computed.get(("tally", split), (None, None))
    if counted_with != depends:
        tally = PromptLengths(opened.rows(split), prompt_format, opened.source_of(split))
        opened.computed["tally", split] = (depends, tally)
    return tally
