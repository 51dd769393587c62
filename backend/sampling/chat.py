"""A chat with a run or a model: the same prompt and random numbers for base and tuned, answers token by token.

Prompts are built as a run's are; token t of turn n uses the uniform of completion 0 of problem n. With adapters base
and tuned share arrays; after full fine-tuning they are two models.
"""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from backend.config.config import Config, parse
from backend.config.model_and_data_names import check_weights, model_source
from backend.data.files import Row
from backend.data.images import with_paths
from backend.data.preview import open_dataset
from backend.data.problems import Messages, PromptFormat, messages_of, problem_of, tokenize_if_fits
from backend.data.rows import Rows, row_name
from backend.engine.device import on_gpu
from backend.engine.images import PromptImages
from backend.engine.shared_weights import copy_sharing_arrays
from backend.models.loading import load_model
from backend.models.policy import Policy, load_base, load_policy
from backend.runs.run_folder import RunFolder, find_run
from backend.runs.saved_weights import END, WeightChoice, find_choice
from backend.runs.steering import run_config
from backend.sampling.cached_sequence import CachedSequence, SampledToken
from backend.sampling.conversations import WAIT_S, Rollout, Tools
from backend.sampling.grammar import GrammarCache
from backend.sampling.outputs import OPEN, CompletionBuffer, TextStream
from backend.sampling.sampler import Sampling, keyed_uniforms
from backend.tools.host import NO_TOOLS, ToolHost
from backend.trainer.memory.estimate import choose_dtype, format_bytes
from backend.types import Completion, Group, Problem
from backend.types import Turn as AnswerTurn
from backend.utils.errors import UserError
from backend.utils.files import names_folder
from backend.utils.machine import machine_bytes
from backend.utils.text import shown_path

SideName = Literal["base", "tuned"]
SIDES: tuple[SideName, ...] = get_args(SideName)
Note = Callable[[str], None]
OnText = Callable[[SideName, str], None]
OnReply = Callable[["Reply"], None]
OnTurns = Callable[[SideName, Sequence[AnswerTurn]], None]
Check = Callable[[], None]

# `load_policy` then keeps the model without adapters as the reference
AS_TRAINED = {"train_mode": "grpo", "beta": 1.0, "reference_model_path": ""}
AS_TRAINED |= {"sync_ref_model": False, "warmup_steps": 0}
HELD_OUT = ("test", "valid", "train")  # prompts come from the first split that has rows


@dataclass(frozen=True, slots=True)
class ChatSource:
    """Model of a chat. `config`: the run's settings at the step of `weights`; the defaults for a plain model."""

    name: str
    config: Config
    run: RunFolder | None = None
    weights: WeightChoice | None = None

    @property
    def has_two_models(self) -> bool:
        return self.run is not None and self.config.train_type == "full"


def find_source(name: str, checkpoint: str = "", runs_dir: Path | None = None) -> ChatSource:
    """A run by path or name at its end or `checkpoint`; else a model by folder or Hugging Face id. Raises UserError."""
    try:
        run = find_run(name, runs_dir)
    except UserError:
        run = None
    if run is not None:
        weights = find_choice(run, checkpoint or END)
        return ChatSource(run.name, run_config(run, weights.step), run, weights)
    try:
        check_weights(model_source(name, "model"), "model")
    except UserError as error:
        if names_folder(name):  # the message says what the folder lacks
            raise
        nothing = "no run of that name or path, no folder, no owner/name id on Hugging Face"
        raise UserError("model", f"There is no run or model {shown_path(name, 60)}: {nothing}.") from error
    if checkpoint:
        raise UserError("checkpoint", f"{shown_path(name, 100)} is a model and no run, so it has no checkpoints.")
    # Neither rows nor rewards: what is left are the settings of a prompt, at their defaults.
    return ChatSource(Path(name).name, parse({"model": name, "data": "-", "system_prompt": ""}))


Sides = dict[SideName, Policy]  # the models of a chat: base, tuned or both


def weight_bytes(sides: Sides) -> int:
    """Memory of the weights, shared arrays counted once."""
    distinct = {id(array): array for policy in sides.values() for array in _arrays(policy.model).values()}
    return sum(array.nbytes for array in distinct.values())


def load_sides(source: ChatSource, wanted: Sequence[SideName] = SIDES, note: Note = lambda sentence: None) -> Sides:
    """Load what `wanted` says; a plain model has a base alone. `note` takes messages. Raises UserError."""
    if source.run is None:
        if "base" not in wanted:
            raise UserError("model", f"{source.name} is a model and no run, so there is nothing tuned beside it.")
        wanted = ("base",)
    dtype, _ = choose_dtype([source.config], machine_bytes(mx.get_active_memory()), gpu=on_gpu())
    config = source.config.model_copy(update={"dtype": dtype})
    if source.run is None or source.has_two_models:
        return _whole_models(source, config, wanted, note)
    assert source.weights is not None
    tuned = load_policy(config.model_copy(update=AS_TRAINED), note)
    try:
        tuned.assign(_read(source.weights.path))
    except ValueError:
        raise _misfit(source) from None
    mx.eval(tuned.model.parameters())
    assert tuned.reference_model is not None and tuned.reference is not None
    base = copy(tuned)
    base.model, base.split_model = tuned.reference_model, tuned.reference
    both: Sides = {"base": base, "tuned": tuned}
    return {name: policy for name, policy in both.items() if name in wanted}


def _whole_models(source: ChatSource, config: Config, wanted: Sequence[SideName], note: Note) -> Sides:
    whole = load_base(config.model_copy(update={"train_type": "lora", "quantization": "none"}))
    base = whole.model
    models: dict[SideName, nn.Module] = {"base": base}
    if "tuned" in wanted:
        size, active = sum(array.nbytes for array in _arrays(base).values()), mx.get_active_memory()
        free = machine_bytes(active) - active
        if "base" in wanted and size > free:
            wanted = ("tuned",)
            needs = f"another {format_bytes(size)} is needed and {format_bytes(max(0, free))} is free"
            both = "Base and tuned share no weights after full fine-tuning, and there is no memory for both"
            note(f"{both}: {needs}. Only the tuned model is loaded.")
        models["tuned"] = _fully_tuned(base, source, keep_base="base" in wanted)
    if "base" not in wanted:
        del models["base"]
    for model in models.values():
        mx.eval(model.freeze().eval().parameters())
    return {name: Policy(model, whole.tokenizer, {}, None) for name, model in models.items()}


def _fully_tuned(base: nn.Module, source: ChatSource, *, keep_base: bool) -> nn.Module:
    assert source.weights is not None
    if source.weights.path.is_dir():
        return load_model(str(source.weights.path), "model")[0]
    model = copy_sharing_arrays(base) if keep_base else base
    own, trained = _arrays(model), _read(source.weights.path)
    if own.keys() != trained.keys() or any(own[name].shape != trained[name].shape for name in own):
        raise _misfit(source)
    # Training keeps 32 bits; the model that comes out of it, and answers here, has the precision it came with.
    model.load_weights([(name, array.astype(own[name].dtype)) for name, array in trained.items()])
    return model


def _arrays(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def _read(file: Path) -> dict[str, mx.array]:
    arrays = mx.load(str(file))
    assert isinstance(arrays, dict)
    return arrays


def _misfit(source: ChatSource) -> UserError:
    misfit = f"The weights of the run {source.name} do not fit the model {source.config.model}"
    return UserError("model", f"{misfit}: it has changed since.")


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt and its answer; `turns` of one with tools, as in completions.jsonl; `images` of the prompt, as paths."""

    prompt: str
    answer: str
    turns: Sequence[Mapping[str, Any]] = ()
    images: Sequence[str] = ()

    def messages(self) -> Messages:
        if self.turns:
            return [message for turn in self.turns for message in AnswerTurn.of(turn).messages()]
        return [{"role": "assistant", "content": self.answer}]


@dataclass(frozen=True, slots=True)
class ChatQuestion:
    """The next prompt of a conversation. `turns`: those before it, by side. `row`: of the held-out split, if it began
    there. `answer`: expected, for reward functions. `system`: replaces the run's. `tools`: the answer may call them.
    `images`: paths of the prompt's pictures; a row has its own."""

    prompt: str
    turns: Mapping[SideName, Sequence[Turn]] = field(default_factory=dict)
    row: int | None = None
    answer: str = ""
    system: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 512
    seed: int = 0
    tools: bool = True
    images: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished answer. `prefilled`: prompt tokens that were not in the cache; times in seconds from the question."""

    side: SideName
    problem: Problem
    completion: Completion
    prefilled: int
    first_token_s: float
    seconds: float

    @property
    def group(self) -> Group:
        return Group(self.problem, [self.completion])

    def figures(self) -> dict[str, Any]:
        return {
            "text": self.completion.text,
            "turns": [turn.row() for turn in self.completion.turns],
            "tokens": self.completion.trained_tokens,
            "stop": self.completion.stop,
            "prompt_tokens": len(self.problem.tokens),
            "prefilled": self.prefilled,
            "first_token_s": self.first_token_s,
            "seconds": self.seconds,
        }


class Chat:
    """Answers questions with the models of `sides`."""

    def __init__(self, source: ChatSource, sides: Sides, host: ToolHost | None = None) -> None:
        """`host`: the tools that answers may call."""
        self.source, self.sides, self.host = source, sides, host
        self.tokenizer = next(iter(sides.values())).tokenizer
        self.grammars = {
            name: GrammarCache(self.tokenizer, side.eos_ids, side.split_model.vocab_size)
            for name, side in sides.items()
        }
        self.sequences = {name: CachedSequence(side.model, side.split_model) for name, side in sides.items()}

    def held_out_rows(self) -> tuple[str, Rows]:
        """(name of the split, its rows): the first of test, valid and train that has any. Raises UserError."""
        if self.source.run is None:
            raise UserError("data", f"{self.source.name} is a model and no run, so there are no prompts of a dataset.")
        opened = open_dataset(self.source.config)
        split = next((split for split in HELD_OUT if opened.rows(split)), "train")
        return opened.source_of(split), opened.rows(split)

    def problem(self, question: ChatQuestion, side: SideName) -> Problem:
        """The question as this side gets it: rendered and tokenised as in training. Raises UserError."""
        schemas = self.host.schemas if self.host is not None and question.tools else NO_TOOLS
        prompt_format = PromptFormat.of(self.source.config, schemas)
        if question.system is not None:
            prompt_format = replace(prompt_format, system_prompt=question.system)
        turns = question.turns.get(side, ())
        typed: Row = {prompt_format.answer_column: question.answer}
        if column := prompt_format.environment_column:  # of several: what is typed has the first
            typed[column] = prompt_format.environments[0]

        def row_of(asked: Turn | ChatQuestion) -> Row:
            row = typed | {prompt_format.prompt_column: asked.prompt}
            return row | {"images": list(asked.images)} if asked.images else row

        index, where, first = 0, "this prompt", row_of(turns[0] if turns else question)
        if question.row is not None:
            source, rows = self.held_out_rows()
            if not 0 <= question.row < len(rows):
                raise UserError("row", f"{source} has rows 1 to {len(rows)}, and no row {question.row + 1}.")
            index, where = question.row, row_name(question.row, source)
            first = with_paths(rows[index], source, where)
            if column:
                typed[column] = first.get(column)
        messages: Messages = messages_of(first, prompt_format, where)
        for turn, following in zip(turns, [*turns, question][1:], strict=True):
            messages += [*turn.messages(), *messages_of(row_of(following), prompt_format, where)[-1:]]
        tokens = tokenize_if_fits(messages, self.tokenizer, prompt_format.variables_of(first), where, None)
        assert isinstance(tokens, list)
        return problem_of(index, row_of(question) if turns else first, messages, tokens, prompt_format)

    def reply(
        self,
        question: ChatQuestion,
        names: Sequence[SideName],
        on_text: OnText = lambda side, text: None,
        check: Check = lambda: None,
        on_reply: OnReply = lambda reply: None,
        on_turns: OnTurns = lambda side, turns: None,
    ) -> dict[SideName, Reply]:
        """The sides' answers, in turns token by token. `on_text` gets each new piece, `on_reply` each answer,
        `on_turns` its turns before and after calls; `check` runs before every token and may raise. Raises UserError."""
        began = time.perf_counter()
        turn = max((len(question.turns.get(name, ())) for name in names), default=0)
        (uniform_T,) = keyed_uniforms(question.seed, [(turn, 0)], question.max_tokens)
        problems = [self.problem(question, name) for name in names]
        talks: Sequence[Rollout | None] = [None for _ in names]
        tools = Tools.of(self.source.config, self.host, self.tokenizer) if question.tools else None
        if tools is not None:
            rollout = tools.begin(problems, 1, check)
            problems, talks = rollout.problems, [rollout.one(place) for place in range(len(names))]
        pictures = next(iter(self.sides.values())).images_of(problems)
        with ExitStack() as stack:
            answers: list[_Answer] = []
            for name, problem, images, talk in zip(names, problems, pictures, talks, strict=True):
                answer = _Answer(self, name, question, problem, uniform_T, images, talk, check, began)
                answers.append(stack.enter_context(closing(answer)))
            replies: dict[SideName, Reply] = {}
            while len(replies) < len(answers):
                for answer in (answer for answer in answers if answer.is_open):
                    check()
                    if text := answer.step():
                        on_text(answer.side, text)
                    if not answer.is_open:
                        answer.run_calls(check, on_turns)
                    if not answer.is_open:
                        replies[answer.side] = answer.reply()
                        on_reply(replies[answer.side])
        return replies


class _Answer:
    """One side's answer, token by token. `talk`: its conversation with tools."""

    def __init__(
        self,
        chat: Chat,
        side: SideName,
        question: ChatQuestion,
        problem: Problem,
        uniform_T: np.ndarray,
        images: PromptImages | None,
        talk: Rollout | None,
        check: Check,
        began: float,
    ) -> None:
        self.side: SideName = side
        self.problem, self._talk, self._began = problem, talk, began
        self._sequence, self._eos_ids, config = chat.sequences[side], chat.sides[side].eos_ids, chat.source.config
        self._outputs = CompletionBuffer(1, question.max_tokens, chat.tokenizer, self._eos_ids, config.stop)
        self._outputs.held = held = chat.grammars[side].state(question.sampling.grammar)

        def generate(prompt: list[int], start: int) -> Generator[SampledToken]:
            return self._sequence.generate(prompt, question.sampling, uniform_T[start:], check, held, images)

        self._generate, self._steps = generate, generate(problem.tokens, 0)
        self._decode = lambda tokens: chat.tokenizer.decode(list(tokens), skip_special_tokens=False)
        self._text = TextStream(self._decode)
        self._first_token_s = self._seconds = 0.0

    def close(self) -> None:
        self._steps.close()

    @property
    def is_open(self) -> bool:
        return self._outputs.stop[0] == OPEN

    def step(self) -> str:
        sampled = next(self._steps)
        self._seconds = time.perf_counter() - self._began
        self._first_token_s = self._first_token_s or self._seconds
        row = np.zeros(1, np.int64)
        logs = (sampled.logp, sampled.log_kept, sampled.log_held)
        self._outputs.append(row, np.array([[sampled.token]]), *(np.array([[log]]) for log in logs if log is not None))
        text = "" if sampled.token in self._eos_ids else self._text.push(sampled.token)
        return text if self.is_open else text + self._text.rest()

    def run_calls(self, check: Check, on_turns: OnTurns) -> None:
        """Run the calls of the turn that has ended, if it has any; the answer goes on after their results."""
        talk, outputs = self._talk, self._outputs
        if talk is None or not talk.end_turns([0], outputs, check):
            return
        on_turns(self.side, talk.turns[0])
        while talk.waiting:
            going_on, _ = talk.results(outputs, WAIT_S, check)
            if going_on:
                outputs.stop[0] = OPEN
                self._steps.close()
                self._steps = self._generate([*self.problem.tokens, *outputs.tokens(0)], int(outputs.length[0]))
                self._text = TextStream(self._decode)
        on_turns(self.side, talk.turns[0])

    def reply(self) -> Reply:
        completion = self._talk.completion(0, self._outputs) if self._talk else self._outputs.completion(0)
        prefilled = self._sequence.prefilled
        return Reply(self.side, self.problem, completion, prefilled, self._first_token_s, self._seconds)
