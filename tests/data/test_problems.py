"""Rows become problems: columns, system messages, the chat template, and prompts that are too long."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx_lm.utils
import pytest

from backend.data.problems import PromptFormat, TooLong, apply_chat_template, tokenize_if_fits
from backend.data.prompts import TokenizedPrompts
from backend.models.tokenizers import load_tokenizer
from backend.types import Problem
from backend.utils.errors import UserError
from tests.data.test_rows import ROWS, settings
from tests.support.random_models import tiny_tokenizer


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


def problems(tokenizer: Any, rows: Sequence[dict[str, Any]], **raw: Any) -> list[Problem]:
    return TokenizedPrompts(rows, tokenizer, PromptFormat.of(settings(**raw)), "rows.jsonl").first(-1)


def test_a_row_becomes_a_problem(tokenizer: Any) -> None:
    row = {"prompt": "What is 3 plus 4?", "answer": 7, "type": None, "extra": [1]}
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
    config = settings(max_seq_length=500 + sizes[2])
    prompts = TokenizedPrompts(rows, tokenizer, PromptFormat.of(config), "rows.jsonl")
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
    with pytest.raises(UserError, match=r"^prompt_feature: The column prompt of row 2 of rows\.jsonl must hold text"):
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
    with pytest.raises(UserError) as caught:
        problems(tokenizer, [ROWS[0], {"prompt": chat, "answer": "x"}])
    (fault,) = caught.value.faults
    place = "prompt_feature: Part 2 of message 2 in the column prompt of row 2 of rows.jsonl"
    assert f"{fault.setting}: {fault.sentence}".startswith(f"{place} {says}"), fault


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_ten_megabytes_on_one_line_cost_little_and_count_as_too_long(tokenizer: Any) -> None:
    rows = [{"prompt": "7" * 10_000_000, "answer": "7"}, {"prompt": "What is 2 plus 3?", "answer": "5"}]
    began = time.process_time()
    prompts = TokenizedPrompts(rows, tokenizer, PromptFormat.of(settings()), "rows.jsonl")
    assert [problem is None for problem in (prompts[0], prompts[1])] == [True, False]
    assert time.process_time() - began < 3
    assert prompts.too_long == 1 and prompts.longest > 10_000


def test_a_long_text_that_may_fit_is_tokenised_exactly(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = user("What is 2 plus 3? " * 200)
    exact = apply_chat_template(chat, tokenizer, {})
    monkeypatch.setattr("backend.data.problems.ALWAYS_EXACT", 10)
    assert tokenize_if_fits(chat, tokenizer, {}, "row 1", len(exact)) == exact
    assert isinstance(tokenize_if_fits(user("7" * 6000), tokenizer, {}, "row 1", 5), TooLong)


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
    broken = load_tokenizer(tmp_path)
    with pytest.raises(UserError) as caught:
        tokenize_if_fits(user("hi"), broken, {}, "row 1", 100)
    (fault,) = caught.value.faults
    assert says in fault.sentence and fault.sentence.isprintable() and len(fault.sentence) <= 200
