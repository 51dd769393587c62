"""Trial completions for the reward bench."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from backend.config.config import Config, parse
from backend.models import policy as policy_module
from backend.trainer import trial_sampling
from backend.trainer.trial_sampling import Pick, TrialSampler
from backend.utils.errors import UserError
from tests.support import small_run
from tests.support.vision_models import picture, tiny_vision_model


def test_a_trial_loads_the_model_alone_and_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ratio against the reference once made a trial load a reference that sampling never reads."""
    loaded: list[Config] = []
    monkeypatch.setattr(trial_sampling, "load_policy", lambda raw: loaded.append(raw) or policy_module.load_policy(raw))
    config = parse(small_run.settings_for(tmp_path, ratio_against="reference", beta=0.1))
    sampler = TrialSampler()
    first, again = (sampler.sample(config, Pick("first", 2), 2, 0) for _ in range(2))
    assert [config.needs_reference for config in loaded] == [False]
    texts = [[completion.text for group in groups for completion in group.completions] for groups in (first, again)]
    assert texts[0] == texts[1] and len(texts[0]) == 4


def test_a_trial_reads_the_pictures_of_its_rows(tmp_path: Path) -> None:
    """At the size of the settings, also where the model is still in memory."""
    data, pictures = tmp_path / "rows.jsonl", [picture(tmp_path / f"{seed}.png", seed=seed) for seed in (0, 1)]
    data.write_text("".join(f'{{"prompt": "Count.", "answer": "1", "image": "{seed}.png"}}\n' for seed in (0, 1)))
    model = str(tiny_vision_model(tmp_path / "model"))
    raw = small_run.settings_for(tmp_path, model=model, data=str(data))
    sampler = TrialSampler()
    first, second = sampler.sample(parse(raw), Pick("first", 2), 2, 0)
    assert [group.problem.images for group in (first, second)] == [pictures[:1], pictures[1:]]
    assert first.problem.tokens == second.problem.tokens
    assert first.completions[0].logps != second.completions[0].logps
    small, _ = sampler.sample(parse(raw | {"image_max_pixels": 1024}), Pick("first", 2), 2, 0)
    assert len(small.problem.tokens) < len(first.problem.tokens)


def test_a_trial_samples_with_the_adapter_that_the_run_starts_from(tmp_path: Path) -> None:
    """As the run's first step would: another adapter, or one that was written since, gives other completions, and none
    the base's."""
    raw = small_run.settings_for(tmp_path)
    adapter = tmp_path / "adapters.safetensors"
    sampler = TrialSampler()

    def texts(**changes: Any) -> list[str]:
        (group,) = sampler.sample(parse(raw | changes), Pick("first", 1), 4, 0)
        return [completion.text for completion in group.completions]

    def write(seed: int) -> None:
        arrays = policy_module.load_policy(parse(raw)).trainable()
        mx.random.seed(seed)
        mx.save_safetensors(str(adapter), {name: mx.random.normal(array.shape) for name, array in arrays.items()})

    base = texts()
    write(0)
    adapted = texts(adapter=str(adapter))
    assert adapted != base and texts(adapter=str(adapter)) == adapted and texts() == base
    write(1)
    os.utime(adapter, (1, 1))
    assert texts(adapter=str(adapter)) not in (adapted, base)
    with pytest.raises(UserError, match="does not fit this run"):
        sampler.sample(parse(raw | {"adapter": str(adapter), "rank": 4}), Pick("first", 1), 4, 0)
