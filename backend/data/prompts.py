"""Prompts of a run, tokenised when a step needs them or in the background, and their order."""

from __future__ import annotations

import os
import random
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from heapq import nlargest
from itertools import islice
from typing import Any

from backend.data.files import Row, Rows, first_line
from backend.data.images import with_paths
from backend.data.pass_rates import PassRates
from backend.data.problems import (
    ALWAYS_EXACT,
    Messages,
    PromptFormat,
    TooLong,
    apply_chat_template,
    chat_sizes,
    check_reads_images,
    count,
    fitted,
    has_chat_template,
    messages_of,
    no_prompt_fits,
    problem_of,
    tokenizer_lock,
)
from backend.data.rows import INDEX, row_name
from backend.types import Problem

FIRST_ROWS = 512  # rows of a split to tokenise before the first step
ROWS_PER_CALL = 64  # rows per tokenizer call, so that a step waits briefly
LONGEST_BATCH = 5 * ALWAYS_EXACT  # characters per tokenizer call
LONGEST_TEXTS = 16  # longest texts to tokenise when searching for the longest prompt


class PromptStream:
    """Problems in a seeded order, reshuffled each epoch. Saved state: `cursor` (rows consumed) and `first`.

    Rows that are too long (None) are skipped in turn, so the order does not depend on them. At least one row must fit.
    With `pass_rates` these choose the rows; `cursor` then counts the problems taken.
    """

    def __init__(
        self, problems: Sequence[Problem | None], seed: int, cursor: int = 0, pass_rates: PassRates | None = None
    ) -> None:
        self.problems = problems
        self.seed = seed
        self.cursor = cursor
        self.pass_rates = pass_rates
        self.first = 0
        """Cursor where these rows began; above 0 after an earlier stage."""
        self._epoch, self._order = -1, array(INDEX)

    @property
    def epoch(self) -> float:
        """Passes over the dataset, with the current one as a fraction."""
        return (self.cursor - self.first) / len(self.problems)

    def ended_epoch(self, before: int) -> bool:
        """True if the rows since the cursor `before` include the last one of an epoch."""
        count = len(self.problems)
        return (self.cursor - self.first) // count > (before - self.first) // count

    def go_on_with(self, problems: Sequence[Problem | None], *, are_same_rows: bool) -> None:
        """Switch to `problems`; equal rows keep their order."""
        if not are_same_rows:
            self.first = self.cursor
            if self.pass_rates is not None:
                self.pass_rates.begin(len(problems))
        self.problems = problems
        self._epoch, self._order = -1, array(INDEX)

    def take(self, count: int) -> list[Problem]:
        """The next `count` problems; each comes once per epoch, unless pass rates choose them."""
        if self.pass_rates is not None:
            drawn = (self.problems[row] for row in self.pass_rates.order(count, self.cursor))
            self.cursor += count
            return list(islice((problem for problem in drawn if problem is not None), count))
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
    """`generator.sample(range(count), count)` as a compact array."""
    left = array(INDEX, range(count))
    order = array(INDEX, bytes(left.itemsize * count))
    for i in range(count):
        j = generator.randrange(count - i)
        order[i] = left[j]
        left[j] = left[count - i - 1]
    return order


class TokenizedPrompts(Sequence[Problem | None]):
    """Rows of one split as problems, tokenised on access; None if the prompt is too long.

    The constructor raises UserError for an invalid chat, access for one that the template refuses.
    """

    read = staticmethod(messages_of)  # (row, format, its name) → its chat

    def __init__(self, rows: Rows, tokenizer: Any, prompt_format: PromptFormat, source: str) -> None:
        self.format = prompt_format
        self.max_tokens = prompt_format.max_tokens
        """Maximum prompt tokens."""
        self.cut = 0
        """Prompts cut so far."""
        self.slow_paths: list[str] = []
        """A message for each reason why tokenising is slow."""
        self._rows, self._tokenizer, self._source = rows, tokenizer, source
        self._lengths = array("i", [-1]) * len(rows)  # tokens by row; −1 until the row is tokenised
        self._characters = chat_sizes(rows, prompt_format, source, self.read)
        self._takes_batches = bool(rows) and self._try_batch()

    def __len__(self) -> int:
        return len(self._rows)

    def are_of(self, rows: Rows, prompt_format: PromptFormat) -> bool:
        return rows is self._rows and prompt_format == self.format

    def __getitem__(self, index: int) -> Problem | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._problems([index])[0]

    def first(self, count: int) -> list[Problem]:
        """The first `count` problems in file order (−1: all), long rows excluded."""
        made = (problem for chunk in _chunks(range(len(self))) for problem in self._problems(chunk))
        problems = (problem for problem in made if problem is not None)
        return list(problems if count < 0 else islice(problems, count))

    def measure(self, indices: Iterable[int]) -> None:
        """Tokenise unmeasured rows, for their lengths."""
        for chunk in _chunks(index for index in indices if self._lengths[index] < 0):
            self._problems(chunk)

    def unmeasured(self) -> array[int]:
        return array(INDEX, (index for index, length in enumerate(self._lengths) if length < 0))

    def longest_texts(self) -> list[int]:
        return nlargest(LONGEST_TEXTS, range(len(self)), key=self._characters.__getitem__)

    def fits(self, index: int) -> bool:
        """True for a tokenised row that fits."""
        return 0 <= self._lengths[index] <= self.max_tokens

    @property
    def fitting(self) -> int:
        return sum(0 <= length <= self.max_tokens for length in self._lengths)

    @property
    def too_long(self) -> int:
        """Tokenised rows that do not fit."""
        return sum(length > self.max_tokens for length in self._lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt so far, or a lower bound."""
        return max(self._lengths, default=0)

    def too_long_note(self, split: str) -> str:
        """A message about tokenised rows that were cut or left out; "" for none."""
        sentences: list[str] = []
        if self.cut:
            longer = f"are longer than {self.max_tokens} tokens, and cut on the left"
            sentences.append(f"{self.cut} of {len(self)} prompts of the {split} split {longer}.")
        if self.too_long:
            no_room = "are above Max prompt" if self.format.has_own_limit else "leave no room for a completion"
            left_out = f"{self.too_long} of {len(self)} rows of the {split} split are left out"
            sentences.append(f"{left_out}: their prompts (up to {self.longest} tokens) {no_room}.")
        return " ".join(sentences)

    def _problems(self, indices: Sequence[int]) -> list[Problem | None]:
        rows = [self._row(index) for index in indices]
        return [
            problem_of(index, row, chat, tokens, self.format) if isinstance(tokens, list) else None
            for index, row, (chat, tokens) in zip(indices, rows, self._fitted(indices, rows), strict=True)
        ]

    def _fitted(self, indices: Sequence[int], rows: Sequence[Row]) -> list[tuple[Messages, list[int] | TooLong]]:
        """(chat, tokens) of these rows, cut if configured. Raises UserError naming the row."""
        chats = [self._chat(index, row) for index, row in zip(indices, rows, strict=True)]
        made: list[tuple[Messages, list[int] | TooLong]] = []
        with tokenizer_lock:
            batch: list[list[int]] | None = None
            characters = sum(self._characters[index] for index in indices)
            if len(chats) > 1 and self._takes_batches and characters <= LONGEST_BATCH:
                with suppress(Exception):  # chat by chat, the error names the row at fault
                    batch = self._apply_to_batch(chats, rows)
            for place, (index, row, chat) in enumerate(zip(indices, rows, chats, strict=True)):
                if batch is not None and (len(batch[place]) <= self.max_tokens or not self.format.cuts):
                    ids = batch[place]
                    made.append((chat, ids if len(ids) <= self.max_tokens else TooLong(len(ids))))
                else:
                    made.append(fitted(chat, row, self._tokenizer, self.format, row_name(index, self._source)))
        for index, whole, (chat, tokens) in zip(indices, chats, made, strict=True):
            self.cut += self._lengths[index] < 0 and chat is not whole
            self._lengths[index] = min(count(tokens), 2**31 - 1)
        return made

    def _apply_to_batch(self, chats: Sequence[Messages], rows: Sequence[Row]) -> list[list[int]]:
        """Token ids, in one call for the rows of each environment."""
        places = dict[str, list[int]]()
        for place, row in enumerate(rows):
            places.setdefault(self.format.environment_of(row), []).append(place)
        made = dict[int, list[int]]()
        for same in places.values():
            variables, batch = self.format.variables_of(rows[same[0]]), [chats[place] for place in same]
            ids = self._tokenizer.apply_chat_template(batch, add_generation_prompt=True, **variables)
            made |= zip(same, ids, strict=False)
        return [made[place] for place in range(len(chats))]

    def _try_batch(self) -> bool:
        if not has_chat_template(self._tokenizer):  # plain text is quick one at a time, too
            return False
        # Without threads of its own: they cost a third more work, the steps need the cores, and after using threads the
        # tokenizers library warns at every fork.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        indices = sorted([0, len(self) - 1], key=self._characters.__getitem__)
        if self._characters[indices[-1]] > ALWAYS_EXACT:  # not these two, of millions of characters
            indices = [min(range(len(self)), key=self._characters.__getitem__)] * 2
        if self._characters[indices[-1]] > ALWAYS_EXACT:
            return False
        rows = [self._row(index) for index in indices]
        chats = [self._chat(index, row) for index, row in zip(indices, rows, strict=True)]
        try:
            alone = [
                apply_chat_template(chat, self._tokenizer, self.format.variables_of(row))
                for chat, row in zip(chats, rows, strict=True)
            ]
            if self._apply_to_batch(chats, rows) == alone:
                return True
            reason = "given several chats at once, the tokenizer answers otherwise than chat by chat."
        except Exception as error:  # of any kind; where the row is at fault, tokenising it alone says so
            reason = first_line(error)
        self.slow_paths.append(f"Prompts are tokenised one at a time, which takes longer: {reason}")
        return False

    def _row(self, index: int) -> Row:
        return with_paths(self._rows[index], self._source, row_name(index, self._source))

    def _chat(self, index: int, row: Row) -> Messages:
        chat = self.read(row, self.format, row_name(index, self._source))
        check_reads_images(chat, self._tokenizer, row_name(index, self._source))
        return chat


def _chunks(indices: Iterable[int]) -> Iterator[list[int]]:
    rest = iter(indices)
    while chunk := list(islice(rest, ROWS_PER_CALL)):
        yield chunk


def measure_first_rows(prompts: TokenizedPrompts, split: str, *, all_rows: bool = False) -> None:
    """Tokenise enough rows to begin. Raises UserError if no prompt fits."""
    prompts.measure(range(len(prompts) if all_rows else min(FIRST_ROWS, len(prompts))))
    if prompts.fitting:
        return
    for chunk in _chunks(prompts.unmeasured()):
        prompts.measure(chunk)
        if any(prompts.fits(index) for index in chunk):
            return
    raise no_prompt_fits(prompts.format, f"Every prompt of the {split} split")


class BackgroundTokenizer:
    """Tokenises unused rows in a thread, split by split."""

    def __init__(self, splits: Mapping[str, TokenizedPrompts]) -> None:
        done = {split: prompts for split, prompts in splits.items() if not prompts.unmeasured()}
        # A deque: one thread appends, another takes.
        self._notes = deque(prompts.too_long_note(split) for split, prompts in done.items())
        self._error: Exception | None = None
        self._closed = threading.Event()
        work = [(split, prompts) for split, prompts in splits.items() if split not in done]
        # A daemon, so that the process can end before the thread has finished.
        self._thread = threading.Thread(target=self._run, args=[work], name="background tokenizer", daemon=True)
        self._thread.start()

    def new_notes(self) -> list[str]:
        """Messages about splits finished since the last call. Raises the thread's error."""
        if self._error is not None:
            raise self._error
        notes = [self._notes.popleft() for _ in range(len(self._notes))]
        return [sentence for sentence in notes if sentence]

    def close(self) -> None:
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
                self._notes.append(prompts.too_long_note(split))
        except Exception as error:  # raised in the run's own thread by `new_notes`
            self._error = error
