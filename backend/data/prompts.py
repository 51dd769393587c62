"""The prompts of a run, tokenised when a step takes them, and the order in which it does.

Every row's chat is built and checked before the first step, which is quick; applying the chat template and tokenising
are not. `BackgroundTokenizer` tokenises the other rows in a thread beside the steps, to count those that are left out
and to report one that the template refuses. The prompts of a step never depend on how far that thread has come.
"""

from __future__ import annotations

import os
import random
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import islice
from typing import Any

from backend.data.files import Row, Rows, first_line
from backend.data.problems import (
    ALWAYS_EXACT,
    Messages,
    PromptFormat,
    TooLong,
    apply_chat_template,
    chat_sizes,
    count,
    fitted,
    messages_of,
    no_prompt_fits,
    problem_of,
)
from backend.data.rows import INDEX, row_name
from backend.types import Problem

FIRST_ROWS = 512
"""Rows of a split to tokenise before the first step: a fraction of a second, and all of a small dataset."""
ROWS_PER_CALL = 64
"""Rows to tokenise in one call: a step that needs the tokenizer waits for at most one such call."""
LONGEST_BATCH = 5 * ALWAYS_EXACT
"""Characters to tokenise in one call, for the same reason."""
LONGEST_TEXTS = 16
"""Rows to tokenise to find the longest prompt: the longest text need not have the most tokens."""

_tokenizer_lock = threading.Lock()
"""A run has one tokenizer and, with BackgroundTokenizer, two threads; a tokenizer may change its own settings while
it works."""


class PromptStream:
    """Problems in a seeded order, reshuffled each epoch. `cursor` (rows consumed) and `first` are the only state to
    save.

    A row without room for the completion (None) is skipped when its turn comes, so the order does not depend on which
    rows those are. At least one row must be a problem.
    """

    def __init__(self, problems: Sequence[Problem | None], seed: int, cursor: int = 0) -> None:
        self.problems = problems
        self.seed = seed
        self.cursor = cursor
        self.first = 0
        """The cursor at which these rows began: 0, unless an earlier stage of the run had others."""
        self._epoch, self._order = -1, array(INDEX)

    @property
    def epoch(self) -> float:
        """Passes over the dataset so far, the current one as a fraction."""
        return (self.cursor - self.first) / len(self.problems)

    def go_on_with(self, problems: Sequence[Problem | None], *, are_same_rows: bool) -> None:
        """Take `problems` from now on: the same rows continue in their order, others begin theirs."""
        if not are_same_rows:
            self.first = self.cursor
        self.problems = problems
        self._epoch, self._order = -1, array(INDEX)

    def take(self, count: int) -> list[Problem]:
        """The next `count` problems; every problem comes once an epoch."""
        problems: list[Problem] = []
        while len(problems) < count:
            epoch, position = divmod(self.cursor - self.first, len(self.problems))
            if epoch != self._epoch:
                # Seeded by the epoch's number, so that a resumed run shuffles as the first process did.
                order = shuffled(len(self.problems), random.Random(f"{self.seed} {epoch}"))
                self._epoch, self._order = epoch, order
            self.cursor += 1
            if (problem := self.problems[self._order[position]]) is not None:
                problems.append(problem)
        return problems


def shuffled(count: int, generator: random.Random) -> array[int]:
    """`generator.sample(range(count), count)` in four bytes each: a list for millions of rows would fill the memory."""
    left = array(INDEX, range(count))
    order = array(INDEX, bytes(left.itemsize * count))
    for i in range(count):
        j = generator.randrange(count - i)
        order[i] = left[j]
        left[j] = left[count - i - 1]
    return order


class TokenizedPrompts(Sequence[Problem | None]):
    """The rows of one split as problems, tokenised on access; None where a prompt leaves no room for the completion.

    The constructor raises UserError for a row that is no chat; access raises it for a row that the chat template
    refuses.
    """

    def __init__(self, rows: Rows, tokenizer: Any, prompt_format: PromptFormat, source: str) -> None:
        self.format = prompt_format
        self.max_tokens = prompt_format.max_tokens
        """Most tokens of a prompt."""
        self.cut = 0
        """Rows tokenised so far whose prompt was cut."""
        self.slow_paths: list[str] = []
        """A message for each way in which tokenising these rows is slower than it could be."""
        self._rows, self._tokenizer, self._source = rows, tokenizer, source
        self._lengths = array("i", [-1]) * len(rows)  # tokens by row; −1 until the row is tokenised
        self._characters = chat_sizes(rows, prompt_format, source)
        self._takes_batches = bool(rows) and self._try_batch()

    def __len__(self) -> int:
        return len(self._rows)

    def are_of(self, rows: Rows, prompt_format: PromptFormat) -> bool:
        """True for the same list of rows in the same format."""
        return rows is self._rows and prompt_format == self.format

    def __getitem__(self, index: int) -> Problem | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._problems([index])[0]

    def first(self, count: int) -> list[Problem]:
        """The first `count` problems in file order (−1: all), without rows that are too long."""
        chunks = (self._problems(chunk) for chunk in _chunks(range(len(self))))
        problems = (problem for chunk in chunks for problem in chunk if problem is not None)
        return list(problems if count < 0 else islice(problems, count))

    def measure(self, indices: Iterable[int]) -> None:
        """Tokenise the rows among these that have no length yet, and store only their lengths."""
        for chunk in _chunks(index for index in indices if self._lengths[index] < 0):
            self._fitted(chunk, [self._rows[index] for index in chunk])

    def unmeasured(self) -> array[int]:
        """The rows that have not been tokenised yet."""
        return array(INDEX, (index for index, length in enumerate(self._lengths) if length < 0))

    def longest_texts(self, count: int = LONGEST_TEXTS) -> list[int]:
        """The rows with the most characters."""
        return nlargest(count, range(len(self)), key=self._characters.__getitem__)

    def fits(self, index: int) -> bool:
        """True for a row that was tokenised and leaves room for the completion."""
        return 0 <= self._lengths[index] <= self.max_tokens

    @property
    def fitting(self) -> int:
        """Rows tokenised so far that leave room for the completion."""
        return sum(0 <= length <= self.max_tokens for length in self._lengths)

    @property
    def too_long(self) -> int:
        """Rows tokenised so far that leave no room."""
        return sum(length > self.max_tokens for length in self._lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt measured so far; a lower bound if it is too long to be tokenised."""
        return max(self._lengths, default=0)

    def _problems(self, indices: Sequence[int]) -> list[Problem | None]:
        rows = [self._rows[index] for index in indices]
        return [
            problem_of(index, row, chat, tokens, self.format) if isinstance(tokens, list) else None
            for index, row, (chat, tokens) in zip(indices, rows, self._fitted(indices, rows), strict=True)
        ]

    def _fitted(self, indices: Sequence[int], rows: Sequence[Row]) -> list[tuple[Messages, list[int] | TooLong]]:
        """These rows' chats, cut where the format says so, with their tokens. Raises UserError naming a refused row."""
        chats = [self._chat(index, row) for index, row in zip(indices, rows, strict=True)]
        made: list[tuple[Messages, list[int] | TooLong]] = []
        with _tokenizer_lock:
            batch = self._tokenize_batch(chats, sum(self._characters[index] for index in indices))
            for place, (index, chat) in enumerate(zip(indices, chats, strict=True)):
                if batch is not None and (len(batch[place]) <= self.max_tokens or not self.format.cuts):
                    ids = batch[place]
                    made.append((chat, ids if len(ids) <= self.max_tokens else TooLong(len(ids))))
                else:
                    made.append(fitted(chat, self._tokenizer, self.format, row_name(index, self._source)))
        for index, whole, (chat, tokens) in zip(indices, chats, made, strict=True):
            self.cut += self._lengths[index] < 0 and chat is not whole
            self._lengths[index] = min(count(tokens), 2**31 - 1)
        return made

    def _tokenize_batch(self, chats: list[Messages], characters: int) -> list[list[int]] | None:
        """All chats in one call, which takes a third off the time; None where that cannot be done."""
        if len(chats) < 2 or not self._takes_batches or characters > LONGEST_BATCH:
            return None
        try:
            return self._apply_to_batch(chats)
        except Exception:
            return None  # chat by chat, the error names the row at fault

    def _apply_to_batch(self, chats: list[Messages]) -> list[list[int]]:
        return self._tokenizer.apply_chat_template(chats, add_generation_prompt=True, **self.format.template_variables)

    def _try_batch(self) -> bool:
        """True if a batch of chats gives the tokens that each chat gives alone. Some tokenizers render one chat
        only."""
        # Without threads of its own: they cost a third more work, the steps need the cores, and after using threads the
        # tokenizers library warns at every fork.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        rows = sorted([0, len(self) - 1], key=self._characters.__getitem__)
        if self._characters[rows[-1]] > ALWAYS_EXACT:  # not these two, of millions of characters
            rows = [min(range(len(self)), key=self._characters.__getitem__)] * 2
        if self._characters[rows[-1]] > ALWAYS_EXACT:
            return False
        chats = [self._chat(row, self._rows[row]) for row in rows]
        try:
            alone = [apply_chat_template(chat, self._tokenizer, self.format.template_variables) for chat in chats]
            if self._apply_to_batch(chats) == alone:
                return True
            reason = "given several chats at once, the tokenizer answers otherwise than chat by chat."
        except Exception as error:  # of any kind; where the row is at fault, tokenising it alone says so
            reason = first_line(error)
        self.slow_paths.append(f"Prompts are tokenised one at a time, which takes longer: {reason}")
        return False

    def _chat(self, index: int, row: Row) -> Messages:
        return messages_of(row, self.format, row_name(index, self._source))


def _chunks(indices: Iterable[int]) -> Iterator[list[int]]:
    rest = iter(indices)
    while chunk := list(islice(rest, ROWS_PER_CALL)):
        yield chunk


def measure_first_rows(prompts: TokenizedPrompts, split: str, *, all_rows: bool = False) -> None:
    """Tokenise enough rows to begin with, or all. Raises UserError when no row leaves room for a completion."""
    prompts.measure(range(len(prompts) if all_rows else min(FIRST_ROWS, len(prompts))))
    if prompts.fitting:
        return
    for chunk in _chunks(prompts.unmeasured()):
        prompts.measure(chunk)
        if any(prompts.fits(index) for index in chunk):
            return
    raise no_prompt_fits(prompts.format, f"Every prompt of the {split} split")


class BackgroundTokenizer:
    """Tokenises the rows that no step has used yet, split by split, in a thread."""

    def __init__(self, splits: Mapping[str, TokenizedPrompts]) -> None:
        done = {split: prompts for split, prompts in splits.items() if not prompts.unmeasured()}
        # A deque: one thread appends, another takes.
        self._notes = deque(_too_long_note(split, prompts) for split, prompts in done.items())
        self._error: Exception | None = None
        self._closed = threading.Event()
        work = [(split, prompts) for split, prompts in splits.items() if split not in done]
        # A daemon, so that the process can end before the thread has finished.
        self._thread = threading.Thread(target=self._run, args=[work], name="background tokenizer", daemon=True)
        self._thread.start()

    def new_notes(self) -> list[str]:
        """Messages about the splits finished since the last call. Raises what ended the thread, such as UserError."""
        if self._error is not None:
            raise self._error
        notes = [self._notes.popleft() for _ in range(len(self._notes))]
        return [sentence for sentence in notes if sentence]

    def close(self) -> None:
        """End the thread, finished or not."""
        self._closed.set()
        self._thread.join()

    def _run(self, work: list[tuple[str, TokenizedPrompts]]) -> None:
        try:
            for split, prompts in work:
                for chunk in _chunks(prompts.unmeasured()):
                    began = time.perf_counter()
                    prompts.measure(chunk)
                    # Rendering holds the interpreter lock, which the steps need too: work half of the time only.
                    if self._closed.wait(time.perf_counter() - began):
                        return
                self._notes.append(_too_long_note(split, prompts))
        except Exception as error:  # raised in the run's own thread by `new_notes`
            self._error = error


def _too_long_note(split: str, prompts: TokenizedPrompts) -> str:
    sentences: list[str] = []
    if prompts.cut:
        longer = f"are longer than {prompts.max_tokens} tokens, and cut on the left"
        sentences.append(f"{prompts.cut} of {len(prompts)} prompts of the {split} split {longer}.")
    if prompts.too_long:
        no_room = "are above Max prompt" if prompts.format.has_own_limit else "leave no room for a completion"
        left_out = f"{prompts.too_long} of {len(prompts)} rows of the {split} split are left out"
        sentences.append(f"{left_out}: their prompts (up to {prompts.longest} tokens) {no_room}.")
    return " ".join(sentences)
