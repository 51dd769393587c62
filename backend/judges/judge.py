"""A judge: a language model that scores completions by a rubric, all of a group at once or each alone. Judgements are
kept in the run folder, by a hash of the model and of what it is asked, so that a resumed run asks nothing again."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.engine.chunk_sizes import REPLY_TOKENS
from backend.judges.model_reward import ModelScores, UnreachableJudgeError
from backend.judges.prompts import (
    Judgement,
    Messages,
    UnreadableError,
    group_messages,
    read_group,
    read_single,
    reply_schema,
    single_messages,
    text_of,
)
from backend.judges.rubric import SETTING, read_rubric, rubric_path
from backend.judges.server import FailedCallError, Server, UnreachableError
from backend.rewards.calls import Poll
from backend.rewards.catalogue import RewardCall
from backend.rewards.functions.judge import judge as parameters
from backend.rewards.inputs import TrainerState
from backend.rewards.registry import FunctionDescription
from backend.runs.events import JsonLines, read_events
from backend.types import Group, Problem
from backend.utils.errors import UserError
from backend.utils.text import quote

if TYPE_CHECKING:
    from backend.judges.local_model import LocalModel

FILE = "judgements.jsonl"
TRIES, BREAK_S = 2, 0.5
POLL_S = 0.05
UNREADABLE = "a reply could not be read ({})"
Judgements = list[Judgement] | None
"""None where no score came."""


@dataclass(frozen=True, slots=True)
class Question:
    """`read` returns one judgement for each completion that is asked about."""

    messages: Messages
    read: Callable[[str], list[Judgement]]
    limit: int


class Judge:
    """`mode`: group or single. `rubric_file`: None for a plain text. Used by one thread."""

    def __init__(self, call: RewardCall, arguments: dict[str, Any]) -> None:
        """Reads the rubric. Raises UserError."""
        self.about = FunctionDescription(call.name)
        self.mode: str = arguments["mode"]
        self.rubric, self.rubric_file = read_rubric(arguments["rubric"]), rubric_path(arguments["rubric"])
        self.uses_mlx = arguments["url"] == "local"
        self._arguments = arguments
        self._model: Server | LocalModel | None = None
        self._kept: JsonLines | None = None
        self._known: dict[str, list[Judgement]] = {}
        self._asked: dict[str, Future[Judgements]] = {}  # by key, since the last `score`
        self._queue: list[tuple[Question, str, Future[Judgements]]] = []  # for a local model
        self._causes: set[str] = set()  # of failures that a note names
        self._notes: list[str] = []
        self._unreachable = ""
        self._calls = 0

    def load(self, folder: Path | None) -> None:
        """Read what is kept in `folder`, and load the model or look for the server. Raises UserError."""
        if self._model is not None:
            return
        if folder is not None:
            for line in read_events(folder / FILE):
                with suppress(KeyError, TypeError, ValueError):  # edited by hand
                    self._known[line["key"]] = [*zip(line["scores"], line["explanations"], strict=True)]
            self._kept = JsonLines(folder / FILE)
        url, model = self._arguments["url"], self._arguments["model"]
        if self.uses_mlx:
            from backend.judges.local_model import local_model

            self._model = local_model(model)
        else:
            self._model = Server(url, model, self._arguments["timeout"])
            self._limit = asyncio.Semaphore(self._arguments["concurrency"])

    def close(self) -> None:
        model, self._model = self._model, None
        if isinstance(model, Server):
            model.close()
        elif model is not None:
            del model
            gc.collect()  # mlx modules are in reference cycles
        if self._kept is not None:
            self._kept.close()
            self._kept = None
        for each in (self._asked, self._queue, self._causes):
            each.clear()

    def start(self, group: Group) -> None:
        """Ask about a group in the background; a local model waits for `score`."""
        if isinstance(self._model, Server):
            self._ask_group(group)

    def score(self, groups: Sequence[Group], state: TrainerState, poll: Poll) -> ModelScores:
        """Wait for the judgements of all completions. Raises UnreachableJudgeError where the server is gone
        and the run should pause; calling it again asks what is missing."""
        began = time.monotonic()
        places = [place for group in groups for place in self._ask_group(group)]
        try:
            self.wait([self._asked[key] for key, _ in places if key in self._asked], poll)
            found = {key: asked.result() if (asked := self._asked.get(key)) else self._known[key] for key, _ in places}
            cached = sum(key not in self._asked for key, _ in places)
            if self._unreachable and self._arguments["when_unreachable"] == "pause":
                raise UnreachableJudgeError(self.about, self._unreachable)
            if self._unreachable:
                self._note("unreachable", self._unreachable)
        finally:
            self._unreachable = ""
            self._asked = {key: future for key, future in self._asked.items() if not future.done()}
        judged = [rows[index] if (rows := found[key]) else (None, "") for key, index in places]
        calls, self._calls, notes, self._notes = self._calls, 0, self._notes, []
        name, count = self.about.name, max(1, len(judged))
        metrics = {
            f"judge/{name}/failed": sum(score is None for score, _ in judged) / count,
            f"judge/{name}/calls": float(calls),
            f"judge/{name}/cached": cached / count,
            f"judge/{name}/seconds": time.monotonic() - began,
        }
        columns: dict[str, list[Any]] = {f"{name}/explanation": [explanation for _, explanation in judged]}
        return ModelScores([score for score, _ in judged], columns, metrics, notes)

    def _ask_group(self, group: Group) -> list[tuple[str, int]]:
        """Begin what is not known yet. → the key and the place in its judgements of each completion."""
        texts = [text_of(completion) for completion in group.completions]
        distinct = sorted(set(texts))
        if self.mode == "group":
            random.Random(json.dumps([group.problem.messages, distinct])).shuffle(distinct)
        asked = [distinct] if self.mode == "group" else [[text] for text in distinct]
        places: dict[str, tuple[str, int]] = {}
        for texts_asked in asked:
            question = self._question(group.problem, texts_asked)
            key = self._key(question)
            if key not in self._known and key not in self._asked:
                self._asked[key] = self._begin(question, key)
            places |= {text: (key, index) for index, text in enumerate(texts_asked)}
        return [places[text] for text in texts]

    def _question(self, problem: Problem, texts: Sequence[str]) -> Question:
        rubric, criteria = self.rubric, max(1, len(self.rubric.criteria))
        if self.mode == "group":
            messages, limit = group_messages(rubric, problem, texts), REPLY_TOKENS * (1 + len(texts))
            return Question(messages, lambda reply: read_group(reply, len(texts)), limit)
        messages, limit = single_messages(rubric, problem, texts[0]), REPLY_TOKENS * (1 + criteria)
        return Question(messages, lambda reply: [read_single(reply, rubric)], limit)

    def _key(self, question: Question) -> str:
        assert self._model is not None
        identity = self._model.model if isinstance(self._model, Server) else self._model.identity
        asked = json.dumps([identity, question.messages])
        return hashlib.blake2b(asked.encode(), digest_size=16).hexdigest()

    def ask_afresh(self, problem: Problem, texts: Sequence[str], order: Sequence[int]) -> Future[list[float | None]]:
        """Scores of `texts`, whatever is known of them; `wait` for it. `order`: in which group mode lists them."""
        scores, found = list[float | None]([None] * len(texts)), Future[list[float | None]]()
        parts = [list(order)] if self.mode == "group" else [[index] for index in range(len(texts))]
        left = len(parts)

        def take(part: list[int], future: Future[Judgements]) -> None:
            nonlocal left
            judged = None if future.cancelled() else future.result()
            for index, (score, _) in zip(part, judged or (), strict=False):
                scores[index] = score
            left -= 1
            if not left:
                found.set_result(scores)

        for part in parts:
            future = self._begin(self._question(problem, [texts[index] for index in part]))
            future.add_done_callback(lambda future, part=part: take(part, future))
        return found

    def wait(self, futures: Iterable[Future[Any]], poll: Poll) -> None:
        """Return once all are done."""
        queue, self._queue = self._queue, []
        if queue:
            prompts, limits = [each.messages for each, *_ in queue], [each.limit for each, *_ in queue]
            model: Any = self._model
            try:
                replies = model.replies(prompts, limits, poll, reply_schema(self.rubric, self.mode))
            except BaseException:
                for *_, future in queue:
                    future.cancel()
                raise
            self._calls += len(queue)
            for (question, key, future), reply in zip(queue, replies, strict=True):
                judged = None
                try:
                    judged = self._read(question, key, reply)
                except UnreadableError as error:
                    self._note("unreadable", UNREADABLE.format(error))
                future.set_result(judged)
        pending = {*futures}
        while pending := wait(pending, POLL_S).not_done:
            poll()

    def _begin(self, question: Question, key: str = "") -> Future[Judgements]:
        if isinstance(self._model, Server):
            return self._model.begin(self._ask(self._model, question, key))
        future = Future[Judgements]()
        self._queue.append((question, key, future))
        return future

    async def _ask(self, server: Server, question: Question, key: str) -> Judgements:
        async with self._limit:
            for attempt in range(TRIES):
                await asyncio.sleep(BREAK_S if attempt else 0)
                self._calls += 1
                try:
                    return self._read(question, key, await server.reply(question.messages))
                except UnreachableError as error:
                    why = f"its server at {quote(server.url, 60)} does not answer ({error})"
                    cause = "unreachable"
                except FailedCallError as error:
                    cause, why = str(error).partition(" (")[0], f"its server {error}"
                except UnreadableError as error:
                    cause, why = "unreadable", UNREADABLE.format(error)
            if cause == "unreachable":
                self._unreachable = why
            else:
                self._note(cause, why)
            return None

    def _read(self, question: Question, key: str, reply: str) -> list[Judgement]:
        """The judgements of a reply, which are kept. Raises UnreadableError."""
        judged = question.read(reply)
        if key:
            self._known[key] = judged
            if self._kept is not None:
                scores, explanations = zip(*judged, strict=True)
                self._kept.append({"key": key, "scores": scores, "explanations": explanations})
        return judged

    def _note(self, cause: str, why: str) -> None:
        """Once for each cause."""
        if cause not in self._causes:
            self._causes.add(cause)
            name = quote(self.about.name, 40)
            self._notes.append(f"The judge {name} gave no score for some completions: {why}. They count without it.")


def open_judge(call: RewardCall) -> Judge:
    """The judge of an entry. Raises UserError for arguments or a rubric that cannot be used."""
    try:
        parameters([], [], [], **call.arguments)
    except ValueError as error:
        raise UserError(SETTING, f"{call.text} cannot be used: {error}.") from None
    return Judge(call, parameters.__kwdefaults__ | call.arguments)
