"""Prompts of a run, tokenised when a step needs them or in the background, and their order."""

from __future__ import annotations

import os
import random
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest
from itertools import islice
from typing import Any

from backend.data.files import Row, Rows
from backend.data.images import with_paths
from backend.data.pass_rates import PassRates
from backend.data.problems import (
    PromptFormat,
    chat_sizes,
    check_reads_images,
    count,
    fitted,
    messages_of,
    no_prompt_fits,
    problem_of,
    tokenizer_lock,
)
from backend.data.rows import INDEX, row_name
from backend.types import Problem

FIRST_ROWS = 512  # rows of a split to tokenise before the first step
LONGEST_TEXTS = 16  # longest texts to tokenise when searching for the longest prompt


class PromptStream:
    """Problems in a seeded order, reshuffled each epoch. Saved state: `cursor` (rows consumed) and `first`. Rows that
    are too long (None) are skipped in turn, so the order does not depend on them. At least one row must fit. With
    `pass_rates` these choose the rows; `cursor` then counts the problems taken."""

    def __init__(
        self, problems: Sequence[Problem | None], seed: int, cursor: int = 0, pass_rates: PassRates | None = None
    ) -> None:
        self.problems = problems
        self.seed = seed
        self.cursor = cursor
        self.pass_rates = pass_rates
        self.first = 0  # cursor where these rows began; above 0 after an earlier stage
        self._epoch, self._order = -1, array(INDEX)

    @property
    def epoch(self) -> float:
        """Passes over the dataset, with the current one as a fraction."""
        return (self.cursor - self.first) / len(self.problems)

    def ended_epoch(self, before: int) -> bool:
        """True if the rows since the cursor `before` include the last one of an epoch."""
        count = len(self.problems)
        return (self.cursor - self.first) // count > (before - self.first) // count

    def go_on_with(self, problems: TokenizedPrompts, *, are_same_rows: bool) -> None:
        """Switch to `problems`; equal rows keep their order."""
        if not are_same_rows:
            self.first = self.cursor
            if self.pass_rates is not None:
                self.pass_rates.begin(problems.characters)
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
                rows = random.Random(f"{self.seed} {epoch}").sample(range(len(self.problems)), len(self.problems))
                self._epoch, self._order = epoch, array(INDEX, rows)
            self.cursor += 1
            if (problem := self.problems[self._order[position]]) is not None:
                problems.append(problem)
        return problems


class TokenizedPrompts(Sequence[Problem | None]):
    """Rows of one split as problems, tokenised on access; None if the prompt is too long. The constructor raises
    UserError for an invalid chat, access for one that the template refuses."""

    read = staticmethod(messages_of)  # (row, format, its name) → its chat

    def __init__(self, rows: Rows, tokenizer: Any, prompt_format: PromptFormat, source: str) -> None:
        self.format = prompt_format
        self.cut = 0  # prompts cut so far
        # Without threads, after which the tokenizers library warns at every fork.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._rows, self._tokenizer, self._source = rows, tokenizer, source
        self._lengths = array("i", [-1]) * len(rows)  # tokens by row; −1 until the row is tokenised
        self.characters = chat_sizes(rows, prompt_format, source, self.read)

    def __len__(self) -> int:
        return len(self._rows)

    def are_of(self, rows: Rows, prompt_format: PromptFormat) -> bool:
        return rows is self._rows and prompt_format == self.format

    def __getitem__(self, index: int) -> Problem | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        row, where = self._row(index), row_name(index, self._source)
        whole = self.read(row, self.format, where)
        check_reads_images(whole, self._tokenizer, where)
        with tokenizer_lock:
            chat, tokens = fitted(whole, row, self._tokenizer, self.format, where)
        self.cut += self._lengths[index] < 0 and chat is not whole
        self._lengths[index] = min(count(tokens), 2**31 - 1)
        return problem_of(index, row, chat, tokens, self.format) if isinstance(tokens, list) else None

    def first(self, count: int) -> list[Problem]:
        """The first `count` problems in file order (−1: all), long rows excluded."""
        problems = (problem for problem in map(self.__getitem__, range(len(self))) if problem is not None)
        return list(problems if count < 0 else islice(problems, count))

    def measure(self, indices: Iterable[int]) -> None:
        for index in indices:
            if self._lengths[index] < 0:
                self[index]

    def unmeasured(self) -> array[int]:
        return array(INDEX, (index for index, length in enumerate(self._lengths) if length < 0))

    def longest_texts(self) -> list[int]:
        return nlargest(LONGEST_TEXTS, range(len(self)), key=self.characters.__getitem__)

    def fits(self, index: int) -> bool:
        return 0 <= self._lengths[index] <= self.format.max_tokens

    @property
    def fitting(self) -> int:
        return sum(0 <= length <= self.format.max_tokens for length in self._lengths)

    @property
    def too_long(self) -> int:
        return sum(length > self.format.max_tokens for length in self._lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt so far, or a lower bound."""
        return max(self._lengths, default=0)

    def too_long_note(self, split: str) -> str:
        """A message about tokenised rows that were cut or left out; "" for none."""
        sentences: list[str] = []
        if self.cut:
            longer = f"are longer than {self.format.max_tokens} tokens, and cut on the left"
            sentences.append(f"{self.cut} of {len(self)} prompts of the {split} split {longer}.")
        if self.too_long:
            no_room = "are above Max prompt" if self.format.has_own_limit else "leave no room for a completion"
            left_out = f"{self.too_long} of {len(self)} rows of the {split} split are left out"
            sentences.append(f"{left_out}: their prompts (up to {self.longest} tokens) {no_room}.")
        return " ".join(sentences)

    def _row(self, index: int) -> Row:
        return with_paths(self._rows[index], self._source, row_name(index, self._source))


def measure_first_rows(prompts: TokenizedPrompts, split: str, *, all_rows: bool = False) -> None:
    """Tokenise enough rows to begin. Raises UserError if no prompt fits."""
    prompts.measure(range(len(prompts) if all_rows else min(FIRST_ROWS, len(prompts))))
    if not prompts.fitting and not any(prompts[index] for index in prompts.unmeasured()):
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
                for index in prompts.unmeasured():
                    began = time.perf_counter()
                    prompts.measure([index])
                    # Rendering holds the interpreter lock, which the steps need too: work half of the time only.
                    if self._closed.wait(time.perf_counter() - began):
                        return
                self._notes.append(prompts.too_long_note(split))
        except Exception as error:  # raised in the run's own thread by `new_notes`
            self._error = error
