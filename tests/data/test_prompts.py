"""Prompts tokenised lazily give the problems, the order and the errors of tokenising everything first."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.config.config import Config, parse
from backend.data.problems import PromptFormat, fitting_problem
from backend.data.prompts import FIRST_ROWS, BackgroundTokenizer, PromptStream, TokenizedPrompts, measure_first_rows
from backend.trainer import run_context
from backend.types import Problem
from backend.utils.errors import UserError
from tests.data.test_problems import tokenizer_in
from tests.support import small_run

ROWS = [{"prompt": "word " * random.Random(n).randint(1, 60) + str(n), "answer": str(n)} for n in range(150)]
"""Prompts of all lengths; some are too long to leave tokens for a completion."""


def settings(**raw: Any) -> Config:
    return parse({"model": "m", "data": "unused", "max_seq_length": 650, "max_completion_length": 500} | raw)


def tokenized(tokenizer: Any, rows: list[dict[str, Any]], **raw: Any) -> TokenizedPrompts:
    return TokenizedPrompts(rows, tokenizer, PromptFormat.of(settings(**raw)), "rows.jsonl")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tokenizer_in(tmp_path_factory.mktemp("tokenizer"))


REFUSES = "{% if 'shout' in messages[0].content %}{{ raise_exception('No shouting') }}{% endif %}"


def until(done: Callable[[], bool]) -> None:
    limit = time.monotonic() + 10
    while not done():
        assert time.monotonic() < limit
        time.sleep(0.002)


@pytest.mark.parametrize("raw", [{}, {"system_prompt": "brief"}, {"chat_template_kwargs": {"enable_thinking": True}}])
def test_lazily_tokenised_problems_equal_eager_ones(tokenizer: Any, raw: dict[str, Any]) -> None:
    made = PromptFormat.of(settings(**raw))
    plain = [p for i, row in enumerate(ROWS) if (p := fitting_problem(i, row, tokenizer, made, "rows.jsonl"))]
    assert 20 < len(plain) < 130, "the rows are of all lengths"
    fast = tokenized(tokenizer, ROWS, **raw)
    assert fast._takes_batches
    assert fast.first(-1) == plain and fast.first(7) == plain[:7]
    assert [fast[index] for index in range(len(ROWS)) if fast[index]] == plain
    assert (fast.fitting, fast.too_long) == (len(plain), len(ROWS) - len(plain))


def test_a_tokenizer_without_batches_gets_one_chat_at_a_time(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tokenized(tokenizer, ROWS).first(-1)
    original = type(tokenizer).apply_chat_template

    def single_chat_only(self: Any, chat: Any, **options: Any) -> Any:
        return original(self, chat if isinstance(chat[0], dict) else chat[0], **options)

    monkeypatch.setattr(type(tokenizer), "apply_chat_template", single_chat_only)
    alone = tokenized(tokenizer, ROWS)
    assert not alone._takes_batches and alone.first(-1) == plain
    assert alone.slow_paths == [
        "Prompts are tokenised one at a time, which takes longer: given several chats at once, the tokenizer answers "
        "otherwise than chat by chat."
    ]


def indices(problems: list[Problem]) -> list[int]:
    return [problem.index for problem in problems]


def test_a_base_model_without_a_chat_template_is_told_nothing(tmp_path: Path) -> None:
    base = tokenized(tokenizer_in(tmp_path, lambda config: config.pop("chat_template")), ROWS)
    assert base.first(1) and base.slow_paths == []


def test_an_epoch_takes_every_row_that_fits_and_skips_those_that_do_not(tokenizer: Any) -> None:
    fitting = set(indices(tokenized(tokenizer, ROWS).first(-1)))
    prompt_stream = PromptStream(tokenized(tokenizer, ROWS), seed=3)
    for epoch in (1, 2):
        taken = [prompt_stream.take(1)[0].index for _ in fitting]
        assert sorted(taken) == sorted(fitting) and epoch - 1 < prompt_stream.epoch <= epoch


def test_the_order_does_not_depend_on_which_rows_are_tokenised_already(tokenizer: Any) -> None:
    """A resumed run is another process, which has tokenised other rows by then."""
    prompt_stream = PromptStream(tokenized(tokenizer, ROWS), seed=0)
    prompt_stream.take(41)
    cursor, uninterrupted = prompt_stream.cursor, indices(prompt_stream.take(80))
    fresh = tokenized(tokenizer, ROWS)
    assert indices(PromptStream(fresh, 0, cursor).take(80)) == uninterrupted
    background_tokenizer = BackgroundTokenizer({"train": fresh})
    assert indices(PromptStream(fresh, 0, cursor).take(80)) == uninterrupted, "and while rows are tokenised"
    until(lambda: not fresh.unmeasured())
    background_tokenizer.close()
    assert indices(PromptStream(fresh, 0, cursor).take(80)) == uninterrupted


def test_a_large_dataset_is_not_tokenised_before_the_first_step(tokenizer: Any) -> None:
    rows = [{"prompt": str(n), "answer": ""} for n in range(FIRST_ROWS + 300)]
    prompts = tokenized(tokenizer, rows)
    measure_first_rows(prompts, "train")
    assert len(prompts.unmeasured()) == 300
    PromptStream(prompts, 0).take(8)
    assert 290 < len(prompts.unmeasured()) < 300
    measure_first_rows(prompts, "train", all_rows=True)
    assert not prompts.unmeasured() and prompts.fitting == len(rows)


@pytest.mark.parametrize(
    "broken", [{"prompt": "", "answer": ""}, {"prompt": "a \ud83d b", "answer": ""}, {"answer": ""}]
)
def test_a_row_that_is_no_chat_is_refused_at_once_at_any_position(tokenizer: Any, broken: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"row {FIRST_ROWS + 2} of rows.jsonl"):
        tokenized(tokenizer, [{"prompt": "a", "answer": ""}] * (FIRST_ROWS + 1) + [broken])


def test_the_background_count_of_left_out_rows_is_noted_once(tokenizer: Any) -> None:
    plain = tokenized(tokenizer, ROWS)
    plain.measure(range(len(ROWS)))
    short = tokenized(tokenizer, [{"prompt": "a", "answer": ""}])
    background_tokenizer = BackgroundTokenizer({"train": tokenized(tokenizer, ROWS), "valid": short})
    notes: list[str] = []
    until(lambda: bool(notes.extend(background_tokenizer.new_notes()) or notes))
    background_tokenizer.close()
    assert notes + background_tokenizer.new_notes() == [
        f"{plain.too_long} of 150 rows of the train split are left out: their prompts (up to {plain.longest} tokens) "
        f"leave no room for a completion."
    ]


def test_a_row_that_the_template_refuses_is_named_from_the_background(tmp_path: Path) -> None:
    picky = tokenizer_in(tmp_path, lambda config: config.update(chat_template=REFUSES + config["chat_template"]))
    rows = [{"prompt": "shout" if n == 40 else "a", "answer": ""} for n in range(60)]
    background_tokenizer = BackgroundTokenizer({"train": tokenized(picky, rows)})
    until(lambda: not background_tokenizer._thread.is_alive())
    with pytest.raises(UserError) as caught:
        background_tokenizer.new_notes()
    assert str(caught.value) == "prompt_feature: The model's chat template refuses row 41 of rows.jsonl: No shouting."


def test_the_longest_prompt_is_found_anywhere(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory was once planned for the longest of the first 512 rows, and a longer row further on exceeded the limit."""
    rows = [{"prompt": "short", "answer": "1"} for _ in range(FIRST_ROWS + 40)]
    rows[-3]["prompt"] = "word " * 60
    prompts = tokenized(tokenizer, rows)
    measure_first_rows(prompts, "train")
    before = prompts.longest
    prompts.measure(prompts.longest_texts())
    assert prompts.longest_texts(1) == [len(rows) - 3] and prompts.longest > 3 * before
    raw = small_run.settings_for(tmp_path)
    Path(raw["data"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    lengths: list[int] = []
    plan = run_context.plan_memory
    monkeypatch.setattr(
        run_context,
        "plan_memory",
        lambda config, policy, longest, *more: lengths.extend(longest) or plan(config, policy, longest, *more),
    )
    run_context.load_context(parse(raw), lambda sentence: None)
    assert max(lengths) > 3 * before


def numbered(count: int) -> list[Problem]:
    return [Problem(n, str(n), [], [], "") for n in range(count)]


def taken_in(prompt_stream: PromptStream, *takes: int) -> list[int]:
    return [problem.index for take in takes for problem in prompt_stream.take(take)]


@hypothesis.settings(deadline=None)
@given(count=st.integers(1, 40), seed=st.integers(0, 2**32 - 1), takes=st.lists(st.integers(0, 17), max_size=12))
def test_every_problem_comes_once_an_epoch_whatever_the_step_sizes(count: int, seed: int, takes: list[int]) -> None:
    prompt_stream = PromptStream(numbered(count), seed)
    taken = taken_in(prompt_stream, *takes)
    assert prompt_stream.cursor == len(taken) and prompt_stream.epoch == len(taken) / count
    for start in range(0, len(taken), count):
        epoch = taken[start : start + count]
        assert len(set(epoch)) == len(epoch)
        assert len(epoch) < count or sorted(epoch) == list(range(count))


@hypothesis.settings(deadline=None)
@given(count=st.integers(1, 30), at=st.integers(0, 100))
def test_the_cursor_alone_resumes_the_order(count: int, at: int) -> None:
    uninterrupted = taken_in(PromptStream(numbered(count), 3), 150)
    assert taken_in(PromptStream(numbered(count), 3, cursor=at), 150 - at) == uninterrupted[at:]
    prompt_stream = PromptStream(numbered(count), 3)
    prompt_stream.take(120)
    prompt_stream.cursor = at  # a step that was stopped puts its problems back
    assert taken_in(prompt_stream, 150 - at) == uninterrupted[at:]
