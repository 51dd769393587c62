"""Scores of reward models equal TRL's, whatever they are batched with; models that are none are refused."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from backend.judges import reward_model
from backend.judges.reward_model import open_reward_model
from backend.rewards.catalogue import read_call
from backend.rewards.errors import RewardError
from backend.rewards.inputs import TrainerState
from backend.utils.errors import UserError
from tests.support.reward_models import GOLDEN, arrays_of, golden_groups, opened, write_reward_model

LOOSE = {"gemma": 2e-3, "gemma3_text": 2e-3}
"""mlx-lm computes Gemma's GELU exactly, and rounds Gemma 3's embedding scale to bfloat16."""


def scored(model, groups=None) -> list[float | None]:
    return model.score(groups or golden_groups(), TrainerState(), lambda: None).scores


@pytest.mark.parametrize("kind", GOLDEN["models"])
def test_scores_are_those_of_trl(kind: str, tmp_path: Path, monkeypatch) -> None:
    model = opened(write_reward_model(tmp_path, kind))
    expected, close = GOLDEN["models"][kind], LOOSE.get(kind, 1e-4)
    monkeypatch.setattr(reward_model, "MICRO_BATCH_TOKENS", {False: 4096, True: 4096})
    batched = scored(model)
    assert batched == pytest.approx(expected["chat"], abs=close)
    monkeypatch.setattr(reward_model, "MICRO_BATCH_TOKENS", {False: 1, True: 1})
    some = golden_groups()[::7]
    assert scored(model, some) == pytest.approx(batched[::7], abs=2e-5), "one text at a time"
    model.close()
    plain = opened(write_reward_model(tmp_path, kind, template=False))
    assert scored(plain, some) == pytest.approx(expected["plain"][::7], abs=close)


def test_gemma_3_with_images(tmp_path: Path) -> None:
    about = GOLDEN["models"]["gemma3_text"]
    whole = {
        "architectures": ["Gemma3ForSequenceClassification"],
        "model_type": "gemma3",
        "text_config": about["config"],
    }
    names = (("model.language_model.", "model.vision_tower.x"), ("language_model.model.", "vision_tower.x"))
    some = golden_groups()[::7]
    for number, (prefix, image) in enumerate(names):
        folder = write_reward_model(tmp_path / str(number), "gemma3_text")
        (folder / "config.json").write_text(json.dumps(whole | {"id2label": {"0": "x"}}))
        arrays = {name.replace("model.", prefix): x for name, x in arrays_of(about["shapes"]).items()}
        mx.save_safetensors(str(folder / "model.safetensors"), arrays | {image: mx.zeros((2, 2))})
        assert scored(opened(folder), some) == pytest.approx(about["chat"][::7], abs=LOOSE["gemma3_text"])


@pytest.mark.parametrize("kind", ["qwen3", "modernbert"])
def test_quantised_scores_are_close_and_the_head_stays(kind: str, tmp_path: Path) -> None:
    folder, expected = write_reward_model(tmp_path, kind), GOLDEN["models"][kind]["chat"][::7]
    some = golden_groups()[::7]
    distance = {
        bits: max(
            abs(a - b) for a, b in zip(scored(opened(folder, f"(quantization={bits})"), some), expected, strict=True)
        )
        for bits in (8, 4)
    }
    assert 1e-4 < distance[8] < 0.1 < distance[4], distance


def test_models_that_are_none_are_refused(tmp_path: Path) -> None:
    def refused(sentence: str, arguments: str = "", drop: str = "", **changes) -> None:
        folder = write_reward_model(tmp_path / "rm", **changes)
        if drop:
            arrays = {name: x for name, x in arrays_of(GOLDEN["models"]["qwen3"]["shapes"]).items() if name != drop}
            mx.save_safetensors(str(folder / "model.safetensors"), arrays)
        with pytest.raises(UserError) as caught:
            open_reward_model(read_call(f"{folder}{arguments}"), tmp_path)
        (fault,) = caught.value.faults
        assert fault.setting == "reward_functions" and sentence in fault.sentence and len(fault.sentence) < 300

    refused("is Qwen3ForCausalLM, and a reward model is a model for", architectures=["Qwen3ForCausalLM"])
    refused("it has 3 labels, and a reward model has one", id2label={"0": "a", "1": "b", "2": "c"})
    refused("its architecture is bert, and", architectures=["BertForSequenceClassification"], model_type="bert")
    refused("its weights have no score.weight", drop="score.weight")
    refused("Missing 1 parameters", drop="model.norm.weight")
    refused("its quantization must be none, 4 or 8, not 3", "(quantization=3)")
    with pytest.raises(UserError, match="There is no model"):
        open_reward_model(read_call("./nowhere/rm"), tmp_path)


def test_a_conversation_without_a_template_is_refused(tmp_path: Path) -> None:
    model = opened(write_reward_model(tmp_path, template=False))
    (group, *_) = golden_groups()
    group.problem.row["prompt"] = group.problem.messages
    with pytest.raises(RewardError, match="has no chat template, and the prompts are conversations"):
        scored(model, [group])
