"""Handlers for the Chat page, in a process of their own with one model, whose memory is free when it ends. The page has
the conversation and sends it with every prompt."""

from __future__ import annotations

import atexit
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from backend.serve.questions import QuestionCall
from backend.utils.errors import UserError

if TYPE_CHECKING:
    from backend.sampling.chat import AnswerTurn, Chat, Reply, SideName

REPORT_EVERY_S = 0.03  # interval of reports about an answer's text: as often as a screen shows it

_loaded: list[Chat] = []  # the chat that was loaded last; empty before
_tools = ExitStack()  # ends the process of its tools
atexit.register(_tools.close)


def chat_load(call: QuestionCall, name: str, checkpoint: str | None = None) -> dict[str, Any]:
    """{"sides": [base, tuned], "bytes", "notes": [sentence], "has_tools"} of a run or model."""
    from backend.sampling.chat import Chat, find_source, load_sides, weight_bytes
    from backend.tools.load import begin_tools

    _loaded.clear()  # frees the memory of the old model first
    _tools.close()
    notes: list[str] = []
    source = find_source(name, checkpoint or "")
    call.check()
    sides = load_sides(source, note=notes.append)
    host, why_not = begin_tools(source.config, _tools)
    notes += filter(None, [why_not])
    _loaded.append(Chat(source, sides, host))
    return {"sides": list(sides), "bytes": weight_bytes(sides), "notes": notes, "has_tools": host is not None}


def chat_row(call: QuestionCall, row: int) -> dict[str, Any]:
    """{"row", "of": rows of the split, "source", "prompt", "images": [path], "answer"} of a row, counted from 0, which
    wraps around at the ends."""
    from backend.sampling.chat import ChatQuestion

    chat = _chat()
    source, rows = chat.held_out_rows()
    row %= len(rows)
    problem = chat.problem(ChatQuestion("", row=row), next(iter(chat.sides)))
    about = {"row": row, "of": len(rows), "source": source}
    return about | {"prompt": problem.prompt, "images": problem.images, "answer": problem.answer}


def chat_reply(
    call: QuestionCall,
    prompt: str,
    sides: Sequence[SideName],
    turns: Mapping[SideName, Sequence[Sequence[Any]]],
    max_tokens: int,
    seed: int,
    free_output: bool = False,
    **asked: Any,
) -> dict[str, Any]:
    """{}, when all sides have answered. `turns`: {side: [[prompt, answer, turns?, images?], …]}; `asked`: the filters,
    and other fields of ChatQuestion.

    Penalties and the grammar are the run's; `free_output` leaves the grammar out, `tools` false the tools.
    Reports {"new_text": {side: text}}, {"turns_of": side, "turns"} before and after a turn's calls have run, and as an
    answer ends {"side", …`Reply.figures`, "group": a line for the question `score`}.
    """
    from backend.rewards.bench import line_of
    from backend.sampling.chat import ChatQuestion, Turn
    from backend.sampling.sampler import Sampling

    texts: dict[str, str] = {}
    last = 0.0

    def send() -> None:
        nonlocal texts, last
        if texts:
            call.report({"new_text": texts})
            texts, last = {}, time.monotonic()

    def add(side: str, text: str) -> None:
        texts[side] = texts.get(side, "") + text
        if time.monotonic() - last > REPORT_EVERY_S:
            send()

    def on_turns(side: str, turns: Sequence[AnswerTurn]) -> None:
        send()
        call.report({"turns_of": side, "turns": [turn.row() for turn in turns]})

    def on_reply(reply: Reply) -> None:
        send()
        call.report({"side": reply.side, **reply.figures(), "group": line_of(reply.group)})

    of_run = Sampling.of(_chat().source.config)
    filters = {key: asked.pop(key) for key in ("temperature", "top_p", "top_k", "min_p")}
    question = ChatQuestion(
        prompt,
        {side: [Turn(*turn) for turn in of_side] for side, of_side in turns.items()},
        sampling=replace(of_run, **filters, grammar=None if free_output else of_run.grammar),
        max_tokens=max_tokens,
        seed=seed,
        **asked,
    )
    _chat().reply(question, sides, add, call.check, on_reply, on_turns)
    return {}


def _chat() -> Chat:
    if not _loaded:
        raise UserError("model", "No model is loaded.")
    return _loaded[0]
