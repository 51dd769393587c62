"""The questions of the Dataset page. Each comes with the settings it depends on, so that no answer belongs to a form that
has moved on; what was read and counted is kept between questions.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

from backend.data.preview import (
    Opened,
    hub_choices,
    is_here,
    kind_of,
    open_dataset,
    overview,
    settings_of,
    shown,
)
from backend.data.prompt_preview import Tally, is_warm, made_of, order, pieces, tokenizer_for
from backend.data.rows import Row
from backend.serve.call import QuestionCall
from backend.spec.config import Config, keys_used_by
from backend.spec.faults import Mistake

CELL = 240
"""Characters of a cell that the table is sent."""
FULL_CELL, FULL_PROMPT = 20_000, 8_000
"""Characters of a cell and tokens of a prompt that are sent for the row that is looked at."""
CHUNK, TELL_EVERY_S = 32, 0.25

_PROMPT_TEXT = keys_used_by("prompt_text")


def preview(asked: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """`settings`, `fetch` → {absent: true} for a dataset of Hugging Face that is not on this machine, else `overview`."""
    config = settings_of(asked["settings"])
    if not asked.get("fetch") and not is_here(config.data):
        return {"absent": True}
    return {"absent": False, **overview(config)}


def preview_choices(asked: dict[str, Any], call: QuestionCall) -> dict[str, list[str]]:
    """`settings` of a dataset of Hugging Face → {configs, splits} that it has."""
    config = settings_of(asked["settings"])
    return hub_choices(config.data, config.dataset_config)


def preview_rows(asked: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """`settings`, `split`, `start`, `count` → {rows: [{column: text}], tokens: [a row's, or None where not known]}."""
    config = settings_of(asked["settings"])
    opened = open_dataset(config)
    start, rows = int(asked["start"]), opened.rows(asked["split"])
    part = range(start, min(start + int(asked["count"]), len(rows)))
    found = [{name: shown(value, CELL) for name, value in rows[place].items()} for place in part]
    return {"rows": found, "tokens": _tokens(opened, asked["split"], part, config)}


def _tokens(opened: Opened, split: str, places: range, config: Config) -> list[int | None]:
    """Lengths of these prompts, where the tokenizer is at hand: the table does not wait for one."""
    if not is_warm(config):
        return [None] * len(places)
    tokenizer = tokenizer_for(config)
    tally = _tally(opened, split, config, tokenizer)
    tally.count(places, tokenizer)
    return [length if length >= 0 else None for length in (tally.lengths[place] for place in places)]


def preview_row(asked: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """`settings`, `split`, `index` → {cells, messages, answer, type, tokens, pieces, faults}: a row in full, and its prompt
    as the model will see it. Without a tokenizer `tokens` is None, and a fault says why; while one is loaded, what is known
    already is told with `loading`."""
    config = settings_of(asked["settings"])
    opened = open_dataset(config)
    index, split = int(asked["index"]), asked["split"]
    if not 0 <= index < len(opened.rows(split)):
        raise Mistake("data", f"{opened.source(split, config)} has no row {index + 1} any more.")
    row = opened.rows(split)[index]
    said: dict[str, Any] = {
        "cells": [{"name": name, "kind": kind_of(value), "text": shown(value, FULL_CELL)} for name, value in row.items()],
        "messages": [], "answer": "", "type": None, "tokens": None, "pieces": [], "has_template": True, "faults": [],
    }  # fmt: skip
    if not is_warm(config):
        call.tell(_with_prompt(said, index, row, None, config, opened.source(split, config)) | {"loading": True})
    tokenizer = _tokenizer(config, said)
    call.check()
    return _with_prompt(said, index, row, tokenizer, config, opened.source(split, config))


def _with_prompt(
    said: dict[str, Any], index: int, row: Row, tokenizer: Any, config: Config, source: str
) -> dict[str, Any]:
    """What was said of a row, and its prompt; or why there is none."""
    try:
        problem = made_of(index, row, tokenizer, config, source)
    except Mistake as mistake:
        return said | {"faults": [*said["faults"], *(fault.to_dict() for fault in mistake.faults)]}
    said = said | {"messages": problem.messages, "answer": problem.answer, "type": problem.type}
    if tokenizer is not None:
        said["tokens"] = len(problem.tokens)
        said["pieces"] = pieces(problem.tokens[:FULL_PROMPT], tokenizer)
        said["has_template"] = bool(getattr(tokenizer, "chat_template", None))
    return said


def preview_counts(asked: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """`settings`, `split`, `most` → `Tally.told` and `no_tokens`, why there are no lengths. Tells the same as it goes; the
    first `most` rows in the order of `backend.data.prompt_preview.order` are looked at, or all."""
    config = settings_of(asked["settings"])
    opened = open_dataset(config)
    said: dict[str, Any] = {"faults": []}
    tokenizer = _tokenizer(config, said)
    no_tokens = said["faults"][0]["sentence"] if tokenizer is None else ""
    tally = _tally(opened, asked["split"], config, tokenizer)
    places = islice(order(len(tally.rows)), asked.get("most"))
    told = time.monotonic()
    while part := list(islice(places, CHUNK)):
        call.check()
        tally.count(part, tokenizer)
        if time.monotonic() - told > TELL_EVERY_S:
            told = time.monotonic()
            call.tell({**tally.told(), "no_tokens": no_tokens})
    return {**tally.told(), "no_tokens": no_tokens}


def _tokenizer(config: Config, said: dict[str, Any]) -> Any:
    """The tokenizer, or None with the reason among the faults."""
    try:
        return tokenizer_for(config)
    except Mistake as mistake:
        said["faults"] = [fault.to_dict() for fault in mistake.faults]
        return None


def _tally(opened: Opened, split: str, config: Config, tokenizer: Any) -> Tally:
    """The count of a split, begun anew when something that its prompts depend on is another one now."""
    depends = (tokenizer, *(str(getattr(config, key)) for key in _PROMPT_TEXT))
    known, tally = opened.noted.get(("tally", split), (None, None))
    if known != depends:
        tally = Tally(opened.rows(split), config, opened.source(split, config))
        opened.noted["tally", split] = (depends, tally)
    return tally
