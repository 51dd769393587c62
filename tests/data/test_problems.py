"""Rows become problems: columns, system messages, the chat template, and prompts that are too long."""

import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import mlx_lm.utils
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.config.config import parse
from backend.data.problems import PromptFormat, apply_chat_template, fitting_problem, tokenize_if_fits
from backend.data.prompts import FIRST_ROWS, BackgroundTokenizer, PromptStream, TokenizedPrompts, measure_first_rows
from backend.models.tokenizers import load_tokenizer
from backend.trainer import run_context
from backend.types import Problem
from backend.utils.errors import UserError
from tests.data.test_rows import ROWS, settings
from tests.support import small_run
from tests.support.cases import mistake
from tests.support.random_models import tiny_tokenizer
from tests.support.tool_tokenizers import tool_tokenizer


def tokenizer_in(folder: Path, change: Callable[[dict[str, Any]], object] = lambda config: None) -> Any:
    """The tiny tokenizer, its tokenizer_config.json changed first."""
    tiny_tokenizer(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    config = json.loads((folder / "tokenizer_config.json").read_text())
    change(config)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return mlx_lm.utils.load_tokenizer(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tokenizer_in(tmp_path_factory.mktemp("tokenizer"))


def tokenized(tokenizer: Any, rows: Sequence[dict[str, Any]], **raw: Any) -> TokenizedPrompts:
    return TokenizedPrompts(rows, tokenizer, PromptFormat.of(settings(**raw)), "rows.jsonl")


def problems(tokenizer: Any, rows: Sequence[dict[str, Any]], **raw: Any) -> list[Problem]:
    return tokenized(tokenizer, rows, **raw).first(-1)


@pytest.mark.parametrize("answer", [7, 7.0, "7"], ids=str)  # 7.0: of a column with an empty cell
def test_a_row_becomes_a_problem(tokenizer: Any, answer: Any) -> None:
    row = {"prompt": "What is 3 plus 4?", "answer": answer, "type": None, "extra": [1]}
    (problem,) = problems(tokenizer, [row])
    assert (problem.index, problem.prompt, problem.answer, problem.type) == (0, "What is 3 plus 4?", "7", None)
    assert problem.row is row
    assert tokenizer.decode(problem.tokens) == "<|im_start|>user\nWhat is 3 plus 4?<|im_end|>\n<|im_start|>assistant\n"


def test_a_prompt_that_is_a_list_of_messages_keeps_its_turns(tokenizer: Any) -> None:
    chat = [
        {"role": "user", "content": "one", "name": None},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    (problem,) = problems(tokenizer, [{"prompt": chat, "answer": "x"}], system_prompt="be brief")
    roles = [message["role"] for message in problem.messages]
    assert problem.prompt == "three" and roles == ["system", "user", "assistant", "user"]
    assert problem.messages[1] == {"role": "user", "content": "one"} and "name" in chat[0], "the row is left as it was"


def test_a_prompt_keeps_its_calls_and_their_results(tmp_path: Path) -> None:
    tokenizer = tool_tokenizer(tmp_path)
    call = {"type": "function", "function": {"name": "calculate", "arguments": {"expression": "6*7"}}}
    chat = [
        {"role": "user", "content": "6*7=", "tool_calls": None, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "name": None},
        {"role": "tool", "content": "42", "name": "calculate", "tool_calls": []},
    ]
    (problem,) = problems(tokenizer, [{"prompt": chat, "answer": "42"}], max_seq_length=9000)
    assert problem.messages[1:] == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42", "name": "calculate"},
    ]
    assert '{"name": "calculate", "arguments": {"expression": "6*7"}}' in tokenizer.decode(problem.tokens)


def test_a_rows_system_message_replaces_the_common_one(tokenizer: Any) -> None:
    own = [{"role": "system", "content": "in the chat"}, {"role": "user", "content": "b"}]
    rows = [
        {"prompt": "a", "answer": "", "system": "in the row"},
        {"prompt": own, "answer": "", "system": "in the row"},
        {"prompt": "c", "answer": "", "system": None},
        {"prompt": "d", "answer": "", "system": ""},
    ]
    made = problems(tokenizer, rows, system_prompt="common")
    assert [problem.messages[0]["content"] for problem in made] == ["in the row", "in the chat", "common", "common"]
    assert [len(problem.messages) for problem in made] == [2] * 4
    renamed = problems(tokenizer, [{"prompt": "a", "answer": "", "role": "mine"}], system_feature="role")
    assert renamed[0].messages[0] == {"role": "system", "content": "mine"}


def test_without_a_chat_template_the_messages_are_joined_as_text(tmp_path: Path) -> None:
    bare = tokenizer_in(tmp_path, lambda config: config.pop("chat_template"))
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert bare.decode(apply_chat_template(messages, bare, {})) == "be brief\n\nhi"


def test_prompts_that_leave_no_room_are_left_out_and_counted_never_truncated(tokenizer: Any) -> None:
    rows = [{"prompt": "word " * count, "answer": str(count)} for count in (1, 40, 2, 300, 3)]
    sizes = [len(problem.tokens) for problem in problems(tokenizer, rows, max_seq_length=9000)]
    prompts = tokenized(tokenizer, rows, max_seq_length=500 + sizes[2])
    made = prompts.first(-1)
    assert [problem.answer for problem in made] == ["1", "2"] and prompts.too_long == 3
    assert prompts.longest == max(sizes) and [problem.index for problem in made] == [0, 2]
    assert [len(problem.tokens) for problem in made] == [sizes[0], sizes[2]], "never truncated"
    assert problems(tokenizer, rows, max_seq_length=501) == []


@pytest.mark.parametrize(
    "prompt", ["", "  ", None, 3, [], ["hi"], [{"role": "user"}], [{"role": "user", "content": {}}], {}]
)
def test_a_cell_that_is_neither_text_nor_messages_names_its_row(tokenizer: Any, prompt: Any) -> None:
    rows = [ROWS[0], {"prompt": prompt, "answer": "x"}]
    wrong = "must hold text or a list" if prompt and prompt != "  " else "is missing or empty"
    with pytest.raises(UserError, match=rf"^prompt_feature: The column prompt of row 2 of rows\.jsonl {wrong}"):
        problems(tokenizer, rows)


TEXT = {"type": "text", "text": "What is "}


def test_text_parts_of_a_message_are_joined(tokenizer: Any) -> None:
    parts = [TEXT | {"image": None}, {"type": "text", "text": "2 plus 3?"}]
    (problem,) = problems(tokenizer, [{"prompt": [{"role": "user", "content": parts}], "answer": "5"}])
    assert problem.prompt == "What is 2 plus 3?" and problem.messages == user("What is 2 plus 3?")


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"type": "image_url", "image_url": "x.png"}, 'is of the type "image_url"; only text and image are supported.'),
        ({"type": "text", "text": None}, "has no text."),
        ("hi", "has no text."),
    ],
    ids=str,
)
def test_other_parts_are_refused_by_their_place(tokenizer: Any, part: Any, says: str) -> None:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [TEXT, part]}]
    setting, sentence = mistake(problems, tokenizer, [ROWS[0], {"prompt": chat, "answer": "x"}])
    place = "Part 2 of message 2 in the column prompt of row 2 of rows.jsonl"
    assert setting == "prompt_feature" and sentence.startswith(f"{place} {says}")


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_ten_megabytes_on_one_line_cost_little_and_count_as_too_long(tokenizer: Any) -> None:
    rows = [{"prompt": "7" * 10_000_000, "answer": "7"}, {"prompt": "What is 2 plus 3?", "answer": "5"}]
    began = time.process_time()
    prompts = tokenized(tokenizer, rows)
    assert [problem is None for problem in (prompts[0], prompts[1])] == [True, False]
    assert time.process_time() - began < 3
    assert prompts.too_long == 1 and prompts.longest > 10_000


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ 1 / 0 }}", "fails for row 1: division by zero."),
        ("{{ raise_exception('no\n\x07way') }}", "refuses row 1: no."),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "refuses row 1: access to attribute '__class__'"),
        ("{{ cycler.__init__.__globals__.os.popen('x') }}", "refuses row 1: access to attribute '__init__'"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails for row 1: "),
        ("{{ messages.append(3) }}", "refuses row 1: access to attribute 'append'"),
        ("{% for %}", "refuses row 1: "),
    ],
)
def test_what_a_template_raises_is_one_sentence(tmp_path: Path, template: str, says: str) -> None:
    tokenizer_in(tmp_path, lambda config: config.update(chat_template=template))
    assert says in mistake(tokenize_if_fits, user("hi"), load_tokenizer(tmp_path), {}, "row 1", 100)[1]


PROMPT_ROWS = [{"prompt": "word " * random.Random(n).randint(1, 60) + str(n), "answer": str(n)} for n in range(150)]
"""Prompts of all lengths; some are too long to leave tokens for a completion."""


REFUSES = "{% if 'shout' in messages[0].content %}{{ raise_exception('No shouting') }}{% endif %}"


def until(done: Callable[[], bool]) -> None:
    limit = time.monotonic() + 10
    while not done():
        assert time.monotonic() < limit
        time.sleep(0.002)


@pytest.mark.parametrize("raw", [{}, {"system_prompt": "brief"}, {"chat_template_kwargs": {"enable_thinking": True}}])
def test_lazily_tokenised_problems_equal_eager_ones(tokenizer: Any, raw: dict[str, Any]) -> None:
    made = PromptFormat.of(settings(**raw))
    plain = [p for i, row in enumerate(PROMPT_ROWS) if (p := fitting_problem(i, row, tokenizer, made, "rows.jsonl"))]
    assert 20 < len(plain) < 130, "the rows are of all lengths"
    fast = tokenized(tokenizer, PROMPT_ROWS, **raw)
    assert fast.first(-1) == plain and fast.first(7) == plain[:7]
    assert [fast[index] for index in range(len(PROMPT_ROWS)) if fast[index]] == plain
    assert (fast.fitting, fast.too_long) == (len(plain), len(PROMPT_ROWS) - len(plain))


def test_an_epoch_takes_every_row_that_fits_and_skips_those_that_do_not(tokenizer: Any) -> None:
    fitting = {problem.index for problem in problems(tokenizer, PROMPT_ROWS)}
    prompt_stream = PromptStream(tokenized(tokenizer, PROMPT_ROWS), seed=3)
    for epoch in (1, 2):
        taken = [prompt_stream.take(1)[0].index for _ in fitting]
        assert sorted(taken) == sorted(fitting) and epoch - 1 < prompt_stream.epoch <= epoch


def test_the_order_does_not_depend_on_which_rows_are_tokenised_already(tokenizer: Any) -> None:
    """A resumed run is another process, which has tokenised other rows by then."""
    prompt_stream = PromptStream(tokenized(tokenizer, PROMPT_ROWS), seed=0)
    prompt_stream.take(41)
    cursor, uninterrupted = prompt_stream.cursor, taken_in(prompt_stream, 80)
    fresh = tokenized(tokenizer, PROMPT_ROWS)
    assert taken_in(PromptStream(fresh, 0, cursor), 80) == uninterrupted
    background_tokenizer = BackgroundTokenizer({"train": fresh})
    assert taken_in(PromptStream(fresh, 0, cursor), 80) == uninterrupted, "and while rows are tokenised"
    until(lambda: not fresh.unmeasured())
    background_tokenizer.close()
    assert taken_in(PromptStream(fresh, 0, cursor), 80) == uninterrupted


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
    plain = tokenized(tokenizer, PROMPT_ROWS)
    plain.measure(range(len(PROMPT_ROWS)))
    short = tokenized(tokenizer, [{"prompt": "a", "answer": ""}])
    background_tokenizer = BackgroundTokenizer({"train": tokenized(tokenizer, PROMPT_ROWS), "valid": short})
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
    assert prompts.longest_texts()[0] == len(rows) - 3 and prompts.longest > 3 * before
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
