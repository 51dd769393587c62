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

from backend.config.config import parse
from backend.judges import local_model as module
from backend.judges import prompts
from backend.judges.judge import open_judge
from backend.judges.local_model import LocalModel, SharingSampler, local_model
from backend.rewards.catalogue import RewardCall
from backend.rewards.inputs import TrainerState
from backend.trainer.memory.model_shape import shape_of
from backend.trainer.memory.phases import MemoryModel
from backend.types import Completion, Group, Problem
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
    folder, asked, read = folder_of(models), prompts_of(), list[int]()
    own = SharingSampler._read_prefix

    def counted(self: SharingSampler, before: Any, tokens: list[int]) -> Any:
        read.append(len(tokens))
        return own(self, before, tokens)

    monkeypatch.setattr(SharingSampler, "_read_prefix", counted)
    model = local_model(str(folder))
    assert local_model(str(folder)) is model
    replies = model.replies(asked, [LIMIT] * len(asked), lambda: None)
    plain, tokenizer, *_ = load(str(folder))
    assert replies == [plain_reply(plain, tokenizer, messages) for messages in asked]
    assert len(set(replies)) > 2
    if rows == 100:  # the rubric, and each group's prompt
        assert len(read) == 3


def test_replies_have_their_schema_and_no_thoughts(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = local_model(str(folder_of(models))), prompts_of()
    for reply in model.replies(asked, [80] * len(asked), lambda: None, json.dumps(VERDICT)):
        assert list(json.loads(reply)) == ["reason", "verdict"]
    monkeypatch.setattr(SharingSampler, "texts", lambda *arguments: ["<think>{}</think>\n [1] ", "[2]"])
    assert model.replies(asked[:2], [1, 1], lambda: None) == ["[1]", "[2]"]


def test_a_judge_scores_with_it_and_frees_its_memory(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "REASON_LENGTH", 4)
    gc.collect()
    before = mx.get_active_memory()
    rubric = tmp_path / "rubric.toml"
    rubric.write_text('[[criteria]]\nname = "short"\nchoices = ["no", "a bit", "yes"]\n', encoding="utf-8")
    arguments = {"rubric": str(rubric), "url": "local", "model": str(folder_of(models)), "mode": "single"}
    judge = open_judge(RewardCall("judge", arguments))
    judge.load(None)
    group = Group(Problem(0, "?", [], [], ""), [Completion([], [], text, "eos") for text in ("a", "b", "a")])
    scored = judge.score([group], TrainerState(), lambda: None)
    assert scored.metrics["judge/judge/calls"] == 2 and scored.metrics["judge/judge/failed"] == 0
    assert scored.scores[0] == scored.scores[2] and {*scored.scores} <= {0.0, 0.5, 1.0}
    judge.close()
    mx.synchronize()  # what still runs holds its arrays
    assert mx.get_active_memory() <= before


def test_the_estimate_covers_a_judge(models: Path) -> None:
    folder = str(folder_of(models))
    config = parse(
        {"model": folder, "data": "none", "batch_size": 4, "group_size": 8, "max_seq_length": 300}
        | {"max_completion_length": 40, "reward_functions": [f"judge(url=local, model='{folder}', mode=single)"]}
    )
    shape = shape_of(Path(folder))
    assert shape is not None
    memory = MemoryModel(config, shape, 40, gpu=False)
    (scorer, mode), *_ = memory.scorers
    estimated = scorer.weights() + sum(memory._scoring(scorer, mode))
    gc.collect()
    before = mx.get_active_memory()
    model, text = LocalModel(folder), " ".join(random_models.CORPUS)
    mx.reset_peak_memory()
    prompts = [
        [{"role": "user", "content": f"{text[:400]}{group}{text}{n}{text[:80]}"}] for group in "abcd" for n in range(8)
    ]
    model.replies(prompts, [1] * 32, lambda: None)
    assert 0.3 < (mx.get_peak_memory() - before) / estimated < 1


def test_a_stop_ends_the_replies_and_keeps_no_memory(models: Path) -> None:
    model, asked, polls = local_model(str(folder_of(models))), prompts_of(), 0

    def stop() -> None:
        nonlocal polls
        polls += 1
        if polls == 5:
            raise KeyboardInterrupt

    model.replies(asked, [LIMIT] * len(asked), lambda: None)
    gc.collect()
    before = mx.get_active_memory()
    with pytest.raises(KeyboardInterrupt):
        model.replies(asked, [LIMIT] * len(asked), stop)
    model.replies(asked, [LIMIT] * len(asked), lambda: None)
    gc.collect()
    mx.synchronize()
    assert mx.get_active_memory() <= before


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^reward_functions: "):
        local_model(str(tmp_path))
