"""A chat against a rollout of the same weights; what is loaded, kept in the cache, and left after a stop."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from backend.config.config import load
from backend.data.preview import open_dataset
from backend.data.problems import PromptFormat
from backend.data.prompts import TokenizedPrompts
from backend.engine.model_probe import split
from backend.engine.output_layer import SplitModel
from backend.models.loading import load_model
from backend.models.policy import load_policy
from backend.sampling import cached_sequence
from backend.sampling import chat as chat_module
from backend.sampling.cached_sequence import CachedSequence
from backend.sampling.chat import Chat, ChatQuestion, Turn, find_source, load_sides
from backend.sampling.conversations import Tools
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import GREEDY, Sampling
from backend.types import Completion
from backend.utils.errors import UserError
from tests.sampling.test_conversations import Format, Host
from tests.sampling.test_rollout import MANY_ENDS
from tests.support.random_models import tiny_model
from tests.support.small_run import settings_for
from tests.support.trained_run import make_run, shaken_policy
from tests.support.vision_models import picture, tiny_vision_model

SAMPLED = Sampling(temperature=0.9, top_p=0.95, top_k=200)
BOTH = ("base", "tuned")


@pytest.fixture(scope="module")
def chats(models: Path) -> Callable[..., Chat]:
    """Makes chats with a run of these settings; each run is made and loaded once."""
    made: dict[str, Chat] = {}

    def chat(**changes: Any) -> Chat:
        key = repr(sorted(changes.items()))
        if key not in made:
            run = make_run(models / f"run{len(made)}", models, system_prompt="Answer briefly.", **changes)
            source = find_source(str(run.path))
            made[key] = Chat(source, load_sides(source))
        return made[key]

    return chat


def ask(chat: Chat, prompt: str = "What is 3 plus 3?", **more: Any) -> dict[str, Completion]:
    question = ChatQuestion(prompt, **({"sampling": GREEDY, "max_tokens": 12} | more))
    return {side: reply.completion for side, reply in chat.reply(question, tuple(chat.sides)).items()}


@pytest.fixture(scope="module")
def seeing(models: Path) -> Chat:
    """A chat with a run of a vision model; its rows 0 and 1 differ in the picture alone."""
    model = tiny_vision_model(models / "seeing" / "model")
    rows = [{"prompt": "Count.", "answer": "1", "image": f"{seed}.png"} for seed in (0, 1)]
    for seed in (0, 1):
        picture(models / "seeing" / f"{seed}.png", seed=seed)
    data = models / "seeing" / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = find_source(str(make_run(models / "seeing" / "run", models, model=str(model), data=str(data)).path))
    return Chat(source, load_sides(source))


def rolled_out(chat: Chat, row: int, sampling: Sampling, seed: int, *, tuned: bool) -> Completion:
    """What a rollout of the run's policy samples for a row, with its weights or before training."""
    config = chat.source.config
    policy = shaken_policy(config, seed=1) if tuned else load_policy(config.model_copy(update={"beta": 0.0}))
    opened = open_dataset(config)
    source = opened.source_of("train")
    problem = TokenizedPrompts(opened.rows("train"), policy.tokenizer, PromptFormat.of(config), source)[row]
    assert problem is not None
    return Sampler(policy, 12).sample([problem], 1, sampling, seed, 0)[0].completions[0]


@pytest.mark.parametrize(("sampling", "train_type"), [(GREEDY, "lora"), (SAMPLED, "full")], ids=str)
def test_both_sides_answer_as_rollouts_do(chats: Callable[..., Chat], train_type: str, sampling: Sampling):
    """The same rendered prompt, tokens and log-probabilities: a chat shows what training and evaluation saw."""
    chat = chats(train_type=train_type)
    answers = ask(chat, row=3, sampling=sampling, seed=7)
    assert answers["base"].tokens != answers["tuned"].tokens, "the two sides must differ, or this test proves nothing"
    for side in BOTH:
        expected = rolled_out(chat, 3, sampling, 7, tuned=side == "tuned")
        assert answers[side].tokens == expected.tokens
        assert answers[side].logps == pytest.approx(expected.logps, abs=1e-4)
        assert (answers[side].text, answers[side].stop) == (expected.text, expected.stop)


def test_pictures_are_answered_as_by_rollouts(seeing: Chat, models: Path):
    """A row's picture, then another of the same size, whose prompt has the same tokens; then both in a conversation."""
    first, second = (str(models / "seeing" / f"{seed}.png") for seed in (0, 1))
    answers = [ask(seeing, row=row, sampling=SAMPLED, seed=7) for row in (0, 1, 0)]
    for row, side in ((0, "tuned"), (1, "base")):
        expected = rolled_out(seeing, row, SAMPLED, 7, tuned=side == "tuned")
        assert answers[row][side].tokens == expected.tokens
        assert answers[row][side].logps == pytest.approx(expected.logps, abs=1e-4)
    assert answers[0] == answers[2] and answers[0]["base"].logps != answers[1]["base"].logps
    typed = ask(seeing, "Count.", images=[second], sampling=SAMPLED, seed=7)
    assert typed["base"].logps == answers[1]["base"].logps
    turns = {side: [Turn("Count.", "One", images=[first])] for side in BOTH}
    problem = seeing.problem(ChatQuestion("And now?", turns=turns, images=[second]), "base")
    assert problem.images == [first, second] and problem.prompt == "And now?"
    assert ask(seeing, "And now?", turns=turns)["base"].tokens


def test_a_model_of_text_refuses_pictures(chats: Callable[..., Chat], tmp_path: Path):
    with pytest.raises(UserError, match="There are images in this prompt, and the model reads only text"):
        ask(chats(), images=[picture(tmp_path / "a.png")])


def test_an_answer_is_penalised_and_held_as_the_run_s_completions_are(chats: Callable[..., Chat]):
    settings = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "output_regex": "[a-e]{3,5}[0-9]"}
    chat = chats(train_type="lora", max_completion_length=12, **settings)
    sampling = Sampling.of(chat.source.config)
    answers = ask(chat, row=3, sampling=sampling, seed=7)
    for side in BOTH:
        expected = rolled_out(chat, 3, sampling, 7, tuned=side == "tuned")
        assert answers[side].tokens == expected.tokens and answers[side].stop == expected.stop == "eos"
        assert answers[side].log_held == pytest.approx(expected.log_held, abs=1e-4)
        assert re.fullmatch("[a-e]{3,5}[0-9]", answers[side].text)


def test_without_memory_only_the_tuned_model_is_loaded(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = find_source(str(make_run(tmp_path / "run", models, train_type="full").path))
    monkeypatch.setattr(chat_module, "machine_bytes", lambda held: held + 1000)
    notes: list[str] = []
    loaded = load_sides(source, note=notes.append)
    assert list(loaded) == ["tuned"] and len(notes) == 1 and "no memory for both" in notes[0]
    assert list(load_sides(source, ["base"])) == ["base"]


def test_a_second_turn_reads_only_what_is_new(chats: Callable[..., Chat]):
    chat = chats(train_type="lora")
    first = ask(chat)
    turns = {side: [Turn("What is 3 plus 3?", first[side].text)] for side in BOTH}
    question = ChatQuestion("And 4 plus 4?", turns, sampling=SAMPLED, max_tokens=12, seed=2)
    replies = chat.reply(question, BOTH)
    for reply in replies.values():
        assert 0 < reply.prefilled < len(reply.problem.tokens) - 10
        assert [message["role"] for message in reply.problem.messages] == ["system", "user", "assistant", "user"]
    for sequence in chat.sequences.values():
        sequence.clear()
    fresh = chat.reply(question, BOTH)
    for side in BOTH:
        assert fresh[side].prefilled == len(fresh[side].problem.tokens)
        assert fresh[side].completion.tokens == replies[side].completion.tokens


class Enough(Exception):
    pass


def test_a_stopped_answer_leaves_the_next_one_as_it_would_have_been(chats: Callable[..., Chat]):
    chat, calls = chats(train_type="lora"), 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls > 9:
            raise Enough

    expected = ask(chat)
    shown: list[str] = []
    with pytest.raises(Enough):
        question = ChatQuestion("What is 9 plus 9?", sampling=GREEDY, max_tokens=200)
        chat.reply(question, BOTH, lambda side, text: shown.append(side), check)
    assert {*shown} == {*BOTH}, "they take turns"
    assert [answer.tokens for answer in ask(chat).values()] == [answer.tokens for answer in expected.values()]


def test_a_plain_model_has_a_base_alone(models: Path):
    settings_for(models)
    source = find_source(str(models / "model"))
    chat = Chat(source, load_sides(source))
    assert list(chat.sides) == ["base"] and ask(chat)["base"].text
    with pytest.raises(UserError, match="nothing tuned beside it"):
        load_sides(source, ["tuned"])
    with pytest.raises(UserError, match="no prompts of a dataset"):
        chat.held_out_rows()


def test_checkpoints_can_be_picked(models: Path, tmp_path: Path):
    run = make_run(tmp_path / "run", models, (1.0, 3.0, 3.0))
    picked = {"": 24, "end": 24, "last": 24, "best": 16, "8": 8, "008": 8}
    sources = {checkpoint: find_source("run", checkpoint, tmp_path) for checkpoint in picked}
    assert {key: source.weights.step for key, source in sources.items() if source.weights} == picked
    for checkpoint in ("best", "8"):
        tuned = load_sides(sources[checkpoint])["tuned"].model
        expected = shaken_policy(load(run.config), seed=picked[checkpoint] // 8).trainable()
        name, array = next(iter(expected.items()))
        assert mx.array_equal(dict(tree_flatten(tuned.parameters()))[name], array)


@pytest.fixture(scope="module")
def places(models: Path) -> Path:
    """A folder with a run, a run without weights, a model, and a folder with nothing."""
    folder = models / "places"
    make_run(folder / "run", models)
    for name in ("new", "empty"):
        (folder / name).mkdir()
    (folder / "new" / "config.yaml").write_text((folder / "run" / "config.yaml").read_text())
    (folder / "model").symlink_to(models / "model")
    return folder


@pytest.mark.parametrize(
    ("name", "checkpoint", "sentence"),
    [
        ("nothing", "", "There is no run or model nothing: no run of that name or path, no folder, no owner/name id"),
        ("run", "12", "The run run has no checkpoint 12; choose one of end, best, 8."),
        ("model", "best", "is a model and no run, so it has no checkpoints."),
        ("new", "", "The run new has no trained weights yet."),
        ("empty", "", "holds no model: config.json is missing."),
    ],
)
def test_what_is_not_there(places: Path, monkeypatch: pytest.MonkeyPatch, name: str, checkpoint: str, sentence: str):
    monkeypatch.chdir(places)
    with pytest.raises(UserError) as mistake:
        find_source(name, checkpoint, places)
    assert sentence in mistake.value.faults[0].sentence


PROMPT = [5, 9, 13, 40, 7, 21, 88, 3]


@pytest.fixture(scope="module")
def sequence_of(models: Path) -> Callable[[str], CachedSequence]:
    """Makes sequences of a model that is loaded once."""

    @cache
    def loaded(arch: str) -> tuple[Any, SplitModel]:
        model = load_model(str(tiny_model(models / arch, arch)), "model")[0]
        return model, split(model)

    return lambda arch: CachedSequence(*loaded(arch))


def take(sequence: CachedSequence, prompt: list[int], count: int) -> list[int]:
    """The first `count` of up to 40 tokens."""
    steps = sequence.generate(prompt, GREEDY, np.linspace(0.01, 0.99, 40, dtype=np.float32))
    return [next(steps).token for _ in range(count)]


@pytest.mark.parametrize("arch", ["qwen3", "gemma3_text", "mamba"])
def test_every_turn_continues_as_a_fresh_sequence_does(sequence_of: Callable[[str], CachedSequence], arch: str):
    """Turns that go on, go back and begin anew; a sliding window and a state are read again to go back."""
    sequence = sequence_of(arch)
    first = take(sequence, PROMPT, 6)
    turns = [[*PROMPT, *first, 30, 31, 32], [*PROMPT, *first[:3], 50, 51], PROMPT, [*PROMPT, *first], [77, 78]]
    for prompt in turns:
        again = take(sequence, prompt, 8)
        assert again == take(sequence_of(arch), prompt, 8), prompt


def test_a_long_prompt_can_be_stopped_between_its_pieces(
    sequence_of: Callable[[str], CachedSequence], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cached_sequence, "PREFILL_CHUNK", 3)
    sequence, checks = sequence_of("qwen3"), []

    def check() -> None:
        checks.append(len(sequence.tokens))
        if len(checks) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(sequence.generate(PROMPT, GREEDY, np.zeros(4, np.float32), check))
    assert checks == [0, 3, 6]
    assert take(sequence, PROMPT, 5) == take(sequence_of("qwen3"), PROMPT, 5)


def test_answers_call_tools_as_rollouts_do(chats: Callable[..., Chat], monkeypatch: pytest.MonkeyPatch):
    """Calls at many ends of turns: the same tokens, masks and turns, of both sides; without tools there are none."""
    plain = chats(train_type="full")
    for policy in plain.sides.values():
        monkeypatch.setattr(policy, "eos_ids", MANY_ENDS)
    chat = Chat(plain.source, plain.sides, Host())
    tools = Tools(Host(), Format(), 3, lambda problem: [{}], lambda problem, text: problem)  # pyright: ignore
    monkeypatch.setattr(chat_module.Tools, "of", lambda config, host, tokenizer: replace(tools, host=host))
    seen: list[tuple[str, int]] = []
    question = ChatQuestion("", row=3, sampling=SAMPLED, max_tokens=60, seed=9)
    replies = chat.reply(question, BOTH, on_turns=lambda side, turns: seen.append((side, len(turns[-1].results))))
    for side in BOTH:
        policy = shaken_policy(chat.source.config, seed=1) if side == "tuned" else load_policy(chat.source.config)
        policy.eos_ids = MANY_ENDS
        sampler = Sampler(policy, 60)
        sampler.tools = replace(tools, host=Host())
        expected = sampler.sample([replies[side].problem], 1, SAMPLED, 9, 0)[0].completions[0]
        completion = replies[side].completion
        assert (completion.tokens, completion.mask) == (expected.tokens, expected.mask)
        assert completion.turns == expected.turns and any(turn.result_tokens for turn in completion.turns)
        assert seen.count((side, 0)) == seen.count((side, 1)) == sum(bool(turn.results) for turn in completion.turns)
    again = chat.reply(replace(question, tools=False), BOTH)
    assert not any(reply.completion.turns or reply.completion.mask for reply in again.values())
