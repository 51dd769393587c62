"""A judge that the run loads: the replies of plain greedy decoding, prompts shared, JSON where it is asked for."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load

from backend.judges import local_model as module
from backend.judges.local_model import SharingSampler, local_model
from backend.utils.errors import UserError
from tests.support import random_models

LIMIT = 12
VERDICT = {
    "type": "object",
    "properties": {"reason": {"type": "string", "maxLength": 8}, "verdict": {"enum": ["no", "yes"]}},
    "required": ["reason", "verdict"],
    "additionalProperties": False,
}


def folder_of(models: Path) -> Path:
    folder = models / "judge"
    return folder if folder.exists() else random_models.tiny_model(folder, tie=False, noise=0.3, seed=1)


def prompts_of() -> list[list[dict[str, Any]]]:
    """2 groups of 3 with a rubric in common, in two messages; one prompt is twice there."""
    words = random_models.CORPUS
    texts = [f"{words[0]} {group} {words[1]}\n\n{words[2][: 8 * n]}" for group in "ab" for n in (1, 5, 5)]
    return [[{"role": "system", "content": words[3]}, {"role": "user", "content": text}] for text in texts]


def plain_reply(model: Any, tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    content = "\n\n".join(message["content"] for message in messages)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    tokens: list[int] = []
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=LIMIT):
        if token in tokenizer.eos_token_ids:
            break
        tokens.append(int(token))
    return tokenizer.decode(tokens).strip()


@pytest.mark.parametrize("rows", [100, 2])
def test_replies_are_those_of_plain_greedy_decoding(models: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(module, "JUDGED_TOKENS", rows * 220)
    folder, prompts, read = folder_of(models), prompts_of(), list[int]()
    own = SharingSampler._read_prefix

    def counted(self: SharingSampler, before: Any, tokens: list[int]) -> Any:
        read.append(len(tokens))
        return own(self, before, tokens)

    monkeypatch.setattr(SharingSampler, "_read_prefix", counted)
    model = local_model(str(folder))
    assert local_model(str(folder)) is model
    replies = model.replies(prompts, [LIMIT] * len(prompts), lambda: None)
    plain, tokenizer, *_ = load(str(folder))
    assert replies == [plain_reply(plain, tokenizer, messages) for messages in prompts]
    assert len(set(replies)) > 2
    if rows == 100:  # the rubric, and each group's prompt
        assert len(read) == 3


def test_replies_have_their_schema_and_no_thoughts(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = local_model(str(folder_of(models))), prompts_of()
    for reply in model.replies(prompts, [80] * len(prompts), lambda: None, json.dumps(VERDICT)):
        assert list(json.loads(reply)) == ["reason", "verdict"]
    monkeypatch.setattr(SharingSampler, "texts", lambda *arguments: ["<think>{}</think>\n [1] ", "[2]"])
    assert model.replies(prompts[:2], [1, 1], lambda: None) == ["[1]", "[2]"]


def test_a_stop_ends_the_replies_and_keeps_no_memory(models: Path) -> None:
    model, prompts, polls = local_model(str(folder_of(models))), prompts_of(), 0

    def stop() -> None:
        nonlocal polls
        polls += 1
        if polls == 5:
            raise KeyboardInterrupt

    model.replies(prompts, [LIMIT] * len(prompts), lambda: None)
    gc.collect()
    before = mx.get_active_memory()
    with pytest.raises(KeyboardInterrupt):
        model.replies(prompts, [LIMIT] * len(prompts), stop)
    model.replies(prompts, [LIMIT] * len(prompts), lambda: None)
    gc.collect()
    assert mx.get_active_memory() <= before


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^reward_functions: "):
        local_model(str(tmp_path))
