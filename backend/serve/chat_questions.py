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
    from backend.sampling.chat import AnswerTurn, Chat, Reply

REPORT_EVERY_S = 0.03  # interval of reports about an answer's text: as often as a screen shows it

_loaded: list[Chat] = []  # the chat that was loaded last; empty before
_tools = ExitStack()  # ends the process of its tools
atexit.register(_tools.close)


def chat_load(request: Mapping[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{"name": run or model, "checkpoint": key} → {"sides": [base, tuned], "bytes", "notes": [sentence],
    "has_tools"}."""
    from backend.sampling.chat import Chat, find_source, load_sides, weight_bytes
    from backend.tools.load import begin_tools

    _loaded.clear()  # frees the memory of the old model first
    _tools.close()
    notes: list[str] = []
    source = find_source(request["name"], request.get("checkpoint") or "")
    call.check()
    sides = load_sides(source, note=notes.append)
    host, why_not = begin_tools(source.config, _tools)
    notes += filter(None, [why_not])
    _loaded.append(Chat(source, sides, host))
    return {"sides": list(sides), "bytes": weight_bytes(sides), "notes": notes, "has_tools": host is not None}


def chat_row(request: Mapping[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{"row": from 0} → {"row", "of": rows of the split, "source", "prompt", "images": [path], "answer"}; wraps around
    at the ends."""
    from backend.sampling.chat import ChatQuestion

    chat = _chat()
    source, rows = chat.held_out_rows()
    row = int(request["row"]) % len(rows)
    problem = chat.problem(ChatQuestion("", row=row), next(iter(chat.sides)))
    about = {"row": row, "of": len(rows), "source": source}
    return about | {"prompt": problem.prompt, "images": problem.images, "answer": problem.answer}


def chat_reply(request: Mapping[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{"sides", "prompt", "images"?: [path], "turns": {side: [[prompt, answer, turns?, images?], …]}, "row"?,
    "answer"?, "system"?, "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "free_output"?, "tools"?}
    → {}, when all have answered.

    Penalties and the grammar are the run's; `free_output` leaves the grammar out, `tools` false the tools.
    Reports {"new_text": {side: text}}, {"turns_of": side, "turns"} before and after a turn's calls have run, and as an
    answer ends {"side", …`Reply.figures`, "group": a line for the question `score`}.
    """
    from backend.rewards.bench import line_of
    from backend.sampling.chat import ChatQuestion, Turn
    from backend.sampling.sampler import Sampling

    texts: dict[str, str] = {}
    begun: set[str] = set()
    last = 0.0

    def send() -> None:
        nonlocal texts, last
        if texts:
            call.report({"new_text": texts})
            texts, last = {}, time.monotonic()

    def add(side: str, text: str) -> None:
        texts[side] = texts.get(side, "") + text
        if side not in begun or time.monotonic() - last > REPORT_EVERY_S:
            begun.add(side)
            send()

    def on_turns(side: str, turns: Sequence[AnswerTurn]) -> None:
        send()
        call.report({"turns_of": side, "turns": [turn.row() for turn in turns]})

    def on_reply(reply: Reply) -> None:
        send()
        call.report({"side": reply.side, **reply.figures(), "group": line_of(reply.group)})

    turns: dict[Any, list[Turn]] = {side: [Turn(*turn) for turn in turns] for side, turns in request["turns"].items()}
    asked = {key: request[key] for key in ("temperature", "top_p", "top_k", "min_p")}
    of_run = Sampling.of(_chat().source.config)
    question = ChatQuestion(
        request["prompt"],
        turns,
        request.get("row"),
        request.get("answer") or "",
        request.get("system"),
        replace(of_run, **asked, grammar=None if request.get("free_output") else of_run.grammar),
        int(request["max_tokens"]),
        int(request["seed"]),
        request.get("tools", True),
        request.get("images") or [],
    )
    _chat().reply(question, request["sides"], add, call.check, on_reply, on_turns)
    return {}


def _chat() -> Chat:
    if not _loaded:
        raise UserError("model", "No model is loaded.")
    return _loaded[0]
