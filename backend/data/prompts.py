"""The prompts of a run, tokenised when they are wanted, so that a run begins at once however many rows there are.

Every row is looked at before the first step, which is quick. Rendering and tokenising, which is not, waits until a row
is drawn; a survey goes through the others beside the steps, to count the rows that are left out and to find one that the
template refuses. What is sampled never depends on how far the survey has come.
"""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import islice
from typing import Any

from jinja2 import TemplateError

from backend.data.rows import Row, check_columns, messages_of, problem_of, render, rendered, whole_characters
from backend.spec.config import Config
from backend.spec.faults import Mistake
from backend.types import Problem

AT_ONCE = 512
"""Rows of a split that are tokenised before the first step: a fraction of a second, and all of a small dataset."""

CHUNK = 64
"""Rows tokenised in one call: a step that draws its problems waits no longer than for these."""

WIDEST = 16
"""Rows that are tokenised to find the longest prompt: the longest text need not have most tokens."""

_one_at_a_time = threading.Lock()
"""A run has one tokenizer and, with the survey, two threads; a tokenizer may change its own settings while it works."""


class TokenizedPrompts(Sequence[Problem | None]):
    """The rows of one split as problems, made when they are asked for; None where a prompt leaves no room for the
    completion. Raises Mistake, now for a missing column or a row that is no chat, later for a row that the template
    refuses."""

    def __init__(self, rows: Sequence[Row], tokenizer: Any, config: Config, source: str) -> None:
        if rows and (faults := check_columns(rows, config, source)):
            raise Mistake(faults)
        self.room = config.max_seq_length - config.max_completion_length
        """Most tokens of a prompt."""
        self._rows, self._tokenizer, self._config, self._source = rows, tokenizer, config, source
        self._lengths = array("i", [-1]) * len(rows)  # tokens by row; −1 for a row that was not tokenised yet
        self._sizes = array("l", [0]) * len(rows)  # characters by row
        for index in range(len(rows)):
            chat = self._chat(index)
            whole_characters(chat, self._where(index))
            self._sizes[index] = sum(len(str(message.get("content", ""))) for message in chat)
        self._takes_many = bool(rows) and self._try_many()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Problem | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._made([index])[0]

    def first(self, count: int) -> list[Problem]:
        """The first `count` problems in file order (−1: all), rows without room left out."""
        made = (problem for chunk in _chunks(range(len(self))) for problem in self._made(chunk) if problem is not None)
        return list(made if count < 0 else islice(made, count))

    # ── what is known of them ────────────────────────────────────────────────────────────────────────────────────────

    def look(self, indices: Iterable[int]) -> None:
        """Tokenise those of these rows that never were, and keep nothing but their lengths."""
        for chunk in _chunks(index for index in indices if self._lengths[index] < 0):
            self._tokens(chunk)

    def unseen(self) -> list[int]:
        """The rows that were never tokenised."""
        return [index for index, length in enumerate(self._lengths) if length < 0]

    def widest(self, count: int = WIDEST) -> list[int]:
        """The rows with most text."""
        return nlargest(count, range(len(self)), key=self._sizes.__getitem__)

    @property
    def fitting(self) -> int:
        """Rows seen so far that leave room for the completion."""
        return sum(0 <= length <= self.room for length in self._lengths)

    @property
    def too_long(self) -> int:
        return sum(length > self.room for length in self._lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt seen so far."""
        return max(self._lengths, default=0)

    # ── tokenising ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _made(self, indices: Sequence[int]) -> list[Problem | None]:
        made = zip(indices, self._tokens(indices), strict=True)
        return [self._problem(index, tokens) if len(tokens) <= self.room else None for index, tokens in made]

    def _problem(self, index: int, tokens: list[int]) -> Problem:
        return problem_of(index, self._rows[index], self._chat(index), tokens, self._config)

    def _tokens(self, indices: Sequence[int]) -> list[list[int]]:
        """Token ids of these rows' chats. Raises Mistake naming the row that the template refuses."""
        chats = [self._chat(index) for index in indices]
        with _one_at_a_time:
            found = self._many(chats) or [
                rendered(chat, self._tokenizer, self._config, self._where(index))
                for index, chat in zip(indices, chats, strict=True)
            ]
        for index, tokens in zip(indices, found, strict=True):
            self._lengths[index] = len(tokens)
        return found

    def _many(self, chats: list[list[dict[str, Any]]]) -> list[list[int]] | None:
        """All chats in one call, which takes a third off the time; None where that cannot be done."""
        if len(chats) < 2 or not self._takes_many:
            return None
        try:
            return self._together(chats)
        except TemplateError:
            return None  # one by one the row has a name

    def _together(self, chats: list[list[dict[str, Any]]]) -> list[list[int]]:
        return self._tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, **self._config.chat_template_kwargs
        )

    def _try_many(self) -> bool:
        """Whether several chats at once give what each gives alone: some tokenizers have a renderer that takes one."""
        # Without threads of its own: they cost a third more work, the steps want the cores, and tokenizers complains of
        # every process that is started once it has had some.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        chats = [self._chat(0), self._chat(len(self) - 1)]
        try:
            alone = [render(chat, self._tokenizer, self._config.chat_template_kwargs) for chat in chats]
            return self._together(chats) == alone
        except Exception:
            return False  # if it is the row's fault, tokenising it alone will say so

    def _chat(self, index: int) -> list[dict[str, Any]]:
        return messages_of(self._rows[index], self._config, self._where(index))

    def _where(self, index: int) -> str:
        return f"row {index + 1} of {self._source}"


def _chunks(indices: Iterable[int]) -> Iterator[list[int]]:
    rest = iter(indices)
    while chunk := list(islice(rest, CHUNK)):
        yield chunk


def first_look(prompts: TokenizedPrompts, split: str, *, everything: bool = False) -> None:
    """Tokenise enough rows to begin with, or every one. Raises Mistake when none of them leaves room for a completion."""
    prompts.look(range(len(prompts) if everything else min(AT_ONCE, len(prompts))))
    for chunk in _chunks(prompts.unseen()):
        if prompts.fitting:
            break
        prompts.look(chunk)
    if not prompts.fitting:
        raise Mistake(
            "max_seq_length",
            f"Every prompt of the {split} split is longer than the {prompts.room} tokens that Max Seq leaves beside the "
            f"completion; raise Max Seq or lower Completion.",
        )


class BackgroundTokenizer:
    """Goes through the rows that nothing has asked for yet, split by split, in a thread of its own."""

    def __init__(self, splits: Mapping[str, TokenizedPrompts]) -> None:
        left = {split: prompts.unseen() for split, prompts in splits.items()}
        self._news = deque(_left_out(split, prompts) for split, prompts in splits.items() if not left[split])
        self._error: Exception | None = None
        self._ended = threading.Event()
        work = [(split, splits[split], rows) for split, rows in left.items() if rows]
        # A daemon: a run that has ended waits for nobody's count.
        self._thread = threading.Thread(target=self._run, args=[work], name="survey of the prompts", daemon=True)
        self._thread.start()

    def said(self) -> list[str]:
        """What a person should know of the splits gone through since this was last asked. Raises what the survey ran
        into: Mistake for a row that the template refuses."""
        if self._error is not None:
            raise self._error
        told = [self._news.popleft() for _ in range(len(self._news))]
        return [sentence for sentence in told if sentence]

    def end(self) -> None:
        """Let go of it, finished or not."""
        self._ended.set()
        self._thread.join()

    def _run(self, work: list[tuple[str, TokenizedPrompts, list[int]]]) -> None:
        try:
            for split, prompts, rows in work:
                for chunk in _chunks(rows):
                    began = time.perf_counter()
                    prompts.look(chunk)
                    # As long again for the steps: rendering holds the interpreter, and they sample and learn meanwhile.
                    if self._ended.wait(time.perf_counter() - began):
                        return
                self._news.append(_left_out(split, prompts))
        except Exception as error:
            self._error = error


def _left_out(split: str, prompts: TokenizedPrompts) -> str:
    if not prompts.too_long:
        return ""
    return (
        f"{prompts.too_long} of {len(prompts)} rows of the {split} split are left out: their prompts (up to "
        f"{prompts.longest} tokens) leave no room for a completion."
    )
