"""Chats that cannot be tokenised in reasonable time are not, and everything else is tokenised exactly."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from backend.config.config import parse
from backend.data import chat_tokens
from backend.data.chat_tokens import TooLong, least_tokens, tokenize_if_fits
from backend.data.problems import PromptFormat, prepare
from backend.data.prompts import TokenizedPrompts
from backend.models.time_limit import TimeLimitError, time_limit
from backend.models.tokenizers import load_tokenizer
from backend.utils.errors import UserError
from backend.utils.places import demo_folder
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


# ── long texts ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("which", ["tiny", "demo"])
def test_a_text_never_has_fewer_tokens_than_its_bound(which: str, tokenizer: Any) -> None:
    tested = tokenizer if which == "tiny" else load_tokenizer(demo_folder("model"))
    rng = random.Random(0)
    pieces = [
        "What is ",
        "quick",
        " the",
        "é",
        "𝄞",
        "\u0301",
        "A\u030a",
        "   ",
        "\n",
        "7",
        "<|im_end|>",
        "</answer>",
        "ﬃ",
        "한",
    ]
    for _ in range(300):
        text = "".join(rng.choice(pieces) for _ in range(rng.randint(1, 60)))
        assert least_tokens(text, tested) <= len(tested.encode(text, add_special_tokens=False)), text
    assert least_tokens("7" * 10_000, tested) >= 50, "the bound says something"


def test_nothing_is_concluded_for_a_tokenizer_that_may_merge_text() -> None:
    class Wrapper:
        def __init__(self, backend: Tokenizer) -> None:
            self.backend_tokenizer = backend

    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    fused = Tokenizer(models.BPE({"a": 0, "?": 1}, [], unk_token="?", fuse_unk=True))
    stripped = Tokenizer(models.BPE({"a": 0, "?": 1}, [], unk_token="?"))
    stripped.normalizer = normalizers.StripAccents()
    dropped = Tokenizer(models.BPE({"a": 0, "?": 1}, [], unk_token="?"))
    dropped.pre_tokenizer = pre_tokenizers.Split("b", "removed")
    plain = Tokenizer(models.BPE({"a": 0, "?": 1}, [], unk_token="?"))
    plain.decoder = decoders.Fuse()
    for backend in (words, fused, stripped, dropped):
        assert least_tokens("b" * 10_000, Wrapper(backend)) == 0
    assert least_tokens("b" * 10_000, Wrapper(plain)) > 0
    assert least_tokens("b" * 3_000_000, Wrapper(words)) == 3000


def test_ten_megabytes_on_one_line_cost_little_and_count_as_too_long(tokenizer: Any) -> None:
    config = parse({"model": "m", "data": "x", "max_seq_length": 600, "max_completion_length": 500})
    rows = [{"prompt": "7" * 10_000_000, "answer": "7"}, {"prompt": "What is 2 plus 3?", "answer": "5"}]
    began = time.process_time()
    prompts = TokenizedPrompts(rows, tokenizer, PromptFormat.of(config), "rows.jsonl")
    assert [problem is None for problem in (prompts[0], prompts[1])] == [True, False]
    assert time.process_time() - began < 3
    assert prompts.too_long == 1 and prompts.longest > 10_000
    prepared = prepare(rows, tokenizer, config, "rows.jsonl")
    assert prepared.too_long == 1 and prepared.problems == [prompts[1]]


def test_a_long_text_that_may_fit_is_tokenised_exactly(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = user("What is 2 plus 3? " * 200)
    exact = chat_tokens.apply_chat_template(chat, tokenizer, {})
    monkeypatch.setattr(chat_tokens, "ALWAYS_EXACT", 10)
    assert tokenize_if_fits(chat, tokenizer, {}, "row 1", len(exact)) == exact
    assert isinstance(tokenize_if_fits(user("7" * 5000), tokenizer, {}, "row 1", 5), TooLong)


# ── templates that do not end, or fail ───────────────────────────────────────────────────────────────────────────────

LOOP_FOR_ONE = (
    "{% if 'loop' in messages[0].content %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}{{ messages[0].content }}"
)


def test_a_template_that_loops_for_one_row_is_stopped_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looping = with_template(tmp_path, LOOP_FOR_ONE)
    monkeypatch.setattr(chat_tokens, "CHAT_S", 0.3)
    assert tokenize_if_fits(user("hi"), looping, {}, "row 1 of x", 100)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"does not end for row 2 of x; it is stopped after 0.3 seconds\."):
        tokenize_if_fits(user("loop"), looping, {}, "row 2 of x", 100)
    assert time.monotonic() - began < 10
    assert tokenize_if_fits(user("hi"), looping, {}, "row 1 of x", 100), "nothing is left on its way to this thread"


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


def test_a_limit_on_time_interrupts_and_leaves_nothing_behind() -> None:
    with pytest.raises(TimeLimitError), time_limit(0.25):
        while True:
            pass
    for _ in range(3):
        with time_limit(5):
            sum(range(1000))
    time.sleep(0.6)  # ticks of the watchdog
