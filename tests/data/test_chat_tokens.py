"""Chats that cannot be tokenised in reasonable time are not, and everything else is tokenised exactly."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from backend.config.config import parse
from backend.data import problems
from backend.data.problems import PromptFormat, TooLong, tokenize_if_fits
from backend.data.prompts import TokenizedPrompts
from backend.models.tokenizers import load_tokenizer
from backend.utils.errors import UserError
from tests.support.random_models import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return with_template(tmp_path_factory.mktemp("tokenizer"), None)


def with_template(folder: Path, template: str | None) -> Any:
    tiny_tokenizer(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    if template is not None:
        about = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(about | {"chat_template": template}))
    return load_tokenizer(folder)


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_ten_megabytes_on_one_line_cost_little_and_count_as_too_long(tokenizer: Any) -> None:
    config = parse({"model": "m", "data": "x", "max_seq_length": 600, "max_completion_length": 500})
    rows = [{"prompt": "7" * 10_000_000, "answer": "7"}, {"prompt": "What is 2 plus 3?", "answer": "5"}]
    began = time.process_time()
    prompts = TokenizedPrompts(rows, tokenizer, PromptFormat.of(config), "rows.jsonl")
    assert [problem is None for problem in (prompts[0], prompts[1])] == [True, False]
    assert time.process_time() - began < 3
    assert prompts.too_long == 1 and prompts.longest > 10_000


def test_a_long_text_that_may_fit_is_tokenised_exactly(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = user("What is 2 plus 3? " * 200)
    exact = problems.apply_chat_template(chat, tokenizer, {})
    monkeypatch.setattr(problems, "ALWAYS_EXACT", 10)
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
    broken = with_template(tmp_path, template)
    with pytest.raises(UserError) as caught:
        tokenize_if_fits(user("hi"), broken, {}, "row 1", 100)
    (fault,) = caught.value.faults
    assert says in fault.sentence and fault.sentence.isprintable() and len(fault.sentence) <= 200
