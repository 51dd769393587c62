"""A chat: the same prompt to every side, the same random numbers, answers token by token.

Prompts are built as a run's are (`backend.data.problems`): the same system message, template and template variables. Token t of turn n is
sampled with the uniform that completion 0 of problem n of a rollout with that seed would get, so a first answer is what `Rollout.sample`
gives for that prompt. No state is kept but caches: the caller has the conversation, and sends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from backend.data.files import Row
from backend.data.preview import open_dataset
from backend.data.problems import Messages, PromptFormat, messages_of, problem_of, tokenize
from backend.data.rows import Rows, row_name
from backend.engine.cpu.affinity import on_one_core
from backend.sampling.cached_sequence import CachedSequence, SampledToken
from backend.sampling.chat.sides import SideName, Sides
from backend.sampling.chat.source import ChatSource
from backend.sampling.grammar import CompiledGrammar, Grammar, GrammarState
from backend.sampling.outputs import OPEN, CompletionBuffer
from backend.sampling.sampler import Sampling, keyed_uniforms
from backend.sampling.text_stream import TextStream
from backend.types import Completion, Group, Problem
from backend.utils.errors import UserError

OnText = Callable[[SideName, str], None]
OnReply = Callable[["Reply"], None]
Check = Callable[[], None]
HELD_OUT = ("test", "valid", "train")
"""Where prompts are picked from: the first of these splits that has rows."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What was asked, and what a side answered."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class ChatQuestion:
    """The next prompt of a conversation, and how it is to be answered.

    `turns` are the turns before it, which differ from side to side in their answers. `row` is the row of the held-out split, from 0,
    that the conversation began with; None where it began with a typed prompt. `answer` is the expected one, for reward functions. `system` replaces
    the common system message; None leaves the run's.
    """

    prompt: str
    turns: Mapping[SideName, Sequence[Turn]] = field(default_factory=dict)
    row: int | None = None
    answer: str = ""
    system: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 512
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished answer. `prefilled` counts the prompt's tokens that were not in the cache; times are in seconds from the question on."""

    side: SideName
    problem: Problem
    completion: Completion
    prefilled: int
    first_token_s: float
    seconds: float

    @property
    def group(self) -> Group:
        """As reward functions take it."""
        return Group(self.problem, [self.completion])

    def figures(self) -> dict[str, Any]:
        """Text, lengths, reason of the end and times, as JSON values."""
        return {
            "text": self.completion.text,
            "tokens": len(self.completion.tokens),
            "stop": self.completion.stop,
            "prompt_tokens": len(self.problem.tokens),
            "prefilled": self.prefilled,
            "first_token_s": self.first_token_s,
            "seconds": self.seconds,
        }


class Chat:
    """Answers questions with the models of `sides`.

    Attributes:
        source – what the chat is with.
        sides – its models.
    """

    def __init__(self, source: ChatSource, sides: Sides) -> None:
        self.source, self.sides = source, sides
        self._format = PromptFormat.of(source.config)
        self._grammars: dict[Grammar, CompiledGrammar] = {}
        self._sequences: dict[SideName, CachedSequence] = {
            name: CachedSequence(side.model, side.split_model) for name, side in sides.sides.items()
        }

    # ── prompts ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def held_out_rows(self) -> tuple[str, Rows]:
        """(the split's name in sentences, its rows): the first of test, valid and train that has any. Raises UserError."""
        if self.source.run is None:
            raise UserError("data", f"{self.source.name} is a model and no run, so there are no prompts of a dataset.")
        opened = open_dataset(self.source.config)
        split = next((split for split in HELD_OUT if opened.rows(split)), "train")
        return opened.source(split, self.source.config), opened.rows(split)

    def problem(self, question: ChatQuestion, side: SideName) -> Problem:
        """The question as this side gets it: rendered and tokenised as in training. Raises UserError."""
        prompt_format = self._format
        if question.system is not None:
            prompt_format = replace(prompt_format, system_prompt=question.system)
        turns = question.turns.get(side, ())
        typed = self._typed_row(question)
        index, row, where, opening = 0, typed, "this prompt", turns[0].prompt if turns else question.prompt
        first: Row = typed | {prompt_format.prompt_column: opening}
        if question.row is not None:
            source, rows = self.held_out_rows()
            if not 0 <= question.row < len(rows):
                raise UserError("row", f"{source} has rows 1 to {len(rows)}, and no row {question.row + 1}.")
            index, first, where = question.row, rows[question.row], row_name(question.row, source)
            row = typed if turns else first
        messages: Messages = messages_of(first, prompt_format, where)
        for i, turn in enumerate(turns):
            following = turns[i + 1].prompt if i + 1 < len(turns) else question.prompt
            messages += [{"role": "assistant", "content": turn.answer}, {"role": "user", "content": following}]
        tokens = tokenize(messages, self.sides.tokenizer, prompt_format.template_variables, where)
        return problem_of(index, row, messages, tokens, prompt_format)

    def _typed_row(self, question: ChatQuestion) -> Row:
        return {self._format.prompt_column: question.prompt, self._format.answer_column: question.answer}

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @on_one_core()
    def reply(
        self,
        question: ChatQuestion,
        names: Sequence[SideName],
        on_text: OnText = lambda side, text: None,
        check: Check = lambda: None,
        on_reply: OnReply = lambda reply: None,
    ) -> dict[SideName, Reply]:
        """The answers of the named sides, which take turns token by token. `on_text` gets each new piece of text, `on_reply` each answer
        as it ends; `check` is called before every token, and may raise to stop. Raises UserError for a prompt that cannot be rendered."""
        began = time.perf_counter()
        turn = max((len(question.turns.get(name, ())) for name in names), default=0)
        (uniform_T,) = keyed_uniforms(question.seed, [(turn, 0)], question.max_tokens)
        problems: dict[SideName, Problem] = {name: self.problem(question, name) for name in names}
        with ExitStack() as stack:
            answers: list[_Answer] = []
            for name, problem in problems.items():
                sequence = self._sequences[name]
                outputs = CompletionBuffer(
                    1, question.max_tokens, self.sides.tokenizer, self.sides.eos_ids, self.source.config.stop
                )
                outputs.held = self._held_output(question.sampling, name)
                steps = stack.enter_context(
                    closing(sequence.generate(problem.tokens, question.sampling, uniform_T, check, outputs.held))
                )
                answers.append(_Answer(name, problem, steps, outputs, self.sides, began))
            replies: dict[SideName, Reply] = {}
            while len(replies) < len(answers):
                for answer in (answer for answer in answers if answer.is_open):
                    check()
                    if text := answer.step():
                        on_text(answer.side, text)
                    if not answer.is_open:
                        replies[answer.side] = answer.reply(self._sequences[answer.side].prefilled)
                        on_reply(replies[answer.side])
        return replies

    def _held_output(self, sampling: Sampling, side: SideName) -> GrammarState | None:
        """The states of a grammar for one answer; the compiled grammar is kept from one question to the next."""
        grammar = sampling.grammar
        if grammar is None:
            return None
        if grammar not in self._grammars:
            size = self.sides.sides[side].split_model.vocab_size
            self._grammars = {grammar: CompiledGrammar(grammar, self.sides.tokenizer, self.sides.eos_ids, size)}
        return GrammarState(self._grammars[grammar])


class _Answer:
    """An answer in progress: its tokens so far, and the text that is complete."""

    def __init__(
        self,
        side: SideName,
        problem: Problem,
        steps: Iterator[SampledToken],
        outputs: CompletionBuffer,
        sides: Sides,
        began: float,
    ) -> None:
        self.side: SideName = side
        self.problem = problem
        self._steps, self._outputs, self._began, self._eos_ids = steps, outputs, began, sides.eos_ids
        self._text = TextStream(lambda tokens: sides.tokenizer.decode(list(tokens), skip_special_tokens=False))
        self._first_token_s = self._seconds = 0.0

    @property
    def is_open(self) -> bool:
        return self._outputs.stop[0] == OPEN

    def step(self) -> str:
        """Take the next token. → the text that it completes; with the last token, all that was held back."""
        sampled = next(self._steps)
        self._seconds = time.perf_counter() - self._began
        self._first_token_s = self._first_token_s or self._seconds
        row = np.zeros(1, np.int64)
        logs = (sampled.logp, sampled.log_kept, sampled.log_held)
        self._outputs.append(row, np.array([[sampled.token]]), *(np.array([[log]]) for log in logs if log is not None))
        text = "" if sampled.token in self._eos_ids else self._text.push(sampled.token)
        return text if self.is_open else text + self._text.rest()

    def reply(self, prefilled: int) -> Reply:
        """The answer, once it has ended."""
        completion = self._outputs.completion(0)
        return Reply(self.side, self.problem, completion, prefilled, self._first_token_s, self._seconds)
